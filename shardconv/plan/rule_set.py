"""Rule set: all rules of one model and its submodels, with the config fields that they read.

The tensors of a submodel have a common prefix, and its config is nested in the model's.

A rule set from a manifest gives the same plans as when it was written, whichever families are installed.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import replace

from shardconv.plan.engines import ENGINE, SHARDCONV, Engine
from shardconv.plan.families.config_fields import lookup, select_fields, with_defaults
from shardconv.plan.families.family import LIBRARIES, NAMES_FAMILY, NUM_LAYERS, PLAN_FILE, TIED, Family, Submodel
from shardconv.plan.families.loading import family_for, load_family
from shardconv.plan.families.rule import Rule
from shardconv.plan.model_rules import MAX_MULTIPLE, ModelRules, UsedRules
from shardconv.support.errors import PlanError, option
from shardconv.support.structs import Data

#: The config fields that are read by themselves, and not by an expression of a rule.
OTHER_FIELDS = ("model_type", NUM_LAYERS, TIED)


class RuleSet(Data, frozen=True, eq=False):
    """The rules of a plan. With tensor names, tensor shapes and tp, they determine it.

    Attributes:
        family: name of the family whose rules are used.
        models: the rules of the model, followed by the rules of each submodel.
        ep: expert parallel size; 1 if each expert is sharded as other layers are.
        uncertain: why the head size is assumed; "" if it is known. If it is assumed, boundaries
            have to be valid for smaller head sizes, too.
        vocab_multiple: the vocabulary is padded to a multiple of this before it is sharded.
        engine: name of the engine whose rules are included; None for shardconv's own runtime.
        in_all_stages: model types whose embedding, norm and head the engine has on every pipeline stage.
    """

    family: str
    models: Annotated[tuple[ModelRules, ...], Meta(min_length=1)]
    ep: Annotated[int, Meta(ge=1)] = 1
    uncertain: str = ""
    vocab_multiple: Annotated[int, Meta(ge=1, le=MAX_MULTIPLE)] = 1
    engine: str | None = None
    in_all_stages: tuple[str, ...] = ()

    def ranks_per_stage(self, tp: int) -> int:
        """Number of ranks of a pipeline stage at tensor parallel size ``tp``."""
        return max(tp, self.ep)

    @property
    def pad(self) -> int:
        """Counts that tp does not divide are padded to a multiple of this and of tp; 0 for no padding."""
        return self.models[0].pad

    def with_padding(self, pad: int, used: UsedRules | None = None, blocks: Mapping[str, int] | None = None) -> Self:
        """Return the rule set with these fields of all its models replaced; see ``ModelRules``.

        Without ``blocks``, the models keep theirs.
        """
        models = (
            replace(model_rules, pad=pad, used=used, blocks=blocks or model_rules.blocks) for model_rules in self.models
        )
        return replace(self, models=tuple(models))

    @property
    def padding_refusal(self) -> str:
        """The reason why padding is not supported for the model; "" if it is supported."""
        if self.uncertain:
            return f"{self.uncertain}: pass {option('head_dim')}"
        if self.family in (NAMES_FAMILY, *LIBRARIES):
            return "no family is known for this model, so outputs with padding may differ"
        return ""

    @property
    def has_plan_file(self) -> bool:
        """Whether some of the rules are from a plan file."""
        families = [model_rules.family for model_rules in self.models]
        origins = {rule.origin for family in families for rule in family.rules}
        origins |= {rule.origin for family in families for rule in family.modules}
        return any(origin.startswith(PLAN_FILE) for origin in origins)

    def for_engine(self, engine: Engine) -> Self:
        """Return the rule set with the rules of an engine, which are tried after the user's rules and before others.

        They replace the rules of another engine.

        Args:
            engine: the engine, or :data:`~shardconv.plan.engines.SHARDCONV`.
        """

        def with_engine(model_rules: ModelRules) -> Iterator[Rule]:
            rules = [rule for rule in model_rules.family.rules if not rule.origin.startswith(ENGINE)]
            yield from (rule for rule in rules if rule.by_user)
            yield from engine.rules((model_rules.config or {}).get("model_type"))
            yield from (rule for rule in rules if not rule.by_user)

        name = None if engine is SHARDCONV else engine.name
        types = [(model_rules.config or {}).get("model_type") for model_rules in self.models]  # of any JSON type
        return replace(
            self.with_rules(with_engine),
            vocab_multiple=engine.vocab_multiple,
            engine=name,
            in_all_stages=tuple(sorted(one for one in engine.in_all_stages if one in types)),
        )

    def without_engine(self) -> Self:
        """Return the rule set without the rules of an engine, for shardconv's own runtime with the same padding."""
        return replace(self.for_engine(SHARDCONV), vocab_multiple=self.vocab_multiple)

    def with_optional_rules(self) -> Self:
        """Return the rule set with rules of the user that may match nothing, for some of the model's tensors."""
        return self.with_rules(
            lambda model_rules: (
                replace(rule, optional=True, mount="") if rule.by_user else rule for rule in model_rules.family.rules
            )
        )

    def with_rules(self, rules_of: Callable[[ModelRules], Iterable[Rule]]) -> Self:
        """Return the rule set with other rules of each model."""
        return self._with_families(lambda one: replace(one.family, rules=tuple(rules_of(one))))

    def without_overrides(self, blocks: Container[str]) -> Self:
        """Return the rule set without the module overrides of ``blocks``."""
        return self._with_families(
            lambda one: replace(
                one.family, modules=tuple(rule for rule in one.family.modules if rule.block not in blocks)
            )
        )

    def _with_families(self, family_of: Callable[[ModelRules], Family]) -> Self:
        models = (replace(model_rules, family=family_of(model_rules)) for model_rules in self.models)
        return replace(self, models=tuple(models))

    def stored(self) -> Self:
        """The rule set as a manifest stores it: the rules whose ``when`` holds, and the fields that they read."""
        return replace(self, models=tuple(map(_stored, self.models)))

    def check(self) -> None:
        """Check the units of a rule set from a manifest, as the units of a family are checked when it is loaded.

        Raises:
            PlanError: if a rule names a unit that does not exist.
        """
        for model_rules in self.models:
            model_rules.family.check_units()


def _stored(model_rules: ModelRules) -> ModelRules:
    family = model_rules.family
    kept = Family(
        family.name,
        prefix=family.prefix,
        rules=tuple(replace(rule, when={}, block="") for rule in model_rules.rules()),
        modules=tuple(replace(rule, when={}, block="") for _, rule in model_rules.modules()),
        stages=family.stages,
    )
    named = kept.units_named()
    kept = replace(kept, units={name: unit for name, unit in family.units.items() if name in named})
    names = with_defaults({*kept.fields_read(), *OTHER_FIELDS}, family.config)
    kept = replace(kept, config={name: value for name, value in family.config.items() if name in names})
    config = None if model_rules.config is None else select_fields(model_rules.config, names)
    return ModelRules(kept, config, model_rules.at, model_rules.pad, blocks=model_rules.blocks)


#: The deepest nesting of submodels.
_MAX_DEPTH = 4


def rules_for(family: Family, config: Mapping[str, object] | None, *, ep: int = 1, uncertain: str = "") -> RuleSet:
    """The rule set of a family and of the families of its submodels, for a config.

    Args:
        family: the family, over which the user's rules are already laid.
        config: the contents of config.json; None without a config.
        ep: expert parallel size.
        uncertain: see :class:`~shardconv.plan.rule_set.RuleSet`.

    Raises:
        PlanError: if submodels are nested too deep, or one that a plan file names does not have a config.
    """
    return RuleSet(family.name, tuple(model_rules_of(family, config)), ep, uncertain)


def model_rules_of(
    family: Family, config: Mapping[str, object] | None, at: str = "", depth: int = 0
) -> Iterator[ModelRules]:
    """The rules of a model, followed by the rules of its submodels.

    Raises:
        PlanError: if submodels are nested too deep, or one that a plan file names does not have a config.
    """
    if depth > _MAX_DEPTH:
        raise PlanError(f"submodels are nested too deep (expected at most {_MAX_DEPTH} nested configs)")
    yield ModelRules(family, config, at)
    for start, submodel in family.submodels.items():
        if submodel.by_user and config is not None and not isinstance(lookup(config, submodel.config), Mapping):
            raise PlanError(
                f"submodel {start!r}: the config does not have a nested config {submodel.config!r}: correct or remove "
                f"it"
            )
        submodel_config, submodel_family = _config_and_family(submodel, config or {})
        if submodel_family is not None:
            yield from model_rules_of(submodel_family, submodel_config, f"{at}.{start}" if at else start, depth + 1)


def _config_and_family(submodel: Submodel, config: Mapping[str, object]) -> tuple[Mapping[str, object], Family | None]:
    """The config and the family of a submodel.

    Configs on the Hub may have the fields of the text model at the top level, and a nested config may have the model's
    ``model_type``, or none. The submodel's type is then the model's with the name of the field appended, such as
    ``qwen2_vl_text`` for ``text_config``.
    """
    nested = lookup(config, submodel.config)
    submodel_config = nested if isinstance(nested, Mapping) else config
    if submodel.family:
        return submodel_config, load_family(submodel.family)
    model_type = config.get("model_type")
    submodel_type = submodel_config.get("model_type") or model_type
    if submodel_type == model_type:
        submodel_type = f"{model_type}_{submodel.config.rpartition('.')[2].removesuffix('_config')}"
    return submodel_config, family_for(submodel_type) if isinstance(submodel_type, str) else None

"""Rule set: all rules of one model and its submodels, with the config fields that they read.

:class:`ModelRules` are the rules of one family, for the model or a submodel. The tensors of a submodel have a common
prefix, and its config is nested in the model's. A rule set from a manifest gives the same plans as when it was
written, whichever families are installed.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import starmap
from math import lcm
from typing import Annotated, Any, Self

from msgspec import Meta
from msgspec.structs import replace

from shardconv.plan.engines import DEEPSTACK, ENGINE, SHARDCONV, Engine
from shardconv.plan.families.config_fields import Fields, fields_in, lookup, reads_stage, select_fields, with_defaults
from shardconv.plan.families.family import LIBRARIES, NAMES_FAMILY, NUM_LAYERS, PLAN_FILE, TIED, Family, Submodel
from shardconv.plan.families.loading import family_for, load_family, model_type_of
from shardconv.plan.families.matcher import name_regex
from shardconv.plan.families.rule import ModuleRule, Rule
from shardconv.plan.padding import UNKNOWN, UnitPadding, padding_of, unit_paddings
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, shard_dim
from shardconv.support.errors import PlanError, option
from shardconv.support.structs import Data

#: The largest multiple to which a size is padded.
MAX_MULTIPLE = 2**16
#: A multiple to which sizes are padded, or 0.
Multiple = Annotated[int, Meta(ge=0, le=MAX_MULTIPLE)]


class UsedRules(dict[Rule, frozenset[str]]):
    """Rule to the names of the layers and parameters that it matches. Not stored, as it follows from the tensors."""


class ModelRules(Data, frozen=True, eq=False):
    """The rules of one family and the config that they read, for a model or one of its submodels.

    Attributes:
        family: the rules.
        config: the config that the rules read; None without a config.
        at: the pattern of the submodel's module; "" for the model itself.
        pad: counts that tp does not divide are padded to a multiple of this and of tp; 0 for no padding.
        used: rule to the names of the layers and parameters that it matches, without rules that match nothing; None if
            tensors are not known. Determines which units are padded together.
        blocks: pattern of a rule to the elements of a block of padding along the dim that it shards, of quantized
            matrices; also where the same matrices are in memory without quantization.
        stage: index of the stage that ``field[stage]`` reads; None if it follows from names.
    """

    family: Family
    config: Mapping[str, Any] | None
    at: str = ""
    pad: Multiple = 0
    used: UsedRules | None = None
    blocks: Mapping[str, Annotated[int, Meta(ge=1, le=MAX_MULTIPLE)]] = {}
    stage: int | None = None

    def fields(self, stage: int | None = None, **others: int) -> Fields:
        """The config fields with the defaults of the family and with other fields; records which fields are read."""
        config = {**(self.config or {}), **others} if others else self.config
        return Fields(config, self.family.config, self.stage if stage is None else stage)

    def stage_of(self, name: str) -> int | None:
        """The stage of a tensor or module: the first number in its name; None without a number."""
        relative = re.sub(f"^{name_regex(self.at)}", "", name) if self.at else name
        match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", relative)
        return int(match[1]) if match else None

    def at_stage(self, name: str) -> "ModelRules":
        """The rules for one module if units differ by stage; otherwise these rules."""
        has_stages = any(map(self._reads_stage, self.family.units))
        return replace(self, stage=self.stage_of(name)) if has_stages else self

    def reads_stage(self, rule: Rule) -> bool:
        """Whether the units of a rule differ by stage."""
        return any(map(self._reads_stage, rule.units))

    def _reads_stage(self, unit: str) -> bool:
        rule = self.family.units[unit]
        return any(reads_stage(expression or 0, self.family.config) for expression in (rule.count, rule.size))

    def rules(self) -> Iterator[Rule]:
        """The rules whose ``when`` holds for the config."""
        fields = self.fields()
        return (rule for rule in self.family.rules if all(starmap(fields.has, rule.when.items())))

    def patterns(self) -> Iterator[str]:
        """The patterns of all rules and module overrides, and of the place of the model."""
        yield self.at
        yield from (rule.pattern for rule in self.family.rules)
        yield from (rule.pattern for rule in self.family.modules)

    def used_rules(self) -> Iterator[Rule]:
        """The rules whose ``when`` holds for the config and that match a tensor."""
        return (rule for rule in self.rules() if self.used is None or rule in self.used)

    def modules(self) -> Iterator[tuple[re.Pattern[str], ModuleRule]]:
        """The module overrides whose ``when`` holds, each with the regular expression of module names.

        Where no rule matches a tensor, the modules belong to another submodel, which has their units.
        """
        fields, units = self.fields(), self.family.units.keys()
        is_used = self.used is None or any(True for _ in self.used_rules())
        for rule in self.family.modules:
            if all(starmap(fields.has, rule.when.items())) and (is_used or not rule.reads() & units):
                yield re.compile(self.regex(rule.pattern)), rule

    def on_rank(self, expression: str | int, tp: int, **others: int) -> int:
        """The value of an expression in which the name of a unit is its count per rank, with other fields."""
        units = self.family.units
        counts = {name: self.units(name, tp).local_size(0) for name in fields_in(expression) if name in units}
        return self.fields(**counts, **others).evaluate(expression)

    def units(self, name: str, tp: int, *, dim: int = 0, size: int = 1) -> Placement:
        """The placement of a dim that has ``size`` elements per unit.

        Raises:
            PlanError: if the number of units follows from a tensor.
            IndivisibleError: if the units cannot be divided over ``tp`` ranks.
        """
        unit = self.unit(name, tp, size=size)
        if self.is_sharded(name, tp):
            return shard_dim(dim, [unit], tp)
        return Placement(dim, unit.width, ((Interval(0, unit.width),),) * tp)

    def is_sharded(self, name: str, tp: int) -> bool:
        """Whether units are sharded over ``tp`` ranks: with ``shard_if_divisible``, if ``tp`` divides their count."""
        unit = self.family.units[name]
        return not unit.shard_if_divisible or unit.count is None or self.fields().evaluate(unit.count) % tp == 0

    def unit(self, name: str, tp: int, *, size: int = 1) -> Unit:
        """Units of ``size`` elements, with their padding for ``tp`` ranks.

        Raises:
            PlanError: if the number of units follows from a tensor, or units that need padding cannot be padded.
        """
        rule = self.family.units[name]
        if rule.count is None:
            raise PlanError(f"unit {name}: its count follows from a tensor: add a count to [units]")
        unpadded = Unit(self.fields().evaluate(rule.count), size, rule.replicate)
        padding = unit_paddings(self).get(name, UNKNOWN) if self.pad and not rule.shard_if_divisible else None
        if padding is None or not padding.refusal:
            return unpadded if padding is None else padding.apply(unpadded, self.multiple(tp))
        try:
            shard_dim(0, [unpadded], tp)
        except IndivisibleError as error:
            raise PlanError(f"unit {name}: {error}, and is not padded: {padding.refusal}") from error
        return unpadded

    def padding(self, rule: Rule, unit: str | None) -> UnitPadding | None:
        """The padding of a unit of a rule; None without padding."""
        return padding_of(self, rule, unit) if self.pad else None

    def used_units(self) -> set[str]:
        """The names of the units of :meth:`used_rules`."""
        return {name for rule in self.used_rules() for name in rule.units}

    def multiple(self, tp: int) -> int:
        """The multiple to which counts are padded for ``tp`` ranks."""
        return lcm(self.pad, tp)

    def regex(self, pattern: str) -> str:
        """The regular expression of full names for a pattern of the family, or for its first components."""
        start = name_regex(self.at) + r"\." if self.at else ""
        return start + name_regex(pattern, self.family.prefix)


#: The config fields that are read by themselves, and not by an expression of a rule.
OTHER_FIELDS = ("model_type", NUM_LAYERS, TIED, DEEPSTACK)


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
            return f"{self.uncertain}: {self.config_remedy}pass {option('head_dim')}"
        if self.family in (NAMES_FAMILY, *LIBRARIES):
            return "no family is known for this model, so outputs with padding may differ"
        return ""

    @property
    def config_remedy(self) -> str:
        """The first half of the remedy for a checkpoint without a config; "" if a config names the model type."""
        if model_type_of(self.models[0].config or {}) is not None:
            return ""
        return f"put the config.json of the model beside its weights, or pass {option(config='FILE')}, or "

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

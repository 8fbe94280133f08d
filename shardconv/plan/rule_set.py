"""Rule set: all rules of one model with the config fields that they read, and their JSON form in a manifest.

A rule set from a manifest gives the same plans as when it was written, whichever families are installed.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NotRequired, Self, TypedDict

from shardconv.plan.config_fields import check_expression, fields_in, lookup
from shardconv.plan.engines import ENGINE, SHARDCONV, Engine
from shardconv.plan.experts import EXPERT_MODES
from shardconv.plan.family import NAMES_FAMILY, PLAN_FILE, TRANSFORMERS, Family, units_named
from shardconv.plan.model_rules import ModelRules
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.rule import Rule
from shardconv.plan.rule_format import parse_module, parse_rule, parse_unit, to_table
from shardconv.support.errors import option

#: The largest multiple to which a size is padded.
MAX_MULTIPLE = 2**16


class ModelRulesJson(TypedDict):
    """JSON form of the rules of a model or submodel.

    Attributes:
        at: pattern of the submodel's module; "" for the model itself.
        prefix: prefixes that names may lack, the first as in the patterns.
        config: the config fields that the rules read; None without a config.
        defaults: defaults of config fields.
        units: name to the table of the unit.
        rules: tables of rules, which also have their pattern and origin.
        modules: tables of module overrides, likewise.
        blocks: elements of blocks of padding; see ``ModelRules``.
    """

    at: str
    prefix: list[str]
    config: dict[str, object] | None
    defaults: dict[str, str | int]
    units: dict[str, dict[str, object]]
    rules: list[dict[str, object]]
    modules: list[dict[str, object]]
    blocks: NotRequired[dict[str, int]]


class RuleSetJson(TypedDict):
    """JSON form of a :class:`RuleSet`, with the same keys as its fields."""

    family: str
    experts: str
    uncertain: str
    vocab_multiple: NotRequired[int]
    models: list[ModelRulesJson]
    pad: NotRequired[int]
    engine: NotRequired[str]


@dataclass(frozen=True, slots=True, eq=False)
class RuleSet:
    """The rules of a plan. With tensor names, tensor shapes and tp, they determine it.

    Attributes:
        family: name of the family whose rules are used.
        models: the rules of the model, followed by those of each submodel.
        experts: one of :data:`~shardconv.plan.experts.EXPERT_MODES`.
        uncertain: why the head size is assumed; "" if it is known. If it is assumed, boundaries
            have to be valid for smaller head sizes, too.
        vocab_multiple: the vocabulary is padded to a multiple of this before it is sharded.
        engine: name of the engine whose rules are included; None for shardconv's own runtime.
    """

    family: str
    models: tuple[ModelRules, ...]
    experts: str = "tensor"
    uncertain: str = ""
    vocab_multiple: int = 1
    engine: str | None = None

    @property
    def pad(self) -> int:
        """Counts that tp does not divide are padded to a multiple of this and of tp; 0 for no padding."""
        return self.models[0].pad

    def with_padding(
        self, pad: int, used: Mapping[Rule, frozenset[str]] | None = None, blocks: Mapping[str, int] | None = None
    ) -> Self:
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
        if self.family in (NAMES_FAMILY, TRANSFORMERS):
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

        def with_engine(model_rules: ModelRules) -> ModelRules:
            rules = model_rules.family.rules
            users, others = (tuple(rule for rule in rules if rule.by_user is by_user) for by_user in (True, False))
            engine_rules = engine.rules((model_rules.config or {}).get("model_type"))
            return replace(model_rules, family=replace(model_rules.family, rules=(*users, *engine_rules, *others)))

        models = tuple(map(with_engine, self.without_engine().models))
        name = None if engine is SHARDCONV else engine.name
        return replace(self, models=models, vocab_multiple=engine.vocab_multiple, engine=name)

    def without_engine(self) -> Self:
        """Return the rule set without the rules of an engine, for shardconv's own runtime."""

        def without_rules(model_rules: ModelRules) -> ModelRules:
            rules = tuple(rule for rule in model_rules.family.rules if not rule.origin.startswith(ENGINE))
            return replace(model_rules, family=replace(model_rules.family, rules=rules))

        return replace(self, models=tuple(map(without_rules, self.models)), engine=None)

    def with_optional_rules(self) -> Self:
        """Return the rule set with rules of the user that may match nothing, for some of the model's tensors."""

        def with_optional(model_rules: ModelRules) -> ModelRules:
            rules = (
                replace(rule, optional=True, mount="") if rule.by_user else rule for rule in model_rules.family.rules
            )
            return replace(model_rules, family=replace(model_rules.family, rules=tuple(rules)))

        return replace(self, models=tuple(map(with_optional, self.models)))

    def without_overrides(self, blocks: Container[str]) -> Self:
        """Return the rule set without the module overrides of ``blocks``."""

        def without_modules(model_rules: ModelRules) -> ModelRules:
            modules = tuple(rule for rule in model_rules.family.modules if rule.block not in blocks)
            return replace(model_rules, family=replace(model_rules.family, modules=modules))

        return replace(self, models=tuple(map(without_modules, self.models)))

    def to_json(self) -> RuleSetJson:
        """Convert to JSON data: the rules whose ``when`` holds, and the config fields that they read."""
        data: RuleSetJson = {
            "family": self.family,
            "experts": self.experts,
            "uncertain": self.uncertain,
            "vocab_multiple": self.vocab_multiple,
            "models": [_model_to_json(rules) for rules in self.models],
        }
        if self.pad:
            data["pad"] = self.pad
        if self.engine:
            data["engine"] = self.engine
        return data

    @classmethod
    def from_json(cls, data: RuleSetJson) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a rule set.
            PlanError: if a rule names a unit that does not exist.
        """
        if data["experts"] not in EXPERT_MODES:
            raise ValueError(f"experts is {data['experts']!r:.60}, expected one of {', '.join(EXPERT_MODES)}")
        models = tuple(_model_from_json(rules, data["family"]) for rules in data["models"])
        if not models:
            raise ValueError("rule set does not have models (expected at least one)")
        multiple = data.get("vocab_multiple", 1)
        if type(multiple) is not int or not 1 <= multiple <= MAX_MULTIPLE:
            raise ValueError(f"vocab_multiple is {multiple!r:.60} (expected an integer from 1 to {MAX_MULTIPLE})")
        pad = data.get("pad", 0)
        if type(pad) is not int or not 0 <= pad <= MAX_MULTIPLE:
            raise ValueError(f"pad is {pad!r:.60} (expected an integer from 0 to {MAX_MULTIPLE})")
        engine = data.get("engine")
        if engine is not None and not isinstance(engine, str):
            raise ValueError(f"engine is {engine!r:.60} (expected a name)")
        rules = cls(data["family"], models, data["experts"], data["uncertain"], multiple, engine)
        return rules.with_padding(pad)


def _model_to_json(model_rules: ModelRules) -> ModelRulesJson:
    family = model_rules.family
    rules, modules = list(model_rules.rules()), [rule for _, rule in model_rules.modules()]
    units = {name: unit for name, unit in (family.units or {}).items() if name in units_named(rules, modules)}
    expressions = [*_expressions_of(rules, modules)]
    expressions += [size for unit in units.values() for size in (unit.count, unit.size) if size is not None]
    defaults = family.config or {}
    names = _fields_read(expressions, defaults) | {"model_type"}
    data: ModelRulesJson = {
        "at": model_rules.at,
        "prefix": list(family.prefix),
        "config": None if model_rules.config is None else _select_fields(model_rules.config, names),
        "defaults": {name: value for name, value in defaults.items() if name in names},
        "units": {name: to_table(unit, without=("override",)) for name, unit in units.items()},
        "rules": [to_table(rule, without=("when", "block")) for rule in rules],
        "modules": [to_table(rule, without=("when", "block")) for rule in modules],
    }
    if model_rules.blocks:
        data["blocks"] = dict(model_rules.blocks)
    return data


def _model_from_json(data: ModelRulesJson, family: str) -> ModelRules:
    for expression in data["defaults"].values():
        check_expression(expression)
    rules = Family(
        family,
        prefix=tuple(data["prefix"]),
        config=data["defaults"],
        units={name: parse_unit(name, unit) for name, unit in data["units"].items()},
        rules=tuple(map(_rule_from_json, data["rules"])),
        modules=tuple(map(_module_from_json, data["modules"])),
    )
    blocks = data.get("blocks", {})
    if not all(type(block) is int and 1 <= block <= MAX_MULTIPLE for block in blocks.values()):
        raise ValueError(f"blocks are {blocks!r:.60} (expected integers from 1 to {MAX_MULTIPLE})")
    return ModelRules(rules.with_base(Family(family)), data["config"], data["at"], blocks=blocks)


def _rule_from_json(table: Mapping[str, object]) -> Rule:
    pattern, origin, by_user = _header(table)
    rule = parse_rule(pattern, _without_header(table), origin, by_user=by_user)
    return replace(rule, mount=str(table.get("mount", "")))


def _module_from_json(table: Mapping[str, object]) -> ModuleRule:
    pattern, origin, by_user = _header(table)
    return parse_module(pattern, _without_header(table), origin, by_user=by_user)


def _header(table: Mapping[str, object]) -> tuple[str, str, bool]:
    """Pattern, origin and ``by_user`` of the table of a rule or a module override."""
    return str(table["pattern"]), str(table.get("origin", "")), table.get("by_user") is True


def _without_header(table: Mapping[str, object]) -> dict[str, object]:
    """The table as in a file: without the keys that only manifests have."""
    return {key: value for key, value in table.items() if key not in ("pattern", "origin", "by_user", "mount")}


def _expressions_of(rules: Iterable[Rule], modules: Iterable[ModuleRule]) -> Iterator[str | int]:
    for rule in rules:
        yield from rule.expressions()
    for module in modules:
        yield from (*module.expressions(), *module.sizes())


def _fields_read(expressions: Iterable[str | int], defaults: Mapping[str, str | int]) -> set[str]:
    """The config fields that expressions read, directly or through the defaults of other fields."""
    read: set[str] = set()
    pending = list(expressions)
    while pending:
        new = fields_in(pending.pop()) - read
        read |= new
        pending += [defaults[name] for name in new if name in defaults]
    return read


def _select_fields(config: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    """The config with these fields only; ``a.b`` is field b of the nested config a."""
    selected: dict[str, object] = {}
    for name in sorted(names):
        if (value := lookup(config, name)) is None:
            continue
        *path, last = name.split(".")
        nested = selected
        for key in path:
            inner = nested.setdefault(key, {})
            assert isinstance(inner, dict)
            nested = inner
        nested[last] = value
    return selected

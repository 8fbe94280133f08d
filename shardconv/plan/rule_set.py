"""Rule set: all rules of one model with the config fields that they read, and their JSON form in a manifest.

A rule set from a manifest gives the same plans as when it was written, whichever families are installed.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from shardconv.plan.config_fields import check_expression, fields_in, lookup
from shardconv.plan.engines import ENGINE, OWN, Engine
from shardconv.plan.experts import EXPERT_MODES
from shardconv.plan.family import NAMES_FAMILY, PLAN_FILE, TRANSFORMERS, Family, units_named
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.rule import Rule
from shardconv.plan.rule_format import parse_module, parse_rule, parse_unit, to_table
from shardconv.plan.scope import Scope

Parsed = TypeVar("Parsed")

#: The largest multiple to which a size is padded.
MAX_MULTIPLE = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class RuleSet:
    """The rules of a plan, which together with tensor names, tensor shapes and tp determine it.

    Attributes:
        family: name of the family whose rules are used.
        scopes: the rules of the model and of each submodel.
        experts: one of :data:`~shardconv.plan.experts.EXPERT_MODES`.
        uncertain: why the head size is assumed, and how to specify it; "" if it is known. If it is assumed, boundaries
            have to be valid for smaller head sizes, too.
        scale_block: rows and columns of a block with one scale, as in the config.
        vocab_multiple: the vocabulary is padded to a multiple of this before it is sharded.
        engine: name of the engine whose rules are included; None for shardconv's own runtime.
    """

    family: str
    scopes: tuple[Scope, ...]
    experts: str = "tensor"
    uncertain: str = ""
    scale_block: Any = None
    vocab_multiple: int = 1
    engine: str | None = None

    @property
    def pad(self) -> int:
        """Counts that tp does not divide are padded to a multiple of this and of tp; 0 for no padding."""
        return self.scopes[0].pad

    def with_padding(self, pad: int, used: Mapping[Rule, frozenset[str]] | None = None) -> Self:
        """The same rules with other values of ``pad`` and ``used``, for which see :class:`Scope`."""
        return replace(self, scopes=tuple(replace(scope, pad=pad, used=used) for scope in self.scopes))

    @property
    def padding_refusal(self) -> str:
        """Why nothing of such a model is padded; "" if padding is supported."""
        if self.uncertain:
            return self.uncertain
        if self.family in (NAMES_FAMILY, TRANSFORMERS):
            return "no family is known for this model, so outputs with padding may differ"
        return ""

    @property
    def has_plan_file(self) -> bool:
        """Whether some of the rules are from a plan file."""
        families = [scope.family for scope in self.scopes]
        origins = {rule.origin for family in families for rule in family.rules}
        origins |= {rule.origin for family in families for rule in family.modules}
        return any(origin.startswith(PLAN_FILE) for origin in origins)

    def for_engine(self, engine: Engine) -> Self:
        """The rules with those of an engine in place of those of another engine, tried after the user's rules.

        Args:
            engine: the engine, or :data:`~shardconv.plan.engines.OWN`.
        """

        def with_engine(scope: Scope) -> Scope:
            rules = scope.family.rules
            users, others = (tuple(rule for rule in rules if rule.by_user is by_user) for by_user in (True, False))
            engine_rules = engine.rules((scope.config or {}).get("model_type"))
            return replace(scope, family=replace(scope.family, rules=(*users, *engine_rules, *others)))

        scopes = tuple(map(with_engine, self.without_engine().scopes))
        name = None if engine is OWN else engine.name
        return replace(self, scopes=scopes, vocab_multiple=engine.vocab_multiple, engine=name)

    def without_engine(self) -> Self:
        """The rules without those of an engine, as shardconv's own runtime uses them."""

        def without_rules(scope: Scope) -> Scope:
            rules = tuple(rule for rule in scope.family.rules if not rule.origin.startswith(ENGINE))
            return replace(scope, family=replace(scope.family, rules=rules))

        return replace(self, scopes=tuple(map(without_rules, self.scopes)), engine=None)

    def without_overrides(self, blocks: Container[str]) -> Self:
        """The rules without the module overrides of ``blocks``."""

        def without_modules(scope: Scope) -> Scope:
            modules = tuple(rule for rule in scope.family.modules if rule.block not in blocks)
            return replace(scope, family=replace(scope.family, modules=modules))

        return replace(self, scopes=tuple(map(without_modules, self.scopes)))

    def to_json(self) -> dict[str, Any]:
        """Plain data: the rules whose ``when`` holds, and the config fields that they read."""
        return {
            "family": self.family,
            "experts": self.experts,
            "uncertain": self.uncertain,
            "scale_block": self.scale_block,
            "vocab_multiple": self.vocab_multiple,
            "scopes": [_scope_to_json(scope) for scope in self.scopes],
            **({"pad": self.pad} if self.pad else {}),
            **({"engine": self.engine} if self.engine else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a rule set.
            PlanError: if a rule names a unit that does not exist.
        """
        if data["experts"] not in EXPERT_MODES:
            raise ValueError(f"experts is {data['experts']!r:.60}, expected one of {', '.join(EXPERT_MODES)}")
        scopes = tuple(_scope_from_json(scope, data["family"]) for scope in data["scopes"])
        if not scopes:
            raise ValueError("rule set has no scopes (expected at least one)")
        multiple = data.get("vocab_multiple", 1)
        if type(multiple) is not int or not 1 <= multiple <= MAX_MULTIPLE:
            raise ValueError(f"vocab_multiple is {multiple!r:.60} (expected an integer from 1 to {MAX_MULTIPLE})")
        pad = data.get("pad", 0)
        if type(pad) is not int or not 0 <= pad <= MAX_MULTIPLE:
            raise ValueError(f"pad is {pad!r:.60} (expected an integer from 0 to {MAX_MULTIPLE})")
        engine = data.get("engine")
        if engine is not None and not isinstance(engine, str):
            raise ValueError(f"engine is {engine!r:.60} (expected a name)")
        rules = cls(data["family"], scopes, data["experts"], data["uncertain"], data["scale_block"], multiple, engine)
        return rules.with_padding(pad)


def _scope_to_json(scope: Scope) -> dict[str, Any]:
    family = scope.family
    rules, modules = list(scope.rules()), [rule for _, rule in scope.modules()]
    units = {name: unit for name, unit in (family.units or {}).items() if name in units_named(rules, modules)}
    expressions = [*_expressions_of(rules, modules)]
    expressions += [size for unit in units.values() for size in (unit.count, unit.size) if size is not None]
    defaults = family.config or {}
    names = _fields_read(expressions, defaults) | {"model_type"}
    return {
        "at": scope.at,
        "prefix": list(family.prefix),
        "config": None if scope.config is None else _select_fields(scope.config, names),
        "defaults": {name: value for name, value in defaults.items() if name in names},
        "units": {name: to_table(unit, without=("override",)) for name, unit in units.items()},
        "rules": [to_table(rule, without=("when", "block")) for rule in rules],
        "modules": [to_table(rule, without=("when", "block")) for rule in modules],
    }


def _scope_from_json(data: dict[str, Any], family: str) -> Scope:
    for expression in data["defaults"].values():
        check_expression(expression)
    rules = Family(
        family,
        prefix=tuple(data["prefix"]),
        config=data["defaults"],
        units={name: parse_unit(name, unit) for name, unit in data["units"].items()},
        rules=tuple(_parse_table(parse_rule, table) for table in data["rules"]),
        modules=tuple(_parse_table(parse_module, table) for table in data["modules"]),
    )
    return Scope(rules.over(Family(family)), data["config"], data["at"])


def _parse_table(parse: Callable[..., Parsed], table: Mapping[str, Any]) -> Parsed:
    """Parse a rule from a table that also has its pattern, origin, ``by_user`` and ``mount``."""
    separate = ("pattern", "origin", "by_user", "mount")
    keys = {key: value for key, value in table.items() if key not in separate}
    rule = parse(table["pattern"], keys, table.get("origin", ""), by_user=table.get("by_user") is True)
    return replace(rule, mount=str(table["mount"])) if "mount" in table else rule  # type: ignore[type-var]


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


def _select_fields(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config with these fields only; ``a.b`` is field b of the nested config a."""
    selected: dict[str, Any] = {}
    for name in sorted(names):
        if (value := lookup(config, name)) is None:
            continue
        *path, last = name.split(".")
        nested = selected
        for key in path:
            nested = nested.setdefault(key, {})
        nested[last] = value
    return selected

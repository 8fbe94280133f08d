"""Family files and plan files: strict loading of the rules for the models of one shape.

Owns the file format (CONTRIBUTING.md has it on a page). A key that is not known is an error, never skipped. Knows no
checkpoint: rules meet tensors in resolve.py.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from shardconv.errors import PlanError
from shardconv.plan.fields import check_expression


@dataclass(frozen=True, slots=True)
class Style:
    """Which dim of a weight, and of the bias beside it, a style cuts; below 0 from the end, None for neither."""

    weight: int | None
    bias: int | None
    packed: bool = False


#: The styles of a rule, under the names that transformers gives them where it has them.
STYLES = {
    "colwise": Style(weight=-2, bias=-1),
    "rowwise": Style(weight=-1, bias=None),
    "colwise_gather_output": Style(weight=-2, bias=-1),
    "packed_colwise": Style(weight=-2, bias=-1, packed=True),
    "packed_rowwise": Style(weight=-1, bias=None, packed=True),
    "embedding_rowwise": Style(weight=-2, bias=-1),
    "embedding_colwise": Style(weight=-1, bias=None),
    "embedding_colwise_gather_output": Style(weight=-1, bias=None),
    "gathered": Style(weight=0, bias=0),
    "by_rows": Style(weight=0, bias=0),
    "replicate": Style(weight=None, bias=None),
    "replicated_with_grad_allreduce": Style(weight=None, bias=None),
}

_FOLDER = Path(__file__).parent / "families"

#: Styles of which a rule may have parts, and need not.
_MAY_HAVE_PARTS = ("colwise_gather_output", "by_rows")

#: What stands in a pattern for one of several texts.
CHOICE = re.compile(r"\{[^{}]*\}")

#: Rules for names that tell by themselves how a tensor is cut; used where no family fits.
NAMES_FAMILY = "by_name"


@dataclass(frozen=True, slots=True)
class UnitRule:
    """A unit in the words of the config; ``count`` is None where the tensor's own size tells it."""

    count: str | int | None = None
    size: str | int = 1
    copies: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One line of a family file, equal to itself alone: a checkpoint with very many tensors compares it as often.

    Attributes:
        pattern: module or tensor names; ``*`` is any text without a dot, ``{a,b}`` is a or b, a leading ``**.`` is any
            prefix or none.
        style: a key of :data:`STYLES`.
        unit: the unit that cuts fall between; None for single elements.
        parts: for packed styles, the unit of each part.
        groups: how often the parts repeat; where there are enough, a rank has whole groups.
        repeats: how often the parts repeat, each of them cut, however many there are.
        pad: fill up with zeros what does not divide.
        transposed: the weight is stored (in, out), as Conv1D stores it.
        beside: a layer of the same module, whose ``rows`` the sizes of units may be told by.
        size: what the last dim has to be, where another size would be another thing of the same name.
        dims: tensors with fewer dims than this stay whole, or with one element along the dim that would be cut: norms
            and the like, beside kernels whose names are not known.
        when: config fields that must have these values for the rule to count.
        optional: of a user's rule, that it may match nothing, as where names on disk and in memory differ.
        origin: whose rule it is, for the report.
    """

    pattern: str
    style: str
    unit: str | None = None
    parts: tuple[str, ...] = ()
    groups: str | int = 1
    repeats: str | int = 1
    pad: bool = False
    transposed: bool = False
    beside: str = ""
    size: str | int | None = None
    dims: int = 0
    when: tuple[tuple[str, Any], ...] = ()
    optional: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        if set("{}") & set(CHOICE.sub("", self.pattern)):
            raise ValueError("a { has no }, or a } no {")
        if self.style not in STYLES:
            raise ValueError(f"style {self.style!r} is none of {', '.join(STYLES)}")
        if bool(self.parts) != STYLES[self.style].packed and self.style not in _MAY_HAVE_PARTS:
            raise ValueError(f"packed styles have parts, and only they and {' and '.join(_MAY_HAVE_PARTS)} may")
        if self.unit and self.parts:
            raise ValueError("a rule has unit or parts, not both")
        check_expression(self.groups)
        check_expression(self.repeats)
        check_expression(1 if self.size is None else self.size)


class InputRule(NamedTuple):
    """An argument of a module that holds something for each unit, of which the module gets the rank's.

    Attributes:
        dim: the dim that counts them, for each example anew.
        unit: the unit.
        size: how many elements of the dim each has, as of features; None where it has one, with matrices behind it.
    """

    dim: int
    unit: str
    size: str | int | None = None


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """What modules that work on a rank's part have to be told; in expressions a unit counts what a rank has of it.

    Attributes:
        pattern: module names, as in a :class:`Rule`.
        attributes: name of an attribute, or ``config.`` and a field of the module's config, to its value on a rank.
        inputs: name of an argument to what of it is the rank's: see :class:`InputRule`.
        at_most: name of an attribute to a layer and another attribute: it is no more than the rows that a rank has of
            the one, over the other.
        norms: the unit of which its ``norms`` are a list, one for each; "" if it has none.
        shared_output: how many elements at the end of the output go to what is cut without a layer between, so that
            their gradient is to be summed; None for none.
        unfused: the layer in it whose weights a way of its own in training would read, so that it must not go it;
            "" for none.
        copied_input: what goes in is whole on every rank, and what comes out is the rank's.
        summed_output: what comes out is the rank's part of a sum over all ranks.
        gathers: parameters of other modules that it reads, by patterns; they are whole while it computes.
        when: config fields that must have these values for it to count.
        origin: whose rule it is.
        is_required: of a user's rule, that it has to meet a module that has what it says.
    """

    pattern: str
    attributes: Mapping[str, str | int]
    inputs: Mapping[str, InputRule]
    at_most: Mapping[str, Sequence[str]] = field(default_factory=dict)
    norms: str = ""
    shared_output: str | int | None = None
    unfused: str = ""
    copied_input: bool = False
    summed_output: bool = False
    gathers: tuple[str, ...] = ()
    when: tuple[tuple[str, Any], ...] = ()
    origin: str = ""
    is_required: bool = False

    @classmethod
    def joined(cls, rules: Sequence["ModuleRule"]) -> Self:
        """What several rules say together; where two differ, the last counts."""
        attributes = {name: value for rule in rules for name, value in rule.attributes.items()}
        inputs = {name: value for rule in rules for name, value in rule.inputs.items()}
        at_most = {name: pair for rule in rules for name, pair in rule.at_most.items()}
        norms = next((rule.norms for rule in reversed(rules) if rule.norms), "")
        shared = next((rule.shared_output for rule in reversed(rules) if rule.shared_output is not None), None)
        return cls(
            "",
            attributes,
            inputs,
            at_most,
            norms,
            shared,
            unfused=next((rule.unfused for rule in reversed(rules) if rule.unfused), ""),
            copied_input=any(rule.copied_input for rule in rules),
            summed_output=any(rule.summed_output for rule in rules),
            gathers=tuple(dict.fromkeys(name for rule in rules for name in rule.gathers)),
        )


class Part(NamedTuple):
    """A model in a model.

    Attributes:
        field: the config field that holds its config.
        family: the family whose rules cut it; that of its config's ``model_type`` if "".
    """

    field: str
    family: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """The rules for the models of one shape.

    Attributes:
        name: the file's name without its ending.
        model_types: the values of config.json's ``model_type`` that it serves.
        prefix: what tensor names may lack at their beginning, as in checkpoints of a bare base model.
        inherits: the family that has what this one does not say; "" for none.
        config: what fields that a config may leave out are then: expressions, or true or false.
        units: name to unit.
        rules: in the order in which they are tried; the first whose pattern matches counts.
        modules: what modules have to be told; all that match count, the last of an attribute's values most.
        parts: of a model made of models, what the names of each begin with.
    """

    name: str
    model_types: tuple[str, ...] = ()
    inherits: str = ""
    prefix: str = ""
    config: Mapping[str, str | int] | None = None
    units: Mapping[str, UnitRule] | None = None
    rules: tuple[Rule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()
    parts: Mapping[str, Part] | None = None

    def over(self, base: "Family") -> "Family":
        """This family with what it does not say taken from ``base``; its own rules are tried first.

        Raises:
            PlanError: if a rule names a unit that neither has.
        """
        family = replace(
            self,
            prefix=self.prefix or base.prefix,
            config={**(base.config or {}), **(self.config or {})},
            units={**(base.units or {}), **(self.units or {})},
            rules=self.rules + base.rules,
            modules=base.modules + self.modules,
            parts={**(base.parts or {}), **(self.parts or {})},
        )
        _check_units_exist(family)
        return family


def family_names() -> list[str]:
    """The names of all families, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_family(name: str) -> Family:
    """The family of that name, with what it inherits.

    Raises:
        PlanError: if there is no such family.
    """
    if name not in family_names():
        near = ", ".join(get_close_matches(name, family_names(), cutoff=0.5)) or "none; docs/models.md has all"
        raise PlanError(f"there is no family {name!r}; near it is {near}")
    text = (_FOLDER / f"{name}.toml").read_text("utf-8")
    family = _parse_family(name, tomllib.loads(text), f"family {name}")
    return family.over(load_family(family.inherits) if family.inherits else Family(name))


@cache
def family_for(model_type: str) -> Family | None:
    """The family that serves a ``model_type`` of config.json, or None."""
    mentioning = (name for name in family_names() if model_type in (_FOLDER / f"{name}.toml").read_text("utf-8"))
    return next((family for family in map(load_family, mentioning) if model_type in family.model_types), None)


def parse_plan_file(name: str, text: str) -> Family:
    """A user's plan file: the format of a family file, in TOML or, by its ending, JSON.

    It stands for itself: what it inherits, and the units of the family that it is laid over, are not in it yet.

    Raises:
        PlanError: if it holds what no plan file holds.
    """
    is_json = name.endswith(".json")
    try:
        data = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name}: is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{name}: a plan file is a table")
    return _parse_family(name, data, f"plan file {name}")


_FAMILY_KEYS = {
    "model_types": list, "inherits": str, "prefix": str, "config": dict, "units": dict, "rules": dict, "modules": dict,
    "parts": dict,
}  # fmt: skip


def _parse_family(name: str, data: dict[str, Any], origin: str) -> Family:
    try:
        _check_keys(data, _FAMILY_KEYS)
        family = Family(
            name=name,
            model_types=tuple(data.get("model_types", ())),
            inherits=data.get("inherits", ""),
            prefix=data.get("prefix", ""),
            config=data.get("config", {}),
            units={key: _parse_unit(key, unit) for key, unit in data.get("units", {}).items()},
            rules=tuple(_parse_rules(data.get("rules", {}), origin)),
            modules=tuple(_parse_modules(data.get("modules", {}), origin)),
            parts={start: _parse_part(start, part) for start, part in data.get("parts", {}).items()},
        )
        for expression in (family.config or {}).values():
            check_expression(expression)
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    return family


def _parse_unit(name: str, data: Any) -> UnitRule:  # noqa: ANN401 - anything TOML holds
    try:
        _check_keys(data, {"count": (str, int), "size": (str, int), "copies": bool})
        unit = UnitRule(**data)
        for expression in (1 if unit.count is None else unit.count, unit.size):
            check_expression(expression)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error
    return unit


_RULE_KEYS = {
    "style": str, "unit": str, "parts": list, "groups": (str, int), "repeats": (str, int), "pad": bool,
    "transposed": bool, "beside": str, "size": (str, int), "dims": int, "when": dict, "optional": bool,
}  # fmt: skip


def _parse_rules(rules: dict[str, Any], origin: str) -> Iterable[Rule]:
    for pattern, alternatives in rules.items():
        for data in alternatives if isinstance(alternatives, list) else [alternatives]:
            try:
                _check_keys(data, _RULE_KEYS)
                parts, when = tuple(data.get("parts", ())), tuple(data.get("when", {}).items())
                if "style" not in data:
                    raise ValueError("style is missing")
                if not all(isinstance(part, str) for part in parts):
                    raise ValueError("parts are names of units")
                if any(isinstance(value, dict | list) for _, value in when):
                    raise ValueError("when compares fields with single values")
                yield Rule(pattern, origin=origin, **{**data, "parts": parts, "when": when})
            except ValueError as error:
                raise ValueError(f"rule {pattern!r}: {error}") from error


_MODULE_KEYS = {
    "attributes": dict, "inputs": dict, "at_most": dict, "norms": str, "shared_output": (str, int),
    "unfused": str, "copied_input": bool, "summed_output": bool, "gathers": list, "when": dict,
}  # fmt: skip


def _parse_modules(modules: dict[str, Any], origin: str) -> Iterable[ModuleRule]:
    for pattern, alternatives in modules.items():
        for data in alternatives if isinstance(alternatives, list) else [alternatives]:
            try:
                _check_keys(data, _MODULE_KEYS)
                attributes, inputs, at_most = (data.get(key, {}) for key in ("attributes", "inputs", "at_most"))
                for expression in (*attributes.values(), data.get("shared_output", 0)):
                    check_expression(expression)
                for place in inputs.values():
                    _check_keys(place, {"dim": int, "unit": str, "size": (str, int)})
                    check_expression(place.get("size", 1))
                if not all(isinstance(two, list) and list(map(type, two)) == [str, str] for two in at_most.values()):
                    raise ValueError("at_most has a layer and an attribute for each name")
                gathers = tuple(data.get("gathers", ()))
                if not all(isinstance(name, str) for name in gathers):
                    raise ValueError("gathers are names of parameters")
                places = {
                    name: InputRule(place["dim"], place["unit"], place.get("size")) for name, place in inputs.items()
                }
                when = tuple(data.get("when", {}).items())
                told = {**data, "attributes": attributes, "inputs": places, "gathers": gathers, "when": when}
                yield ModuleRule(pattern, origin=origin, **told)
            except (ValueError, KeyError) as error:
                raise ValueError(f"modules {pattern!r}: {error}") from error


def _parse_part(start: str, data: Any) -> Part:  # noqa: ANN401 - anything TOML holds
    if isinstance(data, str):
        return Part(data)
    try:
        _check_keys(data, {"config": str, "family": str})
        return Part(data["config"], data["family"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"part {start!r}: {error}: it is a config field, or has config and family") from error


def _check_keys(data: Any, known: Mapping[str, Any]) -> None:  # noqa: ANN401 - anything TOML holds
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is no table")  # noqa: TRY004 - all of them become one PlanError
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"key {key!r} is not known; known are {', '.join(known)}")
        kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
        if type(value) not in kinds:  # exactly: true is no number
            raise ValueError(f"{key} = {value!r:.60} has the wrong type")


def _check_units_exist(family: Family) -> None:
    for rule in family.rules:
        for unit in (rule.unit, *rule.parts):
            if unit is not None and unit not in (family.units or {}):
                raise PlanError(f"{rule.origin}: rule {rule.pattern!r}: there is no unit {unit!r}")
    for told in family.modules:
        for unit in (told.norms, *(one.unit for one in told.inputs.values())):
            if unit and unit not in (family.units or {}):
                raise PlanError(f"{told.origin}: modules {told.pattern!r}: there is no unit {unit!r}")

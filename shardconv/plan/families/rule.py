"""Rules of tensors and of modules whose names match a pattern.

A rule of tensors has their style, and the units that boundaries respect. A rule of modules has attributes, inputs and
collectives that differ from the unsharded model's.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, Struct, structs

from shardconv.plan.families.config_fields import check_expression, fields_in, replaced
from shardconv.support.structs import Data


class Style(Struct, frozen=True):
    """The sharded dim of a weight and of its bias. Negative dims count from the end; None is replicated."""

    weight: int | None
    bias: int | None
    packed: bool = False


#: The origin of the rules of this option.
REPLICATE_OPTION = "--replicate"

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

#: Styles without ``packed`` whose rules may have segments.
_MAY_HAVE_SEGMENTS = ("colwise_gather_output", "by_rows")

#: Names in expressions that are not config fields: sizes of the tensor or of the layer beside it.
SIZE_NAMES = frozenset({"rows", "features"})

#: A choice between several texts in a pattern.
CHOICE = re.compile(r"\{[^{}]*\}")


def check_pattern(pattern: str) -> None:
    """Check that braces in a pattern are balanced and not nested.

    Raises:
        ValueError: if they are not.
    """
    if set("{}") & set(CHOICE.sub("", pattern)):
        raise ValueError("braces are unbalanced or nested")


class Named(Data, frozen=True):
    """Base of units and rules: data with names of units and config fields, which change where a block is mounted.

    Class attributes list the fields that have them; a class with another field in a list is not made. Each value of a
    tuple or mapping is one, and None is none.

    Attributes:
        LABEL: the noun for the data in messages, before its name.
        SIZES: expressions of config fields.
        COUNTS: expressions in which the name of a unit is its count per rank.
        UNITS: names of units.
        NESTED: data with names in turn.
    """

    LABEL: ClassVar = ""
    SIZES: ClassVar[tuple[str, ...]] = ()
    COUNTS: ClassVar[tuple[str, ...]] = ()
    UNITS: ClassVar[tuple[str, ...]] = ()
    NESTED: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = {*cls.SIZES, *cls.COUNTS, *cls.UNITS, *cls.NESTED}
        if unknown := sorted(names - cls.__annotations__.keys()):
            raise TypeError(f"{cls.__name__}: SIZES, COUNTS, UNITS and NESTED name fields (got {', '.join(unknown)})")

    def __post_init__(self) -> None:
        for expression in (*self.sizes(), *self.expressions()):
            check_expression(expression)

    def sizes(self) -> Iterator[str | int]:
        """The expressions in which all names are config fields."""
        yield from self._values("SIZES")

    def expressions(self) -> Iterator[str | int]:
        """The expressions in which the name of a unit is its count per rank."""
        yield from self._values("COUNTS")

    @property
    def units(self) -> tuple[str, ...]:
        """The names of units outside of expressions."""
        return tuple(unit for unit in self._values("UNITS") if unit)

    def reads(self) -> set[str]:
        """The names of units, and those in expressions that may be units."""
        return {*self.units}.union(*map(fields_in, self.expressions()))

    def mounted(self, fields: Mapping[str, str | int], units: Mapping[str, str], **changes: object) -> Self:
        """Replace config fields by others or by expressions, and names of units by others; also set ``changes``."""
        change: dict[str, Callable[[Any], object]] = {
            "SIZES": partial(replaced, names=fields),
            "COUNTS": partial(replaced, names={**fields, **units}),
            "UNITS": lambda unit: units.get(unit, unit),
            "NESTED": lambda data: data.mounted(fields, units),
        }
        return structs.replace(
            self,
            **{name: _mapped(getattr(self, name), change[kind]) for kind in change for name in getattr(self, kind)},
            **changes,
        )

    def _values(self, kind: str) -> Iterator[Any]:
        for name in getattr(self, kind):
            yield from _leaves(getattr(self, name))
        for name in self.NESTED:
            for nested in _leaves(getattr(self, name)):
                yield from nested._values(kind)  # noqa: SLF001 - of the same class


def _leaves(value: object) -> Iterator[Any]:
    """A value, or those in a tuple or mapping; none for None."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple):
        yield from value
    elif value is not None:
        yield value


def _mapped(value: object, change: Callable[[Any], object]) -> object:
    """A value with a change of its leaves."""
    if isinstance(value, Mapping):
        return {name: change(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(change, value))
    return None if value is None else change(value)


class UnitRule(Named, frozen=True):
    """A unit: elements that are never divided between ranks, such as a head. Sizes are expressions of config fields.

    Attributes:
        count: the number of units; None if it follows from the size of the tensor.
        size: elements per unit.
        replicate: replicate units where there are fewer of them than ranks.
        shard_if_divisible: shard units only where tp divides their count; otherwise every rank computes with all of
            them, and rules use their style ``otherwise``.
        override: replace the unit of this name in the inherited family, also for the rules of that family. False once
            the families are joined.
    """

    LABEL = "unit"
    SIZES = ("count", "size")

    count: str | int | None = None
    size: str | int = 1
    replicate: bool = False
    shard_if_divisible: bool = False
    override: bool = False

    def __post_init__(self) -> None:
        if self.shard_if_divisible and self.count is None:
            raise ValueError("shard_if_divisible = true needs a count")
        super().__post_init__()

    def describe(self) -> str:
        """The unit as a plan file has it."""
        shown = {name: getattr(self, name) for name in ("count", "size", "replicate", "shard_if_divisible")}
        kept = {name: value for name, value in shown.items() if value not in (None, False)}
        return f"{{ {', '.join(f'{name} = {value!r}' for name, value in kept.items())} }}".replace("True", "true")


class Rule(Named, frozen=True, eq=False):
    """The sharding of tensors whose names match a pattern. Compared by identity, as it is a key of large dicts.

    Attributes:
        pattern: module or tensor names; ``*`` is any text without a dot, ``{a,b}`` is a or b, a leading ``**.`` is any
            number of modules.
        style: a key of :data:`STYLES`.
        unit: the unit that boundaries respect; None for single elements.
        segments: for packed styles, the unit of each segment.
        segment: index of the only segment in the tensor, from 0; if its size differs, of an even chunk of all segments.
        groups: number of groups of segments; with at least as many as ranks, each is on one rank.
        repeats: number of repetitions of the segments, each of which is sharded.
        pad: pad a size that tp does not divide with zeros.
        transposed: the weight is stored (in, out), as Conv1D stores it.
        beside: a layer of the same module whose number of ``rows`` the expressions of units may read.
        beside_field: the config field that determines which modules have the layer ``beside``, for errors.
        size: the required size of the last dim, where only the size distinguishes tensors of the same name.
        rows: the required size of the sharded dim, where the rule has neither unit nor segments; not checked if the
            config does not have its fields.
        dims: replicate tensors with fewer dims than this, or with one element along the sharded dim: norms beside
            kernels whose names are not known.
        when: config fields that must have these values for the rule to apply.
        otherwise: the style where ``shard_if_divisible`` units are not sharded, because tp does not divide their count.
        optional: whether a user's rule may match nothing, as where names on disk and in memory differ.
        origin: where the rule comes from, for the report.
        by_user: whether it is from a plan file; then it has to match a tensor, unless it is optional.
        mount: the entry of ``[blocks]`` of a plan file that it is from, of which one rule has to match a tensor; ""
            for none, and for optional entries.
        block: the block, at its module, that it is from; "" for none.
    """

    LABEL = "rule"
    SIZES = ("groups", "repeats", "size", "rows")
    UNITS = ("unit", "segments")

    pattern: str
    style: str
    unit: str | None = None
    segments: tuple[str, ...] = ()
    segment: int | None = None
    groups: str | int = 1
    repeats: str | int = 1
    pad: bool = False
    transposed: bool = False
    beside: str = ""
    beside_field: str = ""
    size: str | int | None = None
    rows: str | int | None = None
    dims: int = 0
    when: Mapping[str, str | int | float | bool] = {}
    otherwise: str = ""
    optional: bool = False
    origin: str = ""
    by_user: bool = False
    mount: str = ""
    block: str = ""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.style not in STYLES:
            raise ValueError(f"style {self.style!r} is unknown (expected {', '.join(STYLES)})")
        if bool(self.segments) != STYLES[self.style].packed and self.style not in _MAY_HAVE_SEGMENTS:
            raise ValueError(
                f"segments are required for packed styles, and allowed for {' and '.join(_MAY_HAVE_SEGMENTS)}"
            )
        if self.otherwise and (self.otherwise not in STYLES or STYLES[self.otherwise].packed):
            raise ValueError(f"otherwise = {self.otherwise!r} is not a style without segments")
        if self.unit and self.segments:
            raise ValueError("rule has both unit and segments: remove one of them")
        if self.rows is not None and self.units:
            raise ValueError("rule has rows, and units, whose counts give them: remove rows")
        if self.segment is not None and not 0 <= self.segment < len(self.segments):
            raise ValueError(f"segment = {self.segment} is out of range (got {len(self.segments)} segments)")
        super().__post_init__()


class SliceRule(Named, frozen=True):
    """A slice of an argument, an output, a parameter or a buffer: the elements of the rank's units.

    Attributes:
        dim: the dim that has elements for each unit.
        unit: the unit; "" if there are ``segments``.
        size: elements per unit; None for an argument with one matrix per unit.
        item: the output, if there are several, from 0; None for arguments and single outputs.
        segments: the unit of each segment, if the dim consists of several.
        items: the tensors of an argument that is a list of tensors, from 0; () if it is one tensor.
    """

    SIZES = ("size",)
    UNITS = ("unit", "segments")

    dim: int
    unit: str = ""
    size: str | int | None = None
    item: int | None = None
    segments: tuple[str, ...] = ()
    items: tuple[Annotated[int, Meta(ge=0)], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.unit) == bool(self.segments):
            raise ValueError("it needs either a unit, or segments with the names of units")
        if self.items and self.size is None:
            raise ValueError("items needs size")


class ModuleRule(Named, frozen=True):
    """Per-rank module overrides of the modules that match a pattern.

    In its expressions the name of a unit is its count per rank.

    Attributes:
        pattern: module names, as in a :class:`~shardconv.plan.families.rule.Rule`.
        attributes: attribute, or ``config.`` and a field of the module's config, to its value per rank.
        inputs: argument to how it is sliced.
        at_most: attribute to a layer and another attribute; it is limited to the number of local rows of the layer,
            divided by that attribute.
        slices: replicated parameter or buffer of the module to how it is sliced while the module computes.
        output: how its output is sliced, where it has elements for the units of all ranks.
        norms: the unit of which the list ``norms`` has one each; "" without such a list.
        shared_output: elements at the end of the output whose gradient is all-reduced, as they are used with shards
            without a layer in between; None for none. ``rows`` is the number of rows of the module's weight.
        unfused: the layer whose weight a code path for training would read directly, which is disabled; "" for none.
        allreduce_input_grad: all-reduce the input gradient.
        gathered_output: all-gather the output.
        allreduce_output: all-reduce the output.
        gathers: patterns of parameters of other modules that it reads, which are gathered while it computes.
        when: config fields that must have these values for the overrides to apply.
        optional: whether a user's overrides may match no module, as where one file is for several models.
        origin: where they come from, for messages.
        by_user: whether they are from a plan file; then they have to match a module with the attributes they name.
        block: the block, at its module, that they are from; "" for none.
    """

    LABEL = "modules"
    COUNTS = ("attributes", "shared_output")
    UNITS = ("norms",)
    NESTED = ("inputs", "slices", "output")

    pattern: str
    attributes: Mapping[str, str | int] = {}
    inputs: Mapping[str, SliceRule] = {}
    at_most: Mapping[str, tuple[str, str]] = {}
    slices: Mapping[str, SliceRule] = {}
    output: SliceRule | None = None
    norms: str = ""
    shared_output: str | int | None = None
    unfused: str = ""
    allreduce_input_grad: bool | None = None
    gathered_output: bool | None = None
    allreduce_output: bool | None = None
    gathers: tuple[str, ...] = ()
    when: Mapping[str, str | int | float | bool] = {}
    optional: bool = False
    origin: str = ""
    by_user: bool = False
    block: str = ""

    def __post_init__(self) -> None:
        for pattern in (self.pattern, *self.gathers):
            check_pattern(pattern)
        super().__post_init__()
        for place in self.NESTED:
            for rule in _leaves(getattr(self, place)):
                _check_slice(place, rule)

    def is_empty(self) -> bool:
        """Whether nothing is overridden, as the code of the modules is correct on each rank."""
        return self.joined([self]) == type(self)("")

    @classmethod
    def joined(cls, rules: Sequence["ModuleRule"]) -> Self:
        """The overrides of several rules together; of one that several have, the last."""
        named = [one for one in structs.fields(cls) if one.name not in _ABOUT_RULE] if rules else []
        overrides: dict[str, Any] = {
            one.name: _merged(one.default, [getattr(rule, one.name) for rule in rules]) for one in named
        }
        return cls("", **overrides)


#: The fields of slices beside ``dim`` and ``unit``, by the override that they are of.
_OPTIONAL_FIELDS = {"inputs": ("size", "items"), "output": ("size", "item"), "slices": ("segments",)}


def _check_slice(place: str, rule: SliceRule) -> None:
    """Check that a slice has only the fields that apply to arguments, outputs, parameters or methods."""
    for field in ("size", "item", "segments", "items"):
        if getattr(rule, field) not in (None, ()) and field not in _OPTIONAL_FIELDS[place]:
            raise ValueError(f"{place}: key {field!r} is unknown")
    if place == "inputs" and rule.size is None and rule.dim < 0:
        raise ValueError("inputs: dim is negative without size: count it from 0")


#: Fields of a rule that are not overrides.
_ABOUT_RULE = ("pattern", "when", "optional", "origin", "by_user", "block")


def _merged(default: object, values: Sequence[object]) -> object:
    if any(isinstance(one, Mapping) for one in values):
        return {name: value for one in values if isinstance(one, Mapping) for name, value in one.items()}
    if default == ():
        return tuple(dict.fromkeys(name for one in values if isinstance(one, tuple) for name in one))
    return next((one for one in reversed(values) if one not in (None, "")), default)

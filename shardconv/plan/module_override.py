"""Module overrides: attributes, inputs and collectives of modules that differ from those of the unsharded model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from msgspec import Meta, structs

from shardconv.plan.config_fields import check_expression, fields_in
from shardconv.plan.rule import check_pattern
from shardconv.support.structs import Data


class SliceRule(Data, frozen=True):
    """How an argument, an output, a parameter or a buffer is sliced to the rank's units.

    Attributes:
        dim: the dim that has elements for each unit.
        unit: the unit; "" if there are ``segments``.
        size: elements per unit; None for an argument with one matrix per unit.
        item: the output, if there are several, from 0; None for arguments and single outputs.
        segments: the unit of each segment, if the dim consists of several.
        items: the tensors of an argument that is a list of tensors, from 0; () if it is one tensor.
    """

    dim: int
    unit: str = ""
    size: str | int | None = None
    item: int | None = None
    segments: tuple[str, ...] = ()
    items: tuple[Annotated[int, Meta(ge=0)], ...] = ()

    def __post_init__(self) -> None:
        check_expression(1 if self.size is None else self.size)
        if bool(self.unit) == bool(self.segments):
            raise ValueError("it needs either a unit, or segments with the names of units")
        if self.items and self.size is None:
            raise ValueError("items needs size")

    def units(self) -> tuple[str, ...]:
        """The names of its units."""
        return self.segments or (self.unit,)


class ModuleRule(Data, frozen=True):
    """Per-rank module overrides of the modules that match a pattern.

    In its expressions the name of a unit is its count per rank.

    Attributes:
        pattern: module names, as in a :class:`~shardconv.plan.rule.Rule`.
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
        origin: where they come from, for messages.
        by_user: whether they are from a plan file; then they have to match a module that has what they name.
        block: the block, at its module, that they are from; "" for none.
    """

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
    origin: str = ""
    by_user: bool = False
    block: str = ""

    def __post_init__(self) -> None:
        for pattern in (self.pattern, *self.gathers):
            check_pattern(pattern)
        for expression in self.expressions():
            check_expression(expression)
        for place in ("inputs", "slices"):
            for rule in getattr(self, place).values():
                _check_slice(place, rule)
        if self.output is not None:
            _check_slice("output", self.output)

    def expressions(self) -> Iterator[str | int]:
        """The expressions in which the name of a unit is its count per rank."""
        yield from self.attributes.values()
        if self.shared_output is not None:
            yield self.shared_output

    def sizes(self) -> Iterator[str | int]:
        """The expressions in which names are config fields."""
        places = (*self.inputs.values(), *filter(None, [self.output]))
        yield from (place.size for place in places if place.size is not None)

    def units(self) -> Iterator[str]:
        """The names of units outside of expressions."""
        for place in (*self.inputs.values(), *self.slices.values(), *filter(None, [self.output])):
            yield from place.units()
        if self.norms:
            yield self.norms

    def reads(self) -> set[str]:
        """All names that the overrides depend on: units and config fields."""
        return {*self.units()}.union(*map(fields_in, self.expressions()))

    def is_empty(self) -> bool:
        """Whether nothing is overridden, as the code of the modules is right on each rank."""
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
_ABOUT_RULE = ("pattern", "when", "origin", "by_user", "block")


def _merged(default: object, values: Sequence[object]) -> object:
    if any(isinstance(one, Mapping) for one in values):
        return {name: value for one in values if isinstance(one, Mapping) for name, value in one.items()}
    if default == ():
        return tuple(dict.fromkeys(name for one in values if isinstance(one, tuple) for name in one))
    return next((one for one in reversed(values) if one not in (None, "")), default)

"""A family: the rules, units and module overrides for the models of one shape; and the blocks that it is built from.

Owns what rules can express, which rule_format.py parses. Knows no checkpoint: rules meet tensors in resolve.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from shardconv.errors import PlanError
from shardconv.plan.fields import check_expression, fields_in


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

#: The family of rules for names that by themselves show how a tensor is sharded; used where no family fits.
NAMES_FAMILY = "by_name"

#: The family of transformers' own plan of a model type, used where no family file serves the type.
FOREIGN = "transformers"

#: How the origin of a rule of a user's plan file begins.
PLAN_FILE = "plan file"

#: Styles of which a rule may have parts, and need not.
_MAY_HAVE_PARTS = ("colwise_gather_output", "by_rows")

#: How a parameter is sharded that a module's own code multiplies with: see ``products`` of :class:`ModuleRule`.
PRODUCTS = ("colwise", "rowwise", "rowwise_shared")
#: Names in expressions that are not config fields: sizes of the tensor or of the layer beside it.
SIZE_NAMES = frozenset({"rows", "features"})

#: What stands in a pattern for one of several texts.
CHOICE = re.compile(r"\{[^{}]*\}")


def check_pattern(pattern: str) -> None:
    """Check that braces in a pattern belong together.

    Raises:
        ValueError: if they do not.
    """
    if set("{}") & set(CHOICE.sub("", pattern)):
        raise ValueError("a { has no }, or a } no {")


@dataclass(frozen=True, slots=True)
class UnitRule:
    """A unit in the words of the config.

    Attributes:
        count: how many there are; None where the tensor's own size tells it.
        size: elements of each.
        copies: fewer units than ranks are held by several ranks each.
        whole: a number of units that does not divide by the ranks is not sharded: every rank computes with all of
            them, and rules take their style ``otherwise``.
        override: it takes the place of another unit of its name in the family below, also in the rules of that.
    """

    count: str | int | None = None
    size: str | int = 1
    copies: bool = False
    whole: bool = False
    override: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One line of a family file, equal to itself alone: a checkpoint with very many tensors compares it as often.

    Attributes:
        pattern: module or tensor names; ``*`` is any text without a dot, ``{a,b}`` is a or b, a leading ``**.`` is any
            prefix or none.
        style: a key of :data:`STYLES`.
        unit: the unit that cuts fall between; None for single elements.
        parts: for packed styles, the unit of each part.
        part: the tensor holds this part alone, from 0; or an even share of all, where its size is not that of the part.
        groups: how often the parts repeat; where there are enough, a rank has whole groups.
        repeats: how often the parts repeat, each of them cut, however many there are.
        pad: fill up with zeros what does not divide.
        transposed: the weight is stored (in, out), as Conv1D stores it.
        beside: a layer of the same module, whose ``rows`` the sizes of units may be told by.
        size: what the last dim has to be, where another size would be another thing of the same name.
        dims: tensors with fewer dims than this stay whole, or with one element along the dim that would be cut: norms
            and the like, beside kernels whose names are not known.
        when: config fields that must have these values for the rule to count.
        otherwise: the style where the units are not sharded, because they are ``whole`` and do not divide.
        optional: of a user's rule, that it may match nothing, as where names on disk and in memory differ.
        origin: where the rule comes from, for the report.
        by_user: whether a user wrote it; then it has to match a tensor, unless it is optional.
        mount: the entry of ``[blocks]`` in a user's plan file that it comes from, one rule of which has to match
            a tensor; "" for none, and for optional entries.
        block: the block, at its module, that it comes from; "" for none.
    """

    pattern: str
    style: str
    unit: str | None = None
    parts: tuple[str, ...] = ()
    part: int | None = None
    groups: str | int = 1
    repeats: str | int = 1
    pad: bool = False
    transposed: bool = False
    beside: str = ""
    size: str | int | None = None
    dims: int = 0
    when: tuple[tuple[str, Any], ...] = ()
    otherwise: str = ""
    optional: bool = False
    origin: str = ""
    by_user: bool = False
    mount: str = ""
    block: str = ""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.style not in STYLES:
            raise ValueError(f"style {self.style!r} is none of {', '.join(STYLES)}")
        if bool(self.parts) != STYLES[self.style].packed and self.style not in _MAY_HAVE_PARTS:
            raise ValueError(f"packed styles have parts, and only they and {' and '.join(_MAY_HAVE_PARTS)} may")
        if self.otherwise and (self.otherwise not in STYLES or STYLES[self.otherwise].packed):
            raise ValueError(f"otherwise = {self.otherwise!r} is not a style, or one that needs parts")
        if self.unit and self.parts:
            raise ValueError("a rule has unit or parts, not both")
        if self.part is not None and not 0 <= self.part < len(self.parts):
            raise ValueError(f"part = {self.part} is none of {len(self.parts)} parts")
        check_expression(self.groups)
        check_expression(self.repeats)
        check_expression(1 if self.size is None else self.size)

    @property
    def units(self) -> tuple[str, ...]:
        """The names of its units."""
        return self.parts or ((self.unit,) if self.unit is not None else ())

    def expressions(self) -> Iterator[str | int]:
        """The expressions that it has beside its units."""
        yield from (self.groups, self.repeats)
        if self.size is not None:
            yield self.size


class InputRule(NamedTuple):
    """An argument of a module that holds something for each unit, of which the module gets the rank's.

    Attributes:
        dim: the dim that counts them, for each example anew.
        unit: the unit.
        size: how many elements of the dim each has, as of features; None where it has one, with matrices behind it.
        item: which of several outputs it is; None for arguments, and where there is one output.
        parts: the units of each part, for tensors of which the dim consists of several; then there is no unit.
        items: of an argument that is a list of tensors, those of them that hold features for each unit; () for others.
    """

    dim: int
    unit: str = ""
    size: str | int | None = None
    item: int | None = None
    parts: tuple[str, ...] = ()
    items: tuple[int, ...] = ()

    def units(self) -> tuple[str, ...]:
        """The names of all units."""
        return self.parts or (self.unit,)


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """What modules that work on a rank's part have to be told; in expressions a unit counts what a rank has of it.

    Attributes:
        pattern: module names, as in a :class:`Rule`.
        attributes: name of an attribute, or ``config.`` and a field of the module's config, to its value on a rank.
        inputs: name of an argument to what of it is the rank's: see :class:`InputRule`.
        at_most: name of an attribute to a layer and another attribute: it is no more than the rows that a rank has of
            the one, over the other.
        full_width: the features of all heads, to which its code joins those of the rank; None where it asks for what
            there is.
        locals: name of a local variable of its code to its value on a rank.
        slices: name of a parameter or buffer of its own that is replicated and holds something for each unit, to what
            of it is the rank's.
        output: what of its output the rank goes on with, where it gives something for each unit of all ranks.
        unsharded: name of a method that mixes heads, and so computes over those of all ranks, to what of its output the
            rank goes on with.
        products: name of a parameter of its own that its code multiplies with to how that is sharded: ``colwise`` and
            ``rowwise`` as of linear layers; ``rowwise_shared`` where the product goes on to shards.
        functional: the unit of the heads where its code hands the weights of its layers to torch's function of
            multi-head attention; "" if it does not.
        norms: the unit of which its ``norms`` are a list, one for each; "" if it has none.
        shared_output: how many elements at the end of the output go to what is cut without a layer between, so that
            their gradient is to be summed; None for none. ``rows`` are those of the module's own weight.
        unfused: the layer in it whose weights a way of its own in training would read, so that it must not go it;
            "" for none.
        copied_input: what goes in is whole on every rank, and what comes out is the rank's.
        gathered_output: what comes out are the rank's features, and all of them are needed.
        summed_output: what comes out is the rank's part of a sum over all ranks.
        gathers: parameters of other modules that it reads, by patterns; they are whole while it computes.
        when: config fields that must have these values for it to count.
        origin: where the rule comes from.
        by_user: whether a user wrote it; then it has to match a module that has what it sets.
        block: as of a :class:`Rule`.
    """

    pattern: str
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    inputs: Mapping[str, InputRule] = field(default_factory=dict)
    at_most: Mapping[str, Sequence[str]] = field(default_factory=dict)
    full_width: str | int | None = None
    locals: Mapping[str, str | int] = field(default_factory=dict)
    slices: Mapping[str, InputRule] = field(default_factory=dict)
    output: InputRule | None = None
    unsharded: Mapping[str, InputRule] = field(default_factory=dict)
    products: Mapping[str, str] = field(default_factory=dict)
    functional: str = ""
    norms: str = ""
    shared_output: str | int | None = None
    unfused: str = ""
    copied_input: bool | None = None
    gathered_output: bool | None = None
    summed_output: bool | None = None
    gathers: tuple[str, ...] = ()
    when: tuple[tuple[str, Any], ...] = ()
    origin: str = ""
    by_user: bool = False
    block: str = ""

    def expressions(self) -> Iterator[str | int]:
        """The expressions in which a unit stands for how many of it a rank has."""
        yield from (*self.attributes.values(), *self.locals.values())
        yield from (one for one in (self.full_width, self.shared_output) if one is not None)

    def sizes(self) -> Iterator[str | int]:
        """The expressions of config fields alone."""
        places = (*self.inputs.values(), *filter(None, [self.output]))
        yield from (place.size for place in places if place.size is not None)

    def units(self) -> Iterator[str]:
        """The names of units that it has otherwise."""
        places = (*self.inputs.values(), *self.slices.values(), *self.unsharded.values())
        for place in (*places, *filter(None, [self.output])):
            yield from place.units()
        yield from filter(None, (self.norms, self.functional))

    def reads(self) -> set[str]:
        """The names that it reads: of every unit that it depends on, and of config fields."""
        return {*self.units()}.union(*map(fields_in, self.expressions()))

    @classmethod
    def joined(cls, rules: Sequence["ModuleRule"]) -> Self:
        """What several rules say together; where two differ, the last counts."""
        attributes = {name: value for rule in rules for name, value in rule.attributes.items()}
        inputs = {name: value for rule in rules for name, value in rule.inputs.items()}
        values = {name: value for rule in rules for name, value in rule.locals.items()}
        at_most = {name: pair for rule in rules for name, pair in rule.at_most.items()}
        norms = next((rule.norms for rule in reversed(rules) if rule.norms), "")
        slices = {name: value for rule in rules for name, value in rule.slices.items()}
        width = next((rule.full_width for rule in reversed(rules) if rule.full_width is not None), None)
        output = next((rule.output for rule in reversed(rules) if rule.output is not None), None)
        shared = next((rule.shared_output for rule in reversed(rules) if rule.shared_output is not None), None)
        return cls(
            "",
            attributes,
            inputs,
            at_most,
            width,
            values,
            slices,
            output,
            {name: value for rule in rules for name, value in rule.unsharded.items()},
            {name: value for rule in rules for name, value in rule.products.items()},
            norms=norms,
            shared_output=shared,
            functional=next((rule.functional for rule in reversed(rules) if rule.functional), ""),
            unfused=next((rule.unfused for rule in reversed(rules) if rule.unfused), ""),
            copied_input=_last(rules, "copied_input"),
            gathered_output=_last(rules, "gathered_output"),
            summed_output=_last(rules, "summed_output"),
            gathers=tuple(dict.fromkeys(name for rule in rules for name in rule.gathers)),
        )


def _last(rules: Sequence[ModuleRule], name: str) -> bool | None:
    """What the last of the rules that have a key says; None if none has."""
    return next((value for rule in reversed(rules) if (value := getattr(rule, name)) is not None), None)


class Mount(NamedTuple):
    """A block at a module of a family.

    Attributes:
        pattern: names of the module; "" for the model itself.
        block: the block's name.
        fields: a config field that the block reads, to the field or expression that stands for it here.
        optional: of a user's plan file, that the block may cover no tensor.
    """

    pattern: str
    block: str
    fields: tuple[tuple[str, str | int], ...] = ()
    optional: bool = False

    def describe(self) -> str:
        """The entry in the words of a plan file."""
        fields = ", ".join(f"{name} = {value!r}" for name, value in self.fields)
        return f"blocks {self.pattern!r} = {self.block!r}" + (f" with {fields}" if fields else "")


@dataclass(frozen=True, slots=True)
class Block:
    """How one kind of module is sharded, in names relative to the module.

    Attributes:
        name: the file's name without its ending.
        config: what config fields are where a config leaves them out: expressions, or true or false.
        units: name to unit.
        rules: in the order in which they are tried.
        modules: module overrides; the pattern "" is the module itself.
        blocks: blocks of modules in it.
    """

    name: str
    config: Mapping[str, str | int]
    units: Mapping[str, UnitRule]
    rules: tuple[Rule, ...]
    modules: tuple[ModuleRule, ...]
    blocks: tuple[Mount, ...]


class Part(NamedTuple):
    """A model in a model.

    Attributes:
        field: the config field that holds its config.
        family: the family whose rules cut it; that of its config's ``model_type`` if "".
        by_user: whether a user wrote it; then a config has to have the field.
    """

    field: str
    family: str = ""
    by_user: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The rules for the models of one shape.

    Attributes:
        name: the file's name without its ending.
        model_types: the values of config.json's ``model_type`` that it serves.
        prefix: what tensor names may lack at their beginning, as in checkpoints of a bare base model; and what they may
            have there in its place, as layers of the same kind in another part of the model.
        inherits: the family that has what this one does not say; "" for none.
        config: what fields that a config may leave out are then: expressions, or true or false.
        units: name to unit.
        rules: in the order in which they are tried; the first whose pattern matches counts.
        modules: what modules have to be told; all that match count, the last of an attribute's values most.
        parts: of a composite model, what the names of each submodel begin with.
        blocks: the blocks that it mounts; their rules are tried after its own.
        origin: where it comes from, for the report.
        gathered: why attention is not sharded by heads where it is gathered; "" where none is.
        numbered: units of blocks with a number from the order of blocks, which only rules of blocks name.
        empty: sections and keys that are empty in its file, and so are not taken from another family.
    """

    name: str
    model_types: tuple[str, ...] = ()
    inherits: str = ""
    prefix: tuple[str, ...] = ()
    config: Mapping[str, str | int] | None = None
    units: Mapping[str, UnitRule] | None = None
    rules: tuple[Rule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()
    parts: Mapping[str, Part] | None = None
    blocks: tuple[Mount, ...] = ()
    origin: str = ""
    gathered: str = ""
    numbered: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()

    def over(self, base: "Family") -> "Family":
        """This family with what it does not say taken from ``base``; its own rules are tried first.

        Raises:
            PlanError: if a rule names a unit that neither has.
        """
        base = replace(base, **{name: getattr(Family(""), name) for name in self.empty})
        family = replace(
            self,
            prefix=self.prefix or base.prefix,
            config={**(base.config or {}), **(self.config or {})},
            units={**(base.units or {}), **(self.units or {})},
            rules=self.rules + base.rules,
            modules=base.modules + self.modules,
            parts={**(base.parts or {}), **(self.parts or {})},
            gathered=self.gathered or base.gathered,
            numbered=self.numbered | base.numbered,
        )
        check_units(family.units or {}, family.rules, family.modules)
        return family


def fields_read(family: Family | Block) -> set[str]:
    """The names in all expressions and conditions of a family or a block: config fields and units."""
    rules: tuple[Rule | ModuleRule, ...] = (*family.rules, *family.modules)
    expressions = [one for unit in (family.units or {}).values() for one in (unit.count, unit.size)]
    expressions += [one for rule in rules for one in rule.expressions()]
    expressions += [one for rule in family.modules for one in rule.sizes()]
    expressions += (family.config or {}).values()
    found = set().union(*(fields_in(one) for one in expressions if one is not None and not isinstance(one, bool)))
    return found | {name for rule in rules for name, _ in rule.when}


def units_named(rules: Sequence[Rule], modules: Sequence[ModuleRule]) -> set[str]:
    """The names that may be those of units."""
    found = {unit for rule in rules for unit in (rule.unit, *rule.parts) if unit is not None}
    return found.union(*(module.reads() for module in modules))


def check_units(units: Mapping[str, UnitRule], rules: Sequence[Rule], modules: Sequence[ModuleRule]) -> None:
    """Check that every unit that is named exists, and that rules say what is done where its number does not divide.

    Raises:
        PlanError: if a rule or a module override names another unit, or ``otherwise`` is missing or not needed.
    """
    for rule in rules:
        where = f"{rule.origin}: rule {rule.pattern!r}"
        for unit in rule.units:
            if unit not in units:
                raise PlanError(f"{where}: there is no unit {unit!r}")
        kinds = {units[unit].whole for unit in rule.units} or {False}
        if kinds != {bool(rule.otherwise)}:
            raise PlanError(f"{where}: otherwise is for rules all of whose units have whole = true, and these need it")
    for module in modules:
        for unit in module.units():
            if unit not in units:
                raise PlanError(f"{module.origin}: modules {module.pattern!r}: there is no unit {unit!r}")

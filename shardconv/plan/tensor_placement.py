"""A group of tensors with equal placements, and their placement at one tp, by their rule, config and shape.

Sizes of rule, config and shape that do not agree are an error.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shardconv.plan.experts import Expert, place_expert
from shardconv.plan.families.config_fields import Fields
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.rule import STYLES, Rule
from shardconv.plan.padding import UnitPadding
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, shard_dim
from shardconv.plan.plan import Reason, TensorPlan, TensorSpec
from shardconv.plan.rule_set import ModelRules, RuleSet
from shardconv.support.errors import PlanError, ShapeError, option

#: Config fields about attention heads, which are assumed without a config.
HEAD_FIELDS = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})

#: The largest number of segments whose sizes messages show.
_MOST_SHOWN = 6

#: Number of elements that fill an integer number of bytes, for dtypes with elements smaller than a byte.
_ELEMENTS_PER_GROUP = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}


class PaddedRule(NamedTuple):
    """A rule that pads.

    Attributes:
        group: the first tensors that it pads.
        unit: the unit; None if elements are padded.
        size: number of units without padding.
        padded: number of units with padding.
    """

    group: "TensorGroup"
    unit: str | None
    size: int
    padded: int


class BlockedError(Exception):
    """A tensor cannot be sharded at this tp.

    Args:
        tensor: its name.
        reason: why not.
        is_unsure: whether the reason is based on an assumed head size.
    """

    def __init__(self, tensor: str, reason: str, *, is_unsure: bool) -> None:
        super().__init__(f"{tensor}: {reason}")
        self.tensor = tensor
        self.reason = reason
        self.is_unsure = is_unsure


class TensorGroup(Struct, frozen=True, eq=False, dict=True):
    """Tensors with equal inputs of the placement, and therefore with equal placements. Compared by identity.

    Attributes:
        name: the first of the tensors, for messages.
        rule: the rule that matches their names.
        model_rules: the rules of the model or submodel.
        rules: the rule set that these are from.
        leaf: ``weight`` or ``bias``: which tensor of its module each is.
        spec: dtype, shape and grid.
        rows: rows of the weight of the layer ``beside`` of the rule; None without one.
        stage: the stage of the model, where the units of the rule differ by stage.
        expert: the expert that it belongs to, if ranks have whole experts.
    """

    name: str
    rule: Rule
    model_rules: ModelRules
    rules: RuleSet
    leaf: str
    spec: TensorSpec
    rows: int | None = None
    stage: int | None = None
    expert: Expert | None = None

    @property
    def matrix(self) -> str:
        """The name that the rule is for: of the tensor, or of the logical matrix of a quantized tensor."""
        return self.matrix_of(self.name)

    def matrix_of(self, name: str) -> str:
        """The same for any tensor of the group."""
        return name if self.spec.grid is None else self.spec.grid.logical_name(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rule reads: of the tensor, or of the logical matrix of a quantized tensor."""
        return self.spec.shape if self.spec.grid is None else self.spec.grid.shape

    @cached_property
    def dim(self) -> int | None:
        """The dim of :attr:`shape` that the rule shards, from 0; None where it is replicated.

        Raises:
            PlanError: if the rule shards input features, and the tensor has one dim.
        """
        rule, shape, is_bias = self.rule, self.shape, self.leaf == "bias"
        dim = STYLES[rule.style].bias if is_bias else STYLES[rule.style].weight
        if dim is None or prod(shape) <= 1 or len(shape) < max(rule.dims, 1) or (rule.dims and shape[dim] == 1):
            return None
        if dim >= 0 or len(shape) == 1:
            if dim == -1 and not is_bias:
                raise PlanError(
                    f"{self.name}: style {rule.style} needs a matrix (got a tensor of one dim): use another style"
                )
            return 0
        if rule.transposed and not is_bias:
            dim = {-1: -2, -2: -1}[dim]
        return len(shape) + dim

    @cached_property
    def _fields(self) -> Fields:
        """The fields that the rule's expressions read: the config, ``features`` (the sharded dim) and ``rows``."""
        sizes = {"features": None if self.dim is None else self.shape[self.dim], "rows": self.rows}
        return self.model_rules.fields(self.stage, **{field: size for field, size in sizes.items() if size is not None})

    def plan(self, tp: int) -> TensorPlan:
        """Placement on the ranks of a stage, style and reason at tensor parallel size ``tp``.

        Raises:
            BlockedError: if the units cannot be divided over ``tp`` ranks.
            PlanError: if rule, config and shape do not fit together.
        """
        rule, grid = self.rule, self.spec.grid
        if not self._is_sharded(tp):
            return self._unsharded.plan(tp)
        if self.rules.uncertain and tp & (tp - 1):
            raise BlockedError(
                self.matrix, "only powers of two are supported while head_dim is unknown", is_unsure=True
            )
        try:
            if self.expert is not None:
                placement = place_expert(self.expert, self.spec.shape, tp, self.rules.ep)
                return TensorPlan(placement, "expert", (), Reason(rule.origin, rule.pattern), self.spec.grid)
            matrix_placement = self._place(tp)
            placement = matrix_placement if grid is None else grid.place(matrix_placement, self.spec.shape)
            _check_bytes(placement, self.spec)
        except IndivisibleError as error:
            read = ", ".join(self._fields_read()) or f"shape {list(self.shape)}"
            is_unsure = bool(self.rules.uncertain) and not HEAD_FIELDS.isdisjoint(self._fields.read)
            raise BlockedError(self.matrix, f"{error} ({read})", is_unsure=is_unsure) from error
        except PlanError as error:
            if self.rules.family != NAMES_FAMILY or self.rules.has_plan_file:
                raise
            raise PlanError(f"{error.message}. No family is known for this model", f"pass {option('rules')}") from error
        times = self.rules.ranks_per_stage(tp) // tp
        edits = None if grid is None else grid.edits(matrix_placement)
        edits = None if edits is None else edits * times
        reason = Reason(rule.origin, rule.pattern, self._fields_read())
        return TensorPlan(placement.repeated(times), rule.style, rule.units, reason, grid, edits)

    def padded_rules(self, tp: int) -> Iterator[PaddedRule]:
        """The units that have padding at ``tp`` ranks."""
        if not self._is_sharded(tp):
            yield from self._unsharded.padded_rules(tp)
        elif self.plan(tp).placement.is_padded:
            names, units, _ = self._units
            for name, unit in zip(names, units, strict=True):
                padding = self.model_rules.padding(self.rule, name)
                padded = (padding.apply(unit, self.model_rules.multiple(tp)) if padding else unit).padded_count(tp)
                if padded != unit.count:
                    yield PaddedRule(self, name, unit.count, padded)

    def full_shape(self, tp: int) -> tuple[int, ...]:
        """The full shape where these tensors are shards for ``tp`` ranks: of the sharded dim by rule and config.

        Raises:
            PlanError: if the config lacks a field that gives the size.
        """
        rule, dim, fields = self.rule, self.dim, self._fields
        if dim is None:
            return self.shape
        size = self.shape[dim] * tp
        units = [self.model_rules.family.units[unit] for unit in rule.units]
        if not rule.otherwise and not units and rule.style == "embedding_rowwise":
            size = fields.evaluate("vocab_size")
        elif not rule.otherwise and units and all(unit.count is not None for unit in units):
            widths = (fields.evaluate(unit.count or 0) * fields.evaluate(unit.size) for unit in units)
            size = fields.evaluate(rule.groups) * fields.evaluate(rule.repeats) * sum(widths)
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])

    def _is_sharded(self, tp: int) -> bool:
        """Whether the units of the rule are sharded: with ``shard_if_divisible``, if ``tp`` divides their count."""
        if not self.rule.otherwise:
            return True
        model_rules = replace(self.model_rules, stage=self.stage)
        return all(model_rules.is_sharded(unit, tp) for unit in self.rule.units)

    @cached_property
    def _unsharded(self) -> "TensorGroup":
        """The group with the style that applies where the units are not sharded."""
        rule = self.rule
        other = Rule(rule.pattern, rule.otherwise, pad=True, transposed=rule.transposed, origin=rule.origin)
        return replace(self, rule=other)

    def _fields_read(self) -> tuple[str, ...]:
        """The config fields that were read, with a mark on assumed ones."""
        assumed = HEAD_FIELDS if self.rules.uncertain else frozenset()
        return tuple(f"{key}={value}{' assumed' * (key in assumed)}" for key, value in self._fields.read.items())

    def _place(self, tp: int) -> Placement:
        """The placement of a tensor of shape :attr:`TensorGroup.shape`."""
        rule, shape = self.rule, self.shape
        if rule.size is not None and shape[-1:] != (expected := self._fields.evaluate(rule.size),):
            raise PlanError(
                f"{self.matrix}: shape {list(shape)} does not end in {rule.size} = {expected}, so rule "
                f"{rule.pattern!r} is not meant for it: pass a family or a plan file with a rule for it as "
                f"{option('rules')}"
            )
        if (dim := self.dim) is None:
            return Placement.replicated(tp)
        if len(shape) > 2 and rule.origin == f"family {NAMES_FAMILY}":
            raise PlanError(
                f"{self.matrix} of shape {list(shape)}: its name does not determine which dim to shard: pass "
                f"{option('rules')} with a family, or with a plan file that has a rule for it"
            )
        names, units, chunks = self._units
        groups = self._fields.evaluate(rule.groups)
        self._check_size(dim, groups, units, chunks)
        if chunks > 1:
            return shard_dim(dim, units, tp, groups=groups).chunk(rule.segment or 0, chunks)
        paddings = [self.model_rules.padding(rule, unit) for unit in names]
        return _padded_placement(dim, units, tp, groups, paddings, self.model_rules.multiple(tp))

    def _check_size(self, dim: int, groups: int, units: Sequence[Unit], chunks: int) -> None:
        """Check that the units of all groups, or an even chunk of them, are the elements of the dim."""
        size = self.shape[dim]
        expected = groups * sum(unit.width for unit in units)
        if expected == size * chunks:
            return
        read = ", ".join(f"{key}={value}" for key, value in self._fields.read.items())
        stored = "" if self.spec.grid is None else ", or quantization_config of the layer is wrong"
        of_group = f"; counts of segments are per group, of which there are {groups}" if groups > 1 else ""
        cause = f"{'the config is of another checkpoint, or ' * bool(read)}the family or plan file does not fit{stored}"
        config = option("config")
        raise ShapeError(
            f"{self.matrix}: dim {dim} has {size} elements (expected {_sum_of_widths(groups, units, chunks)}"
            f"{f' by {read} of the config' * bool(read)}{of_group}): {cause}",
            f"pass {f'{config} or ' * bool(read or stored)}other {option('rules')} (now {self.rule.origin}, "
            f"rule {self.rule.pattern!r})",
        )

    @cached_property
    def _units(self) -> tuple[tuple[str | None, ...], tuple[Unit, ...], int]:
        """The units of the sharded dim, or of each of its groups.

        Returns:
            The names of the units; the units; and the number of tensors into which the dim is divided evenly: 1, or the
            number of segments if each tensor holds an even chunk of all of them.
        """
        assert self.dim is not None
        rule, size = self.rule, self.shape[self.dim]
        names = (rule.segments or (rule.unit,)) * self._fields.evaluate(rule.repeats)
        segment_size = size // max(self._fields.evaluate(rule.groups) * len(names), 1)  # of units without a count
        units = tuple(self._unit(unit, segment_size) for unit in names)
        if rule.segment is None:
            return names, units, 1
        if units[rule.segment].width == size:
            return (names[rule.segment],), (units[rule.segment],), 1
        return names, units, len(units)

    def _unit(self, unit_name: str | None, size: int) -> Unit:
        rule, fields = self.rule, self._fields
        if unit_name is None:
            is_vocabulary = rule.pad and rule.style == "embedding_rowwise"
            rows = fields.evaluate_known(rule.rows)
            return Unit(
                size if rows is None else rows,
                pad=rule.pad,
                multiple=self.rules.vocab_multiple if is_vocabulary else 1,
            )
        unit = self.model_rules.family.units[unit_name]
        replicate = unit.replicate and not self.rules.uncertain
        unit_size = fields.evaluate(unit.size)
        if unit.count is not None:
            return Unit(fields.evaluate(unit.count), unit_size, replicate, rule.pad)
        if not unit_size or size % unit_size:
            raise PlanError(f"{self.name}: {size} elements are not a multiple of the {unit_size} of one {unit_name}")
        return Unit(size // unit_size, unit_size, replicate, rule.pad)


def _sum_of_widths(groups: int, units: Sequence[Unit], chunks: int) -> str:
    """The number of elements of all groups, and how it is calculated: ``768 = 8 * (4 * 16 + 2 * 16)``."""
    expected = groups * sum(unit.width for unit in units) // chunks
    widths = " + ".join(f"{unit.count} * {unit.size}" if unit.size > 1 else str(unit.count) for unit in units)
    if groups > 1:
        widths = f"{groups} * ({widths})"
    shown = f"({widths}) / {chunks}" if chunks > 1 else widths
    return str(expected) if len(units) > _MOST_SHOWN or shown == str(expected) else f"{expected} = {shown}"


def _padded_placement(
    dim: int, units: Sequence[Unit], tp: int, groups: int, paddings: Sequence[UnitPadding | None], multiple: int
) -> Placement:
    """The placement of units with the padding of each.

    Raises:
        IndivisibleError: if the units cannot be divided over ``tp`` ranks.
    """
    padded = [padding.apply(unit, multiple) if padding else unit for unit, padding in zip(units, paddings, strict=True)]
    try:
        if paddings[0] is None or paddings[0].heads is None or groups == 1:
            return shard_dim(dim, padded, tp, groups=groups)
        return shard_dim(dim, padded, tp, groups=groups, padded_groups=paddings[0].heads.padded(multiple).kv_heads)
    except IndivisibleError as error:
        refusal = next((padding.refusal for padding in paddings if padding and padding.refusal), "")
        raise IndivisibleError(f"{error}, and is not padded: {refusal}" if refusal else str(error)) from error


def _check_bytes(placement: Placement, spec: TensorSpec) -> None:
    """Refuse boundaries inside a byte, for dtypes with elements smaller than one."""
    if placement.dim is None or spec.dtype not in _ELEMENTS_PER_GROUP:
        return
    group = _ELEMENTS_PER_GROUP[spec.dtype]
    inner = prod(spec.shape[placement.dim + 1 :])
    entries = {entry for entries in placement.ranks for entry in entries}
    edges = {edge for entry in entries for edge in (entry if isinstance(entry, Interval) else (entry.size,))}
    if any(edge * inner % group for edge in edges) or prod(spec.shape[placement.dim :]) % group:
        raise IndivisibleError(f"a boundary of {spec.dtype} would be inside a byte")

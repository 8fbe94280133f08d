"""The placement of one group of tensors at one tp, by its rule, config and shape.

Sizes of rule, config and shape that do not agree are an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from msgspec import structs

from shardconv.plan.experts import place_expert
from shardconv.plan.families.config_fields import Fields
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.rule import Rule
from shardconv.plan.model_rules import ModelRules
from shardconv.plan.padding import UnitPadding
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, shard_dim
from shardconv.plan.plan import Reason, TensorPlan, TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.tensor_groups import TensorGroup
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
        model_rules: the rules of the model or submodel.
        rule: the rule.
        unit: the unit; None if elements are padded.
        size: number of units without padding.
        padded: number of units with padding.
        tensor: the first tensor that the rule pads.
        spec: of the tensor.
    """

    model_rules: ModelRules
    rule: Rule
    unit: str | None
    size: int
    padded: int
    tensor: str
    spec: TensorSpec


class ShardedDim(NamedTuple):
    """The dim that a rule shards, from 0 (None: replicated), and its full size (None: only the tensor has it)."""

    dim: int | None
    size: int | None


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


class GroupPlanner:
    """Placements of one group of tensors.

    Args:
        group: the tensors.
        rules: the rule set that their rule is from.
    """

    def __init__(self, group: TensorGroup, rules: RuleSet) -> None:
        self._group = group
        self._rules = rules

    @cached_property
    def _fields(self) -> Fields:
        return self._group.fields()

    def plan(self, tp: int) -> TensorPlan:
        """Placement, style and reason at ``tp`` ranks.

        Raises:
            BlockedError: if the units cannot be divided over ``tp`` ranks.
            PlanError: if rule, config and shape do not fit together.
        """
        group, rule = self._group, self._group.rule
        if not self._is_sharded(tp):
            return self._unsharded.plan(tp)
        if self._rules.uncertain and tp & (tp - 1):
            raise BlockedError(
                group.matrix, "only powers of two are supported while head_dim is unknown", is_unsure=True
            )
        try:
            if group.expert is not None:
                placement = place_expert(group.expert, group.spec.shape, tp)
                return TensorPlan(placement, "expert", (), Reason(rule.origin, rule.pattern), group.spec.grid)
            matrix_placement = self._place(tp)
            grid = group.spec.grid
            placement = matrix_placement if grid is None else grid.place(matrix_placement, group.spec.shape)
            _check_bytes(placement, group.spec)
        except IndivisibleError as error:
            read = ", ".join(self._fields_read()) or f"shape {list(group.shape)}"
            is_unsure = bool(self._rules.uncertain) and not HEAD_FIELDS.isdisjoint(self._fields.read)
            raise BlockedError(group.matrix, f"{error} ({read})", is_unsure=is_unsure) from error
        except PlanError as error:
            if self._rules.family != NAMES_FAMILY or self._rules.has_plan_file:
                raise
            raise PlanError(f"{error.message}. No family is known for this model", f"pass {option('rules')}") from error
        edits = None if grid is None else grid.edits(matrix_placement)
        reason = Reason(rule.origin, rule.pattern, self._fields_read())
        return TensorPlan(placement, rule.style, rule.units, reason, grid, edits)

    def padded_units(self, tp: int) -> Iterator[PaddedRule]:
        """The units that have padding at ``tp`` ranks."""
        group = self._group
        if not self._is_sharded(tp):
            yield from self._unsharded.padded_units(tp)
            return
        if not self.plan(tp).placement.is_padded:
            return
        names, units, _ = self._units(group.shape[group.dim or 0])
        for unit_name, unit in zip(names, units, strict=True):
            padding = group.model_rules.padding(group.rule, unit_name)
            padded = (padding.apply(unit, group.model_rules.multiple(tp)) if padding else unit).padded_count(tp)
            if padded != unit.count:
                yield PaddedRule(group.model_rules, group.rule, unit_name, unit.count, padded, group.name, group.spec)

    def sharded_dim(self) -> ShardedDim:
        """The dim that is sharded, and its full size by rule and config.

        The size is not read from the tensor, which may therefore be a rank's shard.

        Raises:
            PlanError: if the config lacks a field that gives the size.
        """
        rule = self._group.rule
        if (dim := self._group.dim) is None or rule.otherwise:
            return ShardedDim(dim, None)
        fields = self._group.fields()
        names = rule.segments or (rule.unit,)
        units = [self._group.model_rules.family.units[unit] for unit in names if unit is not None]
        if not units and rule.style == "embedding_rowwise":
            return ShardedDim(dim, fields.evaluate("vocab_size"))
        counted = [fields.evaluate(unit.count) * fields.evaluate(unit.size) for unit in units if unit.count is not None]
        is_known = len(counted) == len(names)
        times = fields.evaluate(rule.groups) * fields.evaluate(rule.repeats)
        return ShardedDim(dim, times * sum(counted) if is_known else None)

    def _is_sharded(self, tp: int) -> bool:
        """Whether the units of the rule are sharded: with ``shard_if_divisible``, if ``tp`` divides their count."""
        model_rules, rule = structs.replace(self._group.model_rules, stage=self._group.stage), self._group.rule
        return not rule.otherwise or all(model_rules.is_sharded(unit, tp) for unit in rule.units)

    @cached_property
    def _unsharded(self) -> "GroupPlanner":
        """The planner with the style that applies where the units are not sharded."""
        rule = self._group.rule
        other = Rule(rule.pattern, rule.otherwise, pad=True, transposed=rule.transposed, origin=rule.origin)
        return GroupPlanner(replace(self._group, rule=other), self._rules)

    def _fields_read(self) -> tuple[str, ...]:
        """The config fields that were read, with a mark on those that were assumed."""
        assumed = HEAD_FIELDS if self._rules.uncertain else frozenset()
        return tuple(f"{key}={value}{' assumed' * (key in assumed)}" for key, value in self._fields.read.items())

    def _place(self, tp: int) -> Placement:
        """The placement of a tensor of shape :attr:`TensorGroup.shape`."""
        group, rule, shape = self._group, self._group.rule, self._group.shape
        if rule.size is not None and shape[-1:] != (expected := self._fields.evaluate(rule.size),):
            raise PlanError(
                f"{group.matrix}: shape {list(shape)} does not end in {rule.size} = {expected}, so rule "
                f"{rule.pattern!r} is not meant for it: pass a family or a plan file with a rule for it as "
                f"{option('rules')}"
            )
        if (dim := group.dim) is None:
            return Placement.replicated(tp)
        if len(shape) > 2 and rule.origin == f"family {NAMES_FAMILY}":
            raise PlanError(
                f"{group.matrix} of shape {list(shape)}: its name does not determine which dim to shard: pass "
                f"{option('rules')} with a family, or with a plan file that has a rule for it"
            )
        names, units, chunks = self._units(shape[dim])
        groups = self._fields.evaluate(rule.groups)
        self._check_size(dim, groups, units, chunks)
        if chunks > 1:
            return shard_dim(dim, units, tp, groups=groups).chunk(rule.segment or 0, chunks)
        paddings = [group.model_rules.padding(rule, unit) for unit in names]
        return _padded_placement(dim, units, tp, groups, paddings, group.model_rules.multiple(tp))

    def _check_size(self, dim: int, groups: int, units: Sequence[Unit], chunks: int) -> None:
        """Check that the units of all groups, or an even chunk of them, are the elements of the dim."""
        group, size = self._group, self._group.shape[dim]
        expected = groups * sum(unit.width for unit in units)
        if expected == size * chunks:
            return
        read = ", ".join(f"{key}={value}" for key, value in self._fields.read.items())
        stored = "" if group.spec.grid is None else ", or quantization_config of the layer is wrong"
        of_group = f"; counts of segments are those of one of the {groups} groups" if groups > 1 else ""
        cause = f"{'the config is of another checkpoint, or ' * bool(read)}the family or plan file does not fit{stored}"
        config = option("config")
        raise ShapeError(
            f"{group.matrix}: dim {dim} has {size} elements (expected {_sum_of_widths(groups, units, chunks)}"
            f"{f' by {read} of the config' * bool(read)}{of_group}): {cause}",
            f"pass {f'{config} or ' * bool(read or stored)}other {option('rules')} (now {group.rule.origin}, "
            f"rule {group.rule.pattern!r})",
        )

    def _units(self, size: int) -> tuple[tuple[str | None, ...], list[Unit], int]:
        """The units of a dim of ``size`` elements, or of each of its groups.

        Returns:
            The names of the units; the units; and the number of tensors into which the dim is divided evenly: 1, or the
            number of segments if each tensor holds an even chunk of all of them.
        """
        rule = self._group.rule
        names = (rule.segments or (rule.unit,)) * self._fields.evaluate(rule.repeats)
        segment_size = size // max(self._fields.evaluate(rule.groups) * len(names), 1)  # of units without a count
        units = [self._unit(unit, segment_size) for unit in names]
        if rule.segment is None:
            return names, units, 1
        if units[rule.segment].width == size:
            return (names[rule.segment],), [units[rule.segment]], 1
        return names, units, len(units)

    def _unit(self, unit_name: str | None, size: int) -> Unit:
        rule, fields = self._group.rule, self._fields
        if unit_name is None:
            is_vocabulary = rule.pad and rule.style == "embedding_rowwise"
            rows = fields.evaluate_known(rule.rows)
            return Unit(
                size if rows is None else rows,
                pad=rule.pad,
                multiple=self._rules.vocab_multiple if is_vocabulary else 1,
            )
        unit = self._group.model_rules.family.units[unit_name]
        replicate = unit.replicate and not self._rules.uncertain
        unit_size = fields.evaluate(unit.size)
        if unit.count is not None:
            return Unit(fields.evaluate(unit.count), unit_size, replicate, rule.pad)
        if not unit_size or size % unit_size:
            raise PlanError(
                f"{self._group.name}: {size} elements are not a multiple of the {unit_size} of one {unit_name}"
            )
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

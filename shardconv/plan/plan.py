"""Plan: the placement, style and reason of every tensor of one checkpoint at one tp, with the rules it is made from.

Plain data that is compared by its JSON form and stored in the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NotRequired, Self, TypedDict

from shardconv.plan.grid import VALUES, Grid, GridJson
from shardconv.plan.placement import Placement, PlacementJson
from shardconv.plan.rule_set import RuleSet, RuleSetJson


class TensorSpec(NamedTuple):
    """A stored tensor.

    Attributes:
        dtype: its dtype, as safetensors names it.
        shape: its shape.
        grid: how it covers a logical matrix; None for a tensor that is stored without quantization.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: Grid | None = None


def logical_tensors(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of the same model without quantization: each logical matrix in place of those that store it."""
    found: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        if spec.grid is None:
            found[name] = spec
        elif spec.grid.axes:
            found[spec.grid.logical_name(name)] = TensorSpec("BF16", spec.grid.shape)
    return found


def num_quantized(tensors: Mapping[str, TensorSpec]) -> int:
    """The number of quantized weights."""
    return sum(spec.grid is not None and spec.grid.role == VALUES for spec in tensors.values())


def quantized_blocks(tensors: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """The groups, blocks and packed words of quantized weights, each as ``128-wide group``."""
    grids = {spec.grid for spec in tensors.values() if spec.grid is not None}
    dims = {(dim.kind, dim.elements) for grid in grids for dim in grid.dims if dim.kind}
    return tuple(f"{elements}-wide {kind}" for kind, elements in sorted(dims))


class Reason(NamedTuple):
    """The rule that determines the placement of a tensor.

    Attributes:
        origin: the source of the rule: ``family llama``, ``plan file x.toml``, ``--replicate``.
        rule: the pattern that matches the tensor.
        fields: the config fields that the rule reads, as ``name=value``.
    """

    origin: str
    rule: str
    fields: tuple[str, ...] = ()


class ReasonJson(TypedDict):
    """JSON form of a :class:`Reason`."""

    origin: str
    rule: str
    fields: list[str]


class TensorPlanJson(TypedDict):
    """JSON form of a :class:`TensorPlan`."""

    placement: PlacementJson
    style: str
    units: list[str]
    reason: ReasonJson
    grid: NotRequired[GridJson]
    edits: NotRequired[list[list[int]]]


class PlanJson(TypedDict):
    """JSON form of a :class:`Plan`: ``tensors`` maps names to indices in ``placements``."""

    tp: int
    family: str | None
    assumed: list[str]
    placements: list[TensorPlanJson]
    tensors: dict[str, int]
    rules: RuleSetJson | None


class TensorPlan(NamedTuple):
    """How one tensor is sharded.

    Attributes:
        placement: the intervals of each rank.
        style: the rule's style, or ``expert`` where experts are distributed over ranks.
        units: the units that are not split: one, or one for each segment; empty if any element may be a boundary.
        reason: the rule, and the config fields that it reads.
        grid: how the stored tensor covers its logical matrix, which the rule is for; None without quantization.
        edits: for each rank the integers that are subtracted from the values of its shard, and added again by a merge:
            one for all of them, or one for each. None if shards have the source's values.
    """

    placement: Placement
    style: str
    units: tuple[str, ...]
    reason: Reason
    grid: Grid | None = None
    edits: tuple[tuple[int, ...], ...] | None = None

    def describe(self) -> str:
        """The style and the reason in one line."""
        origin, rule, fields = self.reason
        read = f" ({', '.join(fields)})" if fields else ""
        return f"{origin}: {self.style} {rule}{read}"

    def to_json(self) -> TensorPlanJson:
        """Convert to JSON data."""
        reason: ReasonJson = {
            "origin": self.reason.origin,
            "rule": self.reason.rule,
            "fields": list(self.reason.fields),
        }
        units = list(self.units)
        data: TensorPlanJson = {
            "placement": self.placement.to_json(), "style": self.style, "units": units, "reason": reason
        }  # fmt: skip
        if self.grid is not None:
            data["grid"] = self.grid.to_json()
        if self.edits is not None:
            data["edits"] = [list(values) for values in self.edits]
        return data

    @classmethod
    def from_json(cls, data: TensorPlanJson) -> Self:
        """The inverse of :meth:`to_json`."""
        reason = data["reason"]
        parsed = Reason(reason["origin"], reason["rule"], tuple(reason["fields"]))
        grid = Grid.from_json(data["grid"]) if "grid" in data else None
        edits = tuple(tuple(values) for values in data["edits"]) if "edits" in data else None
        return cls(Placement.from_json(data["placement"]), data["style"], tuple(data["units"]), parsed, grid, edits)


@dataclass(frozen=True, slots=True)
class Plan:
    """How every tensor of one checkpoint is sharded.

    Attributes:
        tp: tensor parallel size.
        family: name of the family whose rules are used; None without a family.
        tensors: tensor name to placement, style and reason.
        rules: the rules and module overrides, which also give the plan for another tp and for the tensors of the model
            in memory. None for a manifest of format 1 or 2, which does not store them.
        assumed: assumptions and conclusions that are not read from config or plan file, as sentences.
    """

    tp: int
    family: str | None
    tensors: Mapping[str, TensorPlan]
    rules: RuleSet | None = None
    assumed: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        """Without the tensors, which are many."""
        return f"Plan(tp={self.tp}, family={self.family!r}, {len(self.tensors)} tensors)"

    def placement(self, name: str) -> Placement:
        """The placement of a tensor."""
        return self.tensors[name].placement

    def first_difference(self, other: "Plan") -> str | None:
        """The name of the first tensor whose placement or style differs in another plan; None if all are equal."""
        for name, planned in self.tensors.items():
            tensor_plan = other.tensors.get(name)
            if tensor_plan is None or (tensor_plan.placement, tensor_plan.style) != (planned.placement, planned.style):
                return name
        return next((name for name in other.tensors if name not in self.tensors), None)

    def to_json(self) -> PlanJson:
        """Convert to JSON data, in which equal plans of tensors are stored once."""
        index_of: dict[TensorPlan, int] = {}
        tensors = {name: index_of.setdefault(plan, len(index_of)) for name, plan in self.tensors.items()}
        return {
            "tp": self.tp,
            "family": self.family,
            "assumed": list(self.assumed),
            "placements": [plan.to_json() for plan in index_of],
            "tensors": tensors,
            "rules": None if self.rules is None else self.rules.to_json(),
        }

    @classmethod
    def from_json(cls, data: PlanJson) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a plan.
            PlanError: if a rule names a unit that does not exist.
        """
        try:
            distinct = [TensorPlan.from_json(item) for item in data["placements"]]
            tensors = {name: distinct[index] for name, index in data["tensors"].items()}
            rules = None if data["rules"] is None else RuleSet.from_json(data["rules"])
            plan = cls(data["tp"], data["family"], tensors, rules, tuple(data["assumed"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        if other := {tensor_plan.placement.tp for tensor_plan in distinct} - {plan.tp}:
            raise ValueError(f"placements are for {min(other)} ranks (expected {plan.tp})")
        return plan

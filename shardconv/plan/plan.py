"""Plan: the placement, style and reason of every tensor of one checkpoint at one tp, with the rules it is made from.

Plain data that is compared by its JSON form and stored in the manifest, where equal plans of tensors are stored once.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple, Self

from msgspec import Meta, field
from msgspec.structs import replace

from shardconv.plan.grid import VALUES, Grid
from shardconv.plan.placement import Placement
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.stages import Stages
from shardconv.support.structs import Data


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


@lru_cache(maxsize=4096)
def plain_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A tensor without a grid. Equal ones are one object, as models have many tensors of a few shapes."""
    return TensorSpec(dtype, shape)


def logical_tensors(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of the same model without quantization: each logical matrix instead of the tensors that store it."""
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
    grids = {spec.grid for spec in set(tensors.values()) if spec.grid is not None}
    dims = {(dim.kind, dim.elements) for grid in grids for dim in grid.dims if dim.kind}
    return tuple(f"{elements}-wide {kind}" for kind, elements in sorted(dims))


class Reason(Data, frozen=True, cache_hash=True):
    """The rule that determines the placement of a tensor.

    Attributes:
        origin: the source of the rule: ``family llama``, ``plan file x.toml``, ``--replicate``.
        rule: the pattern that matches the tensor.
        fields: the config fields that the rule reads, as ``name=value``.
    """

    origin: str
    rule: str
    fields: tuple[str, ...] = ()


class TensorPlan(Data, frozen=True, omit_defaults=True, cache_hash=True):
    """The sharding of one tensor.

    Attributes:
        placement: the intervals of each rank.
        style: the rule's style, or ``expert`` where ranks have whole experts.
        units: the units that are not split: one, or one for each segment; empty if any element may be a boundary.
        reason: the rule, and the config fields that it reads.
        grid: how the stored tensor covers its logical matrix, which the rule is for; None without quantization.
        edits: for each rank the integers that are subtracted from the values of its shard, and added again by a merge:
            one for all of them, or one for each. None if shards have the source's values.
        stages: the pipeline stages that hold the tensor, ascending.
    """

    placement: Placement
    style: str
    units: tuple[str, ...]
    reason: Reason
    grid: Grid | None = None
    edits: tuple[tuple[int, ...], ...] | None = None
    stages: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] = (0,)

    @property
    def sharding(self) -> tuple[Placement, str, tuple[int, ...]]:
        """Placement, style and stages, which equal plans have in common whatever the rules are called."""
        return self.placement, self.style, self.stages

    def describe(self) -> str:
        """The style and the reason in one line."""
        read = f" ({', '.join(self.reason.fields)})" if self.reason.fields else ""
        return f"{self.reason.origin}: {self.style} {self.reason.rule}{read}"


class Plan(Data, frozen=True, dict=True):
    """The sharding of every tensor of one checkpoint.

    Attributes:
        tp: tensor parallel size.
        family: name of the family whose rules are used; None without a family.
        distinct: the distinct plans of tensors.
        index_of: tensor name to an index into ``distinct``.
        rules: the rules and module overrides, which also give the plan for another tp and for the tensors of the model
            in memory.
        assumed: assumptions and conclusions that are not read from config or plan file, as sentences.
        stages: the stages of pipeline parallelism; None for one. Placements are for the ranks of a stage: ``tp``
            of them, or as many as the expert parallel size if it is larger.
    """

    tp: int
    family: str | None
    distinct: tuple[TensorPlan, ...] = field(name="placements")
    index_of: Mapping[str, Annotated[int, Meta(ge=0)]] = field(name="tensors")
    rules: RuleSet
    assumed: tuple[str, ...] = ()
    stages: Stages | None = None

    @classmethod
    def of_tensors(
        cls,
        tp: int,
        family: str | None,
        tensors: Mapping[str, TensorPlan],
        rules: RuleSet,
        assumed: tuple[str, ...] = (),
        stages: Stages | None = None,
    ) -> Self:
        """The plan with the placement, style and reason of each tensor, by its name."""
        number: dict[TensorPlan, int] = {}
        index_of = {name: number.setdefault(plan, len(number)) for name, plan in tensors.items()}
        return cls(tp, family, tuple(number), index_of, rules, assumed, stages)

    def __post_init__(self) -> None:
        if other := {tensor_plan.placement.num_ranks for tensor_plan in self.distinct} - {self.ranks_per_stage}:
            raise ValueError(f"placements are for {min(other)} ranks (expected {self.ranks_per_stage})")
        if max(self.index_of.values(), default=-1) >= len(self.distinct):
            raise ValueError(f"a tensor has a placement that does not exist (got {len(self.distinct)} placements)")
        if any(stage >= self.pp for tensor_plan in self.distinct for stage in tensor_plan.stages):
            raise ValueError(f"a tensor is in a stage that does not exist (got {self.pp} stages)")

    def stored(self) -> Self:
        """The plan as a manifest stores it, with the rules that apply."""
        return replace(self, rules=self.rules.stored())

    def __repr__(self) -> str:
        """A short form without the many tensors."""
        stages = f", stages of {self.num_layers} layers" if self.stages is not None else ""
        return f"Plan(tp={self.tp}, family={self.family!r}, {len(self.index_of)} tensors{stages})"

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.stages is None else self.stages.count

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Number of layers of each pipeline stage; empty for one stage."""
        return () if self.stages is None else self.stages.num_layers

    @property
    def ep(self) -> int:
        """Expert parallel size; 1 if each expert is sharded."""
        return self.rules.ep

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of a stage."""
        return self.rules.ranks_per_stage(self.tp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.ranks_per_stage * self.pp

    def holds(self, rank: int, name: str) -> bool:
        """Whether the stage of a rank holds a tensor."""
        return rank // self.ranks_per_stage in self.distinct[self.index_of[name]].stages

    @cached_property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """Tensor name to placement, style and reason."""
        return {name: self.distinct[index] for name, index in self.index_of.items()}

    def placement(self, name: str) -> Placement:
        """The placement of a tensor."""
        return self.distinct[self.index_of[name]].placement

    def shards(self, tensors: Mapping[str, TensorSpec], rank: int) -> dict[str, TensorSpec]:
        """Name to dtype and shape of a rank's shards of the tensors that its stage holds."""
        in_stage = rank % self.ranks_per_stage
        return {
            name: spec._replace(shape=self.placement(name).shard_shape(spec.shape, in_stage))
            for name, spec in tensors.items()
            if self.holds(rank, name)
        }

    def first_difference(self, other: "Plan") -> str | None:
        """The name of the first tensor whose placement or style differs in another plan; None if all are equal."""
        for name, planned in self.tensors.items():
            tensor_plan = other.tensors.get(name)
            if tensor_plan is None or tensor_plan.sharding != planned.sharding:
                return name
        return next((name for name in other.tensors if name not in self.tensors), None)

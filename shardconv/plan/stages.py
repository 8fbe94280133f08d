"""Stages of pipeline parallelism: the division of the layer axis over them, and the stages that hold each tensor.

A stage is an interval of the layers. The first one also has the embedding, and the last one the final norm and the
heads. A tied head is the embedding table, which both have. Ranks are numbered stage by stage, as engines and Megatron
do: rank ``stage * tp + t`` holds the shards of tensor parallel rank t of the stage's tensors.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace

from shardconv.plan.engines import engine_named
from shardconv.plan.families.family import ALL, EMBEDDING, HEAD, LAYERS, NUM_LAYERS, STAGES, TIED
from shardconv.plan.placement import Interval, Placement
from shardconv.plan.rule_set import ModelRules, RuleSet
from shardconv.support.errors import PlanError, UsageError, check_count, option
from shardconv.support.formatting import counted
from shardconv.support.structs import Data

#: The largest number of ranks of a plan, and of its stages; and of layers.
MAX_RANKS, MAX_LAYERS = 4096, 10_000


class Stages(Data, frozen=True):
    """The stages of a plan.

    Attributes:
        layers: the placement of the layer axis, whose ranks are the stages.
        is_tied: whether the head is the embedding table, which the last stage then has, too.
        has_copies: whether all stages have the embedding, the final norm and the heads, for an engine that does not
            start without them.
    """

    layers: Placement
    is_tied: bool = False
    has_copies: bool = False

    def __post_init__(self) -> None:
        if self.layers.size > MAX_LAYERS:
            raise ValueError(f"its stages have {self.layers.size} layers (expected at most {MAX_LAYERS})")
        if self.layers != place_layers(self.num_layers):
            raise ValueError("its stages are not consecutive intervals of layers")

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.layers.ranks)

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(map(self.layers.local_size, range(self.count)))

    def layers_of(self, stage: int) -> range:
        """The numbers of the layers of a stage."""
        start = sum(self.num_layers[:stage])
        return range(start, start + self.num_layers[stage])

    @property
    def finest(self) -> "Stages":
        """Stages of one layer each."""
        return replace(self, layers=place_layers((1,) * self.layers.size))

    def of_kind(self, kind: str) -> tuple[int, ...]:
        """The stages that hold a tensor outside of layers, by its kind in ``[stages]`` of a family."""
        kinds = [ALL] if self.has_copies else [kind, HEAD] if kind == EMBEDDING and self.is_tied else [kind]
        return tuple(sorted({stage for one in kinds for stage in range(self.count)[STAGES[one]]}))

    def of_layer(self, number: int) -> tuple[int, ...]:
        """The stage that holds a layer. Layers after the last one are MTP layers, which the last stage has."""
        return (min(bisect_right([*accumulate(self.num_layers)], number), self.count - 1),)


def place_layers(num_layers: Sequence[int]) -> Placement:
    """The placement of the layer axis over stages with these numbers of layers."""
    ranks = tuple((Interval(start, stop),) for start, stop in pairwise(accumulate(num_layers, initial=0)))
    return Placement(0, sum(num_layers), ranks)


def divide_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """The number of layers of each of ``pp`` stages: equal, with the remainder before the last stage.

    vLLM: ``get_pp_indices`` in ``vllm/distributed/utils.py``, which also gives the stages before the last one more.
    """
    even, remainder = divmod(num_layers, pp)
    return tuple(even + (pp - 1 - remainder <= stage < pp - 1) for stage in range(pp))


def even_stages(layer_bytes: Sequence[int], pp: int, least: int = 1) -> tuple[int, ...]:
    """The number of layers of each of ``pp`` stages that minimize the bytes of the largest stage.

    Args:
        layer_bytes: bytes of each layer, including other tensors in the first and in the last one.
        pp: number of stages, at most the number of layers.
        least: the least number of layers of the first stage.
    """
    sizes = [sum(layer_bytes[:least]), *layer_bytes[least:]]
    limits, ends = range(max(sizes), sum(sizes) + 1), [*accumulate(sizes, initial=0)]
    limit = limits[bisect_left(limits, len(sizes), key=lambda limit: sum(_fill(ends, pp, limit)))]
    first, *others = _fill(ends, pp, limit)
    return (first + least - 1, *others)


def _fill(ends: Sequence[int], pp: int, limit: int) -> tuple[int, ...]:
    """The number of layers of each stage if stages have as many layers as fit ``limit``, and at least one each.

    Args:
        ends: bytes of all layers before each layer, and of all.
        pp: number of stages.
        limit: bytes of a stage, at least those of the largest layer.
    """
    starts = [0]
    for stages_after in reversed(range(pp)):
        stop = bisect_right(ends, ends[starts[-1]] + limit) - 1
        starts.append(min(stop, len(ends) - 1 - stages_after))
    return tuple(stop - start for start, stop in pairwise(starts))


class StageChoice(Struct, frozen=True):
    """The pipeline stages that a user chooses.

    Attributes:
        count: number of stages.
        num_layers: number of layers of each; empty for :func:`divide_layers`.
        is_tied: whether the head is the embedding table; None if it follows from the model.
    """

    count: int = 1
    num_layers: tuple[int, ...] = ()
    is_tied: bool | None = None

    @classmethod
    def of(cls, stages: Stages | None) -> Self:
        """The stages of a plan."""
        return cls() if stages is None else cls(stages.count, stages.num_layers, stages.is_tied)


def chosen_stages(
    pp: int | None, stages: str | Sequence[int] | Stages, *, default: Stages | None = None
) -> StageChoice:
    """The stages that a user chooses.

    Args:
        pp: number of stages; None if it is not given.
        stages: number of layers of each, also as a text such as "20,20,21,19"; empty for equal numbers. For an adapter,
            layers of its base model.
        default: the stages if neither is given.

    Raises:
        UsageError: if they contradict each other, are not positive integers, or ``pp`` exceeds :data:`MAX_RANKS`.
    """
    if isinstance(stages, Stages):
        return StageChoice.of(stages)
    if pp is None and not stages:
        return StageChoice.of(default)
    numbers = [int(one) if one.isdecimal() else one for one in stages.split(",")] if isinstance(stages, str) else stages
    counts = tuple(one for one in numbers if type(one) is int and one > 0) if stages else ()
    if stages and len(counts) != len(numbers):
        raise UsageError(
            f"{as_option(stages)} is wrong (expected positive integers, such as {as_option('20,20')}): correct it"
        )
    count = len(counts) if pp is None else check_count(pp, "pp", MAX_RANKS)
    if stages and (count != len(counts) or count == 1):
        expected = f"{pp}, for {option(pp=pp)}" if count != len(counts) else "at least 2"
        raise UsageError(
            f"{as_option(stages)} is for {counted(len(counts), 'stage')} (expected {expected}): pass the number of "
            f"layers of each stage"
        )
    return StageChoice(count, counts)


def as_option(stages: str | Iterable[object]) -> str:
    """The option with the number of layers of each stage."""
    return option(stages=stages if isinstance(stages, str) else ",".join(map(str, stages)))


class Located(NamedTuple):
    """A tensor of a model with stages.

    Attributes:
        kind: of its module in ``[stages]``.
        path: the module in ``[stages]``.
        layer: number of the layer; None outside of layers.
        model_rules: the rules of the model or submodel that has the module.
    """

    kind: str
    path: str
    layer: int | None
    model_rules: ModelRules


class StageFinder:
    """Finds the stages that hold the tensors of a model.

    Args:
        rules: the rules of the model, whose families have ``[stages]``.
    """

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._patterns = [
            (re.compile(f"(?P<path>{model_rules.regex(pattern)}){_AFTER.get(kind, _ANY)}"), kind, model_rules)
            for model_rules in rules.models
            for pattern, kind in model_rules.family.stages.items()
        ]

    def divide(self, chosen: StageChoice, names: Collection[str], *, is_adapter: bool = False) -> Stages:
        """The stages of a model with tensors of these names.

        Args:
            chosen: the choice of the user.
            names: the names of its tensors, or of the tensors that an adapter changes.
            is_adapter: whether they belong to an adapter, which may lack layers.

        Raises:
            PlanError: if the model does not have one sequence of layers, or its number of layers is unknown.
            UsageError: if it has another number of layers than the stages together, or fewer layers than stages.
        """
        found = [self.locate(name) for name in names]
        sequences = {one.path: one.model_rules for one in found if one.kind == LAYERS}
        if len(sequences) != 1:
            raise self._refusal(f"it has {len(sequences)} sequences of layers ({', '.join(sequences) or 'none'})")
        ((path, model_rules),) = sequences.items()
        layers = {one.layer for one in found if one.layer is not None}
        known = model_rules.fields().evaluate_known(NUM_LAYERS)
        if known is None and not chosen.num_layers:
            raise PlanError(
                f"the number of layers is unknown ({NUM_LAYERS} is missing): pass {option('stages')} with the number "
                "of layers of each stage"
            )
        total = max(layers) + 1 if known is None else known
        num_layers = chosen.num_layers or divide_layers(total, chosen.count)
        if 0 in num_layers:
            given = option(pp=chosen.count)
            raise UsageError(f"{given} is more than the {known} layers of {path}: pass at most {known}")
        if total != sum(num_layers) and not (is_adapter and known is None):
            raise UsageError(
                f"{as_option(num_layers)} has {sum(num_layers)} layers (expected {total}, of {path}): pass numbers "
                f"with this sum"
            )
        self._check_first(num_layers, path)
        missing = next((number for number in range(total) if number not in layers), None)  # ``total`` may be huge
        if not is_adapter and missing is not None:
            raise PlanError(
                f"{path}.{missing} is missing (expected {total} layers, by {NUM_LAYERS}): pass the config of this "
                "checkpoint, or the checkpoint with all layers"
            )
        if sum(num_layers) > MAX_LAYERS:
            raise UsageError(
                f"{path} has {sum(num_layers)} layers (expected at most {MAX_LAYERS}): correct {NUM_LAYERS} of the "
                f"config, or {option('stages')}"
            )
        is_tied = _is_tied(self._rules, has_head=any(one.kind == HEAD for one in found))
        has_copies = (model_rules.config or {}).get("model_type") in self._rules.in_all_stages
        return Stages(place_layers(num_layers), is_tied if chosen.is_tied is None else chosen.is_tied, has_copies)

    @property
    def least_in_first(self) -> int:
        """The least number of layers of the first stage, by the engine."""
        return max(engine_named(self._rules.engine).layers_of_first_stage(self._rules.models[0].config), 1)

    def _check_first(self, num_layers: tuple[int, ...], path: str) -> None:
        """Refuse a first stage with fewer layers than the engine needs there."""
        engine, total, pp, least = self._rules.engine, sum(num_layers), len(num_layers), self.least_in_first
        if num_layers[0] < least:
            after = min(total - least, pp - 1)  # number of stages after the first
            stages = as_option((least, *divide_layers(total - least, after))) if after > 0 else option(pp=1)
            raise UsageError(
                f"{as_option(num_layers)} has {num_layers[0]} layers of {path} in the first stage (expected at least "
                f"{least}, to whose outputs {engine} adds features of images): pass {stages} instead"
            )

    def stages_of(self, name: str, stages: Stages) -> tuple[int, ...]:
        """The stages that hold a tensor.

        Raises:
            PlanError: if it is unknown.
        """
        found = self.locate(name)
        return stages.of_kind(found.kind) if found.layer is None else stages.of_layer(found.layer)

    def locate(self, name: str) -> Located:
        """The module of a tensor.

        Raises:
            PlanError: if no pattern matches it.
        """
        if (found := self.find(name)) is None:
            raise self._refusal(f"the stage of {name} is unknown")
        return found

    def find(self, name: str) -> Located | None:
        """The module of a tensor, or one of the modules themselves; None if no pattern matches it."""
        for pattern, kind, model_rules in self._patterns:
            if match := pattern.fullmatch(name):
                layer = int(match["layer"]) if kind == LAYERS else None
                return Located(kind, match["path"], layer, model_rules)
        return None

    def _refusal(self, reason: str) -> PlanError:
        return PlanError(
            f"{option('pp')} is not supported for family {self._rules.family}: {reason}: remove {option('pp')}, or, "
            f"for a decoder, name its modules in [stages] of a plan file"
        )


#: The rest of a name after a pattern of ``[stages]``, by the kind of its tensors.
_ANY, _AFTER = r"(?:\..+)?", {LAYERS: r"\.(?P<layer>\d{1,6})(?:\..+)?"}


def _is_tied(rules: RuleSet, *, has_head: bool) -> bool:
    """Whether the config ties the head to the embedding table, or may tie it where a head is missing."""
    flags = {(model_rules.config or {}).get(TIED) for model_rules in rules.models} - {None}
    return True in flags or not (flags or has_head)

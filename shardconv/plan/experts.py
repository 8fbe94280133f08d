"""Expert parallelism: whole experts on each rank, instead of a shard of each expert.

With expert parallel size ``ep``, a stage has ``ep`` ranks, in ``ep / tp`` data groups. Each has consecutive experts,
and of other tensors rank ``r`` has the shards of tensor parallel rank ``r % tp``. This is as in vLLM with
``--enable-expert-parallel``, and as in Megatron with expert tensor parallel size 1.

Finds the tensors of experts by their names. A rank has the same experts whether a checkpoint packs all experts in one
tensor or has a tensor for each.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

from shardconv.plan.placement import IndivisibleError, Interval, Placement

#: A tensor of any library.
Tensor = TypeVar("Tensor")

_SINGLE = re.compile(r"(?P<module>(?:.*\.)?experts)\.(?P<number>[0-9]{1,6})\.")
_PACKED = re.compile(r"(?:.*\.)?experts\.[^.]+$")


class Expert(NamedTuple):
    """The expert that a tensor belongs to.

    Attributes:
        number: index of the expert; None if the tensor packs all experts.
        total: number of experts.
    """

    number: int | None
    total: int


def find_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Expert]:
    """Find the tensors of experts in a checkpoint."""
    singles = {name: match for name in shapes if (match := _SINGLE.match(name))}
    counts: dict[str, int] = {}
    for match in singles.values():
        counts[match["module"]] = max(counts.get(match["module"], 0), int(match["number"]) + 1)
    experts = {name: Expert(int(match["number"]), counts[match["module"]]) for name, match in singles.items()}
    return experts | {
        name: Expert(None, shape[0])
        for name, shape in shapes.items()
        if len(shape) > 1 and name not in singles and _PACKED.match(name)
    }


def place_expert(expert: Expert, shape: tuple[int, ...], tp: int, ep: int) -> Placement:
    """The placement of a tensor of experts on the ``ep`` ranks of a stage.

    The numbers of experts of two ranks differ by at most one, and the first ranks have more. vLLM:
    ``determine_expert_map`` with the strategy ``linear``.

    Raises:
        IndivisibleError: if ``ep`` is not a multiple of ``tp``, or there are fewer experts than ranks.
    """
    if ep % tp:
        raise IndivisibleError(f"the expert parallel size, {ep}, is neither 1 nor a multiple of {tp}")
    if ep > expert.total:
        raise IndivisibleError(f"the expert parallel size, {ep}, is more than the number of experts, {expert.total}")
    if not shape:
        return Placement.replicated(ep)
    per_rank, more = divmod(expert.total, ep)
    firsts = [rank * per_rank + min(rank, more) for rank in range(ep + 1)]
    if expert.number is None:
        return Placement(0, expert.total, tuple((Interval(*bounds),) for bounds in pairwise(firsts)))
    owner = bisect_right(firsts, expert.number) - 1
    return Placement(0, shape[0], tuple((Interval(0, shape[0]),) if rank == owner else () for rank in range(ep)))


def local_experts(tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], rank: int) -> dict[str, Tensor]:
    """Remove the tensors of experts of other ranks, and number the local experts from 0.

    Args:
        tensors: name to tensor, as in the rank's file.
        placements: name to the placement of the full tensor.
        rank: the rank of the file.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not _is_on_other_rank(placements[name], rank)}
    if len(kept) == len(tensors):
        return dict(tensors)
    first = _first_numbers(kept)
    return {_renumbered(name, first): tensor for name, tensor in kept.items()}


def _is_on_other_rank(placement: Placement, rank: int) -> bool:
    return placement.dim is not None and placement.size > 0 and not placement.ranks[rank]


def _first_numbers(names: Iterable[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for match in filter(None, map(_SINGLE.match, names)):
        first[match["module"]] = min(first.get(match["module"], int(match["number"])), int(match["number"]))
    return first


def _renumbered(name: str, first: Mapping[str, int]) -> str:
    match = _SINGLE.match(name)
    if match is None:
        return name
    number = int(match["number"]) - first[match["module"]]
    return f"{match['module']}.{number}.{name[match.end() :]}"

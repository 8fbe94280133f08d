"""Experts over ranks: each rank holds some of the experts, whole, instead of a part of each.

Owns which tensors are experts', by their names, and where they go. How they lie, packed in one tensor or one by one,
makes no difference: a rank has the same experts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardconv.errors import PlanError
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, cut

#: How experts are cut: each over all ranks, or dealt out over them.
EXPERT_MODES = ("tensor", "expert")

_SINGLE = re.compile(r"(?P<place>(?:.*\.)?experts)\.(?P<number>[0-9]{1,6})\.")
_PACKED = re.compile(r"(?:.*\.)?experts\.[^.]+$")


class Expert(NamedTuple):
    """Whose tensor one is: the expert's number, None where it has all of them; and how many there are."""

    number: int | None
    total: int


def find_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Expert]:
    """The tensors of experts among those of a checkpoint.

    Raises:
        PlanError: if there are none.
    """
    singles = {name: match for name in shapes if (match := _SINGLE.match(name))}
    counts: dict[str, int] = {}
    for match in singles.values():
        counts[match["place"]] = max(counts.get(match["place"], 0), int(match["number"]) + 1)
    found = {name: Expert(int(match["number"]), counts[match["place"]]) for name, match in singles.items()}
    found |= {
        name: Expert(None, shape[0])
        for name, shape in shapes.items()
        if len(shape) > 1 and name not in singles and _PACKED.match(name)
    }
    if not found:
        raise PlanError("no tensor is by its name one of experts, so none can be dealt out: leave out --experts")
    return found


def place_expert(expert: Expert, shape: tuple[int, ...], tp: int) -> Placement:
    """Where a tensor of experts goes.

    Raises:
        IndivisibleError: if the experts cannot be dealt out to ``tp`` ranks.
    """
    if expert.number is None:
        return cut(0, [Unit(expert.total)], tp)
    if expert.total % tp:
        raise IndivisibleError(f"{expert.total} experts are not a multiple of {tp}")
    if not shape:
        return Placement.replicated(tp)
    owner = expert.number // (expert.total // tp)
    return Placement(0, shape[0], tuple((Interval(0, shape[0]),) if rank == owner else () for rank in range(tp)))


def own_experts(tensors: Mapping[str, Any], placements: Mapping[str, Placement], rank: int) -> dict[str, Any]:
    """A rank's tensors without those of other ranks' experts, and with its own ones counted from 0.

    Args:
        tensors: all of its file.
        placements: of the full tensors.
        rank: whose they are.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not _is_elsewhere(placements[name], rank)}
    if len(kept) == len(tensors):
        return dict(tensors)
    first = _first_numbers(kept)
    return {_renumbered(name, first): tensor for name, tensor in kept.items()}


def _is_elsewhere(placement: Placement, rank: int) -> bool:
    return placement.dim is not None and placement.size > 0 and not placement.ranks[rank]


def _first_numbers(names: Iterable[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for match in filter(None, map(_SINGLE.match, names)):
        first[match["place"]] = min(first.get(match["place"], int(match["number"])), int(match["number"]))
    return first


def _renumbered(name: str, first: Mapping[str, int]) -> str:
    match = _SINGLE.match(name)
    if match is None:
        return name
    number = int(match["number"]) - first[match["place"]]
    return f"{match['place']}.{number}.{name[match.end() :]}"

"""Plans of tensors without files, and their placements."""

from collections.abc import Mapping
from typing import Any

from shardconv.plan.placement import Padding, Placement
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, planner_for


def plan_of(
    shapes: Mapping[str, tuple[int, ...]],
    rules: str = "",
    config: Mapping[str, Any] | None = None,
    *,
    tp: int = 2,
    **options: Any,
) -> Plan:
    """The plan of tensors with these names and shapes, by the text of a plan file and a config.

    Args:
        shapes: name to shape.
        rules: the text; "" for none.
        config: the config; None for none.
        tp: number of ranks.
        options: of :class:`PlanRequest`.
    """
    specs = {name: TensorSpec("F32", shape) for name, shape in shapes.items()}
    request = PlanRequest(plan_file=("plan.toml", rules) if rules else None, **options)
    return planner_for(specs, config, request).plan(tp)


def intervals(plan: Plan, name: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The start and stop of each interval of a tensor on each rank."""
    return tuple(tuple((one.start, one.stop) for one in rank) for rank in plan.placement(name).ranks)


def held(placement: Placement, rank: int) -> list[int | None]:
    """The elements of a rank's shard; None for padding."""
    elements: list[int | None] = []
    for entry in placement.ranks[rank]:
        elements += [None] * entry.size if isinstance(entry, Padding) else range(entry.start, entry.stop)
    return elements

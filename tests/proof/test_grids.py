"""Proof of grids: stored tensors that are placed differently from the weight are found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardconv.checkpoint.sources.planning import plan_source
from shardconv.plan.plan import Plan, TensorPlan, logical_tensors
from shardconv.plan.planner import Planner
from shardconv.proof.grids import grid_differences

DATA = Path(__file__).parents[1] / "data/quantized"
DOWN = "model.layers.0.mlp.down_proj"


def differences(name: str, change: Callable[[Plan], Plan] = lambda plan: plan, *, tp: int = 2) -> list[str]:
    """The differences that are found in a checkpoint whose plan is changed."""
    planned = plan_source(DATA / name)
    planner = planned.planner
    weights = Planner(logical_tensors(planned.tensors), planner.rules).plan(tp)
    found = grid_differences(planned.tensors, weights, change(planner.plan(tp)))
    return [difference for _, difference in found if difference]


def with_tensor(plan: Plan, name: str, planned: TensorPlan) -> Plan:
    return Plan.of_tensors(plan.tp, plan.family, {**plan.tensors, name: planned}, plan.rules)


def changed(suffix: str) -> Callable[[Plan], Plan]:
    """Exchange the shards of two ranks of a stored tensor."""

    def change(plan: Plan) -> Plan:
        name = f"{DOWN}.{suffix}"
        planned = plan.tensors[name]
        placement = replace(planned.placement, ranks=planned.placement.ranks[::-1])
        return with_tensor(plan, name, replace(planned, placement=placement))

    return change


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.json")))
def test_placements_of_the_planner_are_right(name, tp):
    assert differences(name, tp=tp) == []


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_tensors_of_another_rank_are_found(suffix):
    assert differences("gptq-3", changed(suffix)) == ["rank 0 of 2 has values of another shard"]


def test_indices_that_do_not_count_from_the_shard_are_found():
    def change(plan: Plan) -> Plan:
        name = f"{DOWN}.g_idx"
        return with_tensor(plan, name, replace(plan.tensors[name], edits=None))

    assert differences("gptq-3", change) == [f"rank 1 of 2 has integers of another shard in {DOWN}.g_idx"]

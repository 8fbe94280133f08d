"""Layout of rank files: their headers and the offsets of shards."""

import pytest

from shardconv.checkpoint.engine.layout import lay_out_ranks
from shardconv.layouts.layout import NATIVE
from shardconv.plan.placement import Unit, shard_dim
from shardconv.plan.plan import Plan, Reason, TensorPlan, TensorSpec
from shardconv.plan.rule_set import RuleSet


def test_ranks_with_equal_shapes_share_a_header():
    """Otherwise headers of very many tensors on many ranks would take gigabytes."""
    names = [f"experts.{number}.up.weight" for number in range(50)]
    tensors = dict.fromkeys(names, TensorSpec("F32", (64, 4)))
    sharded = TensorPlan(shard_dim(0, [Unit(64)], 16), "colwise", (), Reason("test", "*"))
    plan = Plan.of_tensors(16, "test", dict.fromkeys(names, sharded), RuleSet("test", ()))
    layout = lay_out_ranks(tensors, plan, {})
    assert {id(header) for header in layout.headers} == {id(layout.headers[0])}


@pytest.mark.parametrize(
    ("rank", "tp", "file", "count", "name"),
    [
        (3, 10, 0, 1, "rank-3-of-10.safetensors"),
        (3, 11, 0, 1, "rank-03-of-11.safetensors"),
        (100, 101, 2, 11, "rank-100-of-101-file-02-of-11.safetensors"),
    ],
)
def test_names_sort_in_the_order_of_ranks(rank, tp, file, count, name):
    assert NATIVE.rank_file(rank, tp, file, count) == name

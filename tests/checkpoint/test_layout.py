"""Layout of rank files: their headers and the offsets of shards."""

import json

import pytest

from shardconv.checkpoint.engine.layout import lay_out_ranks
from shardconv.layouts.layout import NATIVE
from shardconv.plan.placement import Interval, Placement, Unit, shard_dim
from shardconv.plan.plan import Plan, Reason, TensorPlan, TensorSpec
from shardconv.plan.rule_set import RuleSet

RULES = RuleSet("test", ())
HOW = "colwise", (), Reason("test", "*")


def test_ranks_with_equal_shapes_share_a_header():
    """Otherwise headers of very many tensors on many ranks would take gigabytes."""
    names = [f"experts.{number}.up.weight" for number in range(50)]
    tensors = dict.fromkeys(names, TensorSpec("F32", (64, 4)))
    plan = Plan.of_tensors(16, "test", dict.fromkeys(names, TensorPlan(shard_dim(0, [Unit(64)], 16), *HOW)), RULES)
    layout = lay_out_ranks(tensors, plan, {})
    assert {id(header) for header in layout.headers} == {id(layout.headers[0])}


def test_ranks_with_different_shapes():
    """No rule makes such a placement, but the layout supports it."""
    uneven = Placement(0, 5, ((Interval(0, 1),), (Interval(1, 4),), (Interval(4, 5),)))
    tensors = {"a": TensorSpec("F32", (5, 2)), "b": TensorSpec("U8", (3,))}
    plans = {"a": TensorPlan(uneven, *HOW), "b": TensorPlan(Placement.replicated(3), *HOW)}
    layout = lay_out_ranks(tensors, Plan.of_tensors(3, "test", plans, RULES), {})
    entries = [json.loads(header.raw) for header in layout.headers]
    assert [entry["a"]["shape"] for entry in entries] == [[1, 2], [3, 2], [1, 2]]
    assert [entry["b"]["data_offsets"] for entry in entries] == [[8, 11], [24, 27], [8, 11]]
    assert [size - len(head) for size, head in zip(layout.file_bytes, layout.prefixes, strict=True)] == [11, 27, 11]
    starts = [offset - len(head) for offset, head in zip(layout.shards[1].offsets, layout.prefixes, strict=True)]
    assert starts == [8, 24, 8]


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

"""The compact form of a plan's tensors: names as patterns and ranges, and bytes per layer and rank."""

import json
import re
import struct
from collections import defaultdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import shardconv
from shardconv.checkpoint.operations.plan_report import report_plan
from shardconv.html import Held, number_ranges, parse_name, tensor_table
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.pages import plan_report, tensor_report


def names_of(pattern, ranges):
    """Every name of a pattern, by another way than the scripts of the page."""
    if not ranges:
        return [pattern]
    found = []
    for first, last, *rest in ranges:
        for number in range(first, last + 1):
            filled = pattern.replace("*", str(number), 1)
            found += names_of(filled, rest[0]) if rest else [filled]
    return found


PARTS = st.lists(st.sampled_from(["a", "b*", "*", "0", "1", "2", "11", "007", "weight", "٣"]), min_size=1, max_size=7)


@given(st.sets(PARTS.map(".".join), min_size=1, max_size=40))
def test_patterns_and_ranges_are_the_names(names):
    table = tensor_table(plan_report(tensor_report(name) for name in names))
    found = [name for pattern, _, ranges in table.names for name in names_of(pattern, ranges)]
    assert sorted(found) == sorted(names)


def test_names_of_layers_and_experts_are_one_pattern():
    names = [f"layers.{layer}.experts.{expert}.up" for layer in (0, 1, 2, 5) for expert in range(4)]
    parsed = [parse_name(name) for name in names]
    assert {pattern for pattern, _ in parsed} == {"layers.*.experts.*.up"}
    assert number_ranges(numbers for _, numbers in parsed) == [[0, 2, [[0, 3]]], [5, 5, [[0, 3]]]]


def header_sizes(path: Path) -> dict[str, int]:
    """Name to bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def test_bytes_per_layer_and_rank_are_those_of_the_rank_files(tmp_path):
    source = write_checkpoint(tmp_path / "model", config=llama_config(layers=3))
    shardconv.split(source, tmp_path / "split", tp=4)
    found = defaultdict(int)
    for layers in tensor_table(report_plan(source, tp=4)).layers:
        ranks = [held for held, count in layers.ranks for _ in range(count)]
        numbers = [None] if layers.first is None else range(layers.first, layers.last + 1)
        for number in numbers:
            for rank, held in enumerate(ranks):
                found[layers.name.replace("*", str(number)), rank] += sum(held)
    expected = defaultdict(int)
    for rank in range(4):
        for name, size in header_sizes(tmp_path / "split" / f"rank-{rank}-of-4.safetensors").items():
            layer = re.match(r"model\.layers\.\d+", name)
            expected[layer[0] if layer else name.removesuffix(".weight"), rank] += size
    assert found == expected


def test_bytes_by_placement(tmp_path):
    """With 4 ranks, 2 KV heads of 8 elements, and a vocabulary of 131 that is padded by a row; 64 columns in BF16."""
    source = write_checkpoint(tmp_path / "model", config=llama_config(layers=3))
    table = tensor_table(report_plan(source, tp=4))
    layers = {layers.name: layers for layers in table.layers}
    row = 64 * 2
    ((held, count),) = layers["model.layers.*"].ranks
    assert (layers["model.layers.*"].first, layers["model.layers.*"].last, count) == (0, 2, 4)
    assert held == Held(sharded=(16 + 16 + 3 * 24) * row, shared=(8 + 8) * row, replicated=2 * row)
    assert layers["lm_head"].ranks == ((Held(sharded=33 * row), 3), (Held(sharded=32 * row, padding=row), 1))
    assert layers["model.norm"].ranks == ((Held(replicated=row), 4),)


def test_layers_that_differ_are_apart():
    tensors = [tensor_report(f"layers.{layer}.up", 16 if layer == 2 else 8) for layer in range(5)]
    found = [(layers.first, layers.last) for layers in tensor_table(plan_report(tensors)).layers]
    assert found == [(0, 1), (2, 2), (3, 4)]

"""shardconv/hf/inputs/special.toml: its format, and the inputs of one small model."""

import ast
import tomllib
from pathlib import Path

import pytest
import torch

from shardconv.hf.inputs import example_inputs, special
from tools.model_matrix.trial import model_class, small

TABLES = tomllib.loads((Path(special.__file__).parent / "special.toml").read_text("utf-8"))
SAME = TABLES.pop("same_inputs")
KINDS = {
    "tokens": {"after"}, "normal": set(), "pixels": {"size"}, "uniform": {"sorted"}, "integers": {"below"},
    "ones": {"from", "to", "dtype"}, "numbers": set(), "each": set(), "patches": set(), "positions": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_each_input_has_one_kind_and_its_options(name):
    for row in (row for key, row in TABLES[name].items() if key != "defaults"):
        kind, *options = row
        assert set(options) <= KINDS[kind], row
        sizes = [size for value in row.values() for size in (value if isinstance(value, list) else [value])]
        for size in sizes:
            if isinstance(size, str):
                ast.parse(size, mode="eval")


def test_types_with_the_same_inputs_refer_to_a_table():
    assert set(SAME.values()) <= TABLES.keys()
    assert not SAME.keys() & TABLES.keys()


def test_placeholders_precede_random_text():
    model = small(model_class("image-text-to-text", "inkling2"))
    inputs = example_inputs(model)
    token = model.config.image_token_id
    assert inputs["input_ids"].shape == (2, 9)
    assert (inputs["input_ids"] == token).sum(1).tolist() == [2, 2]
    assert (inputs["input_ids"][:, :2] == token).all()
    assert inputs["image_grid_thw"].tolist() == [[1, 1, 2]] * 2
    assert inputs["pixel_values"].min() < -0.5
    assert inputs["pixel_values"].max() > 0.5
    assert torch.equal(inputs["input_ids"], example_inputs(model)["input_ids"])  # deterministic values

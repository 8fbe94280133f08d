"""shardconv/hf/special.toml: its format, and the inputs of one small model."""

import ast
import tomllib
from pathlib import Path

import pytest
import torch

from shardconv.hf import inputs
from shardconv.hf.inputs import example_inputs
from tests.support.models import model_class
from tools.model_matrix.trial import small

TABLES = tomllib.loads((Path(inputs.__file__).parent / "special.toml").read_text("utf-8"))
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


@pytest.fixture(scope="module")
def inkling():
    return small(model_class("image-text-to-text", "inkling2"))


def test_placeholders_precede_random_text(inkling):
    ids, token = example_inputs(inkling)["input_ids"], inkling.config.image_token_id
    assert ids.shape == (2, 9)
    assert (ids == token).sum(1).tolist() == [2, 2]
    assert (ids[:, :2] == token).all()


def test_image_has_the_patches_of_its_placeholders(inkling):
    assert example_inputs(inkling)["image_grid_thw"].tolist() == [[1, 1, 2]] * 2


def test_pixels_have_both_signs(inkling):
    pixels = example_inputs(inkling)["pixel_values"]
    assert pixels.min() < -0.5
    assert pixels.max() > 0.5


def test_inputs_are_deterministic(inkling):
    assert torch.equal(example_inputs(inkling)["input_ids"], example_inputs(inkling)["input_ids"])

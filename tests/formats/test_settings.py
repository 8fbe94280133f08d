"""Values of quantization settings that no library writes: an error of shardconv, or settings that fit the tensors."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from shardconv.formats.detect import with_grids
from shardconv.formats.settings import read_settings
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError

VALUES = (None, 0, -1, 3, 2**70, 1.5, True, "", "x", "re:(", [], ["x"], ["re:("], [0], {}, {"x": 1})
LAYER = "model.layers.0.mlp.up_proj"
_WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False, "block_structure": [32, 32]}
#: Settings of each method, and the tensors of a layer of 64 by 64 elements.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "format": "pack-quantized"}},
        },
        {
            "weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 2)), "weight_shape": ("I64", (2,)),
            "weight_zero_point": ("I32", (8, 2)),
        },
    ),
    "block": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_WEIGHTS, "strategy": "block"}}},
        },
        {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("BF16", (2, 2)), "weight_zero_point": ("BF16", (2, 2))},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
        {"weight": ("F8_E4M3", (64, 64)), "weight_scale_inv": ("F32", (2, 2))},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ())},
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": ("I8", (64, 64)), "SCB": ("F32", (64,))},
    ),
}  # fmt: skip


def specs(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorSpec]:
    return {f"{LAYER}.{end}": TensorSpec(*spec) for end, spec in tensors.items()}


def changed(table: Any) -> Iterator[Any]:
    """The settings with one value replaced, at any depth."""
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, inner in items:
        for value in (*VALUES, *changed(inner)):
            other = copy.deepcopy(table)
            other[key] = value
            yield other


@pytest.mark.parametrize("name", SETTINGS)
def test_any_value_of_settings_gives_grids_or_an_error(name):
    table, tensors = SETTINGS[name]
    found = with_grids(specs(tensors), {"quantization_config": table})
    assert all(spec.grid is not None for spec in found.values())
    messages = [refusal(specs(tensors), settings) for settings in changed(table)]
    assert sum(map(bool, messages)) > len(messages) / 4
    assert max(map(len, messages)) < 500


def refusal(tensors: dict[str, TensorSpec], settings: Any) -> str:
    """The message of the error for these settings; "" if there is none."""
    try:
        with_grids(tensors, {"quantization_config": json.loads(json.dumps(settings))})
    except PlanError as error:
        return str(error)
    return ""


def test_invalid_pattern_is_refused():
    with pytest.raises(PlanError, match=r"ignore: '\(' is not a regular expression"):
        read_settings({**SETTINGS["compressed-tensors"][0], "ignore": ["re:("]})


LAYERS = [f"model.layers.{at}.mlp.{'a' * 60}" for at in range(1000)]
SLOW = (
    "(a+)+$", "^(a|aa)*$", "(?:a*)*b", "(a{1,9}){1,9}", "((a+)b?)+", "([a-z]+)+$", r"(\w+\.)+x", "(a?){50}",
    ".*a*.*a*.*a*x", "a?" * 30 + "a" * 30, ".*.*.*.*.*.*x",
)  # fmt: skip
QUICK = (
    ".*", "model.layers.[0-9]+.mlp", r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    r"^(?!.*experts).*$", r".*layers\.(0|1|2)\.", "(?:model[.])?lm_head", ".*(q|k|v)_proj$", r".*\(a+\)+",
    "[(a+)+]", "[]a]+", r"a\*\*\*\*\*\*",
)  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_pattern_that_takes_too_long_is_refused(pattern, key):
    table = copy.deepcopy(SETTINGS["compressed-tensors"][0])
    (table if key == "ignore" else table["config_groups"]["group_0"])[key] = [f"re:{pattern}"]
    with pytest.raises(PlanError, match=f"{key}: the pattern .* may take too long to match"):
        read_settings(table)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", QUICK)
def test_other_patterns_are_quick(pattern):
    settings = read_settings({**SETTINGS["compressed-tensors"][0], "ignore": [f"re:{pattern}"]})
    assert all(bool(settings.ignoring(layer)) is bool(re.match(pattern, layer)) for layer in LAYERS)


def test_patterns_that_take_too_long_together_are_refused(monkeypatch):
    """One match takes seconds at most."""
    monkeypatch.setattr("shardconv.formats.format.MAX_SECONDS", 0.2)
    settings = read_settings({**SETTINGS["compressed-tensors"][0], "ignore": ["re:.*a.*a.*a.*ax"]})
    with pytest.raises(PlanError, match=r"its patterns take more than 0.2 seconds to match \('re:"):
        [settings.ignoring(layer) for layer in LAYERS]
    with pytest.raises(PlanError, match=r"has 129 characters \(expected at most 128 for patterns"):
        settings.ignoring("a" * 129)

"""Settings and tensors that contradict each other, and methods that are not supported: one clear error each."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardconv
from shardconv.support.errors import IntegrityError, PlanError
from tests.support.changes import Change, drop, put, tensors
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.compressed import dequantize, write_compressed
from tests.support.models import Tensors, change_config
from tests.support.quantized import check_commands, check_values

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def w4a16(unquantized, tmp_path_factory) -> Path:
    return write_compressed(unquantized("llama"), tmp_path_factory.mktemp("w4a16"), ("W4A16_ASYM", "Linear"))


def weights(**fields: Any) -> Change:
    """Change the settings of weights."""
    return settings(lambda table: table["config_groups"]["group_0"]["weights"].update(fields))


def settings(change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(source: Path) -> None:
        table = json.loads((source / "config.json").read_text())["quantization_config"]
        change(table)
        change_config(source, {"quantization_config": table})

    return apply


def edit(end: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change a tensor of the layer."""
    return put(f"{LAYER}.{end}", lambda found: make(found[f"{LAYER}.{end}"]))


def one_scale_per_row(source: Path) -> None:
    """Change 4 bits to 8, where no shape of another tensor of the layer shows it."""

    def keep_first(found: Tensors) -> None:
        found.update({name: found[name][:, :1] for name in found if name.endswith("weight_scale")})
        for name in [name for name in found if name.endswith("zero_point")]:
            del found[name]

    tensors(keep_first)(source)
    weights(num_bits=8, strategy="channel", group_size=None, symmetric=True)(source)


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "bits": (weights(num_bits=8), r"weight_scale has shape \[128, 8\] \(expected \[128, 4\] for a weight of"),
    "invalid bits": (weights(num_bits=9), "num_bits is 9"),
    "group size": (weights(group_size=64), r"weight_scale has shape \[128, 8\] \(expected \[128, 4\]"),
    "invalid group size": (weights(group_size="32"), "group_size is '32'"),
    "strategy": (weights(strategy="channel"), r"weight_scale has shape \[128, 8\] \(expected \[128, 1\]"),
    "bits with one scale per row": (
        one_scale_per_row,
        r"dim 1 has 128 elements \(expected 256 .*, or quantization_config of the layer is wrong: pass config or",
    ),
    "unknown strategy": (weights(strategy="attn_head"), "strategy 'attn_head' of config_groups.group_0 is not"),
    "missing scale": (drop(f"{LAYER}.weight_scale"), rf"{LAYER}.weight_scale is missing, which pack-quantized needs"),
    "missing zero points": (drop(f"{LAYER}.weight_zero_point"), rf"{LAYER}.weight_zero_point is missing"),
    "missing shape": (drop(f"{LAYER}.weight_shape"), rf"{LAYER}.weight_shape is missing"),
    "missing values": (drop(f"{LAYER}.weight_packed"), rf"{LAYER}.weight_\w+ .*not part of the format"),
    "scale of another shape": (edit("weight_scale", lambda scale: scale.T), r"weight_scale has shape \[8, 128\]"),
    "scale of one dim": (edit("weight_scale", lambda scale: scale[:, 0]), r"weight_scale has shape \[128\]"),
    "zero points that are not packed": (
        edit("weight_zero_point", lambda found: found.repeat_interleave(8, 0)), r"zero_point has shape \[128, 8\]",
    ),
    "values of another dtype": (edit("weight_packed", lambda found: found.long()), "has dtype I64 .expected I32"),
    "shape of three": (edit("weight_shape", lambda found: found.repeat(2)[:3]), r"weight_shape has shape \[3\]"),
    "no target": (
        settings(lambda table: table["config_groups"]["group_0"].update(targets=["re:.*up_proj"])),
        "no group of the settings has .* as a target",
    ),
    "no groups": (settings(lambda table: table.pop("config_groups")), "config_groups is missing"),
    "another format": (
        settings(lambda table: table["config_groups"]["group_0"].update(format="marlin-24")), "format 'marlin-24' is",
    ),
    "sparsity without a format": (
        settings(lambda table: table.update(sparsity_config={"targets": []})), "sparsity_config with format '' is not",
    ),
    "transforms": (
        settings(lambda table: table.update(transform_config={"config_groups": {"u": {}}})), "transform_config is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradiction_is_one_error(w4a16, tmp_path, what):
    change, message = CONTRADICTIONS[what]
    source = shutil.copytree(w4a16, tmp_path / "source")
    change(source)
    with pytest.raises(PlanError, match=message) as caught:
        shardconv.split(source, tmp_path / "out", tp=2)
    assert str(caught.value).count("config=FILE") <= 1
    assert not (tmp_path / "out").exists()


def test_stored_shape_of_another_matrix_is_refused(w4a16, tmp_path):
    """Its values are read when they are copied."""
    source = shutil.copytree(w4a16, tmp_path / "source")
    edit("weight_shape", lambda found: found.flip(0) + 8)(source)
    with pytest.raises(IntegrityError, match=rf"{LAYER}.weight_shape: dim 0 is 264 \(expected 128"):
        shardconv.split(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


def test_schemes_that_differ_between_layers(unquantized, tmp_path):
    source = write_compressed(
        unquantized("llama"), tmp_path / "source",
        ("W4A16_ASYM", "re:.*q_proj"), ("FP8_DYNAMIC", "re:.*o_proj"), ("NVFP4A16", "re:.*k_proj"),
        ("W8A16", "re:.*v_proj"), ("MXFP8", "re:.*gate_proj"), ("W3A16", "re:.*up_proj"),
        ("FP8_BLOCK", "re:.*down_proj"),
    )  # fmt: skip
    for tp in (2, 4):
        check_values(source, unquantized("llama"), tp, partial(dequantize, source), tmp_path / f"tp{tp}")
    check_commands(source, tmp_path, tmp_path / "tp2", "weight_scale", tp=2, reshard=4)


METHODS = {
    "aqlm": "codebooks are shared",
    "vptq": "its format is unknown",
}


@pytest.mark.parametrize("method", METHODS)
def test_unsupported_method_is_named_with_the_reason(tmp_path, method):
    source = write_checkpoint(tmp_path / "source", config=llama_config(layers=1))
    change_config(source, {"quantization_config": {"quant_method": method}})
    with pytest.raises(PlanError, match=rf"quantization '{method}' is not supported, as .*{METHODS[method]}"):
        shardconv.make_plan(source, tp=2)

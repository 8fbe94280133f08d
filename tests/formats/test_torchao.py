"""torchao: the library quantizes, writes metadata, and its own tensors read the rank files with it.

The library is beside the environment (``make test-torchao``); without it, the tests write its format and read it.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.support.errors import PlanError
from tests.support.checkpoints import contents, write_index
from tests.support.models import Tensors, change_config, read
from tests.support.quantized import QUANTIZED, SIZES, check_commands, check_padding, check_values, rank_file

GROUP = 32
#: Classes of torchao with the granularity of their scales.
KINDS = (
    "Int8Tensor per row", "Int8Tensor per tensor", "Int8Tensor per group", "Float8Tensor per row",
    "Float8Tensor per tensor", "Float8Tensor per block", "IntxUnpackedToInt8Tensor",
)  # fmt: skip
LAYER = "model.layers.0.mlp.down_proj"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: make test-torchao")


def quantize(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A weight as a tensor of torchao; ``kind`` is one of :data:`KINDS`, or ``Int4Tensor``."""
    from torchao.quantization import (  # noqa: PLC0415 - takes seconds to import
        Float8Tensor,
        Int4Tensor,
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
        PerBlock,
        PerGroup,
        PerRow,
        PerTensor,
    )  # fmt: skip

    name, _, per = kind.partition(" per ")
    if name == "IntxUnpackedToInt8Tensor":
        return IntxUnpackedToInt8Tensor.from_hp(weight, (1, GROUP), torch.int4)
    if name == "Int4Tensor":  # its constructor from a weight needs a GPU
        rows, columns = weight.shape
        codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
        scale, zero = torch.rand(2, columns // GROUP, rows).bfloat16()
        return Int4Tensor(codes, scale, zero, [1, GROUP], weight.shape)
    by_name = {"row": PerRow(), "tensor": PerTensor(), "group": PerGroup(GROUP), "block": PerBlock([GROUP, GROUP])}
    return {"Int8Tensor": Int8Tensor, "Float8Tensor": Float8Tensor}[name].from_hp(weight, granularity=by_name[per])


def write(source: Path, folder: Path, kind: str) -> Path:
    from torchao.prototype.safetensors import safetensors_support  # noqa: PLC0415 - likewise

    torch.manual_seed(0)
    weights = {
        name: quantize(tensor, kind) if QUANTIZED.fullmatch(name) else tensor for name, tensor in read(source).items()
    }
    tensors, metadata = safetensors_support.flatten_tensor_state_dict(weights)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    quant_type = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}
    change_config(folder, {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}})
    return folder


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def load(path: Path) -> Tensors:
    """The tensors of a file, those of quantized layers as tensors of torchao."""
    from torchao.prototype.safetensors import safetensors_support  # noqa: PLC0415 - likewise

    tensors, others = safetensors_support.unflatten_tensor_state_dict(load_file(path), metadata_of(path))
    assert others == {}
    return tensors


def dequantize(tensors: Tensors) -> Tensors:
    """The weights of the quantized layers."""
    return {name: tensor.dequantize() for name, tensor in tensors.items() if hasattr(tensor, "qdata")}


@pytest.fixture(scope="session")
def torchao(unquantized, tmp_path_factory) -> Callable[[str, str], Path]:
    """A checkpoint by the kind of its tensors and its model."""
    return cache(lambda kind, model: write(unquantized(model), tmp_path_factory.mktemp(model), kind))


@needs_torchao
@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_values_of_shards(torchao, unquantized, tmp_path, kind, model):
    source = torchao(kind, model)
    for tp in SIZES[model]:
        assert check_values(source, unquantized(model), tp, dequantize, tmp_path / f"tp{tp}", load) >= 4
    check_commands(source, tmp_path, tmp_path / "tp2", "_weight_scale", tp=2, reshard=4)


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zero_or_refused(torchao, tmp_path, kind):
    """Int8Tensor has zero points, so padding needs a scale of its own."""
    source = torchao(kind, "padded")
    if kind in ("Int8Tensor per row", "Int8Tensor per tensor"):
        with pytest.raises(PlanError, match="features would be padded, and zeros of this format are not the value 0"):
            shardconv.split(source, tmp_path / "out", tp=4, pad=True)
    else:
        assert check_padding(source, 4, dequantize, tmp_path, load) >= 4


@needs_torchao
def test_files_with_metadata_of_their_own_tensors(torchao, unquantized, tmp_path):
    """Each rank file lists the tensors of all source files."""
    source, full = tmp_path / "source", torchao("Int8Tensor per row", "llama")
    source.mkdir()
    (source / "config.json").write_bytes((full / "config.json").read_bytes())
    tensors, metadata = load_file(full / "model.safetensors"), metadata_of(full / "model.safetensors")
    of_file = {name: f"model-0000{1 + ('.mlp.' in name)}-of-00002.safetensors" for name in tensors}
    for file in sorted(set(of_file.values())):
        is_mlp = file.startswith("model-00002")
        own = {name: text for name, text in metadata.items() if "." in name and (".mlp." in name) is is_mlp}
        own |= {"format": "pt", "tensor_names": json.dumps(list(own))}
        save_file({name: tensors[name] for name in tensors if of_file[name] == file}, source / file, metadata=own)
    write_index(source, of_file)
    shardconv.split(source, tmp_path / "split", tp=2)
    shardconv.split(full, tmp_path / "expected", tp=2)
    for rank in range(2):
        found, expected = (dequantize(load(rank_file(tmp_path / name, rank, 2))) for name in ("split", "expected"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


@needs_torchao
def test_int4_shards_are_those_of_torchao(torchao, tmp_path):
    """torchao cuts tensors itself: the same codes, scales, zero points, shapes and block sizes."""
    source = torchao("Int4Tensor", "llama")
    full = load(source / "model.safetensors")
    for tp in (2, 4):
        plan = shardconv.make_plan(source, tp=tp)
        shardconv.split(source, tmp_path / f"tp{tp}", tp=tp)
        for rank in range(tp):
            local = load(rank_file(tmp_path / f"tp{tp}", rank, tp))
            for name in filter(QUANTIZED.fullmatch, full):
                dim = plan.placement(f"{name.removesuffix('weight')}_weight_qdata").dim
                size = full[name].shape[dim] // tp
                expected = full[name].narrow(dim, rank * size, size)
                assert local[name].shape == expected.shape
                assert local[name].block_size == expected.block_size
                for part in ("qdata", "scale", "zero_point"):
                    assert torch.equal(getattr(local[name], part), getattr(expected, part)), name
    check_commands(source, tmp_path, tmp_path / "tp2", "_weight_scale", tp=2, reshard=4)


# --- without the library --------------------------------------------------------------------------------------------


def write_int8(source: Path, folder: Path, columns: int | None) -> Path:
    """Write random codes; ``columns`` are those of a block with one scale, or None for full rows."""
    torch.manual_seed(0)
    tensors, metadata = {}, {"format": "pt"}
    for name, weight in read(source).items():
        metadata[name] = json.dumps({"_type": "Tensor"})
        if not QUANTIZED.fullmatch(name):
            tensors[name] = weight
            continue
        layer, block = name.removesuffix("weight"), [1, columns or weight.shape[1]]
        tensors[f"{layer}_weight_qdata"] = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        tensors[f"{layer}_weight_scale"] = torch.rand(weight.shape[0], weight.shape[1] // block[1])
        data = {"block_size": block, "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
        metadata[name] = json.dumps({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]})
    metadata["tensor_names"] = json.dumps([name for name in metadata if "." in name])
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    change_config(folder, {"quantization_config": {"quant_method": "torchao"}})
    return folder


def load_int8(path: Path) -> Tensors:
    """The weights of the quantized layers, by the block sizes in the metadata."""
    tensors, found = load_file(path), {}
    for name, text in metadata_of(path).items():
        layer, entry = name.removesuffix("weight"), json.loads(text) if "." in name else {}
        if entry.get("_type") == "Int8Tensor":
            codes, scale = tensors[f"{layer}_weight_qdata"], tensors[f"{layer}_weight_scale"]
            for dim, size in enumerate(entry["_data"]["block_size"]):
                scale = scale.repeat_interleave(size, dim)
            found[name] = codes * scale
    return found


@pytest.mark.parametrize("columns", [None, GROUP])
def test_rank_files_have_their_block_sizes(unquantized, tmp_path, columns):
    (tmp_path / "source").mkdir()
    source = write_int8(unquantized("llama"), tmp_path / "source", columns)
    for tp in SIZES["llama"]:
        assert check_values(source, unquantized("llama"), tp, dict, tmp_path / f"tp{tp}", load_int8) >= 4
    check_commands(source, tmp_path, tmp_path / "tp2", "_weight_scale", tp=2, reshard=4)


@pytest.mark.parametrize("columns", [None, GROUP])
def test_padding_has_block_sizes(unquantized, tmp_path, columns):
    (tmp_path / "source").mkdir()
    source = write_int8(unquantized("padded"), tmp_path / "source", columns)
    assert check_padding(source, 4, dict, tmp_path, load_int8) >= 4


def change_metadata(source: Path, change: Callable[[dict[str, Any]], object]) -> None:
    metadata = metadata_of(source / "model.safetensors")
    entry = json.loads(metadata[f"{LAYER}.weight"])
    change(entry)
    metadata[f"{LAYER}.weight"] = json.dumps(entry)
    save_file(load_file(source / "model.safetensors"), source / "model.safetensors", metadata=metadata)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "two formats": (lambda entry: entry.update(_type="Int4Tensor"), "Int4Tensor, Int8Tensor in one checkpoint"),
    "block size": (lambda entry: entry["_data"].update(block_size=[1, 64]), r"scale has shape \[128, 1\] \(expected"),
    "invalid block size": (lambda entry: entry["_data"].update(block_size="x"), "block_size in the metadata is 'x'"),
    "block size of one dim": (lambda entry: entry["_data"].update(block_size=[256]), "needs a block size"),
    "no data": (lambda entry: entry.pop("_data"), "block_size in the metadata is None"),
    "unquantized": (lambda entry: entry.update(_type="Tensor"), f"{LAYER}._weight_scale needs a block size"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_metadata_that_does_not_fit_is_refused(unquantized, tmp_path, what):
    source = write_int8(unquantized("llama"), tmp_path, None)
    change, message = REFUSED[what]
    change_metadata(source, change)
    with pytest.raises(PlanError, match=message):
        shardconv.make_plan(source, tp=2)

"""Small quantized checkpoints, and checks of what the commands do with them.

Libraries quantize the weights and dequantize the full tensors and the shards: the values of a shard must be, bit for
bit, the same part of the matrix as a shard of the unquantized checkpoint.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.split.loadable import quantized_tensors, runnable_plan, stored_planner
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader
from shardconv.files.containers.safetensors import read_header
from shardconv.plan.placement import Placement
from shardconv.plan.plan import logical_tensors
from shardconv.plan.planner import Planner, padding_report
from shardconv.runtime.estimate import MAX_TP
from shardconv.runtime.rank_tensors import Dequantizer, read_tensors
from tests.support.checkpoints import contents
from tests.support.damage import flip, place
from tests.support.forked import run
from tests.support.models import Model, Tensors, change_config, read
from tests.support.tensors import check_equal_files

#: Names of the weights that are quantized.
QUANTIZED = re.compile(r".*(_proj|experts\.\d+\.w[123])\.weight")

#: The tensor parallel sizes that each model is split for; 8 ranks replicate the KV heads.
SIZES = {"llama": (2, 4, 8), "phi3": (2, 4), "qwen3_moe": (2, 4), "deepseek_v3": (2, 4)}

Dequantize = Callable[[Tensors], Tensors]

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
_GQA = {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
_PHI3 = {**_SIZES, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
_MOE = {
    "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "head_dim": 16, "n_routed_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": 128,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
}  # fmt: skip


def _prepare(tensors: Tensors) -> Tensors:
    return {name: (tensor * 0.05).bfloat16() for name, tensor in tensors.items()}


def _model(model_type: str, config: Mapping[str, Any]) -> Model:
    return Model(model_type, config, rewrite=_prepare, extra={"dtype": "bfloat16"})


#: Unquantized models with the structures that matter: KV heads, fused projections, experts, latent attention.
MODELS = {
    "llama": _model("llama", _GQA),
    "phi3": _model("phi3", _PHI3),
    "qwen2": _model("qwen2", _PHI3),
    "qwen2_moe": _model("qwen2_moe", {**_PHI3, **_MOE, "shared_expert_intermediate_size": 128}),
    "qwen3_moe": _model("qwen3_moe", {**_GQA, **_MOE}),
    "deepseek_v3": _model("deepseek_v3", {**_SIZES, "num_attention_heads": 8, **_MLA}),
    # 6 heads and 10 groups of 32 features, which 4 ranks do not divide
    "padded": _model(
        "llama",
        {
            **_SIZES, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 6,
            "head_dim": 32,
        },
    ),
}  # fmt: skip


def write(source: Path, folder: Path, quantize: Callable[[str, torch.Tensor], Tensors], settings: object) -> Path:
    """Write a quantized copy of a checkpoint.

    Args:
        source: the unquantized checkpoint.
        folder: the folder to write; it may have a config.json already.
        quantize: the stored tensors of one weight, by name and values.
        settings: ``quantization_config``; None to leave the config as it is.
    """
    folder.mkdir(exist_ok=True)
    tensors: Tensors = {}
    for name, tensor in read(source).items():
        tensors |= quantize(name, tensor) if QUANTIZED.fullmatch(name) else {name: tensor}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if not (folder / "config.json").exists():
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    if settings is not None:
        change_config(folder, {"quantization_config": settings})
    return folder


def rank_file(folder: Path, rank: int, tp: int) -> Path:
    return folder / f"rank-{rank}-of-{tp}.safetensors"


def shard(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The shard of a full tensor."""
    if placement.dim is None:
        return tensor
    parts = [tensor.narrow(placement.dim, start, stop - start) for start, stop in placement.ranks[rank]]
    return torch.cat(parts, placement.dim)


def check_values(
    source: Path,
    unquantized: Path,
    tp: int,
    dequantize: Dequantize,
    out: Path,
    load: Callable[[Path], Tensors] = load_file,
    *,
    rtol: float = 0.0,
) -> int:
    """Split; compare the dequantized shards with shards of the dequantized matrices.

    Args:
        source: the quantized checkpoint.
        unquantized: the checkpoint that it was made from, whose placements are the reference.
        tp: tensor parallel size.
        dequantize: the tensors of one file to the matrices of its quantized layers.
        out: folder for the split checkpoint.
        load: reads the tensors of a file.
        rtol: relative tolerance of weights that are dequantized while they are loaded.

    Returns:
        How many of the matrices are sharded.
    """
    shardconv.split(source, out, tp=tp)
    plan = shardconv.make_plan(unquantized, tp=tp)
    full = dequantize(load(source / "model.safetensors"))
    assert full
    for rank in range(tp):
        local = dequantize(load(rank_file(out, rank, tp)))
        loaded = loaded_values(out, rank, next(iter(full.values())).dtype)
        assert local.keys() == full.keys()
        for name, tensor in full.items():
            expected = shard(tensor, plan.placement(name), rank)
            assert local[name].dtype == expected.dtype, name
            assert torch.equal(local[name], expected), f"{name} on rank {rank} of {tp}"
            torch.testing.assert_close(loaded[name], expected, rtol=rtol, atol=0.0)
    return sum(plan.placement(name).dim is not None for name in full)


def loaded_values(split: Path, rank: int, dtype: torch.dtype) -> Tensors:
    """The tensors that ``load`` with ``dequantize`` reads from a rank's file."""
    manifest = read_manifest(split)
    plan = runnable_plan(manifest, split, dequantize=True)
    tensors = read_tensors(RankFileReader(manifest, split, rank))
    return Dequantizer.of_rank(manifest, split, plan, rank, dtype).dequantize(tensors)


def check_run(source: Path, out: Path, *, tp: int = 2, ep: int = 1, pad: bool = False) -> None:
    """Split, run with dequantized weights, and compare with the unsharded model of the dequantized source."""
    shardconv.split(source, out, tp=tp, ep=ep, pad=pad)
    options = ["--token-ids", "1 2 3 4", "--max-new-tokens", "2", "--device", "cpu", "--json"]
    result = run("run", out, "--dequantize", *options, "--check", source)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["differences"], report["error"] < 1e-5) == ([], True)
    assert report["dequantized_bytes"] > report["load_bytes"]


def check_padding(
    source: Path, tp: int, dequantize: Dequantize, out: Path, load: Callable[[Path], Tensors] = load_file
) -> int:
    """Split with padding; compare the dequantized shards with the dequantized matrices, followed by zeros.

    Args:
        source: the quantized checkpoint; its heads have to be padded at the end.
        tp: tensor parallel size.
        dequantize: the tensors of one file to the matrices of its quantized layers.
        out: an empty folder for results.
        load: reads the tensors of a file.

    Returns:
        How many of the matrices are padded.
    """
    shardconv.split(source, out / "split", tp=tp, pad=True)
    full = dequantize(load(source / "model.safetensors"))
    shards = [dequantize(load(rank_file(out / "split", rank, tp))) for rank in range(tp)]
    padded = 0
    for name, tensor in full.items():
        local = [each[name] for each in shards]
        dim = next((at for at in range(tensor.dim()) if local[0].shape[at] != tensor.shape[at]), None)
        if dim is None:
            assert all(torch.equal(each, tensor) for each in local), name
            continue
        assert len({each.shape for each in local}) == 1
        found, size = torch.cat(local, dim), tensor.shape[dim]
        assert torch.equal(found.narrow(dim, 0, size), tensor), name
        zeros = found.narrow(dim, size, found.shape[dim] - size)
        assert torch.equal(zeros, torch.zeros_like(zeros)), name
        padded += zeros.numel() > 0
    manifest = read_manifest(out / "split")
    assert manifest.plan.rules is not None
    logical = logical_tensors(quantized_tensors(manifest))  # as in memory, without quantization
    planners = (Planner(logical, manifest.plan.rules), stored_planner(manifest, None))
    in_memory, in_files = (set(padding_report(planner, tp).units) for planner in planners)
    assert in_memory == in_files
    shardconv.merge(out / "split", out / "merged")
    assert contents(out / "merged") == contents(source)
    assert shardconv.verify(out / "split", against=source).differences == ()
    shardconv.reshard(out / "split", out / "resharded", tp=2, pad=True)
    shardconv.split(source, out / "direct", tp=2, pad=True)
    check_equal_files(out / "resharded", out / "direct")
    return padded


def check_config_alone(source: Path, folder: Path) -> None:
    """Compare what a config alone says of supported sizes and of bytes with the headers of the checkpoint.

    Args:
        source: the quantized checkpoint.
        folder: a folder to make.
    """
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    report, expected = shardconv.estimate_cost(folder, seq=1), shardconv.report_plan(source)
    assert {cost.tp: cost.weight_bytes for cost in report.costs} == {
        tp: size for tp, size in zip(expected.supported_tp, expected.supported_bytes, strict=True) if tp <= MAX_TP
    }
    assert "experts as quantized by the config" in report.notes[0]


def check_commands(source: Path, out: Path, split: Path, scale: str, *, tp: int, reshard: int | None = None) -> None:
    """Merge, verify and reshard a split checkpoint, and find a changed byte of a scale.

    Args:
        source: the quantized checkpoint.
        out: an empty folder for results.
        split: the checkpoint, split at ``tp``; its first rank file is changed.
        scale: end of the names of scales.
        tp: tensor parallel size.
        reshard: another size, to which it is resharded.
    """
    shardconv.merge(split, out / "merged")
    for name, data in contents(source).items():
        assert (out / "merged" / name).read_bytes() == data, name
    assert shardconv.verify(split).differences == ()
    assert shardconv.verify(split, against=source).differences == ()
    if reshard is not None:
        shardconv.split(source, out / "direct", tp=reshard)
        shardconv.reshard(split, out / "resharded", tp=reshard)
        check_equal_files(out / "direct", out / "resharded")
        assert shardconv.verify(out / "resharded", against=source).differences == ()
    path = rank_file(split, 0, tp)
    name = next(name for name in read_header(path).tensors() if name.endswith(scale))
    flip(path, place(path, name)[0])
    assert shardconv.verify(split).differences != ()
    assert any(name in str(each) for each in shardconv.verify(split, against=source).differences)

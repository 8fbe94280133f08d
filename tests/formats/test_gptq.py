"""GPTQ and AWQ: dequantized shards are shards of the dequantized weights, and wrong settings are refused.

``tests/data/quantized`` has checkpoints that gptqmodel wrote, and what it dequantizes them to.
"""

import hashlib
import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.engine import copy
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader, RankSourceReader
from shardconv.formats.detect import with_grids
from shardconv.layers.sharding import take_shard
from shardconv.plan.grid import Grid, GridDim
from shardconv.plan.placement import IndivisibleError, Unit, shard_dim
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import IntegrityError, PlanError, SourceError
from tests.support.checkpoints import contents
from tests.support.damage import flip, place
from tests.support.gptq import dequantize, pack, write_gptq
from tests.support.matrix import cases, each_once
from tests.support.models import change_config, change_tensors
from tests.support.quantized import (
    check_commands,
    check_config_alone,
    check_padding,
    check_run,
    check_values,
    loaded_values,
    rank_file,
    write,
)

DATA = Path(__file__).parents[1] / "data/quantized"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
DOWN = "model.layers.0.mlp.down_proj"

SETTINGS = {
    "awq-4": "awq gemm, 4 bits", "gptq-2-one-group": "gptq, 2 bits", "gptq-3": "gptq gptq_v2, 3 bits",
    "gptq-4-act-order": "gptq, 4 bits",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_plan_names_the_settings(name, tmp_path):
    assert shardconv.report_plan(DATA / name).quantization == SETTINGS[name]
    shardconv.split(DATA / name, tmp_path / "split", tp=2)
    assert shardconv.report_plan(tmp_path / "split").quantization == SETTINGS[name]


#: The dim of a weight [in, out] that is sharded.
DIMS = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1, "o_proj": 0, "down_proj": 0}


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def changed(folder, name="gptq-3", **settings):
    """A copy of a checkpoint of gptqmodel with other settings."""
    shutil.copytree(DATA / name, folder)
    change_config(folder, {"quantization_config": settings_of(folder) | settings})
    return folder


def expected_shard(layer, weight, rank, tp, kv_heads):
    """The shard of a weight of a llama, with KV heads replicated."""
    end = layer.rpartition(".")[2]
    if end in ("k_proj", "v_proj") and tp > kv_heads:
        return weight.chunk(kv_heads, 1)[rank * kv_heads // tp]
    return weight.chunk(tp, DIMS[end])[rank]


def check(source, out, tp):
    """Split, and compare each shard."""
    shardconv.split(source, out, tp=tp)
    config = json.loads((source / "config.json").read_text())
    full = dequantize(load_file(source / "model.safetensors"), config["quantization_config"])
    assert len(full) == len(DIMS)
    for rank in range(tp):
        local = dequantize(load_file(out / f"rank-{rank}-of-{tp}.safetensors"), config["quantization_config"])
        loaded = loaded_values(out, rank, next(iter(full.values())).dtype)
        assert local.keys() == full.keys()
        for layer, weight in full.items():
            expected = expected_shard(layer, weight, rank, tp, config["num_key_value_heads"])
            assert torch.equal(local[layer], expected), (rank, layer)
            assert torch.equal(loaded[f"{layer}.weight"], expected.T), (rank, layer)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_gptqmodel(name):
    """The dequantizer of these tests has the results of gptqmodel."""
    weights = dequantize(load_file(DATA / name / "model.safetensors"), settings_of(DATA / name))
    recorded = json.loads((DATA / f"{name}.json").read_text())
    assert {
        layer: hashlib.sha256(weight.contiguous().view(torch.uint8).numpy()).hexdigest()
        for layer, weight in weights.items()
    } == recorded


@pytest.mark.parametrize(("name", "tp"), each_once(NAMES, [2, 4]))
def test_checkpoints_of_gptqmodel(tmp_path, name, tp):
    check(DATA / name, tmp_path / "split", tp)
    check_commands(DATA / name, tmp_path, tmp_path / "split", "scales", tp=tp, reshard=6 - tp)


@pytest.mark.parametrize("name", ["awq-4", "gptq-4-act-order"])
def test_config_alone_has_the_sizes_of_the_headers(tmp_path, name):
    check_config_alone(DATA / name, tmp_path / "config")


@pytest.mark.parametrize("name", cases(NAMES, lambda name: name in {"awq-4", "gptq-4-act-order"}))
def test_dequantized_models_compute_the_same(tmp_path, name):
    check_run(DATA / name, tmp_path / "split")


#: By default, every size of words with groups, and act-order with every form of groups for 4 bits.
RANDOM = cases(
    itertools.product((2, 3, 4, 8), (32, 64, -1), (False, True)),
    lambda bits, group, act_order: (bits == 4 and act_order) or (group, act_order) == (64, False),
)


@pytest.mark.parametrize(("bits", "group", "act_order"), RANDOM)
def test_random_checkpoints(tmp_path, bits, group, act_order):
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 256}
    source = write_gptq(tmp_path / "source", bits=bits, group=group, act_order=act_order, version="gptq_v2", **sizes)
    check(source, tmp_path / "split", 2)
    check_commands(source, tmp_path, tmp_path / "split", "scales", tp=2, reshard=1)


@pytest.mark.parametrize("version", ["gptq", "awq"])
def test_ranks_with_one_packed_word_of_a_layer(tmp_path, version):
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 4, "intermediate": 32}
    source = write_gptq(tmp_path / "source", bits=4, group=8, version=version, **sizes)
    check(source, tmp_path / "split", 4)


def test_blocks_do_not_end_inside_an_index(tmp_path, monkeypatch):
    """The indices of a layer are longer than a block, whose size depends on the number of threads."""
    monkeypatch.setattr(copy, "_MAX_BLOCKS_BYTES", 5001)
    monkeypatch.setattr(copy, "_MIN_BLOCK_BYTES", 1)
    source = write_gptq(tmp_path / "source", bits=4, group=32, hidden=64, intermediate=2048)
    shardconv.split(source, tmp_path / "split", tp=2)
    monkeypatch.undo()
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()


@pytest.mark.parametrize("name", NAMES)
def test_engines_read_the_values_of_the_source(tmp_path, name):
    """Of a source and of a rank file alike: indices that count from the first group of all ranks."""
    shardconv.split(DATA / name, tmp_path / "split", tp=2)
    manifest, source = read_manifest(tmp_path / "split"), open_source(DATA / name)
    full = load_file(DATA / name / "model.safetensors")
    for rank in range(2):
        of_source = RankSourceReader(source, manifest.plan, rank)
        of_rank_file = RankFileReader(manifest, tmp_path / "split", rank, verify=True)
        for tensor, values in full.items():
            expected = take_shard(values, manifest.plan.placement(tensor), rank)
            for reader in (of_source, of_rank_file):
                assert bytes(reader.read(tensor)) == expected.contiguous().view(torch.uint8).numpy().tobytes(), tensor


def test_files_with_offsets_have_the_indices_of_the_full_tensors(tmp_path):
    shardconv.split(DATA / "gptq-3", tmp_path / "split", tp=2, layout="dcp")
    full = load_file(DATA / "gptq-3/model.safetensors")[f"{DOWN}.g_idx"]
    assert torch.equal(load_file(tmp_path / "split/rank-1-of-2.safetensors")[f"{DOWN}.g_idx"], full[64:])
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(DATA / "gptq-3")


def test_act_order_that_the_settings_deny_is_refused(tmp_path):
    source = changed(tmp_path / "source", "gptq-4-act-order", desc_act=False)
    with pytest.raises(IntegrityError, match=r"q_proj\.g_idx: input feature .* in group .*desc_act"):
        shardconv.split(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("index", [-1, 4])
def test_index_of_a_group_that_does_not_exist_is_refused(tmp_path, index):
    """The checkpoint has 4 groups of 32 features."""
    source = shutil.copytree(DATA / "gptq-4-act-order", tmp_path / "source")
    change_tensors(source, lambda tensors: tensors[f"{DOWN}.g_idx"].__setitem__(70, index))
    message = rf"{DOWN}\.g_idx: input feature 70 is in group {index} \(expected 0 to 3, .* groups of 32"
    with pytest.raises(IntegrityError, match=message):
        shardconv.split(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


def test_act_order_with_another_number_of_groups_is_refused():
    tensors = {
        "q_proj.qweight": TensorSpec("I32", (8, 64)),
        "q_proj.qzeros": TensorSpec("I32", (7, 8)),
        "q_proj.scales": TensorSpec("F16", (7, 64)),
        "q_proj.g_idx": TensorSpec("I32", (64,)),
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    with pytest.raises(PlanError, match=r"qzeros has shape \[7, 8\] \(expected \[2, 8\] for a weight of \[64, 64\]"):
        with_grids(tensors, {"quantization_config": settings})


def test_rank_that_reads_a_source_refuses_unexpected_indices(tmp_path):
    shardconv.split(DATA / "gptq-3", tmp_path / "split", tp=2)
    flipped, name = shutil.copytree(DATA / "gptq-3", tmp_path / "flipped"), f"{DOWN}.g_idx"
    change_tensors(flipped, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    reader = RankSourceReader(open_source(flipped), read_manifest(tmp_path / "split").plan, 1)
    with pytest.raises(SourceError, match=rf"{DOWN}\.g_idx: input feature 0 is in group 3 \(expected 0"):
        reader.read(f"{DOWN}.g_idx")


@pytest.fixture(params=[True, False], ids=["checksums", "no checksums"])
def with_changed_index(request, tmp_path):
    """A split checkpoint with a changed index in a rank file, and whether it has checksums."""
    split = tmp_path / "split"
    shardconv.split(DATA / "gptq-3", split, tp=2, checksums=request.param)
    path = split / "rank-1-of-2.safetensors"
    flip(path, place(path, f"{DOWN}.g_idx")[3], bit=7)  # the sign of the first index
    return split, request.param


def test_changed_indices_of_a_rank_file_are_found(with_changed_index, tmp_path):
    split, has_checksums = with_changed_index
    found = " ".join(shardconv.verify(split).differences)
    assert f"{DOWN}.g_idx" in found or "differ from their checksum" in found
    with pytest.raises(IntegrityError, match="checksum" if has_checksums else r"g_idx: input feature 64 is in group"):
        shardconv.merge(split, tmp_path / "merged")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 64}, "does not fit the tensors"),
        ({"bits": 8}, "does not fit the tensors"),
        ({"bits": 5}, "bits is 5"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "settings per layer"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(PlanError, match=message):
        shardconv.split(changed(tmp_path / "source", **settings), tmp_path / "out", tp=2)


def test_settings_in_the_config_of_the_text_model(tmp_path):
    """transformers reads them from there if the composite model has none."""
    text = json.loads((DATA / "gptq-3/config.json").read_text())
    tensors = load_file(DATA / "gptq-3/model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    placed = shardconv.make_plan(tmp_path, tp=2).placement(f"language_model.{DOWN}.qweight")
    assert placed == shardconv.make_plan(DATA / "gptq-3", tp=2).placement(f"{DOWN}.qweight")


def test_patterns_of_unquantized_layers(tmp_path):
    check(changed(tmp_path / "source", dynamic={"-:.*gate$": {}}), tmp_path / "split", 2)


def test_groups_that_would_straddle_ranks_are_refused(tmp_path):
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 4, "intermediate": 256}
    source = write_gptq(tmp_path / "source", bits=4, group=64, **sizes)
    with pytest.raises(PlanError, match=r"o_proj.*128 / 4 = 32 input features per rank .* 64-wide group"):
        shardconv.split(source, tmp_path / "out", tp=4)
    # with act-order every rank has all groups
    source = write_gptq(tmp_path / "ordered", bits=4, group=64, act_order=True, **sizes)
    check(source, tmp_path / "split", 4)


#: 6 heads and 10 groups of 32 features, which 4 ranks do not divide.
PADDED = {"hidden": 192, "heads": 6, "kv_heads": 6, "intermediate": 320}


@pytest.mark.parametrize(("bits", "version"), [*each_once([2, 3, 4, 8], ["gptq", "gptq_v2"]), (4, "awq")])
def test_padding_is_zero(tmp_path, bits, version):
    """Groups of padding have the scale 0, and indices of their own."""
    source = write_gptq(tmp_path / "source", bits=bits, group=32, version=version, **PADDED)
    assert check_padding(source, 4, partial(dequantize, settings=settings_of(source)), tmp_path) == 7
    if version != "awq":
        indices = load_file(rank_file(tmp_path / "split", 3, 4))[f"{DOWN}.g_idx"]
        assert indices.tolist() == [at // 32 for at in range(96)]


def test_pad_of_a_quantized_checkpoint_is_refused(tmp_path):
    source = write_gptq(tmp_path / "source", bits=4, group=32, **PADDED)
    with pytest.raises(PlanError, match=r"is quantized, and shardconv pad only supports .* split --tp 4 --pad"):
        shardconv.pad(source, tmp_path / "out", tp=4)


@pytest.mark.parametrize("options", [{"group": -1}, {"group": 32, "act_order": True}])
def test_padding_with_scales_of_other_features_is_refused(tmp_path, options):
    source = write_gptq(tmp_path / "source", bits=4, **options, **PADDED)
    with pytest.raises(PlanError, match=r"o_proj.weight: 192 input features would be padded, and zeros of this format"):
        shardconv.split(source, tmp_path / "split", tp=4, pad=True)


def test_padding_inside_a_block_is_refused():
    """The last block of the matrix is not full, and padding would share its scale."""
    blocks = (GridDim(0, 16, 1, "scale block"), GridDim(1))
    grid = Grid("weight_scale", "weight", (328, 64), blocks, ("output", "input"), padding=(16, 1))
    placement = shard_dim(0, [Unit(328, padded=(1, 384))], 4)
    with pytest.raises(IndivisibleError, match="56 output features of padding after 40 are not full blocks of 16"):
        grid.place(placement, (21, 64))


def packed_tensors(size=128, groups=4):
    return {
        "q_proj.weight_packed": TensorSpec("I32", (64, size // 8)),
        "q_proj.weight_scale": TensorSpec("BF16", (64, groups)),
        "q_proj.weight_shape": TensorSpec("I64", (2,)),
        "q_proj.weight_g_idx": TensorSpec("I32", (size,)),
    }


@pytest.mark.parametrize(("actorder", "is_ordered"), [(None, False), ("weight", False), ("group", True)])
def test_actorder_of_compressed_tensors(actorder, is_ordered):
    """Groups in the order of activations are replicated; without them indices of groups are rebased."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": actorder}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    grids = {name: spec.grid for name, spec in with_grids(packed_tensors(), config).items()}
    rows = shard_dim(1, [Unit(128)], 2)
    assert grids["q_proj.weight_g_idx"].edits(rows) == (None if is_ordered else ((0,), (2,)))
    assert (grids["q_proj.weight_scale"].place(rows, (64, 4)).dim is None) == is_ordered
    groups["group_0"]["format"] = "int-quantized"
    if is_ordered:
        with pytest.raises(PlanError, match="actorder with format int-quantized is not supported"):
            with_grids(packed_tensors(), config)


# --- other structures than llama's ----------------------------------------------------------------------------------

GROUP = 32


def quantize(name: str, tensor: torch.Tensor, *, method: str) -> dict[str, torch.Tensor]:
    """Random codes, scales and zero points for one weight."""
    layer, (out, size) = name.removesuffix(".weight"), tensor.shape
    random = np.random.default_rng(len(name) + out)
    axis = 1 if method == "awq" else 0
    stored = {
        f"{layer}.qweight": pack(random.integers(0, 16, (size, out)), 4, axis),
        f"{layer}.qzeros": pack(random.integers(0, 16, (size // GROUP, out)), 4, 1),
        f"{layer}.scales": torch.from_numpy(random.random((size // GROUP, out)).astype(np.float16)),
    }
    stored |= {f"{layer}.g_idx": torch.arange(size, dtype=torch.int32) // GROUP} if method == "gptq" else {}
    return stored


@pytest.mark.parametrize(("model", "method"), each_once(["phi3", "qwen2", "qwen3_moe", "deepseek_v3"], ["gptq", "awq"]))
def test_fused_layers_experts_and_latent_attention(unquantized, tmp_path, model, method):
    of_method = {"gptq": {"desc_act": False, "checkpoint_format": "gptq"}, "awq": {"version": "gemm"}}[method]
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP, **of_method}
    convert = partial(quantize, method=method)
    source = write(unquantized(model), tmp_path / "source", convert, settings)

    def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{layer}.weight": weight.T for layer, weight in dequantize(tensors, settings).items()}

    assert check_values(source, unquantized(model), 2, weights, tmp_path / "tp2") >= 4
    check_commands(source, tmp_path, tmp_path / "tp2", "scales", tp=2, reshard=4)

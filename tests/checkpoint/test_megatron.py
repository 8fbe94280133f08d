"""Checkpoints of Megatron-Core, written and read: against tensors that torch makes, and torch's own reader and writer.

tests/megatron loads them into Megatron-Core. All comparisons are exact.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections import defaultdict, deque
from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import shardconv
from shardconv.checkpoint.sources import layout_source
from shardconv.files.input_files import InputFiles
from shardconv.support.errors import IntegrityError, OutputError, PlanError, SourceError, UsageError
from tests.support.changes import both, config, drop, put
from tests.support.checkpoints import contents, deal, part_names, write_index, write_weights
from tests.support.command import call
from tests.support.faults import failing_after
from tests.support.matrix import MATRIX, cases
from tests.support.megatron import (
    KINDS,
    VOCAB,
    all_names,
    legacy_ranks,
    load_dcp,
    megatron_tensors,
    write_frame,
    write_legacy,
    write_megatron,
)
from tests.support.models import Model, Tensors, change_config, read
from tests.support.tensors import check_equal, check_equal_files

#: Kinds of which all layers have the same tensors, so that they can be stacked.
EQUAL_LAYERS = [kind for kind in KINDS if kind not in {"glm4_moe", "deepseek_v2", "kimi_k2", "deepseek_v3"}]
TPS = (2,)
SHOWN = {"llama", "qwen3_moe", "deepseek_v3"}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module")
def written(source_of, tmp_path_factory):
    """The checkpoint of Megatron-Core of a kind."""

    def write(kind: str) -> Path:
        target = tmp_path_factory.mktemp("written") / "megatron"
        shardconv.split(source_of(kind), target, layout="megatron")
        return target

    return cache(write)


def expected(source: Path) -> Tensors:
    return megatron_tensors(read(source), json.loads((source / "config.json").read_text()))


def stacked(tensors: Tensors) -> Tensors:
    """The layers of the decoder as one tensor for each of their names."""
    layers: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layers.setdefault(re.sub(r"(decoder\.layers)\.\d+", r"\1", name), []).append(tensor)
    return {name: torch.stack(held) if ".layers." in name else held[0] for name, held in layers.items()}


# --- written checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_torch_reads_the_tensors_of_megatron(source_of, written, kind):
    check_equal(load_dcp(written(kind) / "release"), all_names(expected(source_of(kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_merge_gives_the_bytes_of_the_source(source_of, written, tmp_path, kind):
    report = shardconv.merge(written(kind), tmp_path / "merged")
    assert report.derived == ("converted from 1 file of Megatron-Core, without extra states",)
    assert contents(tmp_path / "merged") == contents(source_of(kind))


@pytest.mark.parametrize("kind", cases(EQUAL_LAYERS, lambda kind: kind in SHOWN))
def test_stacked_layers(source_of, tmp_path, kind):
    shardconv.split(source_of(kind), tmp_path / "stacked", layout="megatron", stacked_layers=True)
    check_equal(load_dcp(tmp_path / "stacked" / "release"), stacked(all_names(expected(source_of(kind)))))
    assert common(tmp_path / "stacked")["content_metadata"]["non_homogeneous_layers"] is False
    shardconv.merge(tmp_path / "stacked", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source_of(kind))


def common(folder: Path) -> dict:
    with torch.serialization.safe_globals([argparse.Namespace]):  # as Megatron-Core does
        return torch.load(folder / "release" / "common.pt", weights_only=True)


def test_files_beside_the_chunks(written):
    folder = written("llama")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = common(folder)
    assert vars(found.pop("args")) == {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 16, "max_position_embeddings": 32, "vocab_size": VOCAB,
        "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "no_save_optim": True, "no_save_rng": True, "norm_epsilon": 1e-6,
        "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": True, "add_qkv_bias": True,
        "qk_layernorm": False, "position_embedding_type": "rope", "rotary_base": 10000.0, "mtp_num_layers": None,
        "rotary_percent": 1.0, "rotary_interleaved": False, "use_rope_scaling": False,
        "moe_router_enable_expert_bias": False, "moe_shared_expert_gate": False,
    }  # fmt: skip
    assert found == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"non_homogeneous_layers": True, "singleton_local_shards": False},
    }
    assert json.loads((folder / "release" / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("olmo", {"normalization": "LayerNorm", "add_bias_linear": False}),
        ("qwen2", {"add_qkv_bias": True, "add_bias_linear": False}),
        ("qwen3_moe", {"qk_layernorm": True, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}),
        ("gemma2", {"apply_layernorm_1p": True}),
        ("glm4_moe", {"rotary_percent": 0.5, "qk_layernorm": True}),
        (
            "deepseek_v3",
            {
                "multi_latent_attention": True,
                "qk_layernorm": True,
                "kv_lora_rank": 32,
                "moe_layer_freq": [0, 1],
                "mtp_num_layers": 1,
                "moe_shared_expert_intermediate_size": 128,
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
            },
        ),
        ("qwen2_moe", {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 48}),
    ],
)
def test_arguments_of_the_training_script(written, kind, arguments):
    found = vars(common(written(kind))["args"])
    assert {name: found[name] for name in arguments} == arguments


@pytest.mark.parametrize(
    ("fields", "expected_arguments"),
    [
        ({"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0}, {"rotary_base": 150000.0}),
        ({"full_attention": {"rope_type": "default", "rope_theta": 150000.0}}, {}),
    ],
)
def test_arguments_that_the_training_script_has_to_decide(source_of, written, tmp_path, fields, expected_arguments):
    """Megatron-LM prefers arguments of a checkpoint to those of the script."""
    assert "swiglu" not in vars(common(written("gemma2"))["args"])
    source = shutil.copytree(source_of("gpt_oss"), tmp_path / "source")
    change_config(source, {"rope_parameters": fields})
    shardconv.split(source, tmp_path / "megatron", layout="megatron")
    found = vars(common(tmp_path / "megatron")["args"])
    decided = ("position_embedding_type", "rotary_base", "swiglu")
    assert {name: found[name] for name in decided if name in found} == expected_arguments


@pytest.mark.parametrize(
    ("kind", "fields", "expected_arguments"),
    [
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_theta": 500000.0, "rope_parameters": None},
            {"position_embedding_type": "rope", "rotary_base": 500000.0},
        ),
        ("gemma3", {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}, {}),
        ("deepseek_v3", {"head_dim": 8}, {}),
    ],
)
def test_arguments_of_other_configs(source_of, tmp_path, kind, fields, expected_arguments):
    """The base of scaled embeddings is written; neither one of several bases, nor a head_dim of latent attention."""
    source = shutil.copytree(source_of(kind), tmp_path / "source")
    change_config(source, fields)
    shardconv.split(source, tmp_path / "megatron", layout="megatron")
    found = vars(common(tmp_path / "megatron")["args"])
    decided = ("position_embedding_type", "rotary_base") if kind != "deepseek_v3" else ("kv_channels",)
    assert {name: found[name] for name in decided if name in found} == expected_arguments


def test_extra_states_are_empty(written):
    metadata = FileSystemReader(written("qwen3_moe") / "release").read_metadata()
    states = [name for name, entry in metadata.state_dict_metadata.items() if not hasattr(entry, "size")]
    assert {
        "decoder.layers.1.self_attention.core_attention._extra_state/shard_0_1",
        "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1",
        "decoder.layers.0.mlp.experts.experts.linear_fc1._extra_state/shard_3_4",
        "output_layer._extra_state/shard_0_1",
    } <= {*states}
    (position,) = {
        (info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
        if index.fqn in states
    }
    with (written("qwen3_moe") / "release" / position[0]).open("rb") as file:
        file.seek(position[1])
        data = file.read(position[2])
    (path := written("qwen3_moe").parent / "state.pt").write_bytes(data)
    assert torch.load(path, weights_only=True) == [None]


def test_each_expert_and_projection_is_a_chunk(written):
    metadata = FileSystemReader(written("qwen3_moe") / "release").read_metadata()
    chunks = metadata.state_dict_metadata["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"].chunks
    offsets = [tuple(chunk.offsets) for chunk in chunks]
    assert offsets == [(expert, start, 0) for expert in range(4) for start in (0, 64)]


def test_tp_is_the_number_of_files(source_of, tmp_path):
    report = shardconv.split(source_of("llama"), tmp_path / "files", tp=3, layout="megatron")
    files = sorted((tmp_path / "files" / "release").glob("*.distcp"))
    assert [path.name for path in files] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert report.rank_bytes == tuple(path.stat().st_size for path in files)
    assert max(report.rank_bytes) < 2 * min(report.rank_bytes)
    check_equal(load_dcp(tmp_path / "files" / "release"), all_names(expected(source_of("llama"))))


def test_memory_per_tensor_of_a_dry_run(source_of, tmp_path):
    """Names are most of the memory of a plan: the texts of headers and index, which have them, too, are compressed."""
    source = shutil.copytree(source_of("qwen3_moe"), tmp_path / "source")
    change_config(source, {"num_experts": 4000, "moe_intermediate_size": 1})
    specs = {name: ("BF16", tuple(tensor.shape)) for name, tensor in read(source).items() if ".experts." not in name}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        specs[f"{mlp}.gate.weight"] = "BF16", (4000, 64)
        for name, shape in {"gate_proj": (1, 64), "up_proj": (1, 64), "down_proj": (64, 1)}.items():
            specs |= {f"{mlp}.experts.{expert}.{name}.weight": ("BF16", shape) for expert in range(4000)}
    (source / "model.safetensors").unlink()
    weight_map = {}
    for part, names in zip(part_names(8), deal(list(specs), 8), strict=True):
        write_weights(source / part, {name: specs[name] for name in names})
        weight_map |= dict.fromkeys(names, part)
    write_index(source, weight_map)
    tracemalloc.start()
    try:
        shardconv.split(source, tmp_path / "out", layout="megatron", dry_run=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 520 * len(specs), peak / len(specs)


@pytest.mark.parametrize(("tp", "rows"), [(1, 256), (3, 384)])
def test_the_vocabulary_is_padded_with_zeros(source_of, tmp_path, tp, rows):
    options = {"tp": tp, "make_vocab_size_divisible_by": 128}
    shardconv.split(source_of("llama"), tmp_path / "padded", layout="megatron", **options)
    wanted = expected(source_of("llama"))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        wanted[name] = torch.nn.functional.pad(wanted[name], (0, 0, 0, rows - VOCAB))
    check_equal(load_dcp(tmp_path / "padded" / "release"), all_names(wanted))
    shardconv.merge(tmp_path / "padded", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source_of("llama"))


def test_converted_dtype(source_of, tmp_path):
    shardconv.split(source_of("llama"), tmp_path / "bf16", layout="megatron", dtype="bf16")
    wanted = {name: tensor.bfloat16() for name, tensor in expected(source_of("llama")).items()}
    check_equal(load_dcp(tmp_path / "bf16" / "release"), all_names(wanted))


def test_overwrite_replaces_a_written_checkpoint_only(source_of, written, tmp_path):
    write = partial(shardconv.split, source_of("llama"), tmp_path / "megatron", layout="megatron", overwrite=True)
    write(tp=2)
    write()
    assert contents(tmp_path / "megatron") == contents(written("llama"))
    (tmp_path / "megatron" / "iter_0000010").mkdir()
    (tmp_path / "megatron" / "iter_0000010" / "common.pt").touch()
    with pytest.raises(OutputError, match=r"holds iter_0000010/common\.pt, which is not part of a checkpoint"):
        write()


@pytest.fixture
def interrupted(monkeypatch):
    """Runs a split that fails after 9 small stripes."""
    monkeypatch.setattr("shardconv.checkpoint.operations.foreign_writer.STRIPE_BYTES", 4096)

    def run(write) -> None:
        with failing_after(9), pytest.raises(OutputError):
            write(resume=True, threads=1)

    return run


@pytest.mark.parametrize("layout", ["meta", "megatron"])
def test_an_interrupted_run_is_continued(tmp_path, interrupted, layout):
    source = Model("llama", {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB}).write(tmp_path / "source")
    write = partial(shardconv.split, source, tmp_path / "out", tp=1, layout=layout)
    interrupted(write)
    assert write(resume=True).resumed_bytes > 8 * 3000
    shardconv.split(source, tmp_path / "expected", tp=1, layout=layout)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stacked_layers": True}, "stacked_layers"),
        ({"make_vocab_size_divisible_by": 128}, "make_vocab_size_divisible"),
    ],
)
def test_a_run_with_other_options_is_not_continued(source_of, tmp_path, interrupted, options, text):
    write = partial(shardconv.split, source_of("llama"), tmp_path / "out", layout="megatron")
    interrupted(partial(write, **options))
    with pytest.raises(OutputError, match=rf"the interrupted run had {text}.* \(got none\)"):
        write(resume=True)


def test_torch_is_not_imported(source_of, tmp_path):
    code = (
        "import shardconv, sys; "
        f"shardconv.split({str(source_of('llama'))!r}, {str(tmp_path / 'out')!r}, layout='megatron'); "
        f"shardconv.merge({str(tmp_path / 'out')!r}, {str(tmp_path / 'back')!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- checkpoints that were trained ----------------------------------------------------------------------------------

#: By the end of a name, placements on a mesh of 2 x 2 ranks: the second axis is that of tensor parallelism.
PLACEMENTS = {
    "linear_qkv.weight": (R, S0), "linear_qkv.bias": (R, S0), "linear_proj.weight": (R, S1),
    "linear_fc1.weight": (R, S0), "linear_fc2.weight": (R, S1), "word_embeddings.weight": (S0, S0),
    "output_layer.weight": (R, S0),
    "experts.experts.linear_fc1.weight": (S0, S1), "experts.experts.linear_fc2.weight": (S0, Shard(2)),
}  # fmt: skip


def save(_axis, source: str, folder: str, prefix: int) -> None:
    """Save a checkpoint with an optimizer's state; runs on four ranks. ``prefix`` dims are those of stacked layers."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = {}
    for name, tensor in torch.load(source).items():
        ends = [end for end in PLACEMENTS if name.endswith(end)]
        placed = PLACEMENTS[max(ends, key=len)] if ends else (R, R)
        moved = prefix if name.startswith("decoder.layers.") else 0
        placements = [one if one == R else Shard(one.dim + moved) for one in placed]
        state[name] = distribute_tensor(tensor, mesh, placements)
    moments = {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in state.items()}
    others = {"rng_state/shard_0.0_1.1": [1, 2], "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1": [None]}
    dcp.save({**state, **moments, **others}, checkpoint_id=folder)


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_merge_of_a_trained_checkpoint(source_of, ranks, tmp_path, kind, is_stacked):
    tensors = expected(source_of(kind))
    torch.save(stacked(tensors) if is_stacked else tensors, tmp_path / "tensors.pt")
    ranks("four", save, str(tmp_path / "tensors.pt"), str(tmp_path / "run" / "iter_0000500"), int(is_stacked))
    write_frame(tmp_path / "run", None)
    report = shardconv.merge(tmp_path / "run", tmp_path / "merged", config=source_of(kind) / "config.json")
    assert report.derived == ("converted from 4 files of Megatron-Core, without extra states, optimizer, rng_state",)
    check_equal(read(tmp_path / "merged"), read(source_of(kind)))


@pytest.fixture
def trained(source_of, tmp_path) -> Path:
    """The checkpoint of a training run with the names of a spec with fused norms, and the config beside it."""
    tensors = all_names(expected(source_of("llama")))
    fused = {name: one for name, one in tensors.items() if not re.search(r"\.(input|pre_mlp)_layernorm\.", name)}
    return write_megatron(tmp_path / "run", fused, source_of("llama") / "config.json")


@pytest.mark.parametrize("tp", TPS)
def test_split_equals_a_split_of_the_model(source_of, trained, tmp_path, tp):
    shardconv.split(trained, tmp_path / "from-megatron", tp=tp)
    shardconv.split(source_of("llama"), tmp_path / "split", tp=tp)
    check_equal_files(tmp_path / "from-megatron", tmp_path / "split")
    assert not shardconv.verify(tmp_path / "from-megatron", against=trained).differences
    save_file({name: tensor + 1 for name, tensor in read(source_of("llama")).items()}, tmp_path / "changed.safetensors")
    assert shardconv.verify(tmp_path / "from-megatron", against=tmp_path / "changed.safetensors").differences


@MATRIX
def test_run_of_a_trained_checkpoint(source_of, trained):
    result = call(
        "run", trained, "--tp", "2", "--token-ids", "1 2 3", "--max-new-tokens", "4", "--check", source_of("llama")
    )
    assert result.code == 0  # 3 if outputs differ


def test_plan_shows_the_supported_sizes(trained):
    result = call("plan", trained)
    assert result.code == 0
    assert "supported tp: 1, 2, 4, 8" in result.out


def test_the_last_iteration_is_read(source_of, trained, tmp_path):
    write_megatron(tmp_path / "other", {"optimizer.state": torch.ones(2)})
    (tmp_path / "other" / "iter_0000500").rename(trained / "iter_0000400")
    source = shardconv.split(trained, tmp_path / "split", tp=2)
    assert source.left_out["iter_0000400/common.pt"] == "another iteration"
    assert source.left_out["iter_0000500/common.pt"] == "of Megatron-Core, without weights"
    assert source.left_out["iter_0000500/metadata.json"] == "describes the files of Megatron-Core"


def test_reshard_and_verify_with_a_config(source_of, trained, tmp_path):
    (trained / "config.json").unlink()
    shardconv.reshard(trained, tmp_path / "resharded", tp=2, config=source_of("llama"))
    report = shardconv.verify(trained, config=source_of("llama") / "config.json", against=source_of("llama"))
    assert not report.differences
    shardconv.split(source_of("llama"), tmp_path / "split", tp=2)
    check_equal_files(tmp_path / "resharded", tmp_path / "split")


def test_an_iteration_is_read_alone(source_of, trained, tmp_path):
    with pytest.raises(SourceError) as caught:
        shardconv.merge(trained / "iter_0000500", tmp_path / "merged")
    assert f'pass config="{trained / "config.json"}"' in str(caught.value)
    shardconv.merge(trained / "iter_0000500", tmp_path / "merged", config=trained / "config.json")
    check_equal(read(tmp_path / "merged"), read(source_of("llama")))


@pytest.mark.parametrize("command", ["split --layout megatron", "split --dtype bf16", "merge"])
def test_ranges_are_prefetched_before_they_are_read(source_of, written, tmp_path, monkeypatch, command):
    prefetched, others = set(), set()
    prefetch, read_range = InputFiles.prefetch, InputFiles.read

    def note(files, ranges):
        ranges = [*ranges]
        prefetched.update((number, at) for number, start, size in ranges for at in range(start, start + size))
        prefetch(files, ranges)

    def check(files, number, buffer, offset):
        others.update({(number, at) for at in range(offset, offset + len(buffer))} - prefetched)
        read_range(files, number, buffer, offset)

    source, megatron = source_of("qwen3_moe"), written("qwen3_moe")
    monkeypatch.setattr(InputFiles, "prefetch", note)
    monkeypatch.setattr(InputFiles, "read", check)
    if command == "merge":
        shardconv.merge(megatron, tmp_path / "new")
    elif command == "split --dtype bf16":
        shardconv.split(source, tmp_path / "new", tp=2, dtype="bf16")
    else:
        shardconv.split(source, tmp_path / "new", layout="megatron")
    assert prefetched
    assert not others


# --- the format torch -----------------------------------------------------------------------------------------------


def legacy(source: Path, folder: Path, tp: int, pp: int) -> Path:
    config = json.loads((source / "config.json").read_text())
    return write_legacy(folder, legacy_ranks(expected(source), config, tp, pp), source / "config.json")


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        ("llama", 1, 1), ("llama", 2, 1), ("llama", 2, 2), ("llama, tied", 1, 2), ("qwen3_moe", 2, 1),
        ("gpt_oss", 1, 1), ("gpt_oss", 2, 2), ("deepseek_v2", 2, 2),
    ],
)  # fmt: skip
def test_merge_of_the_format_torch(source_of, tmp_path, kind, tp, pp):
    report = shardconv.merge(legacy(source_of(kind), tmp_path / "run", tp, pp), tmp_path / "merged")
    names = "args, checkpoint_version, extra states, iteration, optimizer, rng_state"
    files = f"{tp * pp} file{'s'[: tp * pp > 1]}"
    padding = "6 rows of padding of the vocabulary"
    assert report.derived == (f"converted from {files} of Megatron-Core, without {names}, {padding}",)
    check_equal(read(tmp_path / "merged"), read(source_of(kind)))


def test_replicas_that_differ_are_an_error(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 2, 1)
    path = folder / "iter_0000500" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(state, path)
    with pytest.raises(
        IntegrityError, match=r"decoder\.final_layernorm\.weight differs from the shard of a lower rank"
    ):
        shardconv.merge(folder, tmp_path / "merged")


def test_a_missing_rank_is_an_error(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 2, 2)
    (folder / "iter_0000500" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(SourceError, match="the file of rank tp 1, pp 0 is missing"):
        shardconv.merge(folder, tmp_path / "merged")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 1, 1)
    path = folder / "iter_0000500" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {"args": Evil(tmp_path / "executed")}, path)
    with pytest.raises(SourceError, match=r"asks for __builtin__\.getattr"):
        shardconv.merge(folder, tmp_path / "merged")
    assert not (tmp_path / "executed").exists()


def test_expert_parallel_ranks_are_refused(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 1, 2)
    inner = folder / "iter_0000500"
    for name in ("mp_rank_00_000", "mp_rank_00_001"):
        (inner / name).rename(inner / f"{name}_000")
    with pytest.raises(SourceError, match=r"mp_rank_00_000_000/model_optim_rng\.pt is of an expert-parallel rank"):
        shardconv.merge(folder, tmp_path / "merged")


def test_expert_parallel_ranks_with_the_names_of_stages_are_refused(source_of, tmp_path):
    folder = legacy(source_of("qwen3_moe"), tmp_path / "run", 1, 1)
    inner = folder / "iter_0000500"
    shutil.copytree(inner / "mp_rank_00", inner / "mp_rank_00_001")
    (inner / "mp_rank_00").rename(inner / "mp_rank_00_000")
    with pytest.raises(SourceError, match=r"mp_rank_00_000/model_optim_rng\.pt is of an expert-parallel rank"):
        shardconv.merge(folder, tmp_path / "merged")


def test_arguments_beside_the_file_of_a_distributed_optimizer(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 1, 1)
    torch.save({"exp_avg": torch.ones(3)}, folder / "iter_0000500" / "mp_rank_00" / "distrib_optim.pt")
    shardconv.merge(folder, tmp_path / "merged")
    check_equal(read(tmp_path / "merged"), read(source_of("llama")))
    path = folder / "iter_0000500" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {"args": argparse.Namespace(norm_epsilon=0.5)}, path)
    with pytest.raises(SourceError, match=r"rms_norm_eps is 1e-06 in the config \(expected 0\.5 by mp_rank_00/model"):
        shardconv.merge(folder, tmp_path / "other")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_hidden_layers": 3}, "layers are missing (got 2 layers, the last with index 1, expected 3)"),
        ({"num_hidden_layers": 1}, "of a layer that the config does not have (num_hidden_layers 1)"),
        ({"num_attention_heads": 7}, "(expected 112 in dim 1, which is num_attention_heads * head_dim)"),
        ({"num_key_value_heads": 4}, "linear_qkv.weight: has 12 rows per head (expected 16, which is head_dim)"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            "(expected 64 in dim 1, which is num_attention_heads * head_dim)",
        ),
        ({"attention_bias": False}, "bias is not one of a 'llama' model with attention_bias False"),
        ({"mlp_bias": False}, "bias is not one of a 'llama' model"),
        ({"vocab_size": 300}, "has 250 rows (expected at least 300, which is vocab_size)"),
        ({"vocab_size": None}, "vocab_size in the config is None (expected a positive integer)"),
        ({"tie_word_embeddings": True}, "output_layer.weight is not one of a 'llama' model with tie_word_embeddings"),
        ({"model_type": "mixtral"}, "tensor decoder.layers.0.mlp.linear_fc2.bias is not one of a 'mixtral' model"),
        ({"hidden_size": 128}, "has shape [250, 64] (expected 128 in dim 1, which is hidden_size)"),
        ({"model_type": "gpt2"}, "layout megatron does not support model type 'gpt2'"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_tensors(trained, tmp_path, fields, text):
    change_config(trained, fields)
    with pytest.raises(SourceError) as caught:
        shardconv.merge(trained, tmp_path / "merged")
    assert text in str(caught.value)


LAYER, NORM, COPY = "model.layers.0", "model.norm.weight", "model.layers.2.embed_tokens.weight"
#: Kind of a source and its change, and the error.
SOURCES = [
    ("llama", put("model.layers.2.mlp.down_proj.weight", torch.ones(64, 96)), "model.layers.2 is not an MTP layer"),
    ("llama", drop("k_proj"), "k_proj"),
    ("llama", drop("embed_tokens"), "made of model.embed_tokens.weight): add the tensor, or correct the config"),
    ("llama", drop("up_proj.bias"), "up_proj.bias"),
    ("llama", put(f"{LAYER}.adapter.input_layernorm.weight", torch.ones(64)), "adapter.input_layernorm"),
    ("llama, tied", config(vocab_size=200), "embed_tokens.weight: dim 0 has 250 elements (expected 200 by vocab_size"),
    ("llama", put(NORM, torch.ones(32)), "final_layernorm.weight: has shape [32] (expected 64 in dim 0"),
    ("olmo", put(NORM, torch.ones(64)), "model.norm.weight: a 'olmo' model does not have this tensor"),
    ("deepseek_v3", put(COPY, lambda found: found[COPY] + 1), f"{COPY}: differs from model.embed_tokens.weight"),
    ("qwen3", drop("q_norm"), "q_layernorm.weight is missing"),
    ("qwen3_moe", drop("layers.1.mlp.gate.weight"), "router.weight is missing (expected beside"),
    ("qwen2", drop("_proj.bias"), "linear_qkv.bias is missing"),
    ("deepseek_v3", drop("e_score_correction_bias"), "router.expert_bias is missing"),
    ("deepseek_v3", drop("layers.1.mlp.shared_experts"), "shared_experts.linear_fc1.weight is missing"),
    ("deepseek_v3", drop("enorm"), "enorm.weight is missing (expected beside"),
    ("deepseek_v3", config(rope_interleave=False), "does not support rope_interleave False"),
    ("glm4_moe", config(num_hidden_layers=3), "model.layers.2 is an MTP layer, as it has eh_proj"),
    ("llama", both(drop("mlp."), config(mlp_bias=False)), "with attention_bias True with mlp_bias False: correct the "),
    ("llama", config(quantization_config={"quant_method": "mxfp4"}), "remove quantization_config"),
    ("olmo", config(clip_qkv=8.0), "does not support clip_qkv 8.0 of the config (expected none)"),
    ("qwen3_moe", config(mlp_only_layers=[0]), "layer 0 has experts (expected an MLP by mlp_only_layers"),
    ("deepseek_v3", config(scoring_func="softmax"), "does not support scoring_func 'softmax' of the config"),
    ("gpt_oss", drop("sinks"), "core_attention.softmax_offset is missing"),
    ("gpt_oss", config(num_local_experts=2), "down_proj: has shape [4, 96, 64] (expected [2, 96, 64] by config.json)"),
]


@pytest.mark.parametrize(("kind", "change", "text"), SOURCES)
def test_sources_that_the_layout_does_not_have(source_of, tmp_path, kind, change, text):
    source = shutil.copytree(source_of(kind), tmp_path / "source")
    change(source)
    with pytest.raises((PlanError, IntegrityError)) as caught:
        shardconv.split(source, tmp_path / "megatron", layout="megatron")
    assert text in str(caught.value)
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoder.layers.0.adapter.input_layernorm.weight", "is not one of a 'llama' model"),
        ("decoder.layers.input_layernorm.weight", "are one tensor with two names, but have different bytes"),
    ],
)
def test_trained_tensors_that_the_layout_does_not_have(source_of, tmp_path, name, text):
    shape = (2, 64) if ".layers.input" in name else (64,)
    tensors = expected(source_of("llama")) | {name: torch.ones(shape)}
    folder = write_megatron(tmp_path / "run", tensors, source_of("llama") / "config.json")
    with pytest.raises(SourceError) as caught:
        shardconv.merge(folder, tmp_path / "merged")
    assert text in str(caught.value)


def test_a_head_of_its_own_is_not_dropped(source_of, tmp_path):
    folder = legacy(source_of("llama"), tmp_path / "run", 1, 1)
    change_config(folder, {"tie_word_embeddings": True})
    with pytest.raises(SourceError, match=r"tensor output_layer\.weight is not one of a 'llama' model"):
        shardconv.merge(folder, tmp_path / "merged")
    staged = legacy(source_of("llama"), tmp_path / "staged", 1, 2)
    change_config(staged, {"tie_word_embeddings": True})
    with pytest.raises(IntegrityError, match=r"output_layer\.weight: differs from embedding\.word_embeddings\.weight"):
        shardconv.merge(staged, tmp_path / "merged")


def test_rows_that_are_removed_are_reported(source_of, trained, tmp_path):
    change_config(trained, {"vocab_size": 100})
    report = shardconv.merge(trained, tmp_path / "merged")
    assert report.derived == ("converted from 1 file of Megatron-Core, without 150 rows of padding of the vocabulary",)


def test_a_comparison_without_arguments_is_reported(written, tmp_path):
    folder = shutil.copytree(written("llama"), tmp_path / "megatron")
    assert shardconv.merge(folder, tmp_path / "compared").notes == ()
    (folder / "release" / "common.pt").unlink()
    (note,) = shardconv.merge(folder, tmp_path / "merged").notes
    assert "does not have the training program's arguments" in note
    assert note in call("merge", folder, "-o", tmp_path / "quiet", "--quiet").err
    assert note in shardconv.split(folder, tmp_path / "split", tp=2).assumed


def test_a_large_checkpoint_is_merged_into_several_files(source_of, written, tmp_path, monkeypatch):
    """With an index, as transformers writes and reads them."""
    most = 50_000
    monkeypatch.setattr(layout_source, "_MAX_FILE_BYTES", most)
    folder, source = written("qwen3_moe"), source_of("qwen3_moe")
    shardconv.merge(folder, tmp_path / "merged")
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert [path.name for path in files] == part_names(len(files))
    tensors = [load_file(path) for path in files]
    assert len(files) > 2
    assert all(len(held) == 1 or sum(one.nbytes for one in held.values()) <= most for held in tensors)
    check_equal({name: one for held in tensors for name, one in held.items()}, read(source))
    loaded, expected = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "merged", source))
    check_equal(loaded.state_dict(), expected.state_dict())
    shardconv.split(folder, tmp_path / "split", tp=2)
    shardconv.merge(tmp_path / "split", tmp_path / "again")
    check_equal_files(tmp_path / "merged", tmp_path / "again")
    shardconv.merge(folder, tmp_path / "one.safetensors")
    check_equal(load_file(tmp_path / "one.safetensors"), read(source))


def test_a_missing_description_of_the_files(source_of, written, tmp_path):
    folder = shutil.copytree(written("llama"), tmp_path / "megatron")
    (folder / "release" / "metadata.json").unlink()
    with pytest.raises(
        SourceError, match=r"files of Megatron-Core, without release/metadata\.json: copy it into the f"
    ):
        shardconv.merge(folder, tmp_path / "merged")
    shardconv.merge(folder, tmp_path / "merged", source_layout="megatron")
    check_equal(read(tmp_path / "merged"), read(source_of("llama")))


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("llama", {"apply_layernorm_1p": True}, "apply_layernorm_1p is False for model type 'llama' (expected True by"),
        ("gemma", {"apply_layernorm_1p": False}, "apply_layernorm_1p is True for model type 'gemma' (expected False"),
        ("llama", {"use_rope_scaling": True}, "use_rope_scaling is False in the config (expected True by common.pt)"),
        ("llama", {"rotary_percent": 0.5}, "partial_rotary_factor is 1.0 in the config (expected 0.5 by common.pt)"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved is False for model type 'llama' (expected True by"),
        ("llama", {"position_embedding_type": "none"}, "position_embedding_type is rope in the config (expected none"),
        ("llama", {"normalization": "LayerNorm"}, "normalization is RMSNorm for model type 'llama' (expected LayerN"),
        ("gemma2", {"swiglu": True}, "swiglu is False for model type 'gemma2' (expected True by common.pt)"),
        ("deepseek_v3", {"moe_router_score_function": "softmax"}, "moe_router_score_function is sigmoid for model typ"),
        ("deepseek_v3", {"moe_router_num_groups": 4}, "n_group is 1 in the config (expected 4 by common.pt)"),
        ("glm4_moe", {"moe_router_topk_scaling_factor": 2.5}, "routed_scaling_factor is 1.0 in the config (expected 2"),
    ],
)  # fmt: skip
def test_arguments_that_the_model_does_not_have(source_of, tmp_path, kind, arguments, text):
    """Arguments that change what is computed, and no shape."""
    folder = write_megatron(tmp_path / "run", expected(source_of(kind)), source_of(kind) / "config.json")
    torch.save({"args": argparse.Namespace(**arguments)}, folder / "iter_0000500" / "common.pt")
    with pytest.raises(SourceError) as caught:
        shardconv.merge(folder, tmp_path / "merged")
    assert text in str(caught.value)


def test_arguments_that_are_none_are_not_compared(source_of, tmp_path):
    """Megatron-Core then has one group of experts and a factor of 1, as this config."""
    source = source_of("glm4_moe")
    folder = write_megatron(tmp_path / "run", expected(source), source / "config.json")
    arguments = argparse.Namespace(moe_router_num_groups=None, moe_router_topk_scaling_factor=None)
    torch.save({"args": arguments}, folder / "iter_0000500" / "common.pt")
    shardconv.merge(folder, tmp_path / "merged")
    check_equal(read(tmp_path / "merged"), read(source))


def test_channels_of_latent_attention_are_not_compared(source_of, tmp_path):
    """Megatron-LM computes them from the number of heads, and does not use them."""
    source = source_of("deepseek_v3")
    folder = write_megatron(tmp_path / "run", expected(source), source / "config.json")
    torch.save({"args": argparse.Namespace(num_layers=2, kv_channels=7)}, folder / "iter_0000500" / "common.pt")
    shardconv.merge(folder, tmp_path / "merged")
    check_equal(read(tmp_path / "merged"), read(source))


@pytest.mark.parametrize("name", ["decoder.final_layernorm.weight", "decoder.layers.1.input_layernorm.bias"])
def test_a_trained_norm_that_the_model_does_not_have(source_of, tmp_path, name):
    tensors = expected(source_of("olmo"))
    tensors[name] = tensors[name] + 0.5
    folder = write_megatron(tmp_path / "run", tensors, source_of("olmo") / "config.json")
    for write in (shardconv.merge, partial(shardconv.split, tp=2, ranks="1")):
        with pytest.raises(IntegrityError, match=r"was trained, and the model of config\.json has the constant"):
            write(folder, tmp_path / "out")


def test_a_shape_that_contradicts_the_order_of_elements(source_of, tmp_path):
    folder = write_megatron(tmp_path / "run", expected(source_of("gpt_oss")), source_of("gpt_oss") / "config.json")
    change_config(folder, {"num_local_experts": 2})
    with pytest.raises(SourceError, match=r"has shape \[4, 192, 64\] \(expected \[2, 192, 64\] by the config\)"):
        shardconv.merge(folder, tmp_path / "merged")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
            "num_attention_heads is 4 in the config",
        ),
        ({"vocab_size": 200}, "vocab_size is 200 in the config (expected 250 by common.pt)"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 0.5 in the config (expected 1e-06 by common.pt)"),
        ({"rope_parameters": {"rope_theta": 5}}, "rope_theta is 5 in the config (expected 10000"),
        ({"rope_parameters": {"rope_theta": 5, "rope_type": "llama3"}}, "rope_theta is 5 in the config (expected 1000"),
    ],
)
def test_a_config_that_contradicts_the_arguments(written, tmp_path, fields, text):
    check_contradiction(written("llama"), tmp_path / "megatron", fields, text)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("qwen3_moe", {"attention_bias": True}, "linear_qkv.bias is missing (expected by the config"),
        ("qwen3_moe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3 in the config (expected 2 by common.pt)"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layer 0 has experts (expected an MLP by mlp_only_layers, decoder_"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "layer 0 has experts (expected an MLP by "),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "of the config are not valid (got "),
        ("deepseek_v3", {"first_k_dense_replace": 0}, "layer 0 has an MLP (expected experts by first_k_dense_replace"),
    ],
)
def test_experts_that_contradict_the_config(written, tmp_path, kind, fields, text):
    check_contradiction(written(kind), tmp_path / "megatron", fields, text)


def check_contradiction(source: Path, folder: Path, fields: dict[str, object], text: str) -> None:
    shutil.copytree(source, folder)
    change_config(folder, fields)
    with pytest.raises(SourceError) as caught:
        shardconv.merge(folder, folder.parent / "merged")
    assert text in str(caught.value)


@pytest.mark.parametrize("operation", [shardconv.merge, partial(shardconv.split, tp=2)])
def test_iterations_without_the_name_of_the_last_one(written, tmp_path, operation):
    folder = shutil.copytree(written("llama"), tmp_path / "megatron")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(SourceError, match=r"iteration\.txt: is missing: copy it, or pass .*megatron.release$"):
        operation(folder, tmp_path / "out")


class Items(list):
    """A list whose class is not Python's."""


class Options(dict):
    """A dict whose class is called with keywords when it is unpickled."""

    def __getnewargs_ex__(self):
        return (), {"strict": True}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "state",
    [Fraction(1, 3), defaultdict(list, step=[1]), deque([1, 2], maxlen=3), Items([1]), Items([1, 2]), Options(step=1)],
    ids=lambda state: type(state).__name__,
)
def test_arguments_beside_objects_of_any_class(source_of, trained, tmp_path, state, protocol):
    """Frameworks store objects of their own classes with the arguments, which are compared all the same."""
    arguments = argparse.Namespace(started=state, states=[state], hidden_size=65)
    path = trained / "iter_0000500" / "common.pt"
    torch.save({"args": arguments, "step": state}, path, pickle_protocol=protocol)
    with pytest.raises(SourceError, match=r"hidden_size is 64 in the config \(expected 65 by common\.pt\)"):
        shardconv.merge(trained, tmp_path / "merged")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stacked_layers": True, "tp": 2}, "are for .* \\(got native\\)"),
        ({"layout": "megatron", "stacked_layers": True}, r"mlp\.linear_fc2\.weight: cannot be stacked"),
        ({"layout": "megatron", "max_file_size": "5GB"}, "layout megatron has one file per rank"),
        ({"layout": "megatron", "tp": 2, "ranks": "1"}, "layout megatron is written for all ranks by one process"),
        ({}, "is missing: shardconv plan SRC lists the supported sizes"),
    ],
)  # fmt: skip
def test_options_that_do_not_apply(source_of, tmp_path, options, text):
    with pytest.raises((UsageError, PlanError), match=text):
        shardconv.split(source_of("deepseek_v3"), tmp_path / "out", **options)


def test_a_split_checkpoint_is_not_resharded_to_this_layout(source_of, tmp_path):
    shardconv.split(source_of("llama"), tmp_path / "split", tp=2)
    with pytest.raises(UsageError, match=r"from a source, .* then shardconv split source-merged --layout megatron"):
        shardconv.reshard(tmp_path / "split", tmp_path / "out", layout="megatron")


def test_reshard_of_a_trained_checkpoint_to_this_layout(source_of, trained, tmp_path):
    assert call("reshard", trained, "--layout", "megatron", "-o", tmp_path / "out").code == 0
    check_equal(load_dcp(tmp_path / "out" / "release"), all_names(expected(source_of("llama"))))
    with pytest.raises(UsageError, match="tp is missing: shardconv plan SRC lists the supported sizes"):
        shardconv.reshard(trained, tmp_path / "other")


def test_verify_says_what_the_files_are(source_of, written):
    result = call("verify", written("llama"))
    assert "no checksums: the checkpoint has files of Megatron-Core" in result.out
    assert "--against SRC compares all" in result.out
    result = call("verify", written("llama"), "--against", source_of("llama"))
    assert (result.code, "correct" in result.out) == (0, True)

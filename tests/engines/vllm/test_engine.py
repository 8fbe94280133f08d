"""vLLM's engine on rank files: greedy tokens and logprobs equal those with its default loader on the source.

Comparisons are exact. Each engine is a process with ``tp`` workers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import shardconv
from tests.engines.vllm.small import MODELS, write
from tests.support.compressed import write_compressed
from tests.support.damage import flip
from tests.support.s3_server import serve_s3

#: Models for which the CPU build of vLLM has kernels.
RUNNABLE = (
    "llama", "llama, tied", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "falcon", "mixtral", "qwen3_moe",
    "gpt_oss", "olmo2",
)  # fmt: skip
#: Models that vLLM's layout supports.
WITH_LAYOUT = ("llama", "llama, tied", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe")
#: Models for the tests of pipeline stages: a tied head, experts, and attention with windows.
IN_STAGES = ("llama", "llama, tied", "qwen3_moe", "gemma3_text")
#: Way to load a model to the options of its split, None for the source itself, and vLLM's load format, of which
#: sharded_state needs no plugin.
WAYS = {
    "split": ({"engine": "vllm"}, "shardconv"),
    "layout": ({"layout": "vllm"}, "sharded_state"),
    "source": (None, "shardconv"),
    "stages": ({"pp": 2, "engine": "vllm"}, "shardconv"),
    "layout in stages": ({"pp": 2, "layout": "vllm"}, "sharded_state"),
}
#: Model, way, and numbers of ranks and stages of the engine; 4 ranks replicate 2 KV heads.
GENERATED = [
    *((name, "split", 2, 1) for name in RUNNABLE),
    *((name, "layout", 2, 1) for name in WITH_LAYOUT),
    *((name, "source", 2, 1) for name in ("llama", "mixtral")),
    ("llama", "split", 4, 1),
    *((name, way, 2, 2) for name in IN_STAGES for way in ("stages", "split", "source", "layout in stages")),
]
pytestmark = pytest.mark.timeout(900)


def engine(model, load_format, tp, file, *, pp=1, **variables):
    """Run the engine on a folder or a model of the Hub, with environment variables; returns its process."""
    script = Path(__file__).with_name("generate.py")
    command = [sys.executable, str(script), str(model), load_format, str(tp), str(pp), str(file)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def generated(model, load_format, tp, *, pp=1, **variables):
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "generated.json"
        result = engine(model, load_format, tp, file, pp=pp, **variables)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return json.loads(file.read_text())


@pytest.fixture(scope="session")
def default(tmp_path_factory):
    """The source of a model, and the tokens generated with vLLM's default loader."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def run(name, tp, pp=1):
        source = write(name, folder)
        return source, generated(source, "auto", tp, pp=pp)

    return run


@pytest.mark.parametrize(("name", "way", "tp", "pp"), GENERATED)
def test_tokens(name, way, tp, pp, default, tmp_path):
    source, expected = default(name, tp, pp)
    options, load_format = WAYS[way]
    if options is not None:
        shardconv.split(source, tmp_path / "split", tp=tp, **options)
    assert generated(source if options is None else tmp_path / "split", load_format, tp, pp=pp) == expected


@pytest.fixture(scope="module")
def from_s3(default, tmp_path_factory):
    """The tokens generated from a split in a bucket, the bytes that the server sent, and the sizes of its files."""
    source, _ = default("llama", 2)
    with serve_s3("bucket") as server:
        shardconv.split(source, "s3://bucket/models/llama", tp=2, layout="vllm")
        server.num_sent = 0
        cache_folder = tmp_path_factory.mktemp("vllm")
        found = generated(
            "s3://bucket/models/llama", "runai_streamer_sharded", 2, VLLM_CACHE_ROOT=str(cache_folder)
        )  # fmt: skip
        num_sent = server.num_sent
        return found, num_sent, {name: len(data) for name, data in server.objects("models/llama/").items()}


def test_layout_in_an_object_store(from_s3, default):
    """vLLM without the plugin: it copies the config to its cache, and streams the rank files."""
    _, expected = default("llama", 2)
    assert from_s3[0] == expected


def test_each_worker_streams_its_own_rank_file(from_s3):
    _, num_sent, sizes = from_s3
    rank_files = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    others = sum(sizes.values()) - rank_files
    assert rank_files < num_sent <= 1.02 * rank_files + 2 * others + 10_000  # lists of files; others are copied twice


#: Schemes of compressed-tensors for which the CPU build has kernels; all but the first need AVX-512.
QUANTIZED = ("W8A8", "W4A16", "FP8_DYNAMIC")


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized(scheme, tmp_path):
    """By the plugin from a split and from the source, and by vLLM's layout."""
    if scheme != QUANTIZED[0] and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip(f"vLLM's kernel for {scheme} needs AVX-512")
    source = write_compressed(MODELS["llama"].write(tmp_path / "llama"), tmp_path / "source", (scheme, "Linear"))
    expected = generated(source, "auto", 2)
    shardconv.split(source, tmp_path / "split", tp=2, engine="vllm")
    assert generated(tmp_path / "split", "shardconv", 2) == expected
    shardconv.split(source, tmp_path / "files", tp=2, layout="vllm")
    assert generated(tmp_path / "files", "sharded_state", 2) == expected
    assert generated(source, "shardconv", 2) == expected


def test_model_of_the_hub(default, tmp_path):
    """By its name, from the cache of huggingface_hub, as after vLLM's download."""
    source, expected = default("llama", 2)
    cached = tmp_path / "hub" / "models--org--small"
    shutil.copytree(source, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert generated("org/small", "shardconv", 2, HF_HOME=str(tmp_path)) == expected


@pytest.fixture(scope="module")
def split(default, tmp_path_factory):
    source = write("llama", tmp_path_factory.mktemp("llama"))
    folder = tmp_path_factory.mktemp("split") / "llama"
    shardconv.split(source, folder, tp=2, engine="vllm")
    return folder


def refusal(folder, tp):
    """The output of vLLM when it does not start, with shardconv's message."""
    result = engine(folder, "shardconv", tp, os.devnull)
    assert result.returncode != 0
    return result.stdout + result.stderr


def test_wrong_tensor_parallel_size(split):
    assert f"{split} is split for another tensor parallel size (got 2, expected 1 of the engine)" in refusal(split, 1)


def test_damaged_rank_file(split, tmp_path):
    folder = shutil.copytree(split, tmp_path / "damaged")
    flip(folder / "rank-1-of-2.safetensors")
    assert "rank-1-of-2.safetensors: the bytes of" in refusal(folder, 2)


def test_boundaries_of_another_engine(default, tmp_path):
    """A vocabulary of 1000 without padding: rank 0 lacks 12 of the 512 rows that vLLM reads."""
    source = write("llama", tmp_path)
    shardconv.split(source, tmp_path / "split", tp=2)
    message = refusal(tmp_path / "split", 2)
    assert "are not on this rank, which holds [0, 500) of 1000: split the source again with shardconv split" in message
    assert f"run shardconv reshard {tmp_path / 'split'} --tp 2 --for vllm" in message


def test_padded_checkpoint_on_three_ranks(default, tmp_path):
    """Heads, widths and the vocabulary are padded; sums in bf16 have another order, so only tokens are compared."""
    source, expected = default("qwen3", 1)
    shardconv.pad(source, tmp_path / "padded", tp=3, vocab_multiple=3 * 64)
    found = generated(tmp_path / "padded", "auto", 3)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]

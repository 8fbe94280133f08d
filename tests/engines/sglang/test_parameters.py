"""Parameters of SGLang's models, loaded by SGLang from rank files and by its default loader from the source.

SGLang's own classes and loaders run on a CPU, one rank at a time. Its forward pass, which needs kernels, does not run.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import get_model_loader
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

import shardconv
from shardconv.layouts.layout_file import layout_file
from shardconv.support.errors import UsageError
from tests.engines.vllm.small import GQA, MLA, MODELS, TIED
from tests.support.models import Model

#: Fields that DeepSeek's configs have, and those of transformers may lack.
_SCALING = {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK = {
    **MLA, "moe_layer_freq": 1, "norm_topk_prob": True, "rope_scaling": {"type": "yarn", **_SCALING},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **_SCALING},
}  # fmt: skip
KINDS = {
    **{name: MODELS[name] for name in (
        "gemma3_text", "llama", "llama, tied", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"
    )},
    "mistral": Model("mistral", GQA),
    "qwen2, tied": Model("qwen2", {**GQA, **TIED}),
    "deepseek_v2": Model("deepseek_v2", {**_DEEPSEEK, "topk_method": "greedy", "scoring_func": "softmax"}),
    "deepseek_v3": Model(
        "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 48, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    ),
}  # fmt: skip
#: On 4 ranks, each KV head is on two of them.
CASES = [*((name, 2) for name in KINDS), *((name, 4) for name in ("llama", "llama, tied", "qwen3_moe", "deepseek_v3"))]
#: Groups of ranks that layers read their sizes from; without communication.
GROUPS = ("tp", "attn_tp", "pp", "moe_ep", "moe_tp")


def parameters(folder, tp, rank, load_format):
    """The state dict of SGLang's model on one rank."""
    arguments = ServerArgs(
        model_path=str(folder), tp_size=tp, device="cpu", load_format=load_format, dtype="float32",
        skip_tokenizer_init=True,
    )  # fmt: skip
    parallel = get_parallel()
    parallel.clear_stamp()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    parallel.override_permanently(**{f"{name}_group": _group(parallel, name) for name in GROUPS})
    config = ModelConfig.from_server_args(arguments)
    loader = get_model_loader(load_config=LoadConfig(load_format=load_format), model_config=config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu")).state_dict()


def _group(parallel, name):
    rank, size = getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size")
    return SimpleNamespace(
        rank_in_group=rank, world_size=size, is_first_rank=True, is_last_rank=True, cpu_group=None, device_group=None
    )


def write(name, folder):
    KINDS[name].write(folder / "source", max_shard_size="1MB")
    return folder / "source"


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_parameters_equal_those_of_the_default_loader(name, tp, tmp_path):
    source = write(name, tmp_path)
    shardconv.split(source, tmp_path / "split", tp=tp, layout="sglang")
    for rank in range(tp):
        found, expected = (
            parameters(folder, tp, rank, load_format)
            for folder, load_format in ((tmp_path / "split", "sharded_state"), (source, "auto"))
        )
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert torch.equal(found[key], tensor), key


def test_all_types_of_the_layout_are_tested():
    assert {model.model_type for model in KINDS.values()} == layout_file("sglang").types.keys()


def test_several_files_per_rank(tmp_path):
    source = write("llama", tmp_path)
    report = shardconv.split(source, tmp_path / "split", tp=2, layout="sglang", max_file_size="200kB")
    assert report.files_per_rank > 2
    found, expected = (parameters(tmp_path / "split", 2, 1, "sharded_state"), parameters(source, 2, 1, "auto"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_files_of_vllm_have_further_tensors(tmp_path):
    """The reason for a layout of its own."""
    source = write("llama", tmp_path)
    shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    with pytest.raises(KeyError, match="_scale"):
        parameters(tmp_path / "split", 2, 0, "sharded_state")


def test_file_names_do_not_have_the_stage(tmp_path):
    """All pipeline stages would read the same files, so the layout does not have stages."""
    from sglang.srt.model_loader.loader import ShardedStateLoader  # noqa: PLC0415

    layout = layout_file("sglang")
    assert layout.file_name.replace("{file}", "{part}") == ShardedStateLoader.DEFAULT_PATTERN
    source = write("llama", tmp_path)
    with pytest.raises(UsageError, match=r"layout sglang does not have pipeline stages \(got 2\)"):
        shardconv.split(source, tmp_path / "split", tp=2, pp=2, layout="sglang")

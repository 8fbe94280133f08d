"""Folders saved by vLLM: merge restores the exact tensors of the checkpoint that vLLM loaded."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import shardconv
from shardconv.engines.check import construct, one_rank
from tests.engines.vllm.small import write


def save(source, folder, *, tp, dtype, max_size, is_processed=False):
    """Load a checkpoint with vLLM's default loader on each rank, and save the ranks with vLLM's code.

    ``is_processed`` processes weights between the two, as the engine does. This repacks unquantized linear layers on a
    CPU with AVX-512, but does not change them on others and on a GPU.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    for rank in range(tp):
        with one_rank(source, tp=tp, rank=rank, dtype=dtype) as config:
            from vllm.config.load import LoadConfig  # noqa: PLC0415 - after the environment is set
            from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415
            from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader  # noqa: PLC0415

            model = construct(config, "cpu")
            get_model_loader(LoadConfig(load_format="auto")).load_weights(model, config.model_config)
            if is_processed:
                from vllm.model_executor.model_loader.utils import process_weights_after_loading  # noqa: PLC0415

                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            ShardedStateLoader.save_model(model, str(folder), max_size=max_size)
    return folder


def check_merge(source, folder, dtype):
    shardconv.merge(folder, folder.parent / "merged")
    found = load_file(folder.parent / "merged" / "model.safetensors")
    expected = {key: value for path in source.glob("*.safetensors") for key, value in load_file(path).items()}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor.to(getattr(torch, dtype))), key
        assert found[key].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge(name, tp, dtype, tmp_path):
    """4 ranks replicate the 2 KV heads; the vocabulary of 1000 is padded to 1024."""
    source = write(name, tmp_path)
    folder = save(source, tmp_path / "saved", tp=tp, dtype=dtype, max_size=200_000)
    assert len(list(folder.glob("model-rank-0-part-*"))) > 1
    check_merge(source, folder, dtype)


def test_weights_that_are_not_saved(tmp_path):
    """vLLM on a CPU that it repacks linear layers for does not save them, so a merge would lack them."""
    source = write("llama", tmp_path)
    folder = save(source, tmp_path / "saved", tp=2, dtype="bfloat16", max_size=None, is_processed=True)
    if any("qkv_proj.weight" in name for path in folder.glob("*.safetensors") for name in load_file(path)):
        check_merge(source, folder, "bfloat16")
        pytest.skip("vLLM saved its linear layers: it repacks them on a CPU with AVX-512")
    with pytest.raises(
        shardconv.ShardconvError, match=r"qkv_proj\.weight: is missing in all layers, for example because vLLM ran"
    ):
        shardconv.merge(folder, tmp_path / "merged")


def test_experts_are_refused(tmp_path):
    folder = save(write("mixtral", tmp_path), tmp_path / "saved", tp=2, dtype="float32", max_size=200_000)
    with pytest.raises(shardconv.ShardconvError, match="belongs to experts, which vLLM repacks before it saves them"):
        shardconv.merge(folder, tmp_path / "merged")

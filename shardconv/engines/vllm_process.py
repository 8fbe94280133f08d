"""Construct vLLM's model of one rank in this process: see ``check.py``. Imports vLLM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch's type stubs do not export it
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from shardconv.engines.check import EngineModel


@contextmanager
def one_rank(folder: Path, tp: int, pp: int, rank: int, arguments: Mapping[str, object]) -> Iterator[VllmConfig]:
    """Initialize vLLM's groups for one process, with the sizes and ranks of larger groups patched in."""
    stage, tp_rank = divmod(rank, tp)
    engine = EngineArgs(
        model=str(folder), tensor_parallel_size=tp, pipeline_parallel_size=pp, enforce_eager=True,
        skip_tokenizer_init=True, distributed_executor_backend="mp", **arguments,
    )  # fmt: skip
    config = engine.create_engine_config()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(1, backend="gloo")
            tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
            with (
                mock.patch.multiple(tensor, world_size=tp, rank_in_group=tp_rank),
                mock.patch.multiple(pipeline, world_size=pp, rank_in_group=stage, rank=stage, ranks=[*range(pp)]),
            ):
                yield config
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def construct(config: VllmConfig, device: str) -> EngineModel:
    """Construct the model that vLLM runs, before its weights are loaded."""
    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        model: EngineModel = initialize_model(config)
    return model


def optional_parameters(model: EngineModel) -> set[str]:
    """Names of parameters that vLLM initializes because most checkpoints omit them: KV-cache scales, expert biases."""
    methods = (BaseKVCacheMethod, AutoGPTQMoEMethod)
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), methods)
        for name, _ in module.named_parameters()
        if isinstance(method, BaseKVCacheMethod) or name.endswith("_bias")
    }

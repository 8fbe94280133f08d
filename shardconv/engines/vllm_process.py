"""Construct vLLM's model of one rank in this process: see ``check.py``. Imports vLLM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch's type stubs do not export it
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from shardconv.engines.check import EngineModel


@contextmanager
def one_rank(
    folder: Path, tp: int, ep: int, pp: int, rank: int, arguments: Mapping[str, object]
) -> Iterator[VllmConfig]:
    """Initialize vLLM's groups for one process, with the sizes and ranks of larger groups patched in."""
    stage, in_stage = divmod(rank, max(tp, ep))
    data_rank, tp_rank = divmod(in_stage, tp)
    engine = EngineArgs(
        model=str(folder), tensor_parallel_size=tp, pipeline_parallel_size=pp, enforce_eager=True,
        skip_tokenizer_init=True, distributed_executor_backend="mp", enable_expert_parallel=ep > 1, **arguments,
    )  # fmt: skip
    config = engine.create_engine_config()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(1, backend="gloo")
            tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
            data, experts = parallel_state.get_dp_group(), parallel_state._EP or tensor  # noqa: SLF001 - None if dense
            config.parallel_config.data_parallel_size = data_size = max(ep // tp, 1)
            with (
                mock.patch.multiple(data, world_size=data_size, rank_in_group=data_rank),
                mock.patch.multiple(experts, world_size=ep, rank_in_group=in_stage),
                mock.patch.multiple(tensor, world_size=tp, rank_in_group=tp_rank),
                mock.patch.multiple(pipeline, world_size=pp, rank_in_group=stage, rank=stage, ranks=[*range(pp)]),
            ):
                yield config
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def construct(config: VllmConfig, device: str) -> EngineModel:
    """Construct the model that vLLM runs, before its weights are loaded."""
    with (
        set_default_torch_dtype(config.model_config.dtype),
        torch.device(device),
        mock.patch.object(expert_map_manager, "determine_expert_map", _determine_expert_map),
    ):
        model: EngineModel = initialize_model(config)
    return model


def _determine_expert_map(*arguments: Any, **options: Any) -> Any:
    """Determine the experts of a rank on the CPU: vLLM reads the values also for models on the meta device."""
    with torch.device("cpu"):
        return determine_expert_map(*arguments, **options)


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

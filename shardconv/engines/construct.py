"""Construction of vLLM's model for one rank in this process: no GPU, no other ranks, no engine.

Imports vLLM when a function is called.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

#: No downloads, and no log messages below errors.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@contextmanager
def one_rank(folder: Path, *, tp: int, rank: int, **arguments: Any) -> Iterator[Any]:
    """Make this process one rank of a tensor parallel group for vLLM.

    The process group has one process; the size and rank that vLLM reads from its tensor parallel group are patched. So
    constructing a model and loading its weights work, but collectives do not.

    Args:
        folder: folder with the config.json of the model.
        tp: tensor parallel size.
        rank: the rank, from 0.
        arguments: other fields of vLLM's EngineArgs, such as ``dtype``.

    Yields:
        vLLM's config, which is vLLM's current one inside the context.
    """
    with mock.patch.dict(os.environ, _ENVIRONMENT), _group_of_one(folder, tp, rank, arguments) as config:
        yield config


@contextmanager
def _group_of_one(folder: Path, tp: int, rank: int, arguments: dict[str, Any]) -> Iterator[Any]:
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - an extra
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    engine = EngineArgs(
        model=str(folder), tensor_parallel_size=tp, enforce_eager=True, skip_tokenizer_init=True,
        distributed_executor_backend="mp", **arguments,
    )  # fmt: skip
    config = engine.create_engine_config()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(1, backend="gloo")
            group = parallel_state.get_tp_group()
            with mock.patch.multiple(group, world_size=tp, rank_in_group=rank):
                yield config
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def construct(config: Any, device: str = "meta") -> torch.nn.Module:
    """Construct the model that vLLM runs, before its weights are loaded.

    Args:
        config: the config that :func:`one_rank` yields.
        device: ``meta`` for names, shapes and dtypes only; ``cpu`` to load weights.
    """
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415 - an extra
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        model: torch.nn.Module = initialize_model(config)
    return model

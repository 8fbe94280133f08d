"""Construct vLLM's model of one rank in this process, without a GPU, other ranks or a running engine.

Importing this module does not import vLLM; calling its functions does.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from torch import Tensor, nn

from shardconv import engines

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Environment in which vLLM downloads nothing, and logs errors only.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class EngineModel(nn.Module):
    """Type of vLLM's models: nn.Module with the method that shardconv calls. Not a base of any class."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load tensors by their names on disk; return the names of the loaded parameters, or None if unknown."""
        raise NotImplementedError


@contextmanager
def one_rank(folder: Path, *, tp: int, rank: int, **arguments: object) -> Iterator["VllmConfig"]:
    """Context manager in which vLLM takes this process for one rank of a tensor parallel group.

    The process group has one process; the size and rank that vLLM reads from its tensor parallel group are patched.
    Constructing a model and loading its weights work; collectives do not.

    Args:
        folder: folder with the config.json of the model.
        tp: tensor parallel size.
        rank: the rank, from 0.
        arguments: further fields of vLLM's EngineArgs, such as ``dtype``.

    Yields:
        vLLM's config, which is also vLLM's current config inside the context.
    """
    with (
        mock.patch.dict(os.environ, _ENVIRONMENT),  # before vLLM is imported, which reads it
        engines.vllm_process.one_rank(folder, tp, rank, arguments) as config,
    ):
        yield config


def construct(config: "VllmConfig", device: str = "meta") -> EngineModel:
    """Construct the model that vLLM runs, before its weights are loaded.

    Args:
        config: the config that :func:`one_rank` yields.
        device: ``meta`` for names, shapes and dtypes only; ``cpu`` to load weights.
    """
    return engines.vllm_process.construct(config, device)


def optional_parameters(model: EngineModel) -> set[str]:
    """Names of the parameters of a quantized model that have a default, such as the scales of the KV cache."""
    return engines.vllm_process.optional_parameters(model)

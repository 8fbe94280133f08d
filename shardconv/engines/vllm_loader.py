"""vLLM's load format ``shardconv``: each worker reads its own rank's bytes, and vLLM's own loaders place them.

Gives rank tensors to ``load_weights`` of vLLM's models. Imported inside vLLM only.
"""

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import LoadConfig, ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from shardconv.engines.weights import open_rank, rank_weights

logger = init_logger(f"vllm.{__name__}")

#: The keys of ``--model-loader-extra-config``.
_VERIFY = "verify"


class ShardconvModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """The loader of ``--load-format shardconv``.

    The model is a split checkpoint, or one that is not split: then each worker reads only the byte ranges of its rank.

    Args:
        load_config: vLLM's; ``model_loader_extra_config`` may have ``verify``: whether a rank file is checked against
            its checksums before it is loaded, true by default.

    Raises:
        ValueError: if the extra config has another key, or another value.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = load_config.model_loader_extra_config or {}
        if not isinstance(extra, dict) or set(extra) - {_VERIFY} or type(extra.get(_VERIFY, True)) is not bool:
            raise ValueError(f'model_loader_extra_config is {extra!r} (expected {{"{_VERIFY}": true or false}})')
        self._verify: bool = extra.get(_VERIFY, True)
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config={}))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The weights of this worker's rank: rank tensors where they are sharded."""
        tp, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.counter_before_loading_weights = time.perf_counter()
        source = open_rank(self._folder(model_config), tp=tp, rank=rank, engine="vllm", verify=self._verify)
        for sentence in source.reader.plan.assumed if rank == 0 else ():
            logger.warning("shardconv: assumed: %s", sentence)
        yield from rank_weights(source, rank)
        logger.info("shardconv: rank %d of %d read %d bytes", rank, tp, source.reader.num_bytes_read)
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def _folder(self, model_config: ModelConfig) -> Path:
        """The folder of the checkpoint; one of the Hub is fetched as vLLM does it."""
        name = model_config.model_weights or model_config.model
        if Path(name).is_dir():
            return Path(name)
        folder, _, _ = self._prepare_weights(
            name, subfolder=None, revision=model_config.revision, fall_back_to_pt=False, allow_patterns_overrides=None
        )
        return Path(folder)

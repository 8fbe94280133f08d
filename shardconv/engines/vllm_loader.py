"""vLLM's load format ``shardconv``: each worker reads the bytes of its rank only.

``load_weights`` of vLLM's models receives rank tensors, and full tensors where they are replicated or their file is
mapped. Imported inside vLLM only.
"""

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from vllm.config import LoadConfig, ModelConfig, get_current_vllm_config
from vllm.distributed import (
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.engines.weights import EngineStages, open_for_engine, rank_weights

logger = init_logger(f"vllm.{__name__}")

#: The keys of ``--model-loader-extra-config``.
_VERIFY = "verify"


class ShardconvModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """The loader of ``--load-format shardconv``.

    The checkpoint may be split or not; of one that is not split, each worker reads only the byte ranges of its rank.

    Args:
        load_config: vLLM's config; ``model_loader_extra_config`` may have ``verify`` (default: true): check the rank
            file against its checksums while it is read.

    Raises:
        ValueError: if the extra config has another key or value.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra: object = load_config.model_loader_extra_config or {}
        if not isinstance(extra, dict) or set(extra) - {_VERIFY} or type(extra.get(_VERIFY, True)) is not bool:
            raise ValueError(
                f'model_loader_extra_config is not supported (got {extra!r}, expected {{"{_VERIFY}": true or false}})'
            )
        self._verify: bool = extra.get(_VERIFY, True)
        self._reader: RankReader | None = None
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config={}))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load all weights. Some models copy them when the iterator has ended, so files are checked again.

        Raises:
            SourceError: if a file was modified meanwhile.
        """
        super().load_weights(model, model_config)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.finish()

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield name and tensor of all weights, as :func:`~shardconv.engines.weights.rank_weights` does."""
        tp, ep, rank = get_tensor_model_parallel_world_size(), 1, get_tensor_model_parallel_rank()
        if get_current_vllm_config().parallel_config.enable_expert_parallel and model_config.is_moe:
            ep, rank = get_ep_group().world_size, get_ep_group().rank_in_group
        self.counter_before_loading_weights = time.perf_counter()
        stages = _stages(model_config)
        source = open_for_engine(
            self._folder(model_config), tp=tp, ep=ep, rank=rank, engine="vllm", verify=self._verify, stages=stages
        )
        for assumption in source.reader.plan.assumed if rank == 0 else ():
            logger.warning("shardconv: assumed: %s", assumption)
        self._reader = source.reader
        yield from rank_weights(source)
        stage = 0 if stages is None else stages.stage
        of, size = max(tp, ep), source.reader.num_bytes_read
        logger.info("shardconv: rank %d of %d in stage %d has %d bytes", rank, of, stage, size)
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def _folder(self, model_config: ModelConfig) -> Path:
        """Return the folder of the checkpoint; vLLM downloads one from the Hub."""
        name = model_config.model_weights or model_config.model
        if Path(name).is_dir():
            return Path(name)
        folder, _, _ = self._prepare_weights(
            name, subfolder=None, revision=model_config.revision, fall_back_to_pt=False, allow_patterns_overrides=None
        )
        return Path(folder)


def _stages(model_config: ModelConfig) -> EngineStages | None:
    """The pipeline stages of vLLM, whose numbers of layers follow from the model and VLLM_PP_LAYER_PARTITION."""
    group = get_pp_group()
    if group.world_size == 1:
        return None
    num_layers = model_config.get_total_num_hidden_layers()
    bounds = (get_pp_indices(num_layers, stage, group.world_size) for stage in range(group.world_size))
    return EngineStages(tuple(stop - start for start, stop in bounds), group.rank_in_group)


def register_loader(load_format: str) -> None:
    """Register the loader with vLLM as a value of ``--load-format``."""
    register_model_loader(load_format)(ShardconvModelLoader)

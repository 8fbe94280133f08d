"""Reorder the rotary pairs of sharded heads, in checkpoints that store the pairs interleaved.

transformers reorders them within each head while it loads. It takes the number of heads from the config, which is that
of the full tensor; this module replaces it by the number of local heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from shardconv.convert.rank_config import RankConfig
from shardconv.hf.package import import_transformers
from shardconv.layers.parallel_module import ParallelModule
from shardconv.support.errors import RunError


@contextmanager
def permute_local_heads() -> Iterator[None]:
    """Within this block, transformers reorders the rotary pairs of the local heads of sharded tensors.

    Raises:
        RunError: while a model is loaded, if a shard does not consist of full heads.
    """
    permute_class = import_transformers("core_model_loading").PermuteForRope
    permute = permute_class.convert

    def convert(self: Any, inputs: dict[str, object], *arguments: object, **options: Any) -> dict[str, object]:
        shared, name = options["config"], options["full_layer_name"]
        config = getattr(shared, self.subconfig_key, shared) if self.subconfig_key else shared
        rows, full = _rows(options["model"], name)
        heads = config.num_attention_heads
        if full % heads or rows % (full // heads):
            raise RunError(f"{name}: has {rows} of {full} rows, which are not full heads ({heads} heads)")
        local = RankConfig(config, {"num_attention_heads": rows // (full // heads)})
        options["config"] = RankConfig(shared, {self.subconfig_key: local}) if self.subconfig_key else local
        converted: dict[str, object] = permute(self, inputs, *arguments, **options)
        return converted

    with patch.object(permute_class, "convert", convert):
        yield


def _rows(model: nn.Module, name: str) -> tuple[int, int]:
    """The rows of a parameter's shard, and of its full tensor without padding."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter: Tensor = module.get_parameter(own)
    placement = module.placements.get(own) if isinstance(module, ParallelModule) else None
    full = parameter.shape[0] if placement is None or placement.dim != 0 else placement.size
    return parameter.shape[0], full

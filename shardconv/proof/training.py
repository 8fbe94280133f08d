"""Training steps that all ranks compute alike: without dropout and other noise, with the same loss each time."""

import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from shardconv.convert.converted_model import RANDOM_FIELDS
from shardconv.proof.outputs import copy_inputs, float_tensors

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def set_training(model: nn.Module) -> None:
    """Set a model to training mode, without dropout: masks of local features would differ from those of all features.

    Batch norms stay in eval mode, as the statistics of one or two examples mean nothing.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        if isinstance(module, _BATCH_NORMS):
            module.eval()
        for fields in (vars(module), *_config_fields(getattr(module, "config", None))):
            fields |= {name: 0.0 for name, value in fields.items() if _is_probability(name, value)}


def _is_probability(name: str, value: object) -> bool:
    """Whether a field is the probability of dropout or noise. Shifts of positions are equal on all ranks."""
    return type(value) is float and RANDOM_FIELDS.search(name) is not None and not name.startswith("pos_embed_")


def _config_fields(config: object) -> Iterator[dict[str, object]]:
    """The fields of a config, and of the configs in it; none for other objects."""
    if isinstance(getattr(config, "model_type", None), str):
        yield vars(config)
        for inner in list(vars(config).values()):
            yield from _config_fields(inner)


def backward_step(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Run a forward and a backward pass. The loss is the sum of all outputs with random weights, the same each time."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    outputs = float_tensors(model(**copy_inputs(inputs)))
    generator = torch.Generator().manual_seed(2)
    weighted = [
        (value * torch.randn(value.shape, generator=generator).to(value.device)).sum() for value in outputs.values()
    ]
    torch.autograd.backward(torch.stack([value for value in weighted if value.requires_grad]).sum())

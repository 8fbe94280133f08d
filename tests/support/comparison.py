"""Inputs for the models of models.py, and comparisons of converted and unsharded models."""

import copy

import pytest
import torch

from shardconv.layers.sharding import take_shard
from tests.support.models import VOCAB

SCALE = 0.3  # attention is neither uniform nor on one token


def inputs_of(model):
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if model.auto in ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"):
        inputs["decoder_input_ids"] = ids[:, :5]
    return inputs


def numbers(output):
    return {key: value for key, value in output.items() if torch.is_tensor(value) and value.is_floating_point()}


def check_gradients(before, after, axis):
    unsharded_modules = dict(before.named_modules())
    largest = max(parameter.grad.abs().max() for parameter in before.parameters() if parameter.grad is not None)
    for name, module in after.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = unsharded_modules[name].get_parameter(own).grad
            if full is None:
                assert parameter.grad is None
                continue
            placement = getattr(module, "placements", {}).get(own)
            mine = full if placement is None else take_shard(full, placement, axis.rank)
            allowed = 1e-4 * max(full.abs().max(), 1e-3 * largest)
            assert (parameter.grad - mine).abs().max() <= allowed, f"{name}.{own}"


def check_refused(model, convert, message, error=ValueError):
    """Check that a conversion raises, and that the model keeps its classes and values."""
    kinds, before = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        convert(model)
    assert kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

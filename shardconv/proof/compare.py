"""A split model beside the plain one: what a forward pass, generation and a training step give on both.

Owns the comparison on one rank. Both come from what is on disk, the plain model by transformers alone.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardconv.convert.model import convert_by
from shardconv.convert.whole import finish
from shardconv.distributed import Axis
from shardconv.layers.sharding import take_shard
from shardconv.plan.request import PlanRequest
from shardconv.proof.inputs import can_generate_text, example_inputs

#: Tokens that are generated to compare them.
NEW_TOKENS = 5


class Comparison(NamedTuple):
    """How far a split model is from the plain one.

    Attributes:
        output: the largest difference of an output of a forward pass, of the largest number in that output.
        tokens: whether greedy tokens, generated with a cache, are equal; None for models that generate none.
        gradient: the largest difference of a gradient of the converted model, of the largest one of its tensor, or of a
            thousandth of the largest of all, if that is more; None for models that cannot be trained as they are.
    """

    output: float
    tokens: bool | None
    gradient: float | None


def compare(axis: Axis, kind: Any, source: Path, split: Path, request: PlanRequest) -> Comparison:
    """Compare on this rank; all ranks call it.

    Args:
        axis: the ranks.
        kind: the class of transformers.
        source: the small model, as ``save_pretrained`` wrote it.
        split: the same, split.
        request: what the split was asked for, so that the conversion in memory follows it.
    """
    from shardconv.runtime.load import load  # noqa: PLC0415 - which needs the packages that run models

    plain = kind.from_pretrained(source).eval()
    inputs = example_inputs(plain)
    with torch.no_grad():
        expected = numbers(plain(**inputs))
    loaded = load(split, device="cpu", group=axis)
    with torch.no_grad():
        found = numbers(loaded(**inputs))
    output = max(_difference(found[key], value) for key, value in expected.items())
    tokens = _equal_tokens(plain, loaded, inputs)
    del loaded
    return Comparison(output, tokens, _gradients(plain, inputs, axis, request))


def numbers(output: Any) -> dict[str, Tensor]:
    """The tensors of numbers in what a model gives, but for its cache."""
    return {key: value for key, value in output.items() if isinstance(value, Tensor) and value.is_floating_point()}


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    is_barred = expected == torch.finfo(expected.dtype).min  # what is never to be chosen: no measure for the others
    if not torch.equal(found == torch.finfo(found.dtype).min, is_barred):
        return float("inf")
    found, expected = found.masked_fill(is_barred, 0), expected.masked_fill(is_barred, 0)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _equal_tokens(plain: Any, loaded: Any, inputs: dict[str, Tensor]) -> bool | None:
    if not can_generate_text(plain):
        return None
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    if plain.config.is_encoder_decoder and plain.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    given = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    expected, found = (model.generate(**copy.copy(given), **options) for model in (plain, loaded))
    return bool(torch.equal(expected, found))


def _gradients(plain: Any, inputs: dict[str, Tensor], axis: Axis, request: PlanRequest) -> float | None:
    converted = copy.deepcopy(plain)
    try:
        _step(plain, inputs)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None  # the model itself cannot be trained so
    finish(convert_by(converted, converted.config.to_dict(), request, axis), axis)
    _step(converted, inputs)
    return gradient_error(plain, converted, axis)


def _step(model: Any, inputs: dict[str, Tensor]) -> None:
    """A forward and a backward pass, of a sum of all outputs with random weights."""
    outputs = numbers(model(**inputs))
    draw = torch.Generator().manual_seed(2)
    weighted = [(value * torch.randn(value.shape, generator=draw)).sum() for value in outputs.values()]
    torch.stack([value for value in weighted if value.requires_grad]).sum().backward()  # type: ignore[no-untyped-call] # torch's


def gradient_error(plain: nn.Module, converted: nn.Module, axis: Axis) -> float:
    """The largest difference between the gradients of both, see :class:`Comparison`."""
    modules = dict(plain.named_modules())
    given = [parameter.grad.abs().max() for parameter in plain.parameters() if parameter.grad is not None]
    floor = 1e-3 * float(max(given, default=0.0))
    worst = 0.0
    for name, module in converted.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = modules[name].get_parameter(own).grad
            if full is None or parameter.grad is None:
                worst = float("inf") if _any(full) or _any(parameter.grad) else worst
                continue
            placement = getattr(module, "placements", {}).get(own)
            mine = full if placement is None else take_shard(full, placement, axis.rank)
            if not (parameter.grad.isfinite().all() and full.isfinite().all()):
                return float("inf")
            difference = float((parameter.grad - mine).abs().max()) if mine.numel() else 0.0
            worst = max(worst, difference / max(float(full.abs().max()), floor, 1e-30))
    return worst


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())

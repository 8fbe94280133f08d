"""Compare a small sharded model with the unsharded one: a forward pass, greedy decoding, and a training step.

The small model is in a folder, together with reference results. transformers loads the unsharded one, once for all
tensor parallel sizes; each rank loads its shards.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardconv.convert.converted_model import RANDOM_FIELDS, extend_model_class
from shardconv.convert.model import config_fields, convert_with_request
from shardconv.convert.protocols import PretrainedModel
from shardconv.distributed import Axis
from shardconv.hf.inputs import can_generate_text, example_inputs
from shardconv.hf.package import isolated
from shardconv.layers.sharding import take_shard
from shardconv.plan.request import PlanRequest
from shardconv.runtime.device import move
from shardconv.runtime.load import load
from shardconv.support.errors import OutputError

#: Number of tokens that are generated to compare them.
NEW_TOKENS = 5

#: Names of the outputs with the cache for the next token.
_CACHES = ("past_key_values", "cache_params", "past_buckets_states", "mems", "state")


def copy_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of inputs for one call, as some models write into their inputs."""
    copied: dict[str, Any] = tree_map_only(Tensor, Tensor.clone, dict(inputs))
    return copied


def float_tensors(output: Mapping[str, object]) -> dict[str, Tensor]:
    """The floating-point tensors of a model's output, also in lists, without the cache."""
    listed = {
        f"{key}.{at}": one for key, value in output.items() if isinstance(value, list) for at, one in enumerate(value)
    }
    values = {**output, **listed}
    return {key: value for key, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()}


def cache_bytes(output: Mapping[str, object]) -> int:
    """Bytes of all tensors in the cache of a model's output."""
    found = {id(one): one for name in _CACHES for one in _cache_tensors(output.get(name), set())}
    return sum(one.numel() * one.element_size() for one in found.values())


def _cache_tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a cache: nested collections, or objects of transformers with tensors as attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    attributes = vars(value).values() if type(value).__module__.startswith("transformers.") else ()
    for one in (*inner, *attributes):
        yield from _cache_tensors(one, seen)


def greedy_tokens(model: PretrainedModel, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of greedy decoding with a cache; None if the model does not generate text."""
    if not can_generate_text(model):
        return None
    options: dict[str, object] = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    given = {name: value for name, value in copy_inputs(inputs).items() if not name.startswith("decoder_")}
    return model.generate(**given, **options)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def set_training(model: nn.Module) -> None:
    """Set a model to training mode, without dropout: masks of local features would differ from masks of all features.

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


class OutputDifferences(NamedTuple):
    """Differences between a sharded model and the unsharded one.

    Attributes:
        output: the largest difference of an output of a forward pass, relative to the largest value of that output.
        tokens: whether the greedy tokens are equal; None if the model does not generate text.
        gradient: the largest difference of a gradient of the converted model, relative to the largest value of that
            gradient, or to a thousandth of the largest value of all gradients if that is larger; None if the unsharded
            model does not have gradients.
        note: why the gradients are not from training mode, or do not exist; "" if they are.
        cache: bytes of the cache after a forward pass, as a fraction of the unsharded model's; None if the model does
            not generate text or does not have a cache.
        problem: why the sharded model failed to run; "" if it did not.
    """

    output: float
    tokens: bool | None
    gradient: float | None
    note: str
    cache: float | None = None
    problem: str = ""


class Reference(NamedTuple):
    """Results of the unsharded model, with which all ranks compare theirs.

    Attributes:
        inputs: of the model.
        output: floating-point outputs of a forward pass, by name.
        tokens: of greedy decoding with a cache; None if the model does not generate text.
        is_training: whether the gradients are from training mode; else they are from eval mode, as the model
            cannot be trained with these inputs.
        gradients: parameter name to gradient, None for parameters without one; None if both modes fail.
        note: see :class:`OutputDifferences`.
        cache: bytes of the cache after a forward pass; 0 if the model does not generate text.
    """

    inputs: dict[str, Tensor]
    output: dict[str, Tensor]
    tokens: Tensor | None
    is_training: bool
    gradients: dict[str, Tensor | None] | None
    note: str
    cache: int


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise any error of a library that writes to a path in a temporary folder as one that names the path.

    Raises:
        OutputError: if anything is raised.
    """
    try:
        yield
    except Exception as error:
        raise OutputError(f"{path}: cannot be written: {error}: free space, or set TMPDIR to another folder") from error


@isolated()
def write_reference(kind: type[PretrainedModel], source: Path, path: Path) -> None:
    """Run the unsharded model, once for all ranks and tensor parallel sizes.

    Args:
        kind: a model class of transformers.
        source: folder of the small model, saved by ``save_pretrained``.
        path: of the file to write.

    Raises:
        OutputError: if the file cannot be written.
    """
    model = _load_unsharded(kind, source)
    inputs = example_inputs(model)
    with torch.no_grad():
        result = model(**copy_inputs(inputs))
    output, cache = float_tensors(result), cache_bytes(result) if can_generate_text(model) else 0
    tokens = greedy_tokens(model, inputs)
    is_training, note = True, ""
    gradients, problem = _gradients(kind, source, inputs, is_training=True)
    if problem:
        is_training, note = False, f"gradients are from eval mode, as the model cannot be trained: {problem}"
        gradients, problem = _gradients(kind, source, inputs, is_training=False)
    if problem:
        note = f"no gradients: {problem}"
    with writing(path):
        torch.save(tuple(Reference(inputs, output, tokens, is_training, gradients, note, cache)), path)


def _load_unsharded(kind: type[PretrainedModel], source: Path) -> PretrainedModel:
    model: PretrainedModel = kind.from_pretrained(source)
    return model.eval()


def _gradients(
    kind: type[PretrainedModel], source: Path, inputs: dict[str, Tensor], *, is_training: bool
) -> tuple[dict[str, Tensor | None] | None, str]:
    """The gradients of the unsharded model, or None and the error that it raises."""
    model = _load_unsharded(kind, source)  # again: some models keep state of earlier passes
    if is_training:
        set_training(model)
    try:
        backward_step(model, inputs)
    except Exception as error:  # noqa: BLE001 - models raise any error for inputs that they cannot be trained with
        return None, f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}, ""


@isolated()
def compare(
    axis: Axis,
    kind: type[PretrainedModel],
    source: Path,
    split: Path,
    request: PlanRequest,
    reference: Path,
    device: str = "cpu",
) -> OutputDifferences:
    """Compare on this rank. All ranks call it.

    Args:
        axis: the ranks.
        kind: a model class of transformers.
        source: folder of the small model, saved by ``save_pretrained``.
        split: the small model as a split checkpoint.
        request: the options with which it was split; the conversion in memory uses them, too.
        reference: file that :func:`write_reference` wrote for the same source.
        device: device of the sharded model.
    """
    expected = Reference(*torch.load(reference, weights_only=True))
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), expected.inputs)
    output, tokens, cache = _compare_outputs(load(split, device=device, group=axis), inputs, expected)
    if expected.gradients is None:
        return OutputDifferences(output, tokens, None, expected.note, cache)
    model = _load_unsharded(kind, source)
    if expected.is_training:
        set_training(model)
    if device != "cpu":
        move(model, torch.device(device))
    converted = convert_with_request(model, config_fields(model), request, axis)
    extend_model_class(converted, axis, axis)
    backward_step(converted, inputs)
    return OutputDifferences(output, tokens, _gradient_error(expected.gradients, converted, axis), expected.note, cache)


def _compare_outputs(
    model: PretrainedModel, inputs: Mapping[str, Tensor], expected: Reference
) -> tuple[float, bool | None, float | None]:
    """The ``output``, ``tokens`` and ``cache`` of :class:`OutputDifferences`."""
    with torch.no_grad():
        result = model(**copy_inputs(inputs))
    found = float_tensors(result)
    cache = cache_bytes(result) / expected.cache if expected.cache else None
    output = max(largest_difference(found[key].cpu(), value) for key, value in expected.output.items())
    tokens = greedy_tokens(model, inputs)
    if tokens is None or expected.tokens is None:
        return output, None if tokens is expected.tokens else False, cache
    return output, torch.equal(tokens.cpu(), expected.tokens), cache


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; infinite if shapes or masked values differ."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    is_masked = expected == torch.finfo(expected.dtype).min  # logits of excluded tokens would dwarf all others
    if not torch.equal(found == torch.finfo(found.dtype).min, is_masked):
        return float("inf")
    found, expected = found.masked_fill(is_masked, 0), expected.masked_fill(is_masked, 0)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _gradient_error(expected: Mapping[str, Tensor | None], converted: nn.Module, axis: Axis) -> float:
    """The largest relative difference of a gradient, see :class:`OutputDifferences`."""
    floor = 1e-3 * max((float(full.abs().max()) for full in expected.values() if full is not None), default=0.0)
    worst = 0.0
    for prefix, module in converted.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = expected[f"{prefix}.{name}" if prefix else name]
            gradient = None if parameter.grad is None else parameter.grad.cpu()
            if full is None or gradient is None:
                worst = float("inf") if _is_nonzero(full) or _is_nonzero(gradient) else worst
                continue
            placement = getattr(module, "placements", {}).get(name)
            shard = full if placement is None else take_shard(full, placement, axis.rank)
            if not (gradient.isfinite().all() and full.isfinite().all()):
                return float("inf")
            difference = float((gradient - shard).abs().max()) if shard.numel() else 0.0
            worst = max(worst, difference / max(float(full.abs().max()), floor, 1e-30))
    return worst


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())

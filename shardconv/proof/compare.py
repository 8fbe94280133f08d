"""Compare a split model with the unsharded one: a forward pass, generation, and a training step.

Both are loaded from disk: the unsharded model by transformers alone, once for all sizes; the split model on each rank.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardconv.convert.converted_model import RANDOM_FIELDS, extend_model_class
from shardconv.convert.model import convert_with_request
from shardconv.distributed import Axis
from shardconv.hf.inputs import can_generate_text, example_inputs
from shardconv.hf.isolation import isolated
from shardconv.layers.sharding import take_shard
from shardconv.plan.request import PlanRequest

#: Tokens that are generated to compare them.
NEW_TOKENS = 5


class Comparison(NamedTuple):
    """How far a split model is from the plain one.

    Attributes:
        output: the largest difference of an output of a forward pass, of the largest number in that output.
        tokens: whether greedy tokens, generated with a cache, are equal; None for models that generate none.
        gradient: the largest difference of a gradient of the converted model, of the largest one of its tensor, or of a
            thousandth of the largest of all, if that is more; None where the unsharded model has none.
        note: why gradients are not those of training, or not there; "" where they are.
        cache: the bytes that a forward pass leaves in the cache, of those that it leaves in the unsharded model's; None
            for models that generate no text, or leave none.
    """

    output: float
    tokens: bool | None
    gradient: float | None
    note: str
    cache: float | None = None


class Reference(NamedTuple):
    """What the unsharded model gives, for all ranks to be compared with.

    Attributes:
        inputs: what it was called with.
        output: the numbers of a forward pass.
        tokens: greedy ones, generated with a cache; None for models that generate none.
        is_training: whether gradients are those of training, and not of the model as it is used, where it cannot be
            trained with such inputs.
        gradients: of each parameter by its name, None where it has none; None for models that have none either way.
        note: see :class:`Comparison`.
        cache: the bytes that the forward pass leaves in its cache; 0 for models that generate no text.
    """

    inputs: dict[str, Tensor]
    output: dict[str, Tensor]
    tokens: Tensor | None
    is_training: bool
    gradients: dict[str, Tensor | None] | None
    note: str
    cache: int


@isolated()
def write_reference(kind: Any, source: Path, path: Path) -> None:
    """Run the unsharded model once, for all ranks and numbers of them.

    Args:
        kind: the class of transformers.
        source: the small model, as ``save_pretrained`` wrote it.
        path: of the file that is written.
    """
    plain = kind.from_pretrained(source).eval()
    inputs = example_inputs(plain)
    with torch.no_grad():
        given = plain(**_fresh(inputs))
    output, cache = numbers(given), cache_bytes(given) if can_generate_text(plain) else 0
    tokens = _greedy_tokens(plain, inputs)
    is_training, note = True, ""
    gradients, problem = _gradients(kind, source, inputs, is_training=True)
    if problem:
        is_training, note = False, f"gradients are those of the model as it is used, as it cannot be trained: {problem}"
        gradients, problem = _gradients(kind, source, inputs, is_training=False)
    if problem:
        note = f"no gradients: {problem}"
    torch.save(tuple(Reference(inputs, output, tokens, is_training, gradients, note, cache)), path)


def _gradients(
    kind: Any, source: Path, inputs: dict[str, Tensor], *, is_training: bool
) -> tuple[dict[str, Tensor | None] | None, str]:
    """Those of the unsharded model; or None, and why it has none."""
    plain = kind.from_pretrained(source).eval()  # anew: some hold on to what earlier passes were like
    if is_training:
        train(plain)
    try:
        _step(plain, inputs)
    except Exception as error:  # noqa: BLE001 - whatever a model says of inputs that are not for training
        return None, f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
    return {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}, ""


@isolated()
def compare(axis: Axis, kind: Any, source: Path, split: Path, request: PlanRequest, reference: Path) -> Comparison:
    """Compare on this rank; all ranks call it.

    Args:
        axis: the ranks.
        kind: the class of transformers.
        source: the small model, as ``save_pretrained`` wrote it.
        split: the same, split.
        request: what the split was asked for, so that the conversion in memory follows it.
        reference: what :func:`write_reference` wrote of the same source.
    """
    from shardconv.runtime.load import load  # noqa: PLC0415 - which needs the packages that run models

    expected = Reference(*torch.load(reference, weights_only=True))
    loaded = load(split, device="cpu", group=axis)
    with torch.no_grad():
        given = loaded(**_fresh(expected.inputs))
    found = numbers(given)
    cache = cache_bytes(given) / expected.cache if expected.cache else None
    output = max(_difference(found[key], value) for key, value in expected.output.items())
    tokens = _greedy_tokens(loaded, expected.inputs)
    are_equal = None
    if tokens is not None or expected.tokens is not None:
        are_equal = tokens is not None and expected.tokens is not None and torch.equal(tokens, expected.tokens)
    del loaded
    if expected.gradients is None:
        return Comparison(output, are_equal, None, expected.note, cache)
    plain = kind.from_pretrained(source).eval()
    if expected.is_training:
        train(plain)
    converted = convert_with_request(plain, plain.config.to_dict(), request, axis)
    extend_model_class(converted, axis)
    _step(converted, expected.inputs)
    return Comparison(output, are_equal, _gradient_error(expected.gradients, converted, axis), expected.note, cache)


def _fresh(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of their own for a call: some models write into theirs."""
    return {name: value.clone() for name, value in inputs.items()}


def numbers(output: Any) -> dict[str, Tensor]:
    """The tensors of numbers in what a model gives, but for its cache."""
    return {key: value for key, value in output.items() if isinstance(value, Tensor) and value.is_floating_point()}


#: The outputs that hold what a model keeps for the next token, by the names that models have for it.
_CACHES = ("past_key_values", "cache_params", "past_buckets_states", "mems", "state")


def cache_bytes(output: Any) -> int:
    """The bytes of all tensors that a model keeps for the next token."""
    found = {id(one): one for name in _CACHES for one in _tensors(output.get(name), set())}
    return sum(one.numel() * one.element_size() for one in found.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a cache, whatever it consists of."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    own = vars(value).values() if type(value).__module__.startswith("transformers.") else ()
    for one in (*inner, *own):
        yield from _tensors(one, seen)


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


def _greedy_tokens(model: Any, inputs: dict[str, Tensor]) -> Tensor | None:
    if not can_generate_text(model):
        return None
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    given = {name: value for name, value in _fresh(inputs).items() if not name.startswith("decoder_")}
    tokens: Tensor = model.generate(**given, **options)
    return tokens


def train(model: nn.Module) -> None:
    """Turn to training with nothing left out: on a rank's features other ones would be.

    Batch norms keep their statistics, as an example or two have none worth the name.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the base of all of torch's
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - likewise
            module.eval()
        for fields in (vars(module), *_configs(getattr(module, "config", None))):
            fields |= {name: 0.0 for name, value in fields.items() if _is_chance(name, value)}


def _is_chance(name: str, value: Any) -> bool:
    """Whether a field says how much is left out, which is 0 for nothing; how far positions move is drawn alike."""
    return type(value) is float and RANDOM_FIELDS.search(name) is not None and not name.startswith("pos_embed_")


def _configs(config: Any) -> Iterator[dict[str, Any]]:
    """The fields of a config, and of those in it."""
    if isinstance(getattr(config, "model_type", None), str):
        yield vars(config)
        for inner in list(vars(config).values()):
            yield from _configs(inner)


def _step(model: Any, inputs: dict[str, Tensor]) -> None:
    """A forward and a backward pass, of a sum of all outputs with random weights; drawn alike each time."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    outputs = numbers(model(**_fresh(inputs)))
    draw = torch.Generator().manual_seed(2)
    weighted = [(value * torch.randn(value.shape, generator=draw)).sum() for value in outputs.values()]
    torch.stack([value for value in weighted if value.requires_grad]).sum().backward()  # type: ignore[no-untyped-call] # torch's


def _gradient_error(expected: Mapping[str, Tensor | None], converted: nn.Module, axis: Axis) -> float:
    """The largest difference between the gradients of both, see :class:`Comparison`."""
    floor = 1e-3 * max((float(full.abs().max()) for full in expected.values() if full is not None), default=0.0)
    worst = 0.0
    for prefix, module in converted.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = expected[f"{prefix}.{own}" if prefix else own]
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

"""A model without values, cut for ranks that are not there, reads a prompt and makes a token: what would that take?

Owns how a model is called on the meta device, as ``generate`` would call it. All of the
conversion is the real one, so what it sends and holds is what a real run does.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.convert.model import DTYPE_NAMES, convert_with_request
from shardconv.errors import RunError
from shardconv.hf.build import build_on_meta
from shardconv.hf.classes import model_class
from shardconv.hf.package import hide_warnings
from shardconv.plan.plan import TensorSpec
from shardconv.plan.request import PlanRequest
from shardconv.runtime.meter import Call, CountedAxis, CountingGroup, LiveBytes, held_tensors

#: What outputs call that which the next call takes over.
_CACHES = ("past_key_values", "cache_params", "state")

#: What models are given that is no text.
_SENSES = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}


class Usage(NamedTuple):
    """What one rank sends and holds.

    Attributes:
        prefill: collectives of the call that reads the prompts.
        decode: those of the next call, which takes one token a prompt; None for models that do not generate, or keep
            nothing from token to token.
        cache_bytes: what the cache holds after the prompts; None likewise.
        activation_bytes: the most that is alive at once in either call, beside values and cache.
        num_layers: how many modules are layers of the decoder, whose calls are marked; 0 where these are not found.
    """

    prefill: tuple[Call, ...]
    decode: tuple[Call, ...] | None
    cache_bytes: int | None
    activation_bytes: int
    num_layers: int


class MetaModel:
    """A model of transformers that can be built on the meta device.

    Args:
        config: the content of ``config.json``.
        stored: the dtype of the values on disk, which is used if the config does not have a dtype.

    Attributes:
        name: of its class.
        dtype: of its values.
        is_dtype_given: whether the config says it.
        num_layers: of its decoder, where it has one.
        max_length: the most tokens that it is made for; None where its config does not say.
        has_encoder: whether an encoder reads the prompts.
        senses: arguments that it takes beside text, as ``pixel_values``.

    Raises:
        RunError: if transformers is not installed or does not have the model.
    """

    def __init__(self, config: Mapping[str, Any], stored: torch.dtype) -> None:
        hide_warnings()  # such as those of missing kernels, which do not matter without values
        self._given = {name: value for name, value in config.items() if name != "quantization_config"}
        kind, made = model_class(config)
        self._kind, self._config, self.name = kind, made, str(kind.__name__)
        text = made.get_text_config(decoder=True)
        named = next((one.dtype for one in (made, text) if getattr(one, "dtype", None) is not None), None)
        self.is_dtype_given = named is not None
        self.dtype: torch.dtype = stored if named is None else named
        self.num_layers: int = getattr(text, "num_hidden_layers", None) or getattr(text, "num_layers", None) or 0
        self.max_length: int | None = getattr(text, "max_position_embeddings", None)
        self.has_encoder = bool(made.is_encoder_decoder)
        self.senses = tuple(name for name in inspect.signature(kind.forward).parameters if name in _SENSES)

    def specs(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of each tensor that it has in memory; of those that are one, the first."""
        model = build_on_meta(self._kind, self._config, dtype=self.dtype)
        first = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        return {
            name: TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in model.state_dict(keep_vars=True).items()
            if first[id(tensor)] == name
        }

    def converted(self, request: PlanRequest, group: CountingGroup) -> Any:
        """The model, cut for the ranks of a group, by the rules that a request asks for."""
        model = build_on_meta(self._kind, self._config, dtype=self.dtype)
        convert_with_request(model, self._given, request, CountedAxis.of(group), has_values=False)
        group.calls.clear()  # those that compared the ranks
        return model


def dry_run(model: MetaModel, request: PlanRequest, *, tp: int, batch: int, seq: int) -> Usage:
    """Count what one of ``tp`` ranks sends and holds, for ``batch`` prompts of ``seq`` tokens and one token more.

    An encoder reads the prompts where there is one, and its decoder begins with one token.

    Raises:
        Exception: whatever building, cutting or calling the model raises, as where its shapes depend on values.
    """
    group = CountingGroup(tp)
    built = model.converted(request, group)
    layers = _layers(built, model.num_layers)
    for layer in layers:
        layer.register_forward_pre_hook(partial(_note, group, is_in=True))
        layer.register_forward_hook(partial(_note, group, is_in=False))
    ids = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    live = LiveBytes([*built.parameters(), *built.buffers(), ids])
    with torch.no_grad(), _AsWithValues(), live:
        states, ids = _encoded(built, ids)
        outputs = built(**states, **_tokens(states, ids), **_options(built))
        prefill = _taken(group)
        name, cache = _cache(outputs) if built.can_generate() else ("", None)
        del outputs
        if cache is None:
            return Usage(prefill, None, None, live.peak, len(layers))
        cache_bytes = sum(tensor.nbytes for tensor in held_tensors(cache))
        built(**states, **_tokens(states, ids[:, :1]), **{name: cache}, **_options(built))
    return Usage(prefill, _taken(group), cache_bytes, live.peak - cache_bytes, len(layers))


def _taken(group: CountingGroup) -> tuple[Call, ...]:
    calls = tuple(group.calls)
    group.calls.clear()
    return calls


def _encoded(model: Any, ids: Tensor) -> tuple[dict[str, Any], Tensor]:
    """What an encoder makes of the prompts, if there is one, and the tokens that are left to the model itself.

    Raises:
        RunError: if the model reads no text.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        raise RunError(f"a {type(model).__name__} takes {next(iter(names))}: only models that read text are counted")
    if not (model.config.is_encoder_decoder and model.can_generate()):
        return {}, ids
    return {"encoder_outputs": model.get_encoder()(input_ids=ids, return_dict=True)}, ids[:, :1]


def _tokens(states: Mapping[str, Any], ids: Tensor) -> dict[str, Tensor]:
    return {"decoder_input_ids" if states else "input_ids": ids}


def _options(model: Any) -> dict[str, Any]:
    """What ``generate`` asks for: a cache, and the logits of the last token only where a model can give them alone."""
    if not model.can_generate():
        return {}
    is_short = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"use_cache": True, **({"logits_to_keep": 1} if is_short else {})}


def _cache(outputs: Any) -> tuple[str, Any]:
    """What is taken over to the next token, and what its argument is called; None where nothing is."""
    return next(((name, outputs[name]) for name in _CACHES if outputs.get(name) is not None), ("", None))


def _layers(model: Any, count: int) -> Sequence[nn.Module]:
    """The layers of the decoder; none where no list has as many modules as the config says."""
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])


def _note(group: CountingGroup, *_: Any, is_in: bool) -> None:
    group.in_layer = is_in


class _AsWithValues(TorchFunctionMode):
    """What torch does otherwise on the meta device than where there are values, done as there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function, or what stands for it."""
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """What attention as one kernel makes: its output, and a number a row; on the meta device torch makes all scores.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, all tokens, head_dim].
        value: [batch, kv_heads, all tokens, value_dim].
        _: which scores count, and how; nothing of it is held.
        __: likewise.

    Returns:
        [batch, heads, tokens, value_dim], which lies in memory as [batch, tokens, heads, value_dim].
    """
    batch, heads, tokens = max(query.shape[0], key.shape[0]), *query.shape[1:-1]
    sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    del sums
    return output


def _multiply_groups(rows: Tensor, weights: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Rows, sorted by expert, times the experts' weights: without values torch does it for bfloat16 only.

    Args:
        rows: [rows, in_features].
        weights: [experts, in_features, out_features].
        arguments: where the experts' rows end.
        options: likewise.

    Returns:
        [rows, out_features].
    """
    if not rows.is_meta or (rows.dim(), weights.dim()) != (2, 3):
        return torch._grouped_mm(rows, weights, *arguments, **options)  # noqa: SLF001 - see below
    return rows.new_empty(rows.shape[0], weights.shape[-1])


def _is_in(*_: Any) -> bool:
    """Whether ids are in others, as that of padding: without values none is."""
    return False


def _all(mask: Tensor, *arguments: Any, **options: Any) -> Any:
    """Whether all of a mask holds: models ask whether no token is padding, and prompts without values have none."""
    is_asked = mask.is_meta and not arguments and not options
    return torch.ones((), dtype=torch.bool) if is_asked else torch.all(mask, *arguments, **options)


def _sum(mask: Tensor, *arguments: Any, **options: Any) -> Any:
    """How much of a mask holds: the same question."""
    is_asked = mask.is_meta and mask.dtype == torch.bool and not arguments and not options
    return torch.tensor(mask.numel()) if is_asked else torch.sum(mask, *arguments, **options)


_INSTEAD = {
    torch.nn.functional.scaled_dot_product_attention: _attend,
    torch._grouped_mm: _multiply_groups,  # noqa: SLF001 - what torch.nn.functional.grouped_mm calls
    Tensor.__contains__: _is_in,
    Tensor.all: _all,
    Tensor.sum: _sum,
}

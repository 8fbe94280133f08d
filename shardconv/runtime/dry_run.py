"""Dry runs on the meta device: one rank of a sharded model processes a prompt and generates a token.

The model is converted, and called as by ``generate``, so its collectives and tensors are those of a real run. A process
group counts collectives, and a mode counts live bytes.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # documented, and not available under a public name
from torch.utils.weak import WeakIdKeyDictionary

from shardconv.convert.model import convert_with_request
from shardconv.convert.protocols import ModelOutput, PretrainedModel
from shardconv.distributed import Axis
from shardconv.hf.build import build_on_meta
from shardconv.hf.classes import model_class
from shardconv.hf.diffusion import DiffusersConfig, of_class
from shardconv.hf.inputs import check_step, diffusion_inputs, step_sizes
from shardconv.hf.names import DiskTensors, disk_tensors
from shardconv.hf.package import hide_warnings
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import RunError
from shardconv.tensor.cost import SEND


class Call(NamedTuple):
    """One collective, or a message to the next pipeline stage.

    Attributes:
        collective: a key of :data:`shardconv.tensor.cost.ROUNDS`, or ``send``.
        num_bytes: bytes of the larger one of input and output.
        in_layer: whether a layer of the decoder called it, rather than a module before or after the layers.
        stage: the pipeline stage that calls it.
    """

    collective: str
    num_bytes: int
    in_layer: bool
    stage: int = 0


class CountingGroup(dist.ProcessGroup):
    """A process group without other processes, which counts collectives instead of running them.

    The functions of ``torch.distributed``, which need not be initialized, call its methods with the tensors that they
    would send. Results are correct on the meta device only, where tensors do not have values.

    Args:
        ranks: the number of ranks; this process is the first.

    Attributes:
        calls: the collectives so far.
        in_layer: ``in_layer`` of the next calls.
        stage: ``stage`` of the next calls.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg] # torch's stub lacks this signature
        self.calls: list[Call] = []
        self.in_layer, self.stage = False, 0

    def count(self, collective: str, tensor: Tensor) -> None:
        """Count a collective; ``tensor`` is the larger one of its input and output."""
        self.calls.append(Call(collective, tensor.nbytes, self.in_layer, self.stage))

    # The overrides have the one signature that torch.distributed calls. They return None: there is nothing to wait for.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Count an all-reduce; of tensors with values only the maximum, which over equal ranks is the value itself."""
        if any(not tensor.is_meta for tensor in tensors) and opts.reduceOp != dist.ReduceOp(dist.ReduceOp.MAX):
            raise RuntimeError("values cannot be summed over ranks that do not exist: use the meta device")
        for tensor in tensors:
            self.count("all_reduce", tensor)

    def all_gather_single(self, output: Tensor, *_: object) -> None:  # type: ignore[override]
        """Count an all-gather; leave the output as it is."""
        self.count("all_gather", output)

    # what torch.distributed calls before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a collective that is not counted")

    return refuse


_COLLECTIVE = re.compile("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)")
for _name in dir(dist.ProcessGroup):  # torch's own methods would silently do nothing on the meta device
    if _COLLECTIVE.match(_name) and _name not in vars(CountingGroup):
        setattr(CountingGroup, _name, _refused(_name))


class CountedAxis(Axis):
    """The tensor axis of the first rank of a :class:`CountingGroup`."""

    @classmethod
    def of(cls, group: CountingGroup) -> Self:
        """Return the axis of a group."""
        return cls("tensor", 0, group.size(), tuple(range(group.size())), group)

    @property
    def message_device(self) -> torch.device:
        """The CPU; the group does not have a backend, as it is not registered with torch.distributed."""
        return torch.device("cpu")


_aten = torch.ops.aten
#: Operations whose shapes are reused: layers call these most, and the result is one tensor that is not a view.
REUSED = {
    _aten.add.Tensor, _aten.cat.default, _aten.mean.dim, _aten.mm.default, _aten.mul.Tensor, _aten.neg.default,
    _aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.silu.default,
}  # fmt: skip


def _shape_key(value: object) -> Hashable:
    """Convert an argument to a key of everything in it that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_shape_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class LiveBytes(TorchDispatchMode):
    """A mode that counts the bytes of all live tensors that operations return, also on the meta device.

    A storage counts once, from the operation that allocates it until it is freed. Temporary memory inside of operations
    and rounding by the allocator are not counted.

    Args:
        given: tensors that are not counted, nor are their views.

    Attributes:
        now: bytes of live tensors.
        peak: the maximum of ``now`` so far.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: MutableMapping[torch.UntypedStorage, None] = WeakIdKeyDictionary()
        self._results: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._given = [tensor.untyped_storage() for tensor in given]
        for storage in self._given:
            self._seen[storage] = None

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation, and count its results."""
        result = self._run(func, args, kwargs or {})
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                self._count(output.untyped_storage())
        return result

    def _run(self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run an operation; on the meta device, reuse the shape of its result from an earlier call.

        On the meta device torch computes shapes in Python, in up to half a millisecond per operation. Reuse takes a
        fraction of that, as all layers have the same shapes.
        """
        if func not in REUSED:
            return func(*args, **kwargs)
        key = (func, _shape_key(args), _shape_key(tuple(kwargs.items())))
        if key not in self._results:
            result = func(*args, **kwargs)
            if not (isinstance(result, Tensor) and result.is_meta):
                return result
            self._results[key] = tuple(result.shape), result.stride(), result.dtype
        size, stride, dtype = self._results[key]
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, until it is freed."""
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size).atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


def held_tensors(value: object) -> list[Tensor]:
    """Find the tensors that an object refers to, through attributes, lists, tuples and values of dicts; each once.

    Args:
        value: an object of any class, such as a KV cache.
    """
    found: dict[int, Tensor] = {}
    visited: dict[int, object] = {}  # keeps objects alive, so that no other gets their id
    pending = [value]
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited[id(current)] = current
        if isinstance(current, Tensor):
            found[id(current)] = current
        elif isinstance(current, dict):
            pending += current.values()
        elif isinstance(current, (list, tuple)):
            pending += current
        elif hasattr(current, "__dict__") and not isinstance(current, type):
            pending += vars(current).values()
    return list(found.values())


#: The default number of tokens per prompt, unless the model supports fewer.
SEQ = 2048

#: The names of caches in outputs, and of the arguments for them.
_CACHES = ("past_key_values", "cache_params", "state")

#: Arguments for images, videos and audio.
_OTHER_INPUTS = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}


class Usage(NamedTuple):
    """Collectives and memory of one rank.

    Attributes:
        prefill: collectives of the call with the prompts; None for models of diffusers.
        decode: collectives of the next call, with one token per prompt, or of a denoising step; None for other models
            without a cache.
        cache_bytes: size of the cache after the prompts; None for models without a cache.
        activation_bytes: peak memory of either call, without weights and cache.
        num_layers: number of layers of the decoder, whose collectives are marked; 0 if they are not found.
    """

    prefill: tuple[Call, ...] | None
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
        name: the name of its class.
        dtype: the dtype of its parameters.
        has_config_dtype: whether the config has the dtype.
        num_layers: the number of layers of its decoder, or of the model if it has none; 0 if unknown.
        max_length: the maximum number of tokens by the config; None if unknown.
        is_diffuser: whether it is a model of diffusers, whose calls are denoising steps.
        has_encoder: whether an encoder processes the prompts.
        other_inputs: its arguments for images, videos and audio, such as ``pixel_values``.

    Raises:
        RunError: if transformers is not installed or does not have the model.
    """

    def __init__(self, config: Mapping[str, object], stored: torch.dtype) -> None:
        hide_warnings()  # such as warnings of missing kernels, which are not used without values
        self._given = {name: value for name, value in config.items() if name != "quantization_config"}
        kind, made = model_class(config)
        self._kind, self._config, self.name = kind, made, str(kind.__name__)
        text = made.get_text_config(decoder=True)
        named = next((one.dtype for one in (made, text) if getattr(one, "dtype", None) is not None), None)
        self.has_config_dtype = named is not None
        self.dtype: torch.dtype = stored if named is None else named
        self.num_layers: int = getattr(text, "num_hidden_layers", None) or getattr(text, "num_layers", None) or 0
        self.max_length: int | None = getattr(text, "max_position_embeddings", None)
        self.is_diffuser = isinstance(made, DiffusersConfig)
        self.has_encoder = bool(made.is_encoder_decoder)
        self.other_inputs = tuple(name for name in inspect.signature(kind.forward).parameters if name in _OTHER_INPUTS)

    def input_sizes(self, given: Mapping[str, int | None]) -> dict[str, Any]:
        """The sizes of its inputs: ``batch`` and ``seq``; for models of diffusers also the sizes of the result.

        Args:
            given: sizes that the user chose, as in :func:`~shardconv.hf.inputs.step_sizes`.

        Raises:
            RunError: if the inputs of a class of diffusers are not known.
        """
        if self.is_diffuser:
            return step_sizes(self._kind, self._given, given)
        return {**given, "seq": given["seq"] or min(SEQ, self.max_length or SEQ)}

    def check_sizes(self, given: Mapping[str, int]) -> None:
        """Check the sizes that the user passed, see :func:`~shardconv.hf.inputs.check_step`."""
        if self.is_diffuser:
            check_step(self._kind, self._given, given)

    def on_disk(self) -> DiskTensors:
        """Return the tensors of its checkpoint, unquantized and without values."""
        return disk_tensors(build_on_meta(self._kind, self._config, dtype=self.dtype))

    def build_converted(self, request: PlanRequest, group: CountingGroup) -> PretrainedModel:
        """Build the model and convert it for the first rank of a group.

        Args:
            request: determines the rules.
            group: the group, whose counts are reset.
        """
        model: PretrainedModel = build_on_meta(self._kind, self._config, dtype=self.dtype)
        convert_with_request(model, self._given, request, CountedAxis.of(group), has_values=False)
        group.calls.clear()  # collectives of the checks
        return model


def dry_run(model: MetaModel, request: PlanRequest, tp: int, batch: int, seq: int, stages: Sequence[int] = ()) -> Usage:
    """Count the collectives and memory of one of ``tp`` ranks: for ``batch`` prompts of ``seq`` tokens, and one token.

    In encoder-decoder models the encoder processes the prompts, and the decoder starts with one token. With ``stages``,
    the numbers of layers of pipeline stages, all stages' collectives and the messages between them are counted, and the
    cache of the stage with most layers. The broadcast of the logits is a message to each stage.

    Raises:
        Exception: any error of building, converting or calling the model, as when its shapes depend on values.
    """
    group = CountingGroup(tp)
    built = model.build_converted(request, group)
    layers = _layers(built, model.num_layers)
    for layer in layers:
        layer.register_forward_pre_hook(partial(_mark_layer, group, is_inside=True))
        layer.register_forward_hook(partial(_mark_layer, group, is_inside=False))
    if stages and sum(stages) != len(layers):
        raise RunError(f"the layers of {model.name} are not found (got {len(layers)}, expected {sum(stages)})")
    for last in [*accumulate(stages)][:-1]:
        layers[last - 1].register_forward_hook(partial(_send, group))
    built.register_forward_hook(partial(_broadcast, group, len(stages) - 1))
    ids = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    live = LiveBytes([*built.parameters(), *built.buffers(), ids])
    with torch.no_grad(), MetaFunctions(), live:
        states, ids = _encode(built, ids)
        outputs = built(**states, **_tokens(states, ids), **_options(built))
        prefill = _take_calls(group)
        name, cache = _cache(outputs) if built.can_generate() else ("", None)
        del outputs
        if cache is None:
            return Usage(prefill, None, None, live.peak, len(layers))
        cache_bytes = sum(tensor.nbytes for tensor in held_tensors(cache))
        cache_of_stage = cache_bytes * max(stages) // sum(stages) if stages else cache_bytes
        group.stage = 0
        built(**states, **_tokens(states, ids[:, :1]), **{name: cache}, **_options(built))
    return Usage(prefill, _take_calls(group), cache_of_stage, live.peak - cache_bytes, len(layers))


def denoise(model: MetaModel, request: PlanRequest, tp: int, step: Mapping[str, int | None]) -> Usage:
    """Count the collectives and memory of one of ``tp`` ranks in a denoising step of a model of diffusers.

    Args:
        model: the model.
        request: determines the rules.
        tp: the number of ranks.
        step: the sizes of the step, see :func:`~shardconv.hf.inputs.step_sizes`.

    Raises:
        Exception: as for :func:`dry_run`.
    """
    group = CountingGroup(tp)
    built = model.build_converted(request, group)
    with torch.device("meta"):
        drawn = diffusion_inputs(built, torch.Generator(), step)
    with_values = of_class(model.name).get("sized_by", ())
    inputs = {name: value if name in with_values else _on_meta(value, model.dtype) for name, value in drawn.items()}
    live = LiveBytes([*built.parameters(), *built.buffers(), *held_tensors(inputs)])
    with torch.no_grad(), MetaFunctions(), patch.object(torch, "autocast", _Autocast), live:
        built(**inputs)
    return Usage(None, _take_calls(group), None, live.peak, 0)


class _Autocast(torch.autocast):
    """``torch.autocast``, which is disabled for the meta device, as torch does not have it there."""

    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:  # as in torch
        if device_type == "meta":
            super().__init__("cpu", enabled=False)
        else:
            super().__init__(device_type, *arguments, **options)


def _on_meta(value: Any, dtype: torch.dtype) -> Any:  # an input of any type
    """An input on the meta device, with this dtype if it has a floating-point dtype."""
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(one, dtype) for one in value)
    if isinstance(value, dict):
        return {name: _on_meta(one, dtype) for name, one in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.to("meta", dtype if value.is_floating_point() else value.dtype)


def _take_calls(group: CountingGroup) -> tuple[Call, ...]:
    """Return the collectives so far, and reset the counts."""
    calls = tuple(group.calls)
    group.calls.clear()
    return calls


def _encode(model: PretrainedModel, ids: Tensor) -> tuple[dict[str, object], Tensor]:
    """Run the encoder, if there is one; return its states as arguments of the model, and the token ids of the model.

    Raises:
        RunError: if the model does not take text.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        raise RunError(f"a {type(model).__name__} takes {next(iter(names))}: only models that take text are counted")
    if not (model.config.is_encoder_decoder and model.can_generate()):
        return {}, ids
    return {"encoder_outputs": model.get_encoder()(input_ids=ids, return_dict=True)}, ids[:, :1]


def _tokens(states: Mapping[str, object], ids: Tensor) -> dict[str, Tensor]:
    return {"decoder_input_ids" if states else "input_ids": ids}


def _options(model: PretrainedModel) -> dict[str, object]:
    """Return the options of ``generate``: a cache, and logits of the last token only, if the model supports that."""
    if not model.can_generate():
        return {}
    can_limit = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"use_cache": True, **({"logits_to_keep": 1} if can_limit else {})}


def _cache(outputs: ModelOutput) -> tuple[str, object]:
    """Return the name and the value of the cache; None if there is none."""
    return next(((name, outputs[name]) for name in _CACHES if outputs.get(name) is not None), ("", None))


def _layers(model: PretrainedModel, count: int) -> Sequence[nn.Module]:
    """Return the layers of the decoder: the first list of ``count`` modules; empty without such a list."""
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])


def _mark_layer(group: CountingGroup, *_: object, is_inside: bool) -> None:
    group.in_layer = is_inside


def _broadcast(group: CountingGroup, others: int, _: nn.Module, __: object, outputs: ModelOutput) -> None:
    """A forward hook of the model: count the messages with the logits from the last stage to the others."""
    for _number in range(others):
        group.count(SEND, outputs.logits if "logits" in outputs else outputs.last_hidden_state)


def _send(group: CountingGroup, _: nn.Module, __: object, hidden: Tensor) -> None:
    """A forward hook of the last layer of a stage: count the message to the next one."""
    group.count(SEND, hidden)
    group.stage += 1


class MetaFunctions(TorchFunctionMode):
    """Replace functions that need values, or allocate other memory on the meta device than on a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the function, or its replacement."""
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Allocate the tensors of fused attention: its output, and a number per row. torch allocates all scores on meta.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, all tokens, head_dim].
        value: [batch, kv_heads, all tokens, value_dim].
        _: mask and dropout, for which no memory is allocated.
        __: the same by keyword.

    Returns:
        [batch, heads, tokens, value_dim], with the strides of [batch, tokens, heads, value_dim].
    """
    batch, heads, tokens = max(query.shape[0], key.shape[0]), *query.shape[1:-1]
    sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    del sums
    return output


#: The operator behind torch.nn.functional.grouped_mm, which a TorchFunctionMode does not intercept itself.
_GROUPED_MM = torch._grouped_mm  # noqa: SLF001 - torch does not export it


def _multiply_groups(rows: Tensor, weights: Tensor, *arguments: Any, **options: Any) -> Tensor:  # as in torch
    """Multiply rows, sorted by expert, with the experts' weights; torch supports only bfloat16 on meta.

    Args:
        rows: [rows, in_features].
        weights: [experts, in_features, out_features].
        arguments: the ends of the experts' rows.
        options: the same by keyword.

    Returns:
        [rows, out_features].
    """
    if not rows.is_meta or (rows.dim(), weights.dim()) != (2, 3):
        return _GROUPED_MM(rows, weights, *arguments, **options)
    return rows.new_empty(rows.shape[0], weights.shape[-1])


def _is_in(*_: object) -> bool:
    """Return False: no token of a prompt without values is padding."""
    return False


def _all(mask: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return True for a full mask on meta, as no token of a prompt without values is padding."""
    is_full = mask.is_meta and not arguments and not options
    return torch.ones((), dtype=torch.bool) if is_full else torch.all(mask, *arguments, **options)


def _sum(mask: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return the number of elements for a mask on meta, as for :func:`_all`; along a dim, :func:`_to_list` does."""
    if not mask.is_meta or mask.dtype != torch.bool:
        return torch.sum(mask, *arguments, **options)
    counts = torch.ones(mask.shape, dtype=torch.bool).sum(*arguments, **options)
    if not counts.dim():
        return counts
    on_meta = counts.to("meta")
    on_meta.counts = counts  # type: ignore[attr-defined]
    return on_meta


def _to_list(tensor: Tensor) -> object:
    """Return the values of a tensor, also of the sums of a mask."""
    return getattr(tensor, "counts", tensor).tolist()


def _without_values(func: Callable[..., object], *arguments: object, **options: object) -> object:
    """Call an elementwise function, without the values of its arguments if one of them is on meta."""
    if any(isinstance(one, Tensor) and one.is_meta for one in arguments):
        arguments = tuple(one.to("meta") if isinstance(one, Tensor) else one for one in arguments)
    return func(*arguments, **options)


_REPLACEMENTS: dict[Callable[..., object], Callable[..., object]] = {
    torch.nn.functional.scaled_dot_product_attention: _attend,
    _GROUPED_MM: _multiply_groups,
    Tensor.__contains__: _is_in,
    Tensor.all: _all,
    Tensor.sum: _sum,
    Tensor.tolist: _to_list,
    Tensor.mul: partial(_without_values, Tensor.mul),
    torch.where: partial(_without_values, torch.where),
}

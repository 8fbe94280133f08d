"""One pipeline stage of a model of transformers, for inference.

Each rank has the modules of its stage. The model's own code runs unchanged on all stages: the embedding of a later
stage returns zeros, and layers of other stages return their input. Where this code calls the first layer of the next
stage, an earlier stage sends the hidden states, and the later one replaces its own by them. The last stage broadcasts
the logits to all. So transformers computes masks, positions and caches, and generates. Code between the embedding and
the first layer has an effect on the first stage only.

The first stage also has the image encoder of a composite model, and broadcasts the features of images to all stages:
some models add them to hidden states after one of the first layers.

Hidden states have shape [batch, tokens, hidden size], in the dtype of the embedding. Each rank sends them to the rank
of the same number in the next stage, with a flag that says whether a stage has failed. No rank reads it before the last
stage is done, so that an accelerator need not be waited for. Then all stages raise the error. A stage that fails takes
part in the messages of a call, too, so that the others do not wait for it. Ranks of its own stage may wait, as without
stages.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardconv.convert.converted_model import ON_OTHER_STAGE, OTHER_STAGES
from shardconv.distributed import Axis
from shardconv.distributed.agreement import gather, run_on_first
from shardconv.distributed.devices import sending_device
from shardconv.hf.build import build_on_meta
from shardconv.hf.classes import ModelClass
from shardconv.plan.families.family import EMBEDDING, ENCODER, HEAD, LAYERS
from shardconv.plan.plan import Plan
from shardconv.plan.stages import StageFinder, Stages
from shardconv.runtime.dry_run import MetaFunctions
from shardconv.support.errors import PeerError, RunError, one_line

#: The remedy for models that do not run in stages.
_WITHOUT_STAGES = "run it in one stage (shardconv reshard DIR --tp N --pp 1)"
#: Kind of modules in ``[stages]`` to the numbers of them that a model may have.
_CONNECTED = {EMBEDDING: (1,), LAYERS: (1,), "last": (1,), "first": (0,), HEAD: (0, 1)}
#: Methods of transformers that compute features with the modules of an image encoder.
_FEATURES = ("get_image_features", "get_video_features")
#: Attributes of modules of other stages. transformers does not initialize them.
_UNUSED_MODULE = {"_is_hf_initialized": True, ON_OTHER_STAGE: True}


def check_runs(kind: ModelClass, plan: Plan) -> None:
    """Check that the layers of a model get nothing but hidden states from other stages, in a dry run without values.

    Raises:
        PlanError: if the stage of a parameter is unknown.
        RunError: if they get more, the model changes hidden states between layers, or the dry run fails.
    """
    model = build_on_meta(*kind).requires_grad_(requires_grad=False)
    finder = StageFinder(plan.rules)
    parts = _Parts.of(model, finder)
    check, zeros = _LayerCheck(model), partial(_tracked, parts.embedding, next(model.parameters()).dtype)
    for module, forward in ((parts.embedding, zeros), (parts.norm, nn.Identity())):
        module._parameters.update(dict.fromkeys(module._parameters))  # noqa: SLF001 - other stages do not have them
        vars(module)["forward"] = forward
        module.register_forward_pre_hook(check.record)
    for layer in parts.layers:
        check.connect(layer)
    with torch.enable_grad():
        _dry_run(model, use_cache=False)
    if check.called != [parts.embedding, *parts.layers, parts.norm]:
        raise does_not_run(model, "it does not call the embedding, each layer and the final norm once, in this order")
    for number, layer in enumerate(parts.layers):
        layer._forward_pre_hooks.clear()  # noqa: SLF001 - the inputs are checked
        layer._forward_hooks.clear()  # noqa: SLF001
        _empty(layer, number)
    with torch.no_grad():
        _dry_run(model)  # with a cache, as on a stage without these layers


def _dry_run(model: nn.Module, **options: object) -> None:
    """Call a model on the meta device.

    Raises:
        RunError: if the call fails.
    """
    try:
        with MetaFunctions():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"), **options)
    except RunError:
        raise
    except NotImplementedError as error:
        raise does_not_run(model, "it reads values, which a dry run does not have") from error
    except Exception as error:
        raise does_not_run(model, f"a dry run raises {one_line(error)}") from error


def does_not_run(model: nn.Module, reason: str) -> RunError:
    """The error for a model that does not run in stages."""
    return RunError(f"{type(model).__name__} does not run in pipeline stages: {reason}: {_WITHOUT_STAGES}")


def _tracked(module: nn.Embedding, dtype: torch.dtype, input_ids: Tensor) -> Tensor:
    """The forward of the embedding in a dry run: what is computed from its output requires a gradient."""
    return input_ids.new_empty(*input_ids.shape, module.embedding_dim, dtype=dtype, requires_grad=True).clone()


def keep_stage(model: nn.Module, plan: Plan, stage: int) -> None:
    """Remove the parameters and buffers of other stages from a model, in place.

    Args:
        model: a model for generation on the meta device, before its layers are converted.
        plan: its plan, with stages.
        stage: the stage.

    Raises:
        PlanError: if the stage of a parameter is unknown.
        RunError: if the model has modules that are not supported.
    """
    finder, stages = StageFinder(plan.rules), _without_copies(plan)
    layers = _Parts.of(model, finder).layers
    for name in [*_names(model, finder)]:
        if stage not in _stages_of(name, finder, stages):
            _remove(model, name)
    for name, module in model.named_modules():
        if stage and (found := finder.find(name)) and found.kind == ENCODER:
            vars(module).update(_UNUSED_MODULE)
    for number, layer in enumerate(layers):
        if number not in stages.layers_of(stage):
            _empty(layer, number)
    if not stages.is_tied or stage < stages.count - 1:
        vars(model)["all_tied_weights_keys"] = {}  # of transformers: nothing is tied on this stage


def _empty(layer: nn.Module, number: int) -> None:
    """Remove the modules of a layer of another stage."""
    layer._modules.clear()  # noqa: SLF001 - it computes nothing
    vars(layer)[ON_OTHER_STAGE] = True
    vars(layer)["forward"] = partial(_pass, number)


def needed_tensors(names: Iterable[str], plan: Plan, stage: int) -> frozenset[str]:
    """The names of the tensors that a stage needs after :func:`keep_stage`. Engines have some tensors on all stages."""
    finder, stages = StageFinder(plan.rules), _without_copies(plan)
    return frozenset(name for name in names if stage in _stages_of(name, finder, stages))


def _without_copies(plan: Plan) -> Stages:
    """The stages of a plan, without copies for an engine."""
    assert plan.stages is not None
    return replace(plan.stages, has_copies=False)


def _stages_of(name: str, finder: StageFinder, stages: Stages) -> tuple[int, ...]:
    """The stages that need a tensor. Engines have image encoders on all stages."""
    return (0,) if finder.locate(name).kind == ENCODER else finder.stages_of(name, stages)


def connect_stage(model: nn.Module, plan: Plan, axis: Axis) -> None:
    """Connect a loaded model with the other stages, in place.

    Args:
        model: the model after :func:`keep_stage`, with all parallel layers and adapters.
        plan: its plan.
        axis: the ranks with the same rank in each stage.
    """
    assert plan.stages is not None
    parts = _Parts.of(model, StageFinder(plan.rules))
    # parameters of layers may have another dtype than hidden states
    dtype = run_on_first(lambda: next(parts.embedding.parameters()).dtype, axis)
    _Stage(axis, model, parts.embedding.embedding_dim, dtype).connect(parts, plan.stages.layers_of(axis.rank))


def refuse_parts(model: nn.Module) -> None:
    """Refuse to save modules of a model in stages, which would write the layers of one stage."""
    for name, module in model.named_modules():
        if module is not model and hasattr(module, "save_pretrained"):
            vars(module)["save_pretrained"] = partial(_refuse_saving, name)


def _refuse_saving(name: str, *_: object, **__: object) -> None:
    raise ValueError(f"{name}: {OTHER_STAGES}")


def _names(model: nn.Module, finder: StageFinder) -> Iterator[str]:
    """Yield the names of all parameters, and of buffers whose stages are known: others are not of a checkpoint."""
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False) if finder.find(name) is not None)


def _remove(model: nn.Module, name: str) -> None:
    """Remove a parameter or buffer."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, own, None)
    vars(module).update(_UNUSED_MODULE)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The modules of a model at which stages are connected.

    Attributes:
        embedding: the embedding table.
        layers: the layers.
        norm: the final norm.
        head: the output projection; None for a base model.
        images: the module that computes features of images; None without an image encoder.
        encoders: the modules that only it may call.
    """

    embedding: nn.Embedding
    layers: list[nn.Module]
    norm: nn.Module
    head: nn.Linear | None
    images: nn.Module | None
    encoders: Sequence[nn.Module]

    @classmethod
    def of(cls, model: nn.Module, finder: StageFinder) -> Self:
        """The modules of a model, by the modules of its parameters.

        Raises:
            PlanError: if the stage of a parameter is unknown.
            RunError: if it has several of a kind, or none.
        """
        paths: dict[str, set[str]] = {}
        located = [finder.locate(name) for name in _names(model, finder)]
        of_modules = ((name, finder.find(name)) for name, _ in model.named_modules())  # a norm may lack parameters
        for one in (*located, *(found for name, found in of_modules if found and found.path == name)):
            paths.setdefault(one.kind, set()).add(one.path)
        for kind, counts in _CONNECTED.items():
            if len(found := paths.get(kind, ())) not in counts:
                names, expected = ", ".join(sorted(found)) or "none", " or ".join(map(str, counts))
                problem = f"modules of kind {kind!r} are not connected (got {names}, expected {expected})"
                raise does_not_run(model, problem)
        embedding, sequence, norm = (model.get_submodule(*paths[kind]) for kind in (EMBEDDING, LAYERS, "last"))
        head = cast("nn.Linear", model.get_submodule(*paths[HEAD])) if HEAD in paths else None
        encoders = paths.get(ENCODER, ())
        images = _owner_of_encoders(model, encoders) if encoders else None
        modules = [module for name, module in model.named_modules() if name in encoders]  # others are parameters
        return cls(cast("nn.Embedding", embedding), [*sequence.children()], norm, head, images, modules)


def _owner_of_encoders(model: nn.Module, paths: Collection[str]) -> nn.Module:
    """The module whose methods compute features of images.

    Raises:
        RunError: if another module has some of the encoders.
    """
    owners = {path.rpartition(".")[0] for path in paths}
    owner = model.get_submodule(min(owners))
    if len(owners) > 1 or not hasattr(owner, _FEATURES[0]):
        raise does_not_run(model, f"no method {_FEATURES[0]} has all of {', '.join(sorted(paths))}")
    return owner


class _LayerCheck:
    """Checks the inputs of layers: hidden states that no code between layers changes, and nothing computed from them.

    Such code would run on all stages, and what it computes would differ between them.

    Attributes:
        called: the modules that were called, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.called: list[nn.Module] = []
        self._current: Any = None

    def record(self, module: nn.Module, _: object) -> None:
        """A forward pre-hook of a module that is called."""
        self.called.append(module)

    def connect(self, layer: nn.Module) -> None:
        """Check the input of a layer, after those of the layers before."""
        layer.register_forward_pre_hook(self.record)
        layer.register_forward_pre_hook(self._check, with_kwargs=True)
        layer.register_forward_hook(self._set_current)

    def _check(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook of a layer."""
        hidden, others = _inputs(args, options)
        if isinstance(self._current, tuple):
            raise does_not_run(self._model, f"a {type(layer).__name__} returns a tuple, not hidden states")
        if self._current is not None and hidden is not self._current:
            raise does_not_run(self._model, f"it changes hidden states before {type(layer).__name__}")
        if any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(others)):
            raise does_not_run(self._model, f"{type(layer).__name__} gets more than one input from other stages")

    def _set_current(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """A forward hook of a layer: the next one must get its output."""
        self._current = output


def _inputs(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Tensor, list[Any]]:
    """The hidden states of a layer, and its other arguments."""
    if args:
        return args[0], [*args[1:], *options.values()]
    return options["hidden_states"], [value for name, value in options.items() if name != "hidden_states"]


class _Messages:
    """The messages of a stage in one call of a model: from the stage before, to the next, and between all at the end.

    The memory for hidden states and the flag is allocated here, so that a rank that is out of memory later can send.

    Args:
        axis: the ranks with the same rank in each stage.
        count: number of values of the hidden states.
        dtype: of hidden states.
        device: of hidden states.
    """

    def __init__(self, axis: Axis, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = axis
        self._values = torch.zeros(count + 1, dtype=dtype, device=sending_device(axis.group, device))
        self._hidden, self._flag = self._values.split([count, 1])
        self._is_received, self._is_sent, self._is_finished = axis.rank == 0, axis.rank == axis.size - 1, False

    def receive(self) -> Tensor:
        """Receive hidden states, [batch * tokens * hidden size]. They are valid until :meth:`send`."""
        self._is_received = True
        dist.recv(self._values, self._axis.ranks[self._axis.rank - 1], group=self._axis.group)
        return self._hidden

    def send(self, hidden: Tensor) -> None:
        """Send hidden states, [batch, tokens, hidden size]."""
        self._hidden.copy_(hidden.reshape(-1))
        self._send()

    def _send(self) -> None:
        self._is_sent = True
        dist.send(self._values, self._axis.ranks[self._axis.rank + 1], group=self._axis.group)

    def finish(self) -> None:
        """Wait for all stages.

        Raises:
            PeerError: if one has failed.
        """
        if message := next(filter(None, self._failures(None)), None):
            raise PeerError(message)

    def fail(self, error: BaseException) -> None:
        """Take part in the messages that are left, after an error on this stage."""
        if not self._is_received:
            self.receive()
        self._flag.fill_(1)
        if not self._is_sent:
            self._send()
        if not self._is_finished:
            self._failures(f"pipeline stage {self._axis.rank}: {one_line(error)}")

    def _failures(self, message: str | None) -> list[str | None]:
        """The messages of all stages; an empty list if none has failed."""
        self._is_finished = True
        dist.all_reduce(self._flag, group=self._axis.group)
        return gather(message, self._axis) if self._flag else []


class _Stage:
    """A stage of a model, which communicates with the stages beside it.

    Args:
        axis: the ranks with the same rank in each stage.
        model: the model.
        hidden_size: of its hidden states.
        dtype: of its hidden states and logits, which is that of the embedding.
    """

    def __init__(self, axis: Axis, model: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        self._axis, self._model, self._hidden_size, self._dtype = axis, model, hidden_size, dtype
        self._is_first, self._is_last = axis.rank == 0, axis.rank == axis.size - 1
        self._messages: _Messages | None = None  # of the call of the model that runs
        self._computes_features = False

    def connect(self, parts: _Parts, held: range) -> None:
        """Replace the forward methods of modules.

        Args:
            parts: the modules.
            held: the numbers of the layers of this stage.
        """
        self._connect_images(parts.images, parts.encoders)
        self._connect_embedding(parts.embedding)
        self._connect_layers(parts.layers, held)
        self._connect_norm(parts.norm, is_output=parts.head is None)
        if parts.head is not None:
            self._connect_head(parts.head)
        self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._model.register_forward_hook(self._end, always_call=True)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook: gradients would end at the hidden states that a stage receives."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a model in pipeline stages does not compute gradients: call it in torch.no_grad() or "
                "torch.inference_mode()"
            )
        if not isinstance(ids := args[0] if args else options.get("input_ids"), Tensor):
            raise TypeError(f"a model in pipeline stages got {ids!r:.60} as input_ids (expected a tensor): pass one")
        self._messages = _Messages(self._axis, ids.numel() * self._hidden_size, self._dtype, self._device)

    def _end(self, *_: object) -> None:
        """A forward hook, also after an error in the call, which the other stages raise, too."""
        messages, self._messages = self._messages, None
        if messages is not None and (error := sys.exception()) is not None:
            messages.fail(error)

    @property
    def _current(self) -> _Messages:
        """The messages of the call that runs."""
        self._check_called()
        assert self._messages is not None
        return self._messages

    def _connect_embedding(self, module: nn.Embedding) -> None:
        module.register_forward_pre_hook(self._check_called)
        if not self._is_first:
            vars(module)["forward"] = partial(self._zeros, module.embedding_dim)

    def _connect_images(self, module: nn.Module | None, encoders: Sequence[nn.Module]) -> None:
        for encoder in encoders:
            encoder.register_forward_pre_hook(self._check_encoder)
        for name in _FEATURES:
            if compute := getattr(module, name, None):
                vars(module)[name] = update_wrapper(partial(self._features, compute), compute)  # keeps the signature

    def _connect_layers(self, layers: Sequence[nn.Module], held: range) -> None:
        if not self._is_first:
            layers[held[0]].register_forward_pre_hook(self._receive, with_kwargs=True)
        if not self._is_last:
            layers[held.stop].register_forward_pre_hook(self._send, with_kwargs=True)

    def _connect_norm(self, module: nn.Module, *, is_output: bool) -> None:
        """Return the input of the final norm of an earlier stage; with ``is_output``, the output of the last stage."""
        run: Callable[[Tensor], Tensor] = partial(_forward, module) if self._is_last else nn.Identity()
        if is_output:
            run = partial(self._broadcast, run, lambda hidden: hidden.shape)
        vars(module)["forward"] = run

    def _connect_head(self, module: nn.Linear) -> None:
        """Return the logits of the last stage from the head."""
        run: Callable[[Tensor], Tensor] = partial(_forward, module) if self._is_last else nn.Identity()
        vars(module)["forward"] = partial(
            self._broadcast, run, lambda hidden: (*hidden.shape[:-1], module.out_features)
        )

    def _zeros(self, hidden_size: int, input_ids: Tensor) -> Tensor:
        """The output of the embedding of a later stage, for token ids of shape [batch, tokens]."""
        return torch.zeros(*input_ids.shape, hidden_size, dtype=self._dtype, device=input_ids.device)

    def _check_encoder(self, encoder: nn.Module, _: object) -> None:
        """A forward pre-hook, on all stages: refuse a call of which later stages would not get the output."""
        if not self._computes_features:
            problem = f"{type(encoder).__name__} is called outside of {' and '.join(_FEATURES)}"
            raise does_not_run(self._model, problem)

    def _features(self, compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The features of images, computed by the first stage, on all stages."""
        if self._computes_features:  # by another method
            return compute(*args, **options)
        values: list[Any] = []
        step = partial(self._compute_features, partial(compute, *args, **options), values)
        without_values, structure = run_on_first(step, self._axis)
        values = tree_map_only(Tensor, self._share, values if self._is_first else without_values)
        return tree_unflatten(values, structure)

    def _compute_features(self, compute: Callable[[], Any], values: list[Any]) -> tuple[list[Any], TreeSpec]:
        """Compute features and append them to ``values``; return them without values, and their structure."""
        self._computes_features = True
        try:
            features, structure = tree_flatten(compute())
        finally:
            self._computes_features = False
        values += features
        return tree_map_only(Tensor, _without_values, features), structure

    def _share(self, tensor: Tensor) -> Tensor:
        """A tensor of the first stage, on all stages; later stages have it on the meta device."""
        device = self._device
        tensor = tensor.to(device).contiguous() if self._is_first else torch.empty_like(tensor, device=device)
        dist.broadcast(tensor, self._axis.ranks[0], group=self._axis.group)
        return tensor

    def _receive(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of the first layer: replace its input by the hidden states of the stage before."""
        zeros = _inputs(args, options)[0]
        hidden = self._current.receive().to(zeros.device, copy=True).view(zeros.shape)
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    def _send(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook of the first layer of the next stage: send its input there."""
        self._current.send(self._checked(_inputs(args, options)[0]))

    def _broadcast(
        self, run: Callable[[Tensor], Tensor], shape_of: Callable[[Tensor], tuple[int, ...]], hidden: Tensor
    ) -> Tensor:
        """The output of the last stage, on all stages."""
        output = run(hidden)
        if not self._is_last:
            output = torch.empty(shape_of(hidden), dtype=self._dtype, device=hidden.device)
        output = self._checked(output).contiguous()
        self._current.finish()
        dist.broadcast(output, self._axis.ranks[-1], group=self._axis.group)
        return output

    def _checked(self, output: Tensor) -> Tensor:
        """An output, checked for the dtype that other stages expect."""
        if output.dtype != self._dtype:
            raise does_not_run(self._model, f"an output is {output.dtype} (expected {self._dtype}, as its embedding)")
        return output

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _check_called(self, *_: object) -> None:
        """A forward pre-hook: refuse a call of a part of the model, whose hidden states are on one stage."""
        if self._messages is None:
            raise RuntimeError(
                f"a module of a {type(self._model).__name__} in pipeline stages was called: call the model itself"
            )


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _forward(module: nn.Module, hidden: Tensor) -> Tensor:
    """The forward of a module's class, which the conversion may have changed."""
    output: Tensor = type(module).forward(module, hidden)
    return output


def _pass(number: int, hidden_states: Tensor, *_: object, past_key_values: Any = None, **__: object) -> Tensor:
    """The forward of a layer of another stage: its input. The cache counts its tokens, from which positions follow.

    Layers of linear attention have a state instead, which does not count tokens.
    """
    layers = getattr(past_key_values, "layers", ())
    if past_key_values is not None and (number >= len(layers) or hasattr(layers[number], "update")):
        tokens = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
        past_key_values.update(tokens, tokens, number)
    return hidden_states

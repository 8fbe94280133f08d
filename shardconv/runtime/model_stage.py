"""One pipeline stage of a model of transformers, for inference.

Each rank has the modules of its stage. The model's own code runs unchanged on all stages: the embedding of a later
stage returns zeros, and layers of other stages return their input. Where this code calls the first layer of the next
stage, an earlier stage sends the hidden states, and the later one replaces its own by them. The last stage broadcasts
the logits to all. So transformers computes masks, positions and caches, and generates. Code between the embedding and
the first layer has an effect on the first stage only.

The first stage also has the image encoder of a composite model, and broadcasts the features of images to all stages:
some models add them to hidden states after one of the first layers.

Hidden states have shape [batch, tokens, hidden size], in the dtype of the model. Each rank sends them to the rank of
the same number in the next stage.
"""

import inspect
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
from shardconv.distributed.agreement import run_on_first
from shardconv.hf.build import build_on_meta
from shardconv.hf.classes import ModelClass
from shardconv.plan.families.family import EMBEDDING, ENCODER, HEAD, LAYERS
from shardconv.plan.plan import Plan
from shardconv.plan.stages import StageFinder, Stages
from shardconv.runtime.dry_run import MetaFunctions
from shardconv.support.errors import RunError, one_line

#: The remedy for models that do not run in stages.
_WITHOUT_STAGES = "run it in one stage (shardconv reshard DIR --tp N --pp 1)"
#: Kind of modules in ``[stages]`` to the number of them that a model may have.
_CONNECTED = {EMBEDDING: 1, LAYERS: 1, "last": 1, "first": 0}
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
    try:
        with torch.enable_grad(), MetaFunctions():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"), use_cache=False)
    except RunError:
        raise
    except Exception as error:
        raise does_not_run(model, f"a dry run raises {one_line(error)}") from error
    if check.called != [parts.embedding, *parts.layers, parts.norm]:
        raise does_not_run(model, "it does not call the embedding, each layer and the final norm once, in this order")


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
            layer._modules.clear()  # noqa: SLF001 - it computes nothing
            vars(layer)[ON_OTHER_STAGE] = True
            vars(layer)["forward"] = partial(_pass, number)
    if not stages.is_tied or stage < stages.count - 1:
        vars(model)["all_tied_weights_keys"] = {}  # of transformers: nothing is tied on this stage


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
    _Stage(axis, model).connect(_Parts.of(model, StageFinder(plan.rules)), plan.stages.layers_of(axis.rank))


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
        heads: the output projections; none for a base model.
        images: the module that computes features of images; None without an image encoder.
    """

    embedding: nn.Embedding
    layers: list[nn.Module]
    norm: nn.Module
    heads: Sequence[nn.Linear]
    images: nn.Module | None

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
        for kind, count in _CONNECTED.items():
            if len(found := paths.get(kind, ())) != count:
                names = ", ".join(sorted(found)) or "none"
                raise does_not_run(model, f"modules of kind {kind!r} are not connected (got {names}, expected {count})")
        embedding, sequence, norm = (model.get_submodule(*paths[kind]) for kind in (EMBEDDING, LAYERS, "last"))
        heads = [cast("nn.Linear", model.get_submodule(path)) for path in paths.get(HEAD, ())]
        images = _owner_of_encoders(model, paths[ENCODER]) if ENCODER in paths else None
        return cls(cast("nn.Embedding", embedding), [*sequence.children()], norm, heads, images)


def _owner_of_encoders(model: nn.Module, paths: Collection[str]) -> nn.Module:
    """The module whose methods compute features of images.

    Raises:
        RunError: if another module has some of the encoders, or its forward method uses them itself.
    """
    owners, _, names = zip(*(path.rpartition(".") for path in paths), strict=True)
    owner = model.get_submodule(owners[0])
    if len({*owners}) > 1 or not hasattr(owner, _FEATURES[0]):
        raise does_not_run(model, f"no method {_FEATURES[0]} has all of {', '.join(sorted(paths))}")
    if used := sorted({*names} & {*inspect.unwrap(type(owner).forward).__code__.co_names}):
        raise does_not_run(model, f"{type(owner).__name__}.forward uses {', '.join(used)} outside of {_FEATURES[0]}")
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
        self._current: Tensor | None = None

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


class _Stage:
    """A stage of a model, which communicates with the stages beside it."""

    def __init__(self, axis: Axis, model: nn.Module) -> None:
        self._axis, self._model = axis, model
        self._is_first, self._is_last = axis.rank == 0, axis.rank == axis.size - 1
        self._is_called = self._computes_features = False

    def connect(self, parts: _Parts, held: range) -> None:
        """Replace the forward methods of modules.

        Args:
            parts: the modules.
            held: the numbers of the layers of this stage.
        """
        self._connect_images(parts.images)
        self._connect_embedding(parts.embedding)
        self._connect_layers(parts.layers, held)
        self._connect_norm(parts.norm, is_output=not parts.heads)
        for head in parts.heads:
            self._connect_head(head)
        self._model.register_forward_pre_hook(self._begin)
        self._model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        """A forward pre-hook: gradients would end at the hidden states that a stage receives."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a model in pipeline stages does not compute gradients: call it in torch.no_grad() or "
                "torch.inference_mode()"
            )
        self._is_called = True

    def _end(self, *_: object) -> None:
        self._is_called = False

    def _connect_embedding(self, module: nn.Embedding) -> None:
        module.register_forward_pre_hook(self._check_called)
        if not self._is_first:
            vars(module)["forward"] = partial(self._zeros, module.embedding_dim)

    def _connect_images(self, module: nn.Module | None) -> None:
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
        tensor = tensor.contiguous() if self._is_first else torch.empty_like(tensor, device=self._device)
        dist.broadcast(tensor, self._axis.ranks[0], group=self._axis.group)
        return tensor

    def _receive(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of the first layer: replace its input by the hidden states of the stage before."""
        zeros = _inputs(args, options)[0]
        hidden = zeros.new_empty(zeros.shape, dtype=self._dtype)
        dist.recv(hidden, self._axis.ranks[self._axis.rank - 1], group=self._axis.group)
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    def _send(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook of the first layer of the next stage: send its input there."""
        hidden = self._checked(_inputs(args, options)[0]).contiguous()
        dist.send(hidden, self._axis.ranks[self._axis.rank + 1], group=self._axis.group)

    def _broadcast(
        self, run: Callable[[Tensor], Tensor], shape_of: Callable[[Tensor], tuple[int, ...]], hidden: Tensor
    ) -> Tensor:
        """The output of the last stage, on all stages."""
        output = run(hidden)
        if not self._is_last:
            output = torch.empty(shape_of(hidden), dtype=self._dtype, device=hidden.device)
        output = self._checked(output).contiguous()
        dist.broadcast(output, self._axis.ranks[-1], group=self._axis.group)
        return output

    def _checked(self, output: Tensor) -> Tensor:
        """An output, checked for the dtype that other stages expect."""
        if output.dtype != self._dtype:
            raise does_not_run(self._model, f"an output is {output.dtype} (expected {self._dtype}, as its parameters)")
        return output

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    def _check_called(self, *_: object) -> None:
        """A forward pre-hook: refuse a call of a part of the model, whose hidden states are on one stage."""
        if not self._is_called:
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

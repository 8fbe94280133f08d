"""One pipeline stage of a model of transformers, for inference.

Each rank has the modules of its stage. The model's own code runs unchanged on all stages: the embedding of a later
stage returns zeros, layers of other stages return their input, the first layer of a later stage gets the hidden states
that it receives from the stage before, the last layer of an earlier stage sends its output to the next stage, and the
last stage broadcasts the logits to all. So transformers computes masks, positions and caches, and generates. Code
between the embedding and the first layer has an effect on the first stage only.

Hidden states have shape [batch, tokens, hidden size], in the dtype of the model. Each rank sends them to the rank of
the same number in the next stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardconv.convert.converted_model import ON_OTHER_STAGE, OTHER_STAGES
from shardconv.distributed import Axis
from shardconv.hf.build import build_on_meta
from shardconv.hf.classes import ModelClass
from shardconv.plan.families.family import EMBEDDING, ENCODER, HEAD, LAYERS
from shardconv.plan.plan import Plan
from shardconv.plan.stages import StageFinder
from shardconv.runtime.dry_run import MetaFunctions
from shardconv.support.errors import RunError, one_line

#: The remedy for models that do not run in stages.
_WITHOUT_STAGES = "run it in one stage (shardconv reshard DIR --tp N --pp 1)"
#: Kind of modules in ``[stages]`` to the number of them that a model may have.
_CONNECTED = {EMBEDDING: 1, LAYERS: 1, "last": 1, "first": 0, ENCODER: 0}


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
    finder = StageFinder(plan.rules)
    assert plan.stages is not None
    stages, layers = replace(plan.stages, has_copies=False), _Parts.of(model, finder).layers
    for name in [*_names(model, finder)]:
        if stage not in finder.stages_of(name, stages):
            _remove(model, name)
    for number, layer in enumerate(layers):
        if number not in stages.layers_of(stage):
            layer._modules.clear()  # noqa: SLF001 - it computes nothing
            vars(layer)[ON_OTHER_STAGE] = True
            vars(layer)["forward"] = partial(_pass, number)
    if not stages.is_tied or stage < stages.count - 1:
        vars(model)["all_tied_weights_keys"] = {}  # of transformers: nothing is tied on this stage


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
    """Remove a parameter or buffer. transformers does not initialize its module."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, own, None)
    vars(module).update({"_is_hf_initialized": True, ON_OTHER_STAGE: True})


@dataclass(frozen=True, slots=True)
class _Parts:
    """The modules of a model at which stages are connected.

    Attributes:
        embedding: the embedding table.
        layers: the layers.
        norm: the final norm.
        heads: the output projections; none for a base model.
    """

    embedding: nn.Embedding
    layers: list[nn.Module]
    norm: nn.Module
    heads: Sequence[nn.Linear]

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
        return cls(cast("nn.Embedding", embedding), [*sequence.children()], norm, heads)


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
        self._is_called = False

    def connect(self, parts: _Parts, held: range) -> None:
        """Replace the forward methods of modules.

        Args:
            parts: the modules.
            held: the numbers of the layers of this stage.
        """
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

    def _connect_layers(self, layers: Sequence[nn.Module], held: range) -> None:
        if not self._is_first:
            layers[held[0]].register_forward_pre_hook(self._receive, with_kwargs=True)
        if not self._is_last:
            layers[held[-1]].register_forward_hook(self._send)

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

    def _receive(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of the first layer: replace its input by the hidden states of the stage before."""
        zeros = _inputs(args, options)[0]
        hidden = zeros.new_empty(zeros.shape, dtype=self._dtype)
        dist.recv(hidden, self._axis.ranks[self._axis.rank - 1], group=self._axis.group)
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    def _send(self, _: nn.Module, __: tuple[Any, ...], hidden: Tensor) -> None:
        """A forward hook of the last layer: send its output to the next stage."""
        dist.send(self._checked(hidden).contiguous(), self._axis.ranks[self._axis.rank + 1], group=self._axis.group)

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
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    def _check_called(self, *_: object) -> None:
        """A forward pre-hook: refuse a call of a part of the model, whose hidden states are on one stage."""
        if not self._is_called:
            raise RuntimeError(
                f"a module of a {type(self._model).__name__} in pipeline stages was called: call the model itself"
            )


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

"""One pipeline stage of a model of transformers, for inference.

Each rank has the modules of its stage. The model's own code runs unchanged on all stages: the embedding of a later
stage returns the hidden states that it receives from the stage before, layers of other stages return their input, the
final norm of an earlier stage sends its input to the next stage, and the last stage broadcasts the logits to all. So
transformers computes masks, positions and caches, and generates.

Hidden states have shape [batch, tokens, hidden size], in the dtype of the model. Each rank sends them to the rank of
the same number in the next stage.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.convert.converted_model import ON_OTHER_STAGE, OTHER_STAGES
from shardconv.distributed import Axis
from shardconv.plan.families.family import EMBEDDING, HEAD, LAYERS
from shardconv.plan.plan import Plan
from shardconv.plan.stages import Located, StageFinder
from shardconv.support.errors import RunError

#: The remedy for models that do not run in stages.
_WITHOUT_STAGES = "run it in one stage (shardconv reshard DIR --tp N --pp 1)"


def keep_stage(model: nn.Module, plan: Plan, axis: Axis) -> None:
    """Remove the parameters and buffers of other stages from a model, and connect it with these stages, in place.

    Args:
        model: a model for generation on the meta device, before its layers are converted.
        plan: its plan, with stages.
        axis: the ranks with the same rank in each stage.

    Raises:
        PlanError: if the stage of a parameter is unknown.
        RunError: if the model has modules that are not supported.
    """
    finder, located = StageFinder(plan.rules), dict[str, Located]()
    assert plan.stages is not None
    for name in [*_names(model, finder)]:
        located[name] = finder.locate(name)
        stages = finder.stages_of(name, plan.stages)
        if stages and axis.rank not in stages:
            _remove(model, name)
    _connect(model, located, finder, _Stage(axis, model))
    if not plan.stages.is_tied or axis.rank < axis.size - 1:
        vars(model)["all_tied_weights_keys"] = {}  # of transformers: nothing is tied on this stage


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


def _connect(model: nn.Module, located: Mapping[str, Located], finder: StageFinder, stage: "_Stage") -> None:
    """Replace the forward methods of the modules at which stages are connected."""
    paths: dict[str, set[str]] = {}
    of_modules = ((name, finder.find(name)) for name, _ in model.named_modules())  # a norm may lack parameters
    for one in (*located.values(), *(found for name, found in of_modules if found and found.path == name)):
        paths.setdefault(one.kind, set()).add(one.path)
    if missing := next((kind for kind in (EMBEDDING, LAYERS, "last") if len(paths.get(kind, ())) != 1), None):
        found = ", ".join(sorted(paths.get(missing, ()))) or "none"
        raise RunError(
            f"{type(model).__name__} does not run in pipeline stages: it has modules of kind {missing!r} that are not "
            f"connected (got {found}, expected one): {_WITHOUT_STAGES}"
        )
    (embedding,), (layers,), (norm,) = paths[EMBEDDING], paths[LAYERS], paths["last"]
    held = {one.layer for name, one in located.items() if one.kind == LAYERS and _has(model, name)}
    for number, layer in enumerate(model.get_submodule(layers).children()):
        stage.connect_layer(layer, number, is_held=number in held)
    stage.connect_embedding(cast("nn.Embedding", model.get_submodule(embedding)))
    heads = [cast("nn.Linear", model.get_submodule(path)) for path in paths.get(HEAD, ())]
    stage.connect_norm(model.get_submodule(norm), is_output=not heads)
    for head in heads:
        stage.connect_head(head)
    stage.connect_model()


def _has(model: nn.Module, name: str) -> bool:
    """Whether a parameter or buffer was not removed."""
    owner, _, own = name.rpartition(".")
    return getattr(model.get_submodule(owner), own) is not None


class _Stage:
    """A stage of a model, which communicates with the stages beside it.

    Attributes:
        current: the hidden states that the next layer, or the final norm, has to get. Code between layers that changes
            them would run once on each stage, so it is refused.
    """

    def __init__(self, axis: Axis, model: nn.Module) -> None:
        self._axis, self._model = axis, model
        self._is_first, self._is_last = axis.rank == 0, axis.rank == axis.size - 1
        self._is_called = False
        self.current: Tensor | None = None

    def connect_model(self) -> None:
        """Refuse gradients, and calls of modules of the model instead of the model itself."""
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

    def connect_embedding(self, module: nn.Embedding) -> None:
        """Replace the embedding of a later stage by the hidden states of the stage before."""
        module.register_forward_pre_hook(self._check_called)
        if not self._is_first:
            vars(module)["forward"] = partial(self._receive, module.embedding_dim)

    def connect_layer(self, module: nn.Module, number: int, *, is_held: bool) -> None:
        """Replace a layer of another stage by its input, and check the input of all layers."""
        if not is_held:
            module._modules.clear()  # noqa: SLF001 - it computes nothing
            vars(module)[ON_OTHER_STAGE] = True
            vars(module)["forward"] = partial(_pass, number)
        if number or not self._is_first:
            module.register_forward_pre_hook(self._check_input, with_kwargs=True)
        module.register_forward_hook(self._set_current)

    def connect_norm(self, module: nn.Module, *, is_output: bool) -> None:
        """Send the input of the final norm of an earlier stage; with ``is_output``, return the last stage's."""
        run = partial(_forward, module) if self._is_last else self._send
        if is_output:
            run = partial(self._broadcast, run, lambda hidden: hidden.shape)
        module.register_forward_pre_hook(self._check_input, with_kwargs=True)
        vars(module)["forward"] = run

    def connect_head(self, module: nn.Linear) -> None:
        """Return the logits of the last stage from the head."""
        run: Callable[[Tensor], Tensor] = partial(_forward, module) if self._is_last else nn.Identity()
        vars(module)["forward"] = partial(
            self._broadcast, run, lambda hidden: (*hidden.shape[:-1], module.out_features)
        )

    def _receive(self, hidden_size: int, input_ids: Tensor) -> Tensor:
        """The hidden states of the stage before, for token ids of shape [batch, tokens]."""
        self.current = torch.empty(*input_ids.shape, hidden_size, dtype=self._dtype, device=input_ids.device)
        dist.recv(self.current, self._axis.ranks[self._axis.rank - 1], group=self._axis.group)
        return self.current

    def _send(self, hidden: Tensor) -> Tensor:
        """Send hidden states to the next stage, and return them."""
        dist.send(self._checked(hidden).contiguous(), self._axis.ranks[self._axis.rank + 1], group=self._axis.group)
        return hidden

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
            raise RunError(
                f"{type(self._model).__name__} does not run in pipeline stages: an output is {output.dtype} (expected "
                f"{self._dtype}, as its parameters): {_WITHOUT_STAGES}"
            )
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

    def _check_input(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook: refuse code of the model between the embedding, layers and final norm."""
        if (args[0] if args else options.get("hidden_states")) is not self.current:
            raise RunError(
                f"{type(self._model).__name__} does not run in pipeline stages: it changes hidden states before "
                f"{type(module).__name__}: {_WITHOUT_STAGES}"
            )

    def _set_current(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """A forward hook: the next layer must get the output of this one."""
        self.current = output


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

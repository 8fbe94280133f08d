"""A model of transformers cut to one pipeline stage, for inference.

Each rank has the modules of its stage. The model's own code runs unchanged on all stages: the embedding of a later
stage returns the hidden states that it receives from the stage before, layers of other stages return their input, the
final norm of an earlier stage sends its input to the next stage, and the last stage broadcasts the logits to all. So
masks, positions, caches and generation are those of transformers.

Hidden states have shape [batch, tokens, hidden size], in the dtype of the model. Each rank sends them to the rank of
the same number in the next stage.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.distributed import Axis
from shardconv.plan.families.family import EMBEDDING, HEAD, LAYERS
from shardconv.plan.plan import Plan
from shardconv.plan.stages import Located, StageFinder
from shardconv.support.errors import RunError


def cut_to_stage(model: nn.Module, plan: Plan, axis: Axis) -> None:
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
    for name in [*_names(model)]:
        located[name] = finder.locate(name)
        stages = finder.stages_of(name, plan.stages)
        if stages and axis.rank not in stages:
            _remove(model, name)
    _connect(model, located, _Stage(axis, model))
    model.register_forward_pre_hook(_refuse_gradients)
    if not plan.stages.is_tied or axis.rank < axis.size - 1:
        vars(model)["all_tied_weights_keys"] = {}  # of transformers: nothing is tied on this stage


def _names(model: nn.Module) -> Iterator[str]:
    """Yield the names of all parameters and buffers."""
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


def _remove(model: nn.Module, name: str) -> None:
    """Remove a parameter or buffer. transformers does not initialize its module."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, own, None)
    vars(module)["_is_hf_initialized"] = True


def _connect(model: nn.Module, located: dict[str, Located], stage: "_Stage") -> None:
    """Replace the forward methods of the modules at which stages are connected."""
    paths: dict[str, set[str]] = {}
    for one in located.values():
        paths.setdefault(one.kind, set()).add(one.path)
    if missing := next((kind for kind in (EMBEDDING, LAYERS, "last") if len(paths.get(kind, ())) != 1), None):
        found = ", ".join(sorted(paths.get(missing, ()))) or "none"
        raise RunError(
            f"{type(model).__name__} does not run in pipeline stages: it has modules of kind {missing!r} that are not "
            f"connected (got {found}, expected one)"
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
        self.current: Tensor | None = None

    def connect_embedding(self, module: nn.Embedding) -> None:
        """Let the embedding of a later stage return the hidden states of the stage before."""
        if not self._is_first:
            vars(module)["forward"] = partial(self._receive, module.embedding_dim)

    def connect_layer(self, module: nn.Module, number: int, *, is_held: bool) -> None:
        """Let a layer of another stage return its input, and check the input of all layers."""
        if not is_held:
            module._modules.clear()  # noqa: SLF001 - it computes nothing
            vars(module)["forward"] = partial(_pass, number)
        if number or not self._is_first:
            module.register_forward_pre_hook(self._check_input, with_kwargs=True)
        module.register_forward_hook(self._set_current)

    def connect_norm(self, module: nn.Module, *, is_output: bool) -> None:
        """Let the final norm of an earlier stage send its input; with ``is_output``, return that of the last stage."""
        run = partial(_forward, module) if self._is_last else self._send
        if is_output:
            run = partial(self._broadcast, run, lambda hidden: hidden.shape)
        module.register_forward_pre_hook(self._check_input, with_kwargs=True)
        vars(module)["forward"] = run

    def connect_head(self, module: nn.Linear) -> None:
        """Let the head return the logits of the last stage."""
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
        """An output, whose dtype has to be the one that other stages expect."""
        if output.dtype != self._dtype:
            raise RunError(
                f"{type(self._model).__name__} does not run in pipeline stages: an output is {output.dtype} (expected "
                f"{self._dtype}, as its parameters): run it without stages"
            )
        return output

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    def _check_input(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A forward pre-hook: refuse code of the model between the embedding, layers and final norm."""
        if (args[0] if args else options.get("hidden_states")) is not self.current:
            raise RunError(
                f"{type(self._model).__name__} does not run in pipeline stages: it changes hidden states before "
                f"{type(module).__name__}: run it without stages"
            )

    def _set_current(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """A forward hook: the output of a layer is what the next one has to get."""
        self.current = output


def _refuse_gradients(*_: object) -> None:
    """A forward pre-hook: gradients would end at the hidden states that a stage receives."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a model in pipeline stages does not compute gradients: call it in torch.no_grad() or "
            "torch.inference_mode()"
        )


def _forward(module: nn.Module, hidden: Tensor) -> Tensor:
    """The forward of a module's class, which the conversion may have changed."""
    output: Tensor = type(module).forward(module, hidden)
    return output


def _pass(number: int, hidden_states: Tensor, *_: object, past_key_values: Any = None, **__: object) -> Tensor:
    """The forward of a layer of another stage: its input. The cache counts its tokens, from which positions follow."""
    if past_key_values is not None:
        tokens = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
        past_key_values.update(tokens, tokens, number)
    return hidden_states

"""One operation on sharded parameters, with what hooks are to be called around it, forward and backward.

Owns when each phase of an operation fires. An identity node of autograd stands in front of the operation's inputs; its
backward runs when all of the operation's own backward is done, which no hook on a node or on a tensor tells. Knows
nothing of which calls are operations.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class ParamHook(ABC):
    """What is called around operations, with their sharded parameters in the order of the arguments, each as often.

    See :mod:`shardconv.tensor.hooks` for when. Each phase runs the hooks in the order in which they were given.
    """

    @abstractmethod
    def pre_forward(self, params: list[nn.Parameter]) -> None:
        """Before an operation."""

    @abstractmethod
    def post_forward(self, params: list[nn.Parameter]) -> None:
        """After it, also when it raised."""

    @abstractmethod
    def pre_backward(self, params: list[nn.Parameter]) -> None:
        """Before the operation's backward."""

    @abstractmethod
    def post_backward(self, params: list[nn.Parameter]) -> None:
        """After it, when the gradients of all its inputs are there."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.is_busy = False
        self.begun: WeakSet[Use] = WeakSet()  # whose backward has begun and not ended


_thread = _Thread()


def is_busy() -> bool:
    """Whether this thread is inside an operation that has its hooks already, or in a hook: nothing fires then."""
    return _thread.is_busy


@contextmanager
def busy() -> Iterator[None]:
    """Let nothing fire in this thread."""
    before, _thread.is_busy = _thread.is_busy, True
    try:
        yield
    finally:
        _thread.is_busy = before


@contextmanager
def suspended() -> Iterator[None]:
    """End the backward phases of operations for as long as something else runs forward in their midst."""
    now = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for the pass that runs
    uses = [use for use in _thread.begun if use.is_in(now)]
    for use in uses:
        use.call("post_backward")
    try:
        yield
    finally:
        for use in uses:
            use.call("pre_backward")


class Use:
    """One operation on sharded parameters.

    Args:
        hooks: what is called.
        params: with what.
    """

    def __init__(self, hooks: tuple[ParamHook, ...], params: list[nn.Parameter]) -> None:
        self.hooks, self.params = hooks, params
        self._pass: int | None = None

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The operation's own result, after its forward phases and with its backward phases to come."""
        begun = []
        try:
            for hook in self.hooks:
                hook.pre_forward(list(self.params))
                begun.append(hook)
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            return (self._run_in_place if _is_in_place(func, args, kwargs) else self._run)(func, args, kwargs)
        finally:
            with ExitStack() as posts:  # each is called, also when one before it raises
                for hook in reversed(begun):
                    posts.callback(hook.post_forward, list(self.params))

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The operation behind the identity node."""
        inputs = [value for value in tensors_in((args, kwargs)) if value.requires_grad]
        if not inputs:
            return func(*args, **kwargs)
        entered = _Enter.apply(self, *inputs)
        args, kwargs = _replaced((args, kwargs), {id(own): new for own, new in zip(inputs, entered, strict=True)})
        output = func(*args, **kwargs)
        # some operations give an input itself: then it has to be that, and there is no backward
        output = _replaced(output, {id(new): own for own, new in zip(inputs, entered, strict=True)})
        given = {id(own) for own in inputs}
        for node in {value.grad_fn for value in tensors_in(output) if id(value) not in given} - {None}:
            node.register_prehook(self.begin)  # type: ignore[union-attr] # None is taken out above
        return output

    def _run_in_place(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An operation that changes one of its inputs, which has to be itself, and has a single new node then."""
        wholes = [whole_of(value) for value in tensors_in((args, kwargs))]
        before = {whole.grad_fn for whole in wholes}
        output = func(*args, **kwargs)
        for node in {whole.grad_fn for whole in wholes} - before - {None}:
            node.register_prehook(self.begin)  # type: ignore[union-attr] # None is taken out above
            node.register_hook(self.end)  # type: ignore[union-attr] # likewise
        return output

    def begin(self, *_: Any) -> None:
        """The operation's backward begins, or another part of it does."""
        # torch has no public name for the pass that runs
        if self._pass != (now := torch._C._current_graph_task_id()):  # noqa: SLF001
            self._pass = now
            self.call("pre_backward")
            _thread.begun.add(self)

    def end(self, *_: Any) -> None:
        """The operation's backward is done."""
        self.begin()  # second derivatives come to the inputs by other ways than the outputs
        _thread.begun.discard(self)
        self.call("post_backward")

    def is_in(self, graph_task: int) -> bool:
        """Whether it is in this backward pass, by torch's number of it."""
        return self._pass == graph_task

    def call(self, phase: str) -> None:
        """Call a phase of all hooks."""
        with busy():
            for hook in self.hooks:
                getattr(hook, phase)(list(self.params))


class _Enter(torch.autograd.Function):
    """The inputs of an operation, as they are."""

    @staticmethod
    def forward(ctx: Any, use: Use, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.use.end()
        return None, *grads


def _is_in_place(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("embedding", "embedding_bag"):  # which change the rows that they read
        return kwargs.get("max_norm") is not None or (name == "embedding" and len(args) > 3 and args[3] is not None)
    is_named_so = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return is_named_so or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def whole_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself."""
    base = tensor._base  # noqa: SLF001 - torch has no public name for it
    return tensor if base is None else base


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _replaced(value: Any, others: dict[int, Tensor]) -> Any:
    """The same nesting with other tensors in the place of some, by their ids."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(item, others) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    items = [_replaced(item, others) for item in value]
    if all(new is own for new, own in zip(items, value, strict=True)):
        return value  # also what cannot be made of a list, as torch.Size
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

"""Runs one operation on sharded parameters and calls the hooks around its forward and backward.

An identity autograd node is inserted before the inputs of the operation. Its backward runs after the whole backward of
the operation; hooks on torch's nodes or tensors do not signal that point.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

#: Positional and keyword arguments of an operation.
Arguments = tuple[object, ...]
Options = dict[str, object]


class ParamHook(ABC):
    """Callbacks around operations that use sharded parameters.

    Each receives the sharded parameters of the operation in argument order, with repetitions. Each phase calls the
    hooks in the order in which they were passed. :mod:`shardconv.tensor.hooks` defines when the phases run.
    """

    @abstractmethod
    def pre_forward(self, params: list[nn.Parameter]) -> None:
        """Called before an operation."""

    @abstractmethod
    def post_forward(self, params: list[nn.Parameter]) -> None:
        """Called after the operation, also if it raised."""

    @abstractmethod
    def pre_backward(self, params: list[nn.Parameter]) -> None:
        """Called before the backward of the operation."""

    @abstractmethod
    def post_backward(self, params: list[nn.Parameter]) -> None:
        """Called after the backward of the operation, when the gradients of all its inputs are computed."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.are_hooks_enabled = True
        self.in_backward: WeakSet[Use] = WeakSet()  # operations whose backward has started and not finished


_thread = _Thread()


def hooks_enabled() -> bool:
    """Whether operations call hooks in this thread; false inside an operation that calls hooks, and inside hooks."""
    return _thread.are_hooks_enabled


@contextmanager
def hooks_disabled() -> Iterator[None]:
    """Disable hooks in this thread."""
    before, _thread.are_hooks_enabled = _thread.are_hooks_enabled, False
    try:
        yield
    finally:
        _thread.are_hooks_enabled = before


def _graph_task() -> int:
    """Torch's id of the current backward pass."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 - torch does not export it


@contextmanager
def interrupted_backward() -> Iterator[None]:
    """Call post_backward of operations whose backward is in progress, and pre_backward again on exit."""
    task = _graph_task()
    uses = [use for use in _thread.in_backward if use.is_in(task)]
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
        hooks: hooks to call.
        params: sharded parameters of the operation, passed to the hooks.
    """

    def __init__(self, hooks: tuple[ParamHook, ...], params: list[nn.Parameter]) -> None:
        self.hooks, self.params = hooks, params
        self._graph_task: int | None = None

    def run(self, func: Callable[..., object], args: Arguments, kwargs: Options) -> object:
        """Run the operation with its forward phases, and register its backward phases. Return its result."""
        called = []
        try:
            for hook in self.hooks:
                hook.pre_forward(list(self.params))
                called.append(hook)
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            return (self._run_in_place if _is_in_place(func, args, kwargs) else self._run)(func, args, kwargs)
        finally:
            with ExitStack() as stack:  # calls all hooks, also if one raises
                for hook in reversed(called):
                    stack.callback(hook.post_forward, list(self.params))

    def _run(self, func: Callable[..., object], args: Arguments, kwargs: Options) -> object:
        """Run the operation on the outputs of the identity node."""
        inputs = [value for value in tensors_in((args, kwargs)) if value.requires_grad]
        if not inputs:
            return func(*args, **kwargs)
        entered = _Enter.apply(self, *inputs)
        args, kwargs = _replaced((args, kwargs), {id(old): new for old, new in zip(inputs, entered, strict=True)})
        output = func(*args, **kwargs)
        # some operations return an input: return the original tensor then, which does not have a backward here
        output = _replaced(output, {id(new): old for old, new in zip(inputs, entered, strict=True)})
        input_ids = {id(value) for value in inputs}
        for node in _nodes(value for value in tensors_in(output) if id(value) not in input_ids):
            node.register_prehook(self.begin)
        return output

    def _run_in_place(self, func: Callable[..., object], args: Arguments, kwargs: Options) -> object:
        """Run an in-place operation on the original inputs; it creates a single new autograd node."""
        bases = [base_of(value) for value in tensors_in((args, kwargs))]
        before = _nodes(bases)
        output = func(*args, **kwargs)
        for node in _nodes(bases) - before:
            node.register_prehook(self.begin)
            node.register_hook(self.end)
        return output

    def begin(self, *_: object) -> None:
        """Call pre_backward at the first node of the operation that runs in a backward pass."""
        if self._graph_task != (task := _graph_task()):
            self._graph_task = task
            self.call("pre_backward")
            _thread.in_backward.add(self)

    def end(self, *_: object) -> None:
        """Call post_backward after the last node of the operation."""
        self.begin()  # second derivatives reach the inputs without passing the outputs
        _thread.in_backward.discard(self)
        self.call("post_backward")

    def is_in(self, graph_task: int) -> bool:
        """Whether the last backward of this operation belongs to a backward pass, by torch's graph task id."""
        return self._graph_task == graph_task

    def call(self, phase: str) -> None:
        """Call one phase of all hooks."""
        with hooks_disabled():
            for hook in self.hooks:
                getattr(hook, phase)(list(self.params))


class _Context(FunctionCtx):
    use: Use


class _Enter(torch.autograd.Function):
    """Identity on the inputs of an operation; its backward ends the backward of the operation."""

    @staticmethod
    def forward(ctx: _Context, use: Use, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.use.end()
        return None, *grads


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """The autograd nodes that computed tensors."""
    return {value.grad_fn for value in tensors if value.grad_fn is not None}


def _is_in_place(func: Callable[..., object], args: Arguments, kwargs: Options) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("embedding", "embedding_bag"):  # with max_norm, they modify the rows that they read
        return kwargs.get("max_norm") is not None or (name == "embedding" and len(args) > 3 and args[3] is not None)
    is_in_place_name = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return is_in_place_name or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is a view of, or the tensor itself."""
    base = tensor._base  # noqa: SLF001 - torch does not export it
    return tensor if base is None else base


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _replaced(value: Any, by_id: dict[int, Tensor]) -> Any:
    """Replace tensors in nested lists, tuples and dicts, by id."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(item, by_id) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    items = [_replaced(item, by_id) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value  # also types that cannot be created from a list of tensors, such as torch.Size
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

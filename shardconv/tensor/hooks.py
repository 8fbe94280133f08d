"""Hooks around every operation that uses sharded parameters, in the forward and backward pass.

    pre_forward(params) -> operation -> post_forward(params)
    ... in each backward pass ...  pre_backward(params) -> backward of the operation -> post_backward(params)

Built on :class:`torch.overrides.TorchFunctionMode`, which intercepts calls of torch's functions and methods.

- **Sharded parameter**: an nn.Parameter that is a DTensor with a sharded placement, or a shard of a shardconv layer.
- **Operation**: a call of torch with a sharded parameter, or a view of one, anywhere in its arguments. Calls that only
  read metadata or set attributes are excluded: properties, shapes, ``requires_grad_``, hook registration. So are calls
  that torch does not show to modes: ``apply`` of an ``autograd.Function``, and with it ``to_local``, ``full_tensor``
  and ``redistribute`` of a DTensor.
- **Backward** phases run for operations with an input that requires grad, once per operation and backward pass, with
  the hooks that were active in forward. ``param.grad`` does not yet include the gradient of the operation.
- **Balance**: every pre call is followed by a post call, also if the operation raises. A backward pass that raises
  stops without the post call.
- **Recomputation** by ``torch.utils.checkpoint`` is a forward pass: the forward phases run again, with the hooks of the
  first pass. Backward phases run once: for the recomputed operations with ``use_reentrant=True``, for the operations
  of the first pass with False. A recomputation that stops early still calls post_forward. If a recomputation starts
  during the backward of an operation, that operation gets post_backward before it, and pre_backward again after it.
- Operations inside hooks do not call hooks. Neither does other code that runs in a backward pass, such as a hook on a
  gradient.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardconv.tensor.sharded import is_sharded

#: Positional and keyword arguments of an operation.
Arguments = tuple[object, ...]
Options = dict[str, object]

#: Methods and functions that do not read values, or only set attributes.
_IGNORED = frozenset({
    "__get__", "__set__", "__delete__", "__len__", "__repr__", "__format__", "__dir__", "__hash__", "__reduce_ex__",
    "__deepcopy__", "__setstate__", "dim", "ndimension", "size", "stride", "numel", "nelement", "storage_offset",
    "element_size", "dim_order", "get_device", "data_ptr", "storage", "untyped_storage", "is_contiguous", "is_complex",
    "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference", "is_pinned", "is_shared", "is_same_size",
    "is_set_to", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
    "share_memory_",
})  # fmt: skip

#: Functions that run a backward pass. Their parameters are arguments to differentiate with respect to.
_BACKWARD_FUNCTIONS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class ParamHook(ABC):
    """Callbacks around operations that use sharded parameters.

    Each receives the sharded parameters of the operation in argument order, with repetitions. Each phase calls the
    hooks in the order in which they were passed. The docstring of this module defines when the phases run.
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


@contextmanager
def use_param_hooks(*hooks: ParamHook) -> Iterator[None]:
    """Call hooks around all operations that use sharded parameters; see the docstring of this module.

    Contexts nest, and only the hooks of the innermost one are called. Without arguments, no hooks are called.

    Args:
        hooks: hooks, called in this order in each phase.

    Example:
        >>> class Count(ParamHook):
        ...     uses = 0
        ...     def pre_forward(self, params):
        ...         self.uses += len(params)
        ...     def post_forward(self, params): ...
        ...     def pre_backward(self, params): ...
        ...     def post_backward(self, params): ...
        >>> count, layer = Count(), ColumnParallelLinear(2, 2)
        >>> with use_param_hooks(count):
        ...     output = layer(torch.ones(1, 2))
        >>> count.uses  # its weight and its bias
        2
    """
    _patch_checkpoint()
    with _HookMode(hooks):
        yield


class _Thread(threading.local):
    def __init__(self) -> None:
        self.are_hooks_enabled = True  # false inside an operation that calls hooks, and inside hooks
        self.in_backward: WeakSet[_Use] = WeakSet()  # operations whose backward has started and not finished


_thread = _Thread()


@contextmanager
def _hooks_disabled() -> Iterator[None]:
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
def _interrupted_backward() -> Iterator[None]:
    """Call post_backward of operations whose backward is in progress, and pre_backward again on exit."""
    task = _graph_task()
    uses = [use for use in _thread.in_backward if use.graph_task == task]
    for use in uses:
        use.call("post_backward")
    try:
        yield
    finally:
        for use in uses:
            use.call("pre_backward")


class _Use:
    """One operation on sharded parameters.

    Args:
        hooks: hooks to call.
        params: sharded parameters of the operation, passed to the hooks.
    """

    def __init__(self, hooks: tuple[ParamHook, ...], params: list[nn.Parameter]) -> None:
        self.hooks, self.params = hooks, params
        self.graph_task: int | None = None

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
        inputs = [value for value in _tensors_in((args, kwargs)) if value.requires_grad]
        if not inputs:
            return func(*args, **kwargs)
        entered = _Enter.apply(self, *inputs)
        args, kwargs = _replaced((args, kwargs), {id(old): new for old, new in zip(inputs, entered, strict=True)})
        output = func(*args, **kwargs)
        # some operations return an input: return the original tensor then, which does not have a backward here
        output = _replaced(output, {id(new): old for old, new in zip(inputs, entered, strict=True)})
        input_ids = {id(value) for value in inputs}
        for node in _nodes(value for value in _tensors_in(output) if id(value) not in input_ids):
            node.register_prehook(self.begin)
        return output

    def _run_in_place(self, func: Callable[..., object], args: Arguments, kwargs: Options) -> object:
        """Run an in-place operation on the original inputs; it creates a single new autograd node."""
        bases = [_base_of(value) for value in _tensors_in((args, kwargs))]
        before = _nodes(bases)
        output = func(*args, **kwargs)
        for node in _nodes(bases) - before:
            node.register_prehook(self.begin)
            node.register_hook(self.end)
        return output

    def begin(self, *_: object) -> None:
        """Call pre_backward at the first node of the operation that runs in a backward pass."""
        if self.graph_task != (task := _graph_task()):
            self.graph_task = task
            self.call("pre_backward")
            _thread.in_backward.add(self)

    def end(self, *_: object) -> None:
        """Call post_backward after the last node of the operation."""
        self.begin()  # second derivatives reach the inputs without passing the outputs
        _thread.in_backward.discard(self)
        self.call("post_backward")

    def call(self, phase: str) -> None:
        """Call one phase of all hooks."""
        with _hooks_disabled():
            for hook in self.hooks:
                getattr(hook, phase)(list(self.params))


class _Enter(torch.autograd.Function):
    """Identity on the inputs of an operation; its backward ends the backward of the operation.

    Hooks on torch's nodes or tensors do not signal that point.
    """

    @staticmethod
    def forward(ctx: Any, use: _Use, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
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


def _base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is a view of, or the tensor itself."""
    base = tensor._base  # noqa: SLF001 - torch does not export it
    return tensor if base is None else base


def _tensors_in(value: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


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
        return value  # a list that the operation changes, and types such as torch.Size
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class _HookMode(TorchFunctionMode):
    """Intercepts calls. The innermost mode handles a call and disables hooks for the outer ones."""

    def __init__(self, hooks: tuple[ParamHook, ...]) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not _thread.are_hooks_enabled or getattr(func, "__name__", "") in _IGNORED or func in _BACKWARD_FUNCTIONS:
            return func(*args, **kwargs)
        with _hooks_disabled():
            params = [
                param for value in _tensors_in((args, kwargs)) if (param := _sharded_parameter(value)) is not None
            ]
            if not params or not self.hooks:
                return func(*args, **kwargs)
            return _Use(self.hooks, params).run(func, args, kwargs)


def _sharded_parameter(value: Tensor) -> nn.Parameter | None:
    """Return the sharded parameter that a tensor is, or is a view of."""
    base = _base_of(value)
    return base if isinstance(base, nn.Parameter) and is_sharded(base) else None


def _active_hooks() -> tuple[ParamHook, ...]:
    # torch does not export its stack of modes; its own checkpoint finds the device mode in the same way
    modes = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001
    return next((mode.hooks for mode in reversed(modes) if isinstance(mode, _HookMode)), ())


def _with_active_hooks(function: Callable[..., object]) -> Callable[..., object]:
    """Bind a function to the currently active hooks."""
    hooks = _active_hooks()

    def run(*args: object, **kwargs: object) -> object:
        with _interrupted_backward():
            if _active_hooks() == hooks:
                return function(*args, **kwargs)
            with _HookMode(hooks):
                return function(*args, **kwargs)

    return run


@cache
def _patch_checkpoint() -> None:
    """Patch torch's checkpoint to recompute under the hooks of the first pass; once per process, at first use.

    Torch restores autocast, the device and the RNG state, but not modes. ``context_fn`` cannot restore them: it belongs
    to the caller, usually a model, and works with ``use_reentrant=False`` only. So both variants wrap their function.
    """
    _bind_argument(torch.utils.checkpoint.CheckpointFunction, "forward", 1)
    _bind_argument(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", 0)


def _bind_argument(owner: object, name: str, position: int) -> None:
    """Patch a function of a class or module of torch: its argument at a position is bound to the active hooks."""
    original = getattr(owner, name)

    @wraps(original)
    def patched(*args: Callable[..., object], **kwargs: object) -> object:
        bound = _with_active_hooks(args[position])
        return original(*args[:position], bound, *args[position + 1 :], **kwargs)

    setattr(owner, name, staticmethod(patched) if isinstance(owner, type) else patched)

"""Hooks around every operation that touches sharded parameters, forward and backward.

Owns which calls are such operations; :mod:`shardconv.tensor.operation` owns when their phases fire. Stands on
:class:`torch.overrides.TorchFunctionMode`, which sees every call of torch's functions and methods. Knows nothing of
what hooks are for.

    pre_forward(params) -> operation -> post_forward(params)
    ... in each backward pass ...  pre_backward(params) -> backward of the operation -> post_backward(params)

- **Sharded parameter**: an nn.Parameter that is a DTensor with a sharded placement, or a shard of a layer of
  shardconv's own.
- **Operation**: a call of torch that is given a sharded parameter, or a view of one, anywhere in its arguments. What
  only looks at a tensor, or sets something beside its values, is none: properties, shapes, ``requires_grad_``, hooks.
  Neither is what torch lets no mode see: an ``autograd.Function`` that is applied, and with it a DTensor's
  ``to_local``, ``full_tensor`` and ``redistribute``.
- **Backward**: of operations any input of which requires grad; with the hooks of their forward, also when those are no
  longer active; once for each use and pass. ``param.grad`` does not have the use's share yet.
- **Balance**: whoever heard pre hears post, also when the operation raises. A backward pass that raises ends between.
- **Recomputation** by ``torch.utils.checkpoint`` is a forward pass: forward phases fire again, with the hooks of the
  first one, whatever is active then. Backward phases fire once: with ``use_reentrant=True`` of what was recomputed,
  with False of the first pass. A recomputation that stops early ends with post_forward, too. Where it begins in the
  midst of an operation's backward, that hears post_backward before it, and pre_backward again behind it.
- The hooks' own operations fire nothing. Nor does other code that a backward pass runs, as a hook on a gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.tensor.operation import ParamHook, Use, busy, is_busy, suspended, tensors_in, whole_of
from shardconv.tensor.parameters import is_sharded

#: Methods and functions that look at no values, or that set something beside them.
_SILENT = frozenset({
    "__get__", "__set__", "__delete__", "__len__", "__repr__", "__format__", "__dir__", "__hash__", "__reduce_ex__",
    "__deepcopy__", "__setstate__", "dim", "ndimension", "size", "stride", "numel", "nelement", "storage_offset",
    "element_size", "dim_order", "get_device", "data_ptr", "storage", "untyped_storage", "is_contiguous", "is_complex",
    "is_floating_point", "is_signed", "is_conj", "is_neg", "is_inference", "is_pinned", "is_shared", "is_same_size",
    "is_set_to", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
    "share_memory_",
})  # fmt: skip

#: What runs a backward pass, with parameters as what gradients are asked for.
_PASSES = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@contextmanager
def use_param_hooks(*hooks: ParamHook) -> Iterator[None]:
    """Call hooks around all operations that touch sharded parameters, and no other hooks; see this module's docstring.

    Nests: inside, only these are called; behind it the outer ones again. Without arguments none are called.

    Args:
        hooks: called in this order in each phase.

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
    _teach_checkpoint()
    with _HookMode(hooks):
        yield


class _HookMode(TorchFunctionMode):
    """Sees the calls. The innermost one handles a call; those around it then find the thread busy."""

    def __init__(self, hooks: tuple[ParamHook, ...]) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_busy() or getattr(func, "__name__", "") in _SILENT or func in _PASSES:
            return func(*args, **kwargs)
        with busy():
            params = [found for value in tensors_in((args, kwargs)) if (found := _sharded_parameter(value)) is not None]
            if not params or not self.hooks:
                return func(*args, **kwargs)
            return Use(self.hooks, params).run(func, args, kwargs)


def _sharded_parameter(value: Tensor) -> nn.Parameter | None:
    """The sharded parameter that a tensor is, or is a view of."""
    whole = whole_of(value)
    if not isinstance(whole, nn.Parameter):
        return None
    return whole if is_sharded(whole) else None


def _active_hooks() -> tuple[ParamHook, ...]:
    # torch has no public name for its stack of modes; its own checkpoint looks for the device's mode in the same way
    modes = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001
    return next((mode.hooks for mode in reversed(modes) if isinstance(mode, _HookMode)), ())


def _with_active_hooks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under the hooks that are active now, whenever it is called."""
    hooks = _active_hooks()

    def run(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            if _active_hooks() == hooks:
                return function(*args, **kwargs)
            with _HookMode(hooks):
                return function(*args, **kwargs)

    return run


@cache
def _teach_checkpoint() -> None:
    """Make torch's checkpoint recompute under the hooks of the first pass; once in a process, at the first hooks.

    It restores autocast, the device and random numbers, but no mode, and cannot be told of one: ``context_fn`` is for
    its caller, who is most often a model, and for one of its two ways only. So what either will run again is wrapped.
    """
    torch_s: Any = torch.utils.checkpoint
    first_pass, prepare = torch_s.CheckpointFunction.forward, torch_s._checkpoint_without_reentrant_generator  # noqa: SLF001

    @wraps(first_pass)
    def first_pass_with_hooks(ctx: Any, function: Any, *args: Any) -> Any:
        return first_pass(ctx, _with_active_hooks(function), *args)

    @wraps(prepare)
    def prepare_with_hooks(function: Any, *args: Any, **kwargs: Any) -> Any:
        return prepare(_with_active_hooks(function), *args, **kwargs)

    torch_s.CheckpointFunction.forward = staticmethod(first_pass_with_hooks)
    torch_s._checkpoint_without_reentrant_generator = prepare_with_hooks  # noqa: SLF001

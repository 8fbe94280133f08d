"""Hooks around every operation that uses sharded parameters, in the forward and backward pass.

    pre_forward(params) -> operation -> post_forward(params)
    ... in each backward pass ...  pre_backward(params) -> backward of the operation -> post_backward(params)

Built on :class:`torch.overrides.TorchFunctionMode`, which intercepts calls of torch's functions and methods;
:mod:`shardconv.tensor.operation` runs the phases of one operation.

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
  first pass. Backward phases run once: for the recomputed operations with ``use_reentrant=True``, for those of the
  first pass with False. A recomputation that stops early still calls post_forward. If a recomputation starts during
  the backward of an operation, that operation gets post_backward before it, and pre_backward again after it.
- Operations inside hooks do not call hooks. Neither does other code that runs in a backward pass, such as a hook on a
  gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.tensor.operation import (
    Arguments,
    Options,
    ParamHook,
    Use,
    base_of,
    hooks_disabled,
    hooks_enabled,
    interrupted_backward,
    tensors_in,
)
from shardconv.tensor.sharded import is_sharded

_P = ParamSpec("_P")
_T = TypeVar("_T")

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
        if not hooks_enabled() or getattr(func, "__name__", "") in _IGNORED or func in _BACKWARD_FUNCTIONS:
            return func(*args, **kwargs)
        with hooks_disabled():
            params = [param for value in tensors_in((args, kwargs)) if (param := _sharded_parameter(value)) is not None]
            if not params or not self.hooks:
                return func(*args, **kwargs)
            return Use(self.hooks, params).run(func, args, kwargs)


def _sharded_parameter(value: Tensor) -> nn.Parameter | None:
    """Return the sharded parameter that a tensor is, or is a view of."""
    base = base_of(value)
    if not isinstance(base, nn.Parameter):
        return None
    return base if is_sharded(base) else None


def _active_hooks() -> tuple[ParamHook, ...]:
    # torch does not export its stack of modes; its own checkpoint finds the device mode in the same way
    modes = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001
    return next((mode.hooks for mode in reversed(modes) if isinstance(mode, _HookMode)), ())


def _with_active_hooks(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Bind a function to the currently active hooks."""
    hooks = _active_hooks()

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with interrupted_backward():
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

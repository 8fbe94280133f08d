"""Modules of the caller: build one on the meta device, convert it, and load tensors into it.

Owns the values of buffers that are not stored, which the constructor of the module computes.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardconv.support.errors import RunError, UsageError


def check_builder(model: object) -> None:
    """Check that ``model`` is a function that builds a module, such as its class.

    Raises:
        UsageError: if it is a module, or cannot be called.
    """
    kind = type(model).__name__
    if isinstance(model, nn.Module):
        raise UsageError(
            f"model is an instance of {kind} (expected its class, or a function that builds it): pass model={kind}, or "
            f"model=lambda: {kind}(...) with its arguments"
        )
    if not callable(model):
        raise UsageError(f"model is {model!r:.60} (expected a class of modules, or a function that builds one)")


def build_by_caller(
    make: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build, convert and fill the caller's module.

    Args:
        make: builds the module.
        convert: converts it in place, and returns it.
        tensors: the stored tensors, by name.
        dtype: dtype of floating-point values; None as they are stored.

    Raises:
        RunError: if a parameter or buffer does not have values.
    """
    with torch.device("meta"):
        model = convert(make())
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return fill(model, make, tensors)


def fill(model: nn.Module, make: Callable[[], nn.Module], tensors: dict[str, Tensor]) -> nn.Module:
    """Fill a converted module on the meta device.

    Args:
        model: the module.
        make: builds the module before its conversion.
        tensors: the stored tensors, by name.

    Raises:
        RunError: if a parameter or buffer does not have values.
    """
    model.load_state_dict(tensors, assign=True)
    if any(one.tensor.is_meta for one in _computed(model)):
        _fill_computed(model, make)
    values = (*model.named_parameters(), *((one.name, one.tensor) for one in _computed(model)))
    if missing := [name for name, tensor in values if tensor.is_meta]:
        raise RunError(
            f"{', '.join(missing[:3])}: is not in any file, and __init__ does not compute the same values each time: "
            f"compute it from constants, or save it with the checkpoint"
        )
    return model


def _fill_computed(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Replace tensors on the meta device that are not stored: build their modules on the CPU, and use their tensors.

    A value that depends on the state of a random generator stays on the meta device: the checkpoint had another one.
    """
    first, second = ({one.name: one.tensor for one in _computed(_build_on_cpu(make, seed))} for seed in (0, 1))
    for name, holder, key, tensor in list(_computed(model)):
        value, other = first.get(name), second.get(name)
        if not tensor.is_meta or value is None or other is None or value.is_meta or value.shape != tensor.shape:
            continue
        if torch.equal(value, other):
            holder[key] = value


def _build_on_cpu(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module on the CPU, of which each parameter is moved to the meta device as soon as it is assigned."""
    thread = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:  # torch calls it in all threads
            return None  # it stays as it is
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type] # torch: None only
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            return make()
    finally:
        hook.remove()


class _Computed(NamedTuple):
    """A tensor that a constructor computes.

    Attributes:
        name: its name in the model.
        holder: the buffers, attributes or list that hold it.
        key: where it is in them.
        tensor: the tensor.
    """

    name: str
    holder: Any
    key: Any
    tensor: Tensor


def _computed(model: nn.Module) -> Iterator[_Computed]:
    """Each buffer, and each other tensor that is not a parameter, also in a list, of all modules."""
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        for holder in (module._buffers, vars(module)):  # noqa: SLF001 - buffers of torch
            for key, value in holder.items():
                listed = [(value, at, one) for at, one in enumerate(value)] if isinstance(value, list) else []
                for where, at, one in [(holder, key, value), *listed]:
                    if isinstance(one, Tensor) and not isinstance(one, nn.Parameter):
                        yield _Computed(f"{start}{key}" if where is holder else f"{start}{key}.{at}", where, at, one)

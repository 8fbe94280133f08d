"""Modules of the caller: build one on the meta device, convert it, and load tensors into it.

Owns the values of buffers that are not stored, which the constructor of the module computes.
"""

import threading
from collections.abc import Callable, Iterator

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
    model.load_state_dict(tensors, assign=True)
    if any(tensor.is_meta for _, _, tensor in _computed(model)):
        _fill(model, make)
    values = (*model.named_parameters(), *((name, tensor) for name, _, tensor in _computed(model)))
    if missing := [name for name, tensor in values if tensor.is_meta]:
        raise RunError(
            f"{', '.join(missing[:3])}: is not in any file, and __init__ does not compute the same values each time: "
            f"compute it from constants, or save it with the checkpoint"
        )
    return model


def _fill(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Replace tensors on the meta device that are not stored: build their modules on the CPU, and use their tensors.

    A value that depends on the state of a random generator stays on the meta device: the checkpoint had another one.
    """
    first, second = ({name: tensor for name, _, tensor in _computed(_build_on_cpu(make, seed))} for seed in (0, 1))
    modules = dict(model.named_modules())
    for name, key, tensor in list(_computed(model)):
        value, other = first.get(name), second.get(name)
        if not tensor.is_meta or value is None or other is None or value.is_meta or value.shape != tensor.shape:
            continue
        if torch.equal(value, other):
            setattr(modules[name.removesuffix(key).removesuffix(".")], key, value)


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


def _computed(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Name, attribute and value of each buffer, and of each other tensor that is not a parameter, of all modules."""
    for path, module in model.named_modules():
        own = {**dict(module.named_buffers(recurse=False, remove_duplicate=False)), **vars(module)}
        for key, value in own.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield (f"{path}.{key}" if path else key), key, value

"""A disguised CPU: CPU tensors that pass for tensors of an accelerator, for tests on machines without one.

Every operation runs at once on the CPU tensors inside. So it shows where devices are mixed, which device values and
random numbers come from, and what is copied; but not what depends on streams. Collectives run by gloo. Sparse tensors,
autocast and torch.compile are not supported. Some errors in a backward pass end the process: torch aborts where an
exception leaves a Python device guard. So checkpointing recomputes whole functions.

The first call of :func:`disguised` registers the device for the rest of the process: call it on ranks or in a new
process.
"""

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
import torch._dynamo  # operators of the device that torch calls import it, too late
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey, _DisableTorchDispatch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import set_checkpoint_early_stop

NAME = "disguised"
#: Whether the checks of all tests run on an accelerator.
IS_USED = bool(os.environ.get("TEST_DEVICES"))
DEVICE = torch.device("privateuseone", 0)  # its name is "disguised" when it is registered
#: The accelerator of this machine; without one, the disguised CPU. Found before that one is registered.
ACCELERATOR = str(torch.accelerator.current_accelerator(check_available=True) or NAME)
#: Operators whose indices, the second argument, may be on the CPU, as on CUDA.
_INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
#: Operators that copy values between devices, or return them to Python.
_COPYING = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::equal"}
#: Operators that gloo has for CPU tensors only.
_OF_CPU = {"c10d::send", "c10d::recv_"}


#: Functions that make a tensor of a list, which may contain tensors.
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray}
_INDEXERS = {Tensor.__getitem__, Tensor.__setitem__}


class DeviceTensor(Tensor):
    """A tensor of the device."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Self:
        """Make a tensor of the device of values on the CPU."""
        values = values.resolve_conj().resolve_neg()  # autograd asks this tensor whether it is conjugated
        layout = (values.shape, values.stride(), values.storage_offset())
        made = Tensor._make_wrapper_subclass(cls, *layout, dtype=values.dtype, device=DEVICE)
        made.values = values
        return made

    def __repr__(self) -> str:
        """Show the values."""
        return f"DeviceTensor({self.values!r})"

    def __format__(self, spec: str) -> str:
        """Show a number as one."""
        return format(self.cpu(), spec)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called outside of disguised()")


class DeviceModule:
    """The module that ``torch.get_device_module`` returns for the device."""

    generator = torch.Generator()

    _initialized = True
    device = staticmethod(nullcontext)
    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = synchronize = staticmethod(lambda _=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    mem_get_info = staticmethod(lambda _=None: (1 << 30, 1 << 30))
    max_memory_allocated = staticmethod(lambda _=None: 12345)

    @classmethod
    def get_rng_state(cls, _: Any = None) -> Tensor:
        return cls.generator.get_state()

    @classmethod
    def set_rng_state(cls, state: Tensor, _: Any = None) -> None:
        cls.generator.set_state(state)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        cls.generator.manual_seed(seed + 1)  # other numbers than those of the CPU, as on other devices


class DeviceGenerator(torch.Generator):
    """In place of ``torch.Generator``, which is a generator of the CPU for this device, too."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """Make a generator of a device."""
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class _Functions(TorchFunctionMode):
    """Assigns values of the device to ``tensor.data``, which does not reach an operator; no memory is pinned."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "pin_memory" in kwargs:
            assert kwargs["device"] == "cpu", "only memory of the CPU can be pinned"
            kwargs = {**kwargs, "pin_memory": False}
        if func == Tensor.data.__set__ and isinstance(args[1], DeviceTensor):
            return self._set_data(*args)
        if func is Tensor.tolist:
            args = (args[0].cpu(),)
        if func in _MAKERS and isinstance(args[0], list | tuple):  # they read numbers without operators
            args = tree_map_only(DeviceTensor, lambda each: each.cpu().tolist(), args)
        if func in _INDEXERS and isinstance(args[1], tuple):  # so do they, with sequences among the indices
            args = (args[0], tuple(map(self._index, args[1])), *args[2:])
        return func(*args, **kwargs)

    @staticmethod
    def _index(index: Any) -> Any:
        """An index whose numbers are on the CPU if it is a sequence."""
        if isinstance(index, list | tuple):
            return tree_map_only(DeviceTensor, lambda each: each.cpu().tolist(), index)
        return index

    @staticmethod
    def _set_data(tensor: Tensor, made: DeviceTensor) -> None:
        if isinstance(tensor, DeviceTensor):
            Tensor.data.__set__(tensor, made)
            tensor.values = made.values
        else:  # it has to become a tensor of another class
            made = DeviceTensor(made.values).requires_grad_(tensor.requires_grad)
            attributes = {**vars(tensor), **vars(made), "_is_param": isinstance(tensor, nn.Parameter)}
            torch._C._swap_tensor_impl(tensor, made)
            tensor.__class__ = DeviceTensor
            vars(tensor).update(attributes)


class Operators(TorchDispatchMode):
    """Runs operators of the device on the CPU.

    Attributes:
        copies: number of copies to and from the device, and of values that Python reads from it, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    @staticmethod
    def _check(name: str, args: Any, own: Collection[int], others: Iterable[Tensor]) -> None:
        """Check the tensors of an operator: those of the device, by the ids of their values, and the others."""
        if own and name in _OF_CPU:
            raise RuntimeError(f"{name} gets tensors of {NAME}, which gloo does not send from rank to rank")
        free = {id(each) for each in (tree_leaves(args[1]) if name in _INDEXING else [])}
        if own and name != "aten::copy_" and any(each.dim() and id(each) not in free for each in others):
            raise RuntimeError(f"{name} gets tensors of the CPU and of {NAME}")

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        own = {id(each.values): each for each in given if isinstance(each, DeviceTensor)}
        others = [each for each in given if not isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        to_device = bool(own) if target is None else torch.device(target).type == NAME
        if not own and not to_device:
            return func(*args, **kwargs)
        self._check(func.name(), args, own, others)
        if func.namespace == "shardconv":  # operators of the package are not kernels of the device
            with self:
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if func.name() == "aten::_fused_sdp_choice":
            return 0  # attention in terms of other operators: the device does not have a kernel for it
        if func.name() in _COPYING and (others or not to_device):
            self.copies[func.name()] += 1
        inner = tree_map_only(DeviceTensor, lambda each: each.values, (args, kwargs))
        if target is not None and to_device:
            inner[1]["device"] = "cpu"
        if func.name() == "aten::histc":  # models count integers on other devices than CPUs
            inner = tree_map_only(Tensor, Tensor.float, inner)
        with _device_seeds(is_used=torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None):
            result = func(*inner[0], **inner[1])
        if torch.Tag.inplace_view in func.tags:
            with _DisableTorchDispatch():
                func(*args, **kwargs)
        if not to_device:
            return result
        return tree_map_only(Tensor, lambda each: own[id(each)] if id(each) in own else DeviceTensor(each), result)


@contextmanager
def _device_seeds(*, is_used: bool) -> Iterator[None]:
    """Draw random numbers from the generator of the device."""
    if not is_used:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(DeviceModule.get_rng_state())
    yield
    DeviceModule.set_rng_state(torch.get_rng_state())
    torch.set_rng_state(before)


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    dist.Backend.backend_capability["gloo"].append(NAME)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.Generator = DeviceGenerator


@contextmanager
def disguised() -> Iterator[Operators]:
    """Have the device; operators of its tensors run inside only."""
    _register()
    with set_checkpoint_early_stop(False), _Functions(), Operators() as operators:
        yield operators


class _DefaultDevice(TorchFunctionMode):
    """Makes it the default device, except in code of the package that does not pass a device on."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_default = func in _device_constructors() and kwargs.get("device") is None
        if not is_default or ("device" not in kwargs and _is_called_by_package()):
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        device = ACCELERATOR if generator is None else generator.device
        return func(*args, **{**kwargs, "device": device}).to(ACCELERATOR)


def _is_called_by_package() -> bool:
    """Whether the innermost caller that is neither torch nor this module is in the package."""
    frame: Any = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(("torch.", __name__)):
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("shardconv.")


@contextmanager
def on_device() -> Iterator[None]:
    """Make an accelerator the default device, if the environment says that tests run on one."""
    if not IS_USED:
        yield
        return
    with with_accelerator(), _DefaultDevice():
        yield


def with_accelerator() -> AbstractContextManager[object]:
    """A context in which the accelerator can be used: operators of a disguised CPU run inside only."""
    return disguised() if ACCELERATOR == NAME else nullcontext()

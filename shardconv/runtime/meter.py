"""What a forward pass sends and holds, counted while it runs: collectives, and bytes that are alive at once.

Owns the two meters. They stand on what torch offers for it, a process group written in Python and a mode that sees each
operation, so what is counted is what runs. Knows nothing of models, and nothing of what a byte costs.
"""

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # which torch documents, and has under no other name
from torch.utils.weak import WeakIdKeyDictionary

from shardconv.distributed import Axis


class Call(NamedTuple):
    """One collective.

    Attributes:
        collective: a key of :data:`shardconv.tensor.cost.ROUNDS`.
        num_bytes: of the largest tensor that a rank holds before or after.
        in_layer: whether a layer of the model called it, and not what stands before or behind the layers.
    """

    collective: str
    num_bytes: int
    in_layer: bool


class CountingGroup(dist.ProcessGroup):
    """A process group without other processes, which counts collectives instead of doing them.

    Stands on :class:`torch.distributed.ProcessGroup`, which Python can derive from: the functions of
    ``torch.distributed`` call its methods with the tensors that they would send. ``torch.distributed`` is not started.
    On the meta device there are no values that could be missing.

    Args:
        ranks: how many there would be; this is the first.

    Attributes:
        calls: what was called so far.
        in_layer: what is noted of the next call.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg] # torch's types lack this way to make one
        self.calls: list[Call] = []
        self.in_layer = False

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:  # type: ignore[override] # there is nothing to wait for
        """Count; where all ranks hold the same, the largest is what this one has."""
        if any(not tensor.is_meta for tensor in tensors) and opts.reduceOp != dist.ReduceOp.MAX:
            raise RuntimeError("there are no other ranks, whose values could be summed")
        for tensor in tensors:
            self._count("all_reduce", tensor)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> None:  # type: ignore[override] # noqa: ARG002
        """Count; what the other ranks would give stays as it is."""
        self._count("all_gather", output)

    def _count(self, collective: str, tensor: Tensor) -> None:
        self.calls.append(Call(collective, tensor.nbytes, self.in_layer))


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is a collective that is not counted")

    return refuse


for _name in dir(dist.ProcessGroup):  # torch's own would do nothing on the meta device, without a word
    if re.match("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)", _name) and _name not in vars(
        CountingGroup
    ):
        setattr(CountingGroup, _name, _refused(_name))


class CountedAxis(Axis):
    """The tensor axis as the first of ranks sees it that are not there."""

    @classmethod
    def of(cls, group: CountingGroup) -> "CountedAxis":
        """The axis over a group."""
        return cls("tensor", 0, group.size(), tuple(range(group.size())), group)

    @property
    def message_device(self) -> torch.device:
        """The CPU; a group that torch does not know has no backend to ask."""
        return torch.device("cpu")


_aten = torch.ops.aten
#: Operations whose result is one tensor, with memory of its own, and which layers call most.
_NEW_TENSOR = {
    _aten.add.Tensor, _aten.cat.default, _aten.mean.dim, _aten.mm.default, _aten.mul.Tensor, _aten.neg.default,
    _aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.silu.default,
}  # fmt: skip


def _described(value: Any) -> Any:
    """All of an argument that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operations make and that are alive at once; also on the meta device.

    A storage counts once, from the operation that makes it until nothing refers to it any more. What an operation uses
    inside and gives back before it ends is not seen, and an allocator's rounding neither.

    Args:
        given: tensors that were there before, which do not count; nor do views of them.

    Attributes:
        now: bytes that are alive.
        peak: the most that were.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()
        self._results: dict[Any, Any] = {}
        self._given = [tensor.untyped_storage() for tensor in given]
        for storage in self._given:
            self._seen[storage] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do the operation, and count what it made."""
        result = self._made(func, args, kwargs or {})
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return result

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation makes.

        On the meta device torch needs up to half a millisecond to find it out, in Python. What it found for the same
        shapes before is made again in a fraction of that, so that many layers take little time.
        """
        if func not in _NEW_TENSOR:
            return func(*args, **kwargs)
        key = (func, _described(args), _described(tuple(kwargs.items())))
        if key not in self._results:
            result = func(*args, **kwargs)
            if not result.is_meta:
                return result
            self._results[key] = tuple(result.shape), result.stride(), result.dtype
        size, stride, dtype = self._results[key]
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size).atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


def held_tensors(value: Any) -> list[Tensor]:
    """The tensors that an object holds, at any depth; each once.

    Args:
        value: as a cache of keys and values, whatever its class.
    """
    found: dict[int, Tensor] = {}
    looked_at: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        one = ahead.pop()
        if id(one) in looked_at:
            continue
        looked_at[id(one)] = one
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, (list, tuple)):
            ahead += one
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            ahead += vars(one).values()
    return list(found.values())

"""Meters of a forward pass of one rank: a process group that counts collectives, and a mode that counts live bytes."""

import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from typing import NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented, and not available under a public name
from torch.utils.weak import WeakIdKeyDictionary

from shardconv.distributed import Axis


class Call(NamedTuple):
    """One collective, or a message to the next pipeline stage.

    Attributes:
        collective: a key of :data:`shardconv.tensor.cost.ROUNDS`, or ``send``.
        num_bytes: bytes of the larger one of input and output.
        in_layer: whether a layer of the decoder called it, rather than a module before or after the layers.
        stage: the pipeline stage that calls it.
    """

    collective: str
    num_bytes: int
    in_layer: bool
    stage: int = 0


class CountingGroup(dist.ProcessGroup):
    """A process group without other processes, which counts collectives instead of running them.

    The functions of ``torch.distributed``, which need not be initialized, call its methods with the tensors that they
    would send. Results are correct on the meta device only, where tensors do not have values.

    Args:
        ranks: the number of ranks; this process is the first.

    Attributes:
        calls: the collectives so far.
        in_layer: ``in_layer`` of the next calls.
        stage: ``stage`` of the next calls.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg] # torch's stub lacks this signature
        self.calls: list[Call] = []
        self.in_layer, self.stage = False, 0

    def count(self, collective: str, tensor: Tensor) -> None:
        """Count a collective; ``tensor`` is the larger one of its input and output."""
        self.calls.append(Call(collective, tensor.nbytes, self.in_layer, self.stage))

    # The overrides have the one signature that torch.distributed calls. They return None: there is nothing to wait for.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Count an all-reduce; of tensors with values only the maximum, which over equal ranks is the value itself."""
        if any(not tensor.is_meta for tensor in tensors) and opts.reduceOp != dist.ReduceOp(dist.ReduceOp.MAX):
            raise RuntimeError("values cannot be summed over ranks that do not exist: use the meta device")
        for tensor in tensors:
            self.count("all_reduce", tensor)

    def all_gather_single(self, output: Tensor, *_: object) -> None:  # type: ignore[override]
        """Count an all-gather; leave the output as it is."""
        self.count("all_gather", output)

    # what torch.distributed calls before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a collective that is not counted")

    return refuse


_COLLECTIVE = re.compile("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)")
for _name in dir(dist.ProcessGroup):  # torch's own methods would silently do nothing on the meta device
    if _COLLECTIVE.match(_name) and _name not in vars(CountingGroup):
        setattr(CountingGroup, _name, _refused(_name))


class CountedAxis(Axis):
    """The tensor axis of the first rank of a :class:`CountingGroup`."""

    @classmethod
    def of(cls, group: CountingGroup) -> Self:
        """Return the axis of a group."""
        return cls("tensor", 0, group.size(), tuple(range(group.size())), group)

    @property
    def message_device(self) -> torch.device:
        """The CPU; the group does not have a backend, as it is not registered with torch.distributed."""
        return torch.device("cpu")


_aten = torch.ops.aten
#: Operations whose shapes are reused: layers call these most, and the result is one tensor that is not a view.
REUSED = {
    _aten.add.Tensor, _aten.cat.default, _aten.mean.dim, _aten.mm.default, _aten.mul.Tensor, _aten.neg.default,
    _aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.silu.default,
}  # fmt: skip


def _shape_key(value: object) -> Hashable:
    """Convert an argument to a key of everything in it that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_shape_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class LiveBytes(TorchDispatchMode):
    """A mode that counts the bytes of all live tensors that operations return, also on the meta device.

    A storage counts once, from the operation that allocates it until it is freed. Temporary memory inside of operations
    and rounding by the allocator are not counted.

    Args:
        given: tensors that do not count, nor do views of them.

    Attributes:
        now: bytes of live tensors.
        peak: the maximum of ``now`` so far.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: MutableMapping[torch.UntypedStorage, None] = WeakIdKeyDictionary()
        self._results: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._given = [tensor.untyped_storage() for tensor in given]
        for storage in self._given:
            self._seen[storage] = None

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation, and count its results."""
        result = self._run(func, args, kwargs or {})
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                self._count(output.untyped_storage())
        return result

    def _run(self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run an operation; on the meta device, reuse the shape of its result from an earlier call.

        On the meta device torch computes shapes in Python, in up to half a millisecond per operation. Reuse takes a
        fraction of that, as all layers have the same shapes.
        """
        if func not in REUSED:
            return func(*args, **kwargs)
        key = (func, _shape_key(args), _shape_key(tuple(kwargs.items())))
        if key not in self._results:
            result = func(*args, **kwargs)
            if not (isinstance(result, Tensor) and result.is_meta):
                return result
            self._results[key] = tuple(result.shape), result.stride(), result.dtype
        size, stride, dtype = self._results[key]
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, until it is freed."""
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size).atexit = False
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


def held_tensors(value: object) -> list[Tensor]:
    """Find the tensors that an object refers to, through attributes, lists, tuples and values of dicts; each once.

    Args:
        value: an object of any class, such as a KV cache.
    """
    found: dict[int, Tensor] = {}
    visited: dict[int, object] = {}  # keeps objects alive, so that no other gets their id
    pending = [value]
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited[id(current)] = current
        if isinstance(current, Tensor):
            found[id(current)] = current
        elif isinstance(current, dict):
            pending += current.values()
        elif isinstance(current, (list, tuple)):
            pending += current
        elif hasattr(current, "__dict__") and not isinstance(current, type):
            pending += vars(current).values()
    return list(found.values())

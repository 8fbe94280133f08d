"""Bytes of the tensors of a forward pass: of live results of operations, and of tensors that an object holds."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented, and not available under a public name
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
#: Operations whose shapes are reused: those that layers call most and whose result is one tensor that is not a view.
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

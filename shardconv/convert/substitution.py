"""Substitution of tensors while a module runs, such as of a full tensor for a shard.

Owns how a forward that was written for full tensors reads a gathered parameter. ``nn.Module`` looks parameters and
buffers up in ``__getattr__``, and so does :class:`Substitutable`, which first looks in the substitution of the calling
thread. Nothing is written to the module, so that

- other threads, and hooks that run outside the substitution, find the module's own parameter,
- ``state_dict()``, ``named_parameters()`` and optimizers always have the module's own parameters, under their names,
- ``torch.compile(fullgraph=True)`` traces it: Dynamo supports attributes of ``threading.local``.

``torch.nn.utils.parametrize`` renames the parameters in the state dict, does not pickle, and gathers at each access,
also where one rank reads ``weight.dtype``; all threads share its cache. ``torch.func.functional_call`` writes to the
module while it runs, which other threads and ``state_dict()`` see.

Dynamo has no guards on attributes of ``threading.local``. Compiled code must therefore not depend on a substitution
that was made outside of it: the forward of a module whose parameters are substituted makes a substitution of its own,
or removes that of others (:class:`OwnForward`).

Threads that run over the same ranks have to call collectives in the same order on all of them: run one pass at a time,
or give each thread's model a process group of its own.
"""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from shardconv.plan.placement import Placement

#: The tensor for each module and name of a parameter or buffer of it.
Substitution = Mapping[tuple[nn.Module, str], Tensor]


class _OfThread(threading.local):
    """The substitution of a thread; a new thread has none."""

    tensors: Substitution = MappingProxyType({})


_current = _OfThread()


class Substitutable(nn.Module):
    """A module whose parameters and buffers can be substituted.

    Attributes:
        slices: the placements of parameters and buffers of which its forward reads the slice of the rank.
    """

    slices: Mapping[str, Placement] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        """The substituted tensor, else the module's own parameter, buffer or child."""
        found = _current.tensors.get((self, name))
        return super().__getattr__(name) if found is None else found


class Substituted:
    """A context in which tensors are substituted for the code of this thread, in addition to earlier substitutions.

    Args:
        tensors: the tensors; their modules are :class:`Substitutable`.
        without: a module whose earlier substitutions are suspended.
    """

    def __init__(self, tensors: Substitution, without: nn.Module | None = None) -> None:
        self._tensors, self._without = tensors, without

    def __enter__(self) -> None:
        """Substitute."""
        self._before = _current.tensors
        kept = {key: tensor for key, tensor in self._before.items() if key[0] is not self._without}
        _current.tensors = {**kept, **self._tensors}

    def __exit__(self, *_: object) -> None:
        """Restore the earlier substitutions."""
        _current.tensors = self._before


class OwnForward(Substitutable):
    """A parallel layer that computes with its shards also while other modules read its full tensors."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the layer's own."""
        with Substituted({}, without=self):
            return super().forward(*inputs, **options)

"""Substitution of attributes of a module while it runs, such as of a full tensor for a shard.

Owns how a forward that was written for full tensors reads a gathered parameter. ``nn.Module`` looks parameters, buffers
and children up in ``__getattr__``, and so does :class:`Substitutable`, which first looks in the substitution of the
calling thread. Nothing is written to the module, so that

- other threads, and hooks that run outside the substitution, find the module's own attributes,
- ``state_dict()``, ``named_parameters()`` and optimizers always have the module's own parameters, under their names,
- ``torch.compile(fullgraph=True)`` traces it: Dynamo supports attributes of ``threading.local``.

``torch.nn.utils.parametrize`` renames the parameters in the state dict, does not pickle, and gathers at each access,
also where one rank reads ``weight.dtype``; all threads share its cache. ``torch.func.functional_call`` writes to the
module while it runs, which other threads and ``state_dict()`` see.

Dynamo does not guard attributes of ``threading.local``. Compiled code must therefore not depend on a substitution
that was made outside of it: the forward of a module whose parameters are substituted makes a substitution of its own,
or removes that of others (:class:`ForwardWithShards`).

Threads that run over the same ranks have to call collectives in the same order on all of them: run one pass at a time,
or give each thread's model a process group of its own.
"""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from shardconv.plan.placement import Placement

#: The value for each module and name of an attribute of it.
Substitution = Mapping[tuple[nn.Module, str], object]


class _ThreadState(threading.local):
    """The substitution of a thread; a new thread has none."""

    values: Substitution = MappingProxyType({})


current_substitution = _ThreadState()


class Substitutable(nn.Module):
    """A module whose parameters, buffers and children can be substituted.

    Attributes:
        slices: the placements of parameters and buffers of which its forward reads the slice of the rank.
    """

    slices: Mapping[str, Placement] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:  # any attribute, as of nn.Module
        """Return the substitute, else the module's own parameter, buffer or child."""
        found = current_substitution.values.get((self, name))
        return super().__getattr__(name) if found is None else found


class Substituted:
    """A context in which attributes are substituted for the code of this thread, in addition to earlier substitutions.

    Args:
        values: the substitutes; their modules are :class:`Substitutable`.
        without: a module whose earlier substitutions are suspended.
    """

    def __init__(self, values: Substitution, without: nn.Module | None = None) -> None:
        self._values, self._without = values, without

    def __enter__(self) -> None:
        """Add the substitutes to those of the thread."""
        self._before = current_substitution.values
        kept = {key: value for key, value in self._before.items() if key[0] is not self._without}
        current_substitution.values = {**kept, **self._values}

    def __exit__(self, *_: object) -> None:
        """Restore the earlier substitutions."""
        current_substitution.values = self._before


class ForwardWithShards(Substitutable):
    """A parallel layer that computes with its shards also while other modules read its full tensors."""

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the layer's own forward, without substitutions of others."""
        with Substituted({}, without=self):
            return super().forward(*inputs, **options)

"""Agreement between ranks: steps that fail on all together, a value of one rank for all, and facts that must be equal.

Each is one exchange. A rank that has failed takes part, too, so that the others do not wait for it.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from socket import gethostname
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
import xxhash

from shardconv.distributed.groups import Axis
from shardconv.distributed.operations import reduce_from_tp
from shardconv.files.checksums import checksum
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath
from shardconv.support.errors import PeerError, RunError, ShardconvError
from shardconv.support.formatting import ranges

T = TypeVar("T")
#: The most hosts or paths of a group that a message names.
_MAX_NAMED = 3
_NO_TEXTS: Mapping[str, str] = MappingProxyType({})


def gather(value: T, axis: Axis | None = None) -> list[T]:
    """Return the values of all ranks of an axis, or of all processes. All of them call it."""
    if axis.size == 1 if axis is not None else not dist.is_initialized():
        return [value]
    values = [value] * (dist.get_world_size() if axis is None else axis.size)
    dist.all_gather_object(values, value, group=None if axis is None else axis.group)
    return values


def is_first_rank() -> bool:
    """Whether this is the first rank, also before torch.distributed is initialized."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


# --- steps ------------------------------------------------------------------------------------------------------------


def attempt(step: Callable[[], T]) -> tuple[list[T], ShardconvError | None]:
    """Run a step; return its result in a list, which is empty if it fails, and the error.

    Errors of other libraries become a :class:`RunError` with the type of the error.
    """
    try:
        return [step()], None
    except ShardconvError as error:
        return [], error
    except Exception as error:  # noqa: BLE001 - reported whatever it is: by other ranks, or beside other results
        problem = RunError(f"{type(error).__name__}: {str(error).strip() or 'no message'}")
        problem.__cause__ = error
        return [], problem


def run_on_all(axis: Axis, step: Callable[[], T]) -> T:
    """Run a step on all ranks. If it fails on any rank, all ranks raise.

    Raises:
        PeerError: if it fails on other ranks only, with the error of the first of them.
        ShardconvError: the error of this rank.
    """
    results, problem = attempt(step)
    messages = gather(None if problem is None else problem.message, axis)
    if problem is not None:
        problem.is_repeated = messages[axis.rank] in messages[: axis.rank]
        raise problem
    for rank, message in enumerate(messages):
        if message is not None:
            raise PeerError(f"rank {rank}: {message}")
    return results[0]


def run_on_first(step: Callable[[], T], axis: Axis | None = None) -> T:
    """Run a step on the first rank of an axis, or of all processes, while the others wait; all return its result.

    Raises:
        PeerError: on the others, if it fails.
        ShardconvError: on the first, its error.
    """
    is_first = is_first_rank() if axis is None else axis.rank == 0
    results, problem = attempt(step) if is_first else ([], None)
    of_first, message = gather((results, None if problem is None else problem.message), axis)[0]
    if problem is not None:
        raise problem
    if message is not None:
        raise PeerError(message)
    return of_first[0]


# --- facts ------------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A checkpoint as one rank or process sees it.

    Attributes:
        digests: plural name of a fact to its checksum.
        texts: plural name to fact, for facts that a message shows.
        host: the name of the host.
        path: of the checkpoint.
    """

    digests: dict[str, str]
    texts: dict[str, str]
    host: str
    path: str

    @classmethod
    def here(cls, path: AnyPath, facts: Mapping[str, object], texts: Mapping[str, str] = _NO_TEXTS) -> Self:
        """The view of this process; JSON can represent the facts."""
        known = {**texts, **facts}.items()
        digests = {name: checksum(json.dumps(fact, sort_keys=True).encode()) for name, fact in known}
        return cls(digests, dict(texts), gethostname(), str(path))


def check_same(path: AnyPath, axis: Axis, facts: Mapping[str, object], texts: Mapping[str, str] = _NO_TEXTS) -> None:
    """Check that facts are the same on all ranks.

    Args:
        path: of the checkpoint, for the message.
        axis: the ranks.
        facts: plural name to fact, which JSON can represent. Only its checksum is compared.
        texts: plural name to fact, as the message shows it. Where these differ, ``facts`` may differ for that reason.

    Raises:
        RunError: on all ranks, if some are not.
    """
    views = gather(View.here(path, facts, texts), axis)
    error = difference(path, views, "rank", "make them the same on all ranks")
    if error is not None:
        error.is_repeated = axis.rank > 0
        raise error


def difference(path: AnyPath, views: Sequence[View], noun: str, remedy: str) -> RunError | None:
    """The error for facts that differ between the ranks or processes of some views; None if they are equal.

    Args:
        path: of the checkpoint.
        views: of all ranks or processes, in order.
        noun: "rank" or "process".
        remedy: for facts other than versions of remote files.
    """
    first = views[0]
    different = [name for name in first.digests if any(view.digests[name] != first.digests[name] for view in views)]
    different = [name for name in different if name in first.texts] or different
    if not different:
        return None
    if REMOTE_VERSIONS in different:
        remedy = "remote files changed meanwhile, or the URLs differ: start again with one URL"
    described = _described(views, different, noun)
    return RunError(f"{path}: {' and '.join(different)} differ between {_plural(noun)} ({described}): {remedy}")


def _described(views: Sequence[View], names: Collection[str], noun: str) -> str:
    """Describe which ranks or processes see the same files, with hosts and paths where these differ."""
    has_hosts, has_paths = len({view.host for view in views}) > 1, len({view.path for view in views}) > 1
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, view in enumerate(views):
        groups.setdefault(tuple(view.digests[name] for name in names), []).append(at)
    members = []
    for group in groups.values():
        hosts = f" on {_some(views[at].host for at in group)}" if has_hosts else ""
        paths = f" in {_some(views[at].path for at in group)}" if has_paths else ""
        members.append(f"{_plural(noun) if len(group) > 1 else noun} {ranges(group)}{hosts}{paths}")
    texts = [views[group[0]].texts for group in groups.values()]
    if texts[0].keys() >= {*names}:
        seen = (", ".join(text[name] for name in names) for text in texts)
        return "; ".join(f"{member}: {text}" for member, text in zip(members, seen, strict=True))
    first, *others = members
    return f"{first} {'differs' if first.startswith(f'{noun} ') else 'differ'} from {' and from '.join(others)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _some(values: Iterable[str]) -> str:
    """Distinct names, the first ones if they are many."""
    distinct = list(dict.fromkeys(values))
    more = len(distinct) - _MAX_NAMED
    return ", ".join(distinct[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


# --- values of tensors ------------------------------------------------------------------------------------------------


def same_on_all_ranks(digests: list[int], axis: Axis) -> list[bool]:
    """Compare each number over the ranks: True where its maximum equals its minimum. All ranks call it."""
    values = torch.tensor([digests, [-digest for digest in digests]], device=axis.message_device)
    maxima = reduce_from_tp(values, op=dist.ReduceOp.MAX, group=axis)
    return [bool(same) for same in (maxima[0] == -maxima[1]).tolist()]


def digest(data: bytes | memoryview) -> int:
    """Return the hash of bytes as a positive int64, for :func:`same_on_all_ranks`."""
    return xxhash.xxh3_64_intdigest(data) >> 1

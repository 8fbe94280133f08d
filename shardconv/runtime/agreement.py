"""Steps that fail on all ranks together, and values that one rank sends to the others.

Owns how an error on one rank reaches the others, so that none of them waits for a rank that has failed.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from socket import gethostname
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from shardconv.checkpoint.split.views import View, describe_views, remedy
from shardconv.distributed import Axis, reduce_from_tp
from shardconv.distributed.agreement import digest, same_on_all_ranks
from shardconv.files.storage.table import shown
from shardconv.support.errors import PeerError, RunError, ShardconvError

T = TypeVar("T")


def attempt(step: Callable[[], T]) -> tuple[list[T], ShardconvError | None]:
    """Run a step; return its result in a list, which is empty if it fails, and the error.

    Errors other than those of shardconv become a :class:`RunError` with the type of the error.
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
    failed = torch.tensor(int(problem is not None), device=axis.message_device)
    if axis.size > 1 and reduce_from_tp(failed, group=axis):
        problems: list[str | None] = [None] * axis.size
        dist.all_gather_object(problems, None if problem is None else shown(problem.message), group=axis.group)
        for rank, text in enumerate(problems):
            if text is not None and problem is None:
                raise PeerError(f"rank {rank}: {text}")
        if problem is not None:
            problem.is_repeated = problems[axis.rank] in problems[: axis.rank]
    if problem is not None:
        raise problem
    return results[0]


def run_on_first(step: Callable[[], T]) -> T:
    """Run a step on the first rank while the others wait; all ranks return its result.

    Raises:
        RunError: on all ranks, if it fails.
    """
    results, problem = attempt(step) if is_first_rank() else ([], None)
    results, text = broadcast_from_first((results, None if problem is None else problem.message))
    if text is not None:
        error = RunError(text)
        error.is_repeated = not is_first_rank()
        raise error
    return results[0]


def check_same(
    path: Path, axis: Axis, facts: Mapping[str, object], named: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that facts are the same on all ranks.

    Args:
        path: of the checkpoint, for the message.
        axis: the ranks.
        facts: plural name to fact, which JSON can represent. Only its digest is compared.
        named: plural name to fact, as the message shows it. Where these differ, ``facts`` may differ for that reason.

    Raises:
        RunError: on all ranks, if some are not.
    """
    digests = {name: digest(json.dumps(fact, sort_keys=True).encode()) for name, fact in {**named, **facts}.items()}
    same = same_on_all_ranks(list(digests.values()), axis)
    if all(same):
        return
    different = [name for name, is_same in zip(digests, same, strict=True) if not is_same]
    different = [name for name in different if name in named] or different
    text = ", ".join(named[name] for name in different if name in named)
    own = View(str([digests[name] for name in different]), text, gethostname(), shown(path))
    views = [own] * axis.size
    dist.all_gather_object(views, own, group=axis.group)
    error = RunError(
        f"{path}: {' and '.join(different)} differ between ranks ({describe_views(views, 'rank')}): "
        f"{remedy(different, 'make them the same on all ranks')}"
    )
    error.is_repeated = axis.rank > 0
    raise error


def is_first_rank() -> bool:
    """Whether this is the first rank, also before torch.distributed is initialized."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def broadcast_from_first(value: T) -> T:
    """Return the first rank's value. All ranks call it."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def gather_from_all(value: T) -> list[T]:
    """Return the values of all ranks. All ranks call it."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

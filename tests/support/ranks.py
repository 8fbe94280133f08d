"""Processes under torch.distributed that many tests share.

A check is a function of a test module. It runs on several of them at once, each with the axis of its group: two pairs
of neighbors, two strided pairs, all four, or, for slow checks, one pair. A world of eight is separate.
"""

import importlib
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LAYOUTS = {
    "pair": ((2, 3),),
    "pairs": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
    "four": ((0, 1, 2, 3),),
    "eight": (tuple(range(8)),),
    "three": ((0, 1, 2),),
    "five": (tuple(range(5)),),
    "six": (tuple(range(6)),),
    "twelve": (tuple(range(12)),),
}
#: Modules that the processes have imported when they start: what most checks import. With torchvision only torch, as
#: tools/torchvision.py has to be imported before the others.
_IMPORTED = ["torch"] if find_spec("torchvision") else [
    "functorch.compile", "hypothesis", "pytest", "shardconv.checkpoint.operations.split", "shardconv.proof.compare",
    "shardconv.runtime.load", "shardconv.tensor", "torch._dynamo", "transformers.models.llama.modeling_llama",
]  # fmt: skip
KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PATIENCE, _NO_ANSWER = 150, "no answer"


class Ranks:
    """Processes that run checks."""

    def __init__(self, folder: Path, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._pipes = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, theirs, str(folder / "rendezvous")), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, layout: str, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a check on every rank of a layout; returns their results, or raises with the errors of failed ranks."""
        ranks = sorted(rank for group in LAYOUTS[layout] for rank in group)
        for rank in ranks:
            self._pipes[rank].send((layout, check.__module__, check.__qualname__, arguments))
        pipes = [self._pipes[rank] for rank in ranks]
        end = time.monotonic() + _PATIENCE
        results = [pipe.recv() if pipe.poll(max(end - time.monotonic(), 0)) else (False, _NO_ANSWER) for pipe in pipes]
        found = zip(ranks, results, strict=True)
        failures = [f"rank {rank}: {result}" for rank, (is_right, result) in found if is_right is False]
        if any(result == (False, _NO_ANSWER) for result in results):
            self.stop()
        if failures:
            raise AssertionError("\n".join(failures))
        for reason in [result for is_right, result in results if is_right is None]:
            pytest.skip(reason)
        return [result for _, result in results]

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def ranks_in(folder: Path, world: int = 4) -> Iterator[Callable[..., list[Any]]]:
    """A function like :meth:`Ranks.run` that starts processes on first use, and again after a failure."""
    current: list[Ranks] = []

    def run(*arguments: Any) -> list[Any]:
        if not current or not current[-1].is_alive:
            home = folder / str(len(current))
            home.mkdir()
            current.append(Ranks(home, world))
        return current[-1].run(*arguments)

    yield run
    for ranks in current:
        ranks.stop()


def on_ranks(layout: str = "", plan: str = "") -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a check, whose first parameter is the axis of a rank, and the others are those of the test.

    Args:
        layout: a key of :data:`LAYOUTS`; by default the parameter ``layout`` of the test.
        plan: the text of a plan file, whose path is the second parameter of the check.
    """

    def decorate(check: Callable[..., Any]) -> Callable[..., None]:
        def test(ranks: Callable[..., list[Any]], **arguments: Any) -> None:
            if plan:
                arguments[names[0]] = arguments["tmp_path"] / "net.toml"
                arguments[names[0]].write_text(plan)
            ranks(layout or arguments.pop("layout"), check, *(arguments[name] for name in names))

        _, *names = inspect.signature(check).parameters
        own = ["ranks", "tmp_path", *([] if layout else ["layout"]), *names[bool(plan) :]]
        test.__signature__ = inspect.Signature([inspect.Parameter(name, KEYWORD) for name in dict.fromkeys(own)])
        test.check = check
        update_wrapper(test, check, updated=())
        del test.__wrapped__  # pytest would read its signature
        return test

    return decorate


def _layouts(world: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {name: groups for name, groups in LAYOUTS.items() if max(map(max, groups)) < world}


def _serve(rank: int, world: int, pipe: Any, rendezvous: str) -> None:
    import torch  # noqa: PLC0415 - only the ranks need torch
    import torch.distributed as dist  # noqa: PLC0415

    from shardconv.distributed import as_axis  # noqa: PLC0415
    from tests.support.disguised import on_device  # noqa: PLC0415

    sys.path.insert(0, str(Path(__file__).parents[2]))
    torch.set_num_threads(1)
    backend = os.environ.get("TEST_BACKEND", "gloo")
    if "nccl" in backend:
        os.environ["NCCL_HOSTID"] = str(rank)  # otherwise it refuses ranks that share a GPU
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    axes = {}
    for layout, groups in _layouts(world).items():
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=60))
            if rank in ranks:
                axes[layout] = as_axis(group)
    while True:
        try:
            layout, module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            check: Any = importlib.import_module(module)
            for part in name.split("."):
                check = getattr(check, part)
            check = getattr(check, "check", check)  # of a test that on_ranks made
            with on_device():
                torch.manual_seed(0)
                pipe.send((True, check(axes[layout], *arguments)))
        except pytest.skip.Exception as skipped:
            pipe.send((None, skipped.msg))
        except BaseException:  # noqa: BLE001 - the test reports it
            pipe.send((False, traceback.format_exc()))

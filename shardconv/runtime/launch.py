"""Start the ranks of a run on this machine, or join those that torchrun started.

Stands on torch's own launcher of processes. The ranks find each other by a file in a folder of their own and talk over
the loopback interface, so nothing of a run can be reached from elsewhere.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a world: it keeps for ever the one that there is when it is imported
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, RunProcsResult, SignalException, start_processes

from shardconv.errors import RunError
from shardconv.parent import PARENT

#: Where the ranks that :func:`launch` started meet; the sign of being one of them.
RENDEZVOUS = "SHARDCONV_RENDEZVOUS"
_END_SECONDS = 10
#: The signals whose handlers torch replaces when it starts processes.
_TORCH_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``shardconv`` with these arguments in as many processes as there are ranks.

    When one ends with an error, or this process is interrupted, the others are ended, too.

    Args:
        arguments: of the command line.
        ranks: number of processes.

    Returns:
        The exit code.

    Raises:
        RunError: if a rank failed, with what it said; or was killed.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # launch says what there is to say
    with TemporaryDirectory(prefix="shardconv-") as folder:
        threads = os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": threads,
            "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
            RENDEZVOUS: f"file://{folder}/rendezvous",
            PARENT: str(os.getpid()),
        }
        envs = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
        result = _run_processes(arguments, envs, Path(folder) / "logs")
        errors = _errors(Path(folder))
    failures = {} if result is None else result.failures
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    own, others = errors
    if own:
        raise RunError(own[0])
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        raise RunError(f"rank {first.local_rank} was ended by {name}; the others were ended, too")
    if others:
        raise RunError(others[0])
    return int(first.exitcode)


def _run_processes(arguments: Sequence[str], envs: dict[int, dict[str, str]], logs: Path) -> RunProcsResult | None:
    """Start a process per environment and wait for all of them; none is left when this returns or raises."""
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in _TORCH_SIGNALS}
    context = None
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a context to close; ranks unblock them
    try:
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(envs, ("-m", "shardconv", *arguments)),
            envs=envs,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return context.wait(period=0.1)
    except SignalException as error:  # torch's, of a signal to this process
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from error
        sys.exit(128 + error.sigval)
    finally:
        if context is not None:
            context.close(signal.SIGTERM, timeout=_END_SECONDS)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # start_processes replaces them
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


_OWN, _OTHERS = "own-error", "others-error"


def _errors(folder: Path) -> list[list[str]]:
    """What the ranks said that failed, in the order of time: of their own, and what others brought about."""
    found = [sorted(folder.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns) for kind in (_OWN, _OTHERS)]
    return [[path.read_text() for path in paths] for paths in found]


def tell(message: str, *, is_others: bool) -> None:
    """Leave what went wrong on this rank to :func:`launch`, so that it is said once.

    Args:
        message: what it is.
        is_others: whether another process brought it about, which may have more to say.
    """
    folder = Path(os.environ[RENDEZVOUS].removeprefix("file://")).parent
    written = folder / f"writing-{os.environ['RANK']}"
    written.write_text(message)
    written.rename(folder / f"{_OTHERS if is_others else _OWN}-{os.environ['RANK']}")


def is_launched() -> bool:
    """Whether :func:`launch` started this process; it says what is to be said of signals and lost connections."""
    return RENDEZVOUS in os.environ


def join() -> None:
    """Be a rank: start ``torch.distributed`` as :func:`launch` means it; nothing to do where torchrun did the start."""
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous is None:
        return
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= ranks else "gloo"  # nccl: one rank a device
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)


def leave() -> None:
    """End ``torch.distributed`` when all ranks are done, with its threads, which must not outlive the interpreter."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()  # models, which hold groups, in cycles
        dist.destroy_process_group()

"""Start the ranks of a run on this machine, or join the ranks that torchrun started.

Uses torch's own process launcher. The rendezvous is a file in a temporary folder and connections use the loopback
interface, so that no other machine can reach a run.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401 - before init_process_group: it keeps the default group of its import
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, RunProcsResult, SignalException, start_processes

from shardconv.distributed.devices import backends_for
from shardconv.files.folder import temporary_folder
from shardconv.support.errors import RunError, UsageError
from shardconv.support.launched import PARENT, RENDEZVOUS, read_failures

_TERMINATE_SECONDS = 10
#: Seconds between two calls of a function while ranks run.
_TICK_SECONDS = 1.0
#: The signals whose handlers torch replaces when it starts processes.
_TORCH_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(arguments: Sequence[str], ranks: int, tick: Callable[[], None] = lambda: None) -> int:
    """Run ``shardconv`` with some arguments in one process per rank.

    When one fails, or this process is interrupted, the others are terminated.

    Args:
        arguments: arguments of the command line.
        ranks: number of processes.
        tick: called every second while they run.

    Returns:
        The exit code.

    Raises:
        RunError: if a rank failed, with its message, or was killed.
        UsageError: if the options or the prompts on stdin are not valid.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is replaced by one message
    with temporary_folder() as folder:
        threads = os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": threads,
            "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
            RENDEZVOUS: f"file://{folder}/rendezvous",
            PARENT: str(os.getpid()),
            "TMPDIR": str(folder),  # ranks that are terminated leave files
        }
        envs = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
        result = _run_processes(arguments, envs, folder / "logs", tick)
        errors = read_failures(folder)
    if not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    causes, consequences = errors
    if first.exitcode < 0 and not causes:
        name = signal.Signals(-first.exitcode).name
        raise RunError(f"rank {first.local_rank} was killed by {name}; the other ranks were terminated")
    if reported := causes or consequences:
        rank, message = reported[0]
        is_usage = rank in result.failures and result.failures[rank].exitcode == UsageError.exit_code
        raise (UsageError if is_usage else RunError)(message)
    return int(first.exitcode)


def _run_processes(
    arguments: Sequence[str], envs: dict[int, dict[str, str]], logs: Path, tick: Callable[[], None]
) -> RunProcsResult:
    """Start a process per environment and wait for all of them; none is left when this returns or raises."""
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in _TORCH_SIGNALS}
    context = None
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the processes can be terminated; ranks unblock them
    try:
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(envs, ("-m", "shardconv", *arguments)),
            envs=envs,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        while (result := context.wait(timeout=_TICK_SECONDS, period=0.1)) is None:
            tick()
        return result  # noqa: TRY300 - the finally clause is for all ways out
    except SignalException as error:  # raised by torch's signal handler
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # timeout(1) sends two, and the ranks have to be terminated
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from error
        sys.exit(128 + error.sigval)
    finally:
        if context is not None:
            context.close(signal.SIGTERM, timeout=_TERMINATE_SECONDS)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # start_processes replaces them
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def join() -> None:
    """Join the process group that :func:`launch` set up. Does nothing under torchrun."""
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous is None:
        return
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group(backends_for(ranks), init_method=rendezvous, rank=rank, world_size=ranks)


def leave() -> None:
    """Wait for all ranks, then destroy the process group and its threads, which must not outlive the interpreter."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()  # frees models in reference cycles, which hold process groups
        dist.destroy_process_group()

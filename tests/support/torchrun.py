"""Processes that torchrun starts, on this machine."""

import socket
import subprocess
import sys

from tests.support.command import ENVIRONMENT, Result, finish
from tests.support.forked import Popen


def free_port() -> int:
    """A port on the loopback interface that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(*arguments: object) -> subprocess.Popen[str]:
    """Start torchrun with some arguments, from its own options on."""
    return Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def on_one_node(size: int, *arguments: object) -> subprocess.Popen[str]:
    """Start ``size`` processes."""
    return torchrun("--standalone", "--nproc-per-node", size, *arguments)


def on_nodes(size: int, *nodes: list[object]) -> list[Result]:
    """Run ``size`` processes with each of some arguments, as on as many hosts."""
    address = ("--master-addr", "127.0.0.1", "--master-port", free_port(), "--nnodes", len(nodes))
    started = [
        torchrun(*address, "--nproc-per-node", size, "--node-rank", rank, *arguments)
        for rank, arguments in enumerate(nodes)
    ]
    return [finish(node) for node in started]

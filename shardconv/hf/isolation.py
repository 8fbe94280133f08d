"""Computations whose results do not depend on the settings of the process, and that leave those settings as they were.

Owns the list of these settings: threads, default dtype and device, gradient mode, random generators, and log output.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardconv.hf.package import quiet


@contextmanager
def isolated() -> Iterator[None]:
    """Compute on one thread, in float32 on the CPU, with gradients; restore settings and random generators afterwards.

    The number of threads determines the order in which sums are added up, to which some small models are sensitive.
    Warnings and progress bars are hidden.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()
    with quiet():
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        try:
            with (
                warnings.catch_warnings(),
                torch.inference_mode(mode=False),
                torch.enable_grad(),
                torch.device("cpu"),
                torch.random.fork_rng(devices=[]),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)

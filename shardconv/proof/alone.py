"""What is computed for a proof, in a process that may be a user's: nothing of it depends on that, and nothing is left.

Owns which settings those are.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers.utils import logging


@contextmanager
def alone() -> Iterator[None]:
    """One thread, float32 on the CPU, with gradients; generators stay as they were.

    How many threads there are decides how sums are taken, which some small models make much of. Warnings and progress
    are for those who run models, not for those who compare them.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
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
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)

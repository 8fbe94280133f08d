"""Import transformers and diffusers, which are optional, and control their log output."""

import logging
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from shardconv.support.errors import RunError, install, option


def import_transformers(submodule: str = "") -> Any:
    """The package transformers, or one of its modules.

    Args:
        submodule: the name of the module in transformers.

    Raises:
        RunError: if transformers is not installed.
    """
    try:
        package = import_module("transformers")
    except ImportError as error:
        raise RunError(f"transformers is needed to build the model: {install('transformers')}") from error
    return import_module(f"transformers.{submodule}") if submodule else package


def import_diffusers() -> Any:
    """The package diffusers.

    Raises:
        RunError: if diffusers is not installed.
    """
    try:
        return import_module("diffusers")
    except ImportError as error:
        raise RunError(f"diffusers is needed to build the model: {install('diffusers')}") from error


def import_peft() -> Any:
    """The package PEFT.

    Raises:
        RunError: if it is not installed.
    """
    try:
        with quiet():
            return import_module("peft")
    except ImportError as error:
        raise RunError(
            f"--check with {option('adapters')} compares with PEFT, which is not installed: pip install peft"
        ) from error


def _is_no_kernel_warning(record: logging.LogRecord) -> bool:
    """Whether a record is not a warning of bitsandbytes on an optional kernel, which reads like a failed check."""
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


def diffusers_name(config: Mapping[str, object]) -> str | None:
    """The class of diffusers that a config names; None for configs of transformers."""
    name = config.get("_class_name")
    return name if isinstance(name, str) and "model_type" not in config else None


def hide_progress() -> None:
    """Turn off the progress bars of transformers in this process."""
    import_transformers().logging.disable_progress_bar()


def hide_warnings() -> None:
    """Turn off the warnings of transformers in this process."""
    import_transformers().logging.set_verbosity_error()


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off the progress bars and warnings of transformers, and of diffusers if it is imported, within a block.

    Also turns off the warning of bitsandbytes on a kernel, which they may import.
    """
    packages = [import_transformers(), *filter(None, [sys.modules.get("diffusers")])]
    with ExitStack() as stack:
        kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
        kernels.addFilter(_is_no_kernel_warning)
        stack.callback(kernels.removeFilter, _is_no_kernel_warning)
        for settings in (package.utils.logging for package in packages):
            stack.callback(settings.set_verbosity, settings.get_verbosity())
            if settings.is_progress_bar_enabled():
                stack.callback(settings.enable_progress_bar)
            settings.set_verbosity_error()
            settings.disable_progress_bar()
        yield


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

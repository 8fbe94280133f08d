"""Import transformers, which is optional, and control its log output."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from shardconv.support.errors import RunError


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
        raise RunError("transformers is needed to build the model: pip install 'shardconv[transformers]'") from error
    return import_module(f"transformers.{submodule}") if submodule else package


def hide_progress() -> None:
    """Turn off the progress bars of transformers in this process."""
    import_transformers().logging.disable_progress_bar()


def hide_warnings() -> None:
    """Turn off the warnings of transformers in this process."""
    import_transformers().logging.set_verbosity_error()


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off the progress bars and warnings of transformers within a block."""
    logging = import_transformers().utils.logging
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hide_warnings()
    hide_progress()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()

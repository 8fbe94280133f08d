"""Packages of the extra ``remote``, imported when a URL is opened."""

import importlib
from types import ModuleType

from shardconv.support.errors import SourceError


def obstore() -> ModuleType:
    """The clients of stores.

    Raises:
        SourceError: if the package is not installed.
    """
    return _require("obstore")


def obstore_stores() -> ModuleType:
    """The classes of stores; errors as in :func:`obstore`."""
    return _require("obstore.store")


def huggingface_hub() -> ModuleType:
    """The client of the Hub, with its constants; errors as in :func:`obstore`."""
    _require("huggingface_hub.constants")  # an attribute of the package only when it was imported
    return _require("huggingface_hub")


def _require(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise SourceError(f"URLs require {package} ({error}): pip install 'shardconv[remote]'") from error

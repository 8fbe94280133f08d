"""Temporary folders; a message reports a signal that interrupts their removal."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardconv.support.exits import Removal


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder, and remove it at the end; a signal that ends its removal gets a note."""
    folder = Path(tempfile.mkdtemp(prefix="shardconv-")).resolve()
    try:
        yield folder
    finally:
        with Removal():
            shutil.rmtree(folder, ignore_errors=True)

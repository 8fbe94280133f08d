"""Temporary folders that are removed at the end, and errors of libraries that write into them."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardconv.support.errors import OutputError
from shardconv.support.exits import Removal


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder, removed at the end; a signal that interrupts this says that files may be left."""
    folder = Path(tempfile.mkdtemp(prefix="shardconv-")).resolve()
    try:
        yield folder
    finally:
        with Removal():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise any error of a library that writes to a path in a temporary folder as one that names the path.

    Raises:
        OutputError: if anything is raised.
    """
    try:
        yield
    except Exception as error:
        raise OutputError(f"{path}: cannot be written: {error}: free space, or set TMPDIR to another folder") from error

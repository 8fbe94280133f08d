"""Read JSON objects from disk, with a size limit and errors that name the file."""

import json
import stat
from pathlib import Path

from shardconv.files.storage.table import remote_file
from shardconv.files.text_files import START_BYTES, text_problem
from shardconv.support.errors import SourceError

#: The remedy for a file that is not the expected JSON.
_AGAIN = "correct it, or download or copy it again"
_MAX_BYTES = 512 * 2**20


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        SourceError: if the file cannot be read, or is not a JSON object.
    """
    return parse_object(path, read_text(path))


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        SourceError: if it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if (remote := remote_file(path)) is not None:
            return remote.read_all(_MAX_BYTES).decode()
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):
            raise SourceError(f"{path}: is not a regular file")  # reading a pipe could block forever
        if status.st_size > _MAX_BYTES:
            raise SourceError(f"{path}: is too large (got {status.st_size} bytes, expected at most {_MAX_BYTES})")
        return path.read_bytes().decode()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8") from error


def parse_object(path: Path, text: str) -> dict[str, object]:
    """Parse a JSON object; the path is for messages.

    Raises:
        SourceError: if the text is not a JSON object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem, remedy = text_problem(text[:START_BYTES].encode()) or (f"is not JSON ({error})", _AGAIN)
        raise SourceError(f"{path}: {problem}: {remedy}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: is not a JSON object (got {type(data).__name__}): {_AGAIN}")
    return data

"""Small text files and JSON objects, with a size limit and errors that name the file.

Recognizes pointers of git LFS and pages of websites that were saved under the name of the file.
"""

import json
import re
import stat

from shardconv.files.folder import AnyPath, RemotePath
from shardconv.support.errors import SourceError

#: The remedy for a file that is not the expected JSON.
_AGAIN = "correct it, or download or copy it again"
_MAX_BYTES = 512 * 2**20
#: Pattern of the first bytes of a text that was stored instead of the file, to the problem and the remedy.
_STARTS = {
    rb"version https://git-lfs\.": ("is a pointer of git LFS, not the file itself", "run git lfs pull"),
    rb"(\xef\xbb\xbf)?\s*<[!?A-Za-z]": ("is an HTML or XML page, not the file itself", "download it again"),
}
#: Number of bytes to read from the start of a file.
START_BYTES = 64


def read_json(path: AnyPath) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        SourceError: if the file cannot be read, or is not a JSON object.
    """
    return parse_object(path, read_text(path))


def read_text(path: AnyPath) -> str:
    """Read a UTF-8 text file.

    Raises:
        SourceError: if it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if isinstance(path, RemotePath):
            return path.file.read_all(_MAX_BYTES).decode()
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


def parse_object(path: AnyPath, text: str) -> dict[str, object]:
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


def text_problem(start: bytes) -> tuple[str, str] | None:
    """The problem and the remedy of a text file, by its first :data:`START_BYTES` bytes; None for all other files."""
    return next((problem for pattern, problem in _STARTS.items() if re.match(pattern, start)), None)

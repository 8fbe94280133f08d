"""Text files in place of weight files: what git and websites store under the name of a file that they do not send."""

import re

#: The first bytes of such a file, with the problem and the remedy.
_STARTS = {
    rb"version https://git-lfs\.": ("is a pointer of git LFS, not the file itself", "run git lfs pull"),
    rb"(\xef\xbb\xbf)?\s*<[!?A-Za-z]": ("is an HTML or XML page, not the file itself", "download it again"),
}
#: Number of bytes to read from the start of a file.
START_BYTES = 64


def text_problem(start: bytes) -> tuple[str, str] | None:
    """The problem and the remedy of a text file, by its first :data:`START_BYTES` bytes; None for all other files."""
    return next((problem for pattern, problem in _STARTS.items() if re.match(pattern, start)), None)

"""The progress of commands that read a source, which may be remote."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardconv.support.console import Console
from shardconv.support.progress import Progress


@contextmanager
def source_progress(console: Console, what: str) -> Iterator[Progress | None]:
    """A callback for the progress of a command; the headers of remote files that it reads first have their own.

    Args:
        console: of the command.
        what: name of the activity.
    """
    from shardconv.files.folder import header_progress

    with (
        console.progress("read headers", counts=True) as headers,
        header_progress(headers),
        console.progress(what) as progress,
    ):
        yield progress

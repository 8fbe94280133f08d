"""URLs in place of local destinations: new files are uploaded while they are written."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.padding_manifest import PADDING_NAME
from shardconv.files import storage
from shardconv.files.storage.table import remote_output
from shardconv.files.storage.url import Location, is_url, parse
from shardconv.files.weight_formats import CONFIG_NAME, SAFETENSORS
from shardconv.support.errors import OutputError, SourceError, UsageError, option

if TYPE_CHECKING:
    from shardconv.files.storage.remote_output import RemoteOutput

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Why some stores are not written.
_READ_ONLY = {
    "hf": "commits are made by the Hub's own tools: write to a local folder, then hf upload ORGANIZATION/MODEL DIR",
    "http": "uploads to web servers do not become visible as a whole: write to a local folder, s3://, gs:// or az://",
}


def writes_remote(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let the destination of a function be a URL: during a call, it is the path of a stand-in.

    The destination is the second positional argument, or ``dst``.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        dst = args[1] if len(args) > 1 else kwargs.get("dst")
        if not isinstance(dst, str | os.PathLike) or not is_url(dst):
            return function(*args, **kwargs)
        location = parse(os.fspath(dst))
        if kwargs.get("resume"):
            raise UsageError(f"{location}: is a URL, and an upload cannot be continued: remove {option(resume=True)}")
        with _target(location) as target:
            if len(args) > 1:
                return function(args[0], target, *args[2:], **kwargs)  # type: ignore[arg-type] # a path for a path
            return function(*args, **{**kwargs, "dst": target})  # type: ignore[arg-type] # likewise

    return call


def is_remote(target: Path) -> bool:
    """Whether a path stands for a URL, whose files are written from the beginning to the end.

    Their headers come before the checksums are known, so they do not have the identity of the split checkpoint.
    """
    return remote_output(target) is not None


def refuse_remote(target: Path, name: str) -> None:
    """Refuse to write ``name`` to a URL.

    Raises:
        UsageError: if the target is one.
    """
    if is_remote(target):
        raise UsageError(f"{target}: is a URL, and {name} is only written to local folders: upload it afterwards")


@contextmanager
def _target(location: Location) -> Iterator[Path]:
    """The stand-in of a destination.

    Raises:
        UsageError: if nothing can be written there.
        OutputError: if it cannot be listed.
    """
    if reason := _READ_ONLY.get("http" if location.is_web else location.scheme):
        raise UsageError(f"{location}: cannot be written: {reason}")
    if location.file and not location.file.endswith(".safetensors"):
        raise UsageError(
            f"{location}: is not a folder or a .safetensors file: choose another path with {option('dst')}"
        )
    try:
        output = storage.remote_output.RemoteOutput(location)
    except SourceError as error:
        raise OutputError(error.message) from None
    with output.mirrored() as target:
        yield target


@contextmanager
def remote_staging(path: Path, output: "RemoteOutput", *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """The folder to write into, in place of the one of :func:`~shardconv.checkpoint.output.staging.staging`.

    Args:
        path: the stand-in of the destination, or the folder of an adapter in the new files.
        output: the destination.
        is_folder: whether the result is a folder.
        overwrite: replace an existing checkpoint.

    Raises:
        OutputError: if it cannot be written.
    """
    if path != output.target:
        path.mkdir(parents=True)
        yield path
        return
    if is_folder and output.location.file:
        raise UsageError(
            f"{output.location}: ends with .safetensors (expected a folder): choose another path with {option('dst')}"
        )
    with output.writing(_order, overwrite=overwrite) as folder:
        yield folder


def _order(name: str) -> int:
    """The place of a file among those that make a folder a checkpoint; 0 for all others."""
    file = PurePosixPath(name).name
    if file in {MANIFEST_NAME, PADDING_NAME}:
        return 2
    return int(file == CONFIG_NAME or SAFETENSORS.lists(file))

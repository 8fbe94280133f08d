"""URLs in place of local paths: the remote files that belong to a checkpoint, as a folder of stand-ins."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardconv.checkpoint.engine.copy import Progress
from shardconv.files import storage
from shardconv.files.header import MAX_HEADER_BYTES, header_bytes
from shardconv.files.storage.url import Location, is_url, parse
from shardconv.files.weight_formats import CONFIG_NAME, SAFETENSORS, is_weights
from shardconv.plan.quantization import SETTINGS_FILES
from shardconv.support.errors import SourceError, UsageError

if TYPE_CHECKING:
    from shardconv.files.storage.remote_file import RemoteFile

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Files that web servers are asked for beside the weights, as they do not list folders.
_AUXILIARY_FILES = (
    CONFIG_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", *SETTINGS_FILES,
)  # fmt: skip
_HUB_HOSTS = ("huggingface.co", "hf.co")
#: Requests for headers and sizes at a time.
_REQUESTS = 16
#: Maximum bytes of a file whose contents are copied.
_MAX_SMALL = 2**28
_progress: ContextVar[Progress | None] = ContextVar("progress of headers", default=None)


def reads_remote(
    *names: str, contents: bool = False
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Let arguments of a function be URLs, or lists with some: in a call, each is the path of a folder of stand-ins.

    Args:
        names: of the arguments; the first is also the first positional argument.
        contents: whether stand-ins of small files have their contents, for code that reads local files only.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if not any(map(_is_url, (*args[:1], *(kwargs.get(name) for name in names)))):
                return function(*args, **kwargs)
            with ExitStack() as stack:

                def local(value: object) -> object:
                    if isinstance(value, list | tuple):
                        return [local(one) for one in value]
                    return stack.enter_context(mirrored(str(value), contents=contents)) if _is_url(value) else value

                first = [local(value) for value in args[:1]]
                by_name = {name: local(value) if name in names else value for name, value in kwargs.items()}
                return function(*first, *args[1:], **by_name)  # type: ignore[arg-type] # paths in place of paths

        return call

    return decorate


def _is_url(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_url, value))
    return isinstance(value, str | os.PathLike) and is_url(value)


@contextmanager
def local_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The local path of a checkpoint: for a URL, that of stand-ins, with the contents of small files."""
    if is_url(path):
        with mirrored(os.fspath(path), contents=True) as folder:
            yield folder
    else:
        yield Path(path)


@contextmanager
def mirrored(url: str, *, contents: bool = False) -> Iterator[Path]:
    """The local path of the stand-ins of a remote file or folder.

    Args:
        url: of the file or folder.
        contents: see :func:`reads_remote`.

    Raises:
        SourceError: if it does not exist or cannot be listed, or a package is not installed.
        UsageError: if the URL is not valid.
    """
    location = parse(url)
    files = _files_of(location)
    if not files or (location.file and location.file not in files):
        raise _missing(location)
    name = storage.hub.folder_name(location) if location.scheme == "hf" else PurePosixPath(location.folder).name
    _prefetch_headers([file for each, file in files.items() if each.endswith(".safetensors") and "/" not in each])
    copied = [each for each, file in files.items() if contents and _is_copied(each, file)]
    with storage.mirror.mirror(name or location.host, location.to("").rstrip("/"), files, copied) as folder:
        yield folder / location.file if location.file else folder


def _missing(location: Location) -> SourceError:
    """The error for a missing file or folder.

    Raises:
        SourceError: if its bucket or container is missing, too.
    """
    if location.is_web or location.scheme == "hf" or not storage.stores.has_bucket(location):
        return SourceError(f"{location}: does not exist")
    if not location.path:
        return SourceError(f"{location}: is empty")
    kind = "file" if location.file else "folder"
    return SourceError(f"{location}: does not exist, but its bucket or container does: correct the name of the {kind}")


def _is_copied(name: str, file: "RemoteFile") -> bool:
    """Whether the stand-in of a file gets its contents: not weights, and at most :data:`_MAX_SMALL` bytes."""
    return (SAFETENSORS.lists(name) or not is_weights(name)) and file.size <= _MAX_SMALL


@contextmanager
def header_progress(progress: Progress | None) -> Iterator[None]:
    """Call a function with the number of remote headers that were read and the total, in calls from this context."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def _prefetch_headers(files: "list[RemoteFile]") -> None:
    """Fetch the headers of all safetensors files concurrently; reading one later raises its errors."""
    progress = _progress.get()
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for done, _ in enumerate(pool.map(_prefetch_header, files), 1):
            if progress is not None:
                progress(done, len(files))


def _prefetch_header(file: "RemoteFile") -> None:
    with suppress(SourceError):
        file.keep(header_bytes(file))


def _files_of(location: Location) -> "dict[str, RemoteFile]":
    """Name to file of what belongs to a URL: a folder, or a file with what is read next to it."""
    if location.is_web:
        return _web_files(location)
    is_single = location.file is not None and location.file.endswith(".safetensors")
    if is_single and location.scheme != "hf":
        return _existing(location, [str(location.file), CONFIG_NAME])
    files = storage.hub.list_model(location) if location.scheme == "hf" else storage.stores.list_files(location)
    return {name: file for name, file in files.items() if not is_single or name in {location.file, CONFIG_NAME}}


def _web_files(location: Location) -> "dict[str, RemoteFile]":
    name = location.file
    if name is None:
        model = "/".join(location.path.split("/")[:2])
        other = f"a .safetensors file or an index (*{SAFETENSORS.index_suffix})"
        remedy = f"hf://{model}" if location.host in _HUB_HOSTS else other
        raise UsageError(f"{location}: web servers do not list folders: pass the URL of {remedy}")
    if not SAFETENSORS.lists(name):
        return _existing(location, [name] if location.query else [name, CONFIG_NAME])
    index = _existing(location, [name])
    listed = _listed(index[name].read_all(MAX_HEADER_BYTES)) if index else []
    return index | _existing(location, [*listed, *_AUXILIARY_FILES])


def _listed(text: bytes) -> list[str]:
    """The names in an index; empty if it is not valid, which is found when it is opened."""
    try:
        weight_map = json.loads(text)["weight_map"]
        return sorted({name for name in weight_map.values() if isinstance(name, str) and "/" not in name})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _existing(location: Location, names: list[str]) -> "dict[str, RemoteFile]":
    """Name to file of those files of a folder that exist."""
    store = storage.stores.open_store(location)
    files = {name: storage.remote_file.RemoteFile(store, location.prefix + name, location.to(name)) for name in names}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        exist = pool.map(storage.remote_file.RemoteFile.exists, files.values())
        return {name: file for (name, file), is_there in zip(files.items(), exist, strict=True) if is_there}

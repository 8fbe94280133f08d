"""Auxiliary files of a new checkpoint: config, tokenizer and others, copied or written with other contents."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple, Self

import xxhash
from msgspec import Struct

from shardconv.checkpoint.engine.copy import default_threads
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.split_folders import auxiliary_paths
from shardconv.files.checksums import checksum, checksum_file
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath, file_bytes, permissions, read_json
from shardconv.files.input_files import chunks
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.support.errors import IntegrityError, SourceError


class NewText(NamedTuple):
    """A text file that is written, and its permissions before the umask."""

    text: str
    mode: int = 0o666

    def write(self, path: Path) -> str:
        """Write it to a path that does not exist; returns its checksum."""
        data = self.text.encode()
        with create(path, self.mode) as file:
            file.write(data)
        return checksum(data)


class AuxiliaryFiles(Struct, frozen=True):
    """Auxiliary files of a new checkpoint, by their names.

    Attributes:
        copied: name to path of files that are copied with their permissions.
        made: name to text of files that are written.
        expected: name to checksum of copied files, if these are known.
        config: the config of the plan, which the source's config.json must still be when it is copied; None if there is
            none.
    """

    copied: Mapping[str, AnyPath] = {}
    made: Mapping[str, NewText] = {}
    expected: Mapping[str, str] | None = None
    config: Mapping[str, object] | None = None

    @classmethod
    def of_source(cls, source: Source) -> Self:
        """The auxiliary files of a source, some of which may get other contents."""
        paths = source.auxiliary_files
        copied = {name: path for name, path in paths.items() if name not in source.made_files}
        made = {
            name: NewText(text, permissions([paths[name]]) if name in paths else 0o666)
            for name, text in source.made_files.items()
        }
        return cls(copied, made, config=source.config)

    @classmethod
    def of_split(cls, manifest: Manifest, folder: AnyPath) -> Self:
        """The auxiliary files of a split or padded checkpoint, with their checksums.

        Raises:
            SplitCheckpointError: if one is missing, not a regular file, or a link out of the folder.
        """
        return cls(auxiliary_paths(manifest, folder), expected=manifest.auxiliary_files)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.copied, *self.made)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(file_bytes, self.copied.values())) + sum(len(one.text.encode()) for one in self.made.values())

    def checksums(self) -> dict[str, str]:
        """Name to checksum, computed without copying."""
        made = {name: checksum(one.text.encode()) for name, one in self.made.items()}
        return {name: checksum_file(path) for name, path in self.copied.items()} | made

    def write(self, folder: Path, threads: int | None = None) -> dict[str, str]:
        """Copy and write the files into a folder.

        Args:
            folder: the folder.
            threads: number of threads, each of which copies one file at a time; None for the default.

        Returns:
            Name to checksum.

        Raises:
            IntegrityError: if a checksum is not the expected one.
            SourceError: if a file changes during the copy, or the config has changed since the plan was made.
        """
        for name in self.names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        stopping, copies = Event(), list[Future[str]]()
        with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="shardconv") as pool:
            try:
                copies += (pool.submit(_copy, path, folder / name, stopping) for name, path in self.copied.items())
                checksums = {name: copy.result() for name, copy in zip(self.copied, copies, strict=True)}
            except BaseException:
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for name, path in self.copied.items():
            if self.expected is not None and checksums[name] != self.expected[name]:
                raise IntegrityError(f"{path}: differs from its checksum: restore the original file")
        for name, new in self.made.items():
            checksums[name] = new.write(folder / name)
        if self.config is not None and read_json(folder / CONFIG_NAME) != self.config:
            raise SourceError(
                f"{self.copied.get(CONFIG_NAME, CONFIG_NAME)}: changed after the plan was made: run the command again"
            )
        return checksums


def _copy(path: AnyPath, target: Path, stopping: Event) -> str:
    """Copy a file with its permissions, and return its checksum; ends early if another thread is ``stopping``."""
    running = xxhash.xxh3_128()
    with create(target, permissions([path])) as copy:
        for chunk in chunks(path):
            if stopping.is_set():
                raise InterruptedError("another thread failed, or the user interrupted the copy")
            running.update(chunk)
            copy.write(chunk)
    return running.hexdigest()

"""Destinations of new checkpoints: a local path, a URL, or a folder of a checkpoint that is being written."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PADDING_NAME, PIPELINE_NAME
from shardconv.checkpoint.output.existing import NewCheckpoint, check_disjoint, check_replaceable, is_occupied
from shardconv.checkpoint.output.journal import Journal
from shardconv.checkpoint.output.staging import as_output_errors, nested_staging, staged_folder, staging
from shardconv.checkpoint.sources.layout_files import LATEST_NAME
from shardconv.files import storage
from shardconv.files.fileio import LocalOutputFiles, OutputFiles
from shardconv.files.folder import AnyPath
from shardconv.files.paths import local_path
from shardconv.files.storage.url import Location, is_url, parse
from shardconv.files.weight_formats import CONFIG_NAME, INDEX_NAME, SAFETENSORS
from shardconv.support.errors import OutputError, SourceError, UsageError, option

if TYPE_CHECKING:
    from shardconv.files.storage.remote_output import RemoteOutput

#: The reason why a store is not written, and the remedy.
_READ_ONLY = {
    "hf": "commits are made by the Hub's own tools: write to a local folder, then hf upload ORGANIZATION/MODEL DIR",
    "http": "uploads to web servers do not become visible as a whole: write to a local folder, s3://, gs:// or az://",
}


class NewFolder(NamedTuple):
    """A folder of a checkpoint that is being written.

    Attributes:
        path: the local folder for its files that are not weights, and for its weights if it is local.
        create: creates files of known sizes in it, which threads write at any position. Takes the arguments of
            :class:`~shardconv.files.fileio.LocalOutputFiles`.
    """

    path: Path
    create: Callable[..., OutputFiles] = LocalOutputFiles


class Destination:
    """The place of a new checkpoint: a local path. Subclasses are remote, or in another new checkpoint.

    Args:
        path: the path; of a URL, its parts as a path.

    Attributes:
        is_remote: whether files are written from the beginning to the end, and cannot be changed or continued. Their
            headers come before the checksums are known, so they do not have the identity of a split checkpoint.
        keeps_journal: whether an interrupted run can be continued.
        is_nested: whether it is in a checkpoint that is being written.
    """

    is_remote = False
    keeps_journal = True
    is_nested = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        """The path or the URL, as messages and reports have it."""
        return str(self.path)

    @property
    def existing(self) -> AnyPath:
        """The path of the existing file or folder."""
        return self.path

    def check(self, new: NewCheckpoint, sources: Iterable[AnyPath]) -> bool:
        """Check that a checkpoint may be written here; returns whether that replaces something.

        Raises:
            OutputError: if it would replace something that must not be replaced.
            UsageError: if the destination overlaps with a source.
        """
        check_disjoint(str(self), self.path if self.is_remote else self.path.resolve(), sources)
        check_replaceable(self.existing, new)
        return is_occupied(self.existing)

    @contextmanager
    def writing(self, new: NewCheckpoint, journal: Journal | None) -> Iterator[NewFolder]:
        """Provide the folder to write into, which becomes visible as a whole on exit, or not at all after an error.

        For a checkpoint of one file, the file is created in this folder under the name of :attr:`path`.

        Raises:
            OutputError: if it would replace something that must not be replaced, or cannot be written.
        """
        with staging(self.path, new, journal) as folder:
            yield NewFolder(folder)


class RemoteDestination(Destination):
    """A folder or a file in an object store: new files are uploaded while they are written.

    Raises:
        UsageError: if nothing can be written there.
        OutputError: if it cannot be listed.
    """

    is_remote = True
    keeps_journal = False

    def __init__(self, location: Location) -> None:
        if reason := _READ_ONLY.get("http" if location.is_web else location.scheme):
            raise UsageError(f"{location}: cannot be written: {reason}")
        if location.file and not location.file.endswith(".safetensors"):
            raise UsageError(
                f"{location}: is not a folder or a .safetensors file: choose another path with {option('dst')}"
            )
        self._location = location
        super().__init__(Path(str(self)))
        try:
            self._output: RemoteOutput = storage.remote_output.RemoteOutput(location)
        except SourceError as error:
            raise OutputError(error.message) from None

    def __str__(self) -> str:
        return self._location.to(self._location.file or "").rstrip("/")

    @property
    def existing(self) -> AnyPath:
        """See the base."""
        return self._output.existing

    @contextmanager
    def writing(self, new: NewCheckpoint, journal: Journal | None) -> Iterator[NewFolder]:
        """See the base."""
        del journal
        if new.is_folder and self._location.file:
            raise UsageError(
                f"{self._location}: ends with .safetensors (expected a folder): choose another path with "
                f"{option('dst')}"
            )
        with (
            as_output_errors(str(self)),
            self._output.writing(_completion_order, overwrite=new.overwrite) as folder,
        ):
            yield NewFolder(folder, self._output.create)


class InnerDestination(Destination):
    """A folder of a checkpoint that is being written, such as the folder of an adapter or of a component."""

    is_nested = True

    def __init__(self, outer: NewFolder, name: str) -> None:
        super().__init__(outer.path / name)
        self._folder = outer._replace(path=self.path)
        self.is_remote = outer.create is not LocalOutputFiles
        self.keeps_journal = not self.is_remote

    def check(self, new: NewCheckpoint, sources: Iterable[AnyPath]) -> bool:
        """Do nothing: the outer folder is new."""
        del new, sources
        return False

    @contextmanager
    def writing(self, new: NewCheckpoint, journal: Journal | None) -> Iterator[NewFolder]:
        """See the base."""
        if self.is_remote:
            self.path.mkdir(new.mode | 0o700, parents=True)
            yield self._folder
            return
        with nested_staging(self.path, new, journal) as folder:
            yield NewFolder(folder)


@contextmanager
def joined_folder(path: Path) -> Iterator[NewFolder]:
    """Provide the folder that another process writes for a local destination.

    Raises:
        OutputError: if it cannot be written.
    """
    with as_output_errors(str(path)):
        yield NewFolder(staged_folder(path))


def find_destination(dst: str | Path | Destination | None, *, resume: bool) -> Destination | None:
    """The destination that a user passes as a path or a URL; None without one.

    Args:
        dst: the path or the URL.
        resume: whether an interrupted run is continued.

    Raises:
        UsageError: if nothing can be written there, or an upload is to be continued.
        OutputError: if it cannot be listed.
    """
    if dst is None or isinstance(dst, Destination):
        return dst
    if not is_url(dst):
        return Destination(local_path(dst))
    location = parse(os.fspath(dst))
    if resume:
        raise UsageError(f"{location}: is a URL, and an upload cannot be continued: remove {option(resume=True)}")
    return RemoteDestination(location)


def _completion_order(name: str) -> int:
    """The position of a file in the order of the files that complete a checkpoint; 0 for all others."""
    file = PurePosixPath(name).name
    if file == PIPELINE_NAME:
        return 3
    if file in {MANIFEST_NAME, PADDING_NAME, LATEST_NAME, INDEX_NAME}:
        return 2
    return int(file == CONFIG_NAME or SAFETENSORS.lists(file))

"""Read and write the manifest of a split checkpoint, shardconv.json."""

from pathlib import Path

from msgspec.structs import replace

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_format import check_manifest, seal, unseal
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath, RemotePath, file_bytes
from shardconv.files.paths import locked, missing_hint, unfinished
from shardconv.files.weight_formats import refuse_rank_files, refuse_sharded_state
from shardconv.support.errors import ShardconvError, SourceError, SplitCheckpointError

_MAX_BYTES = 2**30


def is_split(path: AnyPath) -> bool:
    """Whether a path is the folder of a split checkpoint."""
    return (path / MANIFEST_NAME).exists()


def read_manifest(folder: AnyPath, *, remedy: str = "") -> Manifest:
    """Read and check the manifest of a split checkpoint.

    Args:
        folder: the split checkpoint.
        remedy: another remedy for the message that it is not one.

    Raises:
        SplitCheckpointError: if the folder is not a split checkpoint, or its manifest is not valid.
    """
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise SplitCheckpointError(f"{folder}: does not exist{missing_hint(folder)}")
    try:
        manifest = unseal(_read(path), Manifest)
        check_manifest(manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        if problem := unfinished(folder) or locked(folder):
            raise SplitCheckpointError(f"{folder}: {problem}") from error
        if is_split(folder.parent) and folder.is_file():
            remedy = f"pass its folder {folder.parent}"
            raise SplitCheckpointError(f"{folder}: belongs to a split checkpoint: {remedy}") from error
        _refuse_without_manifest(folder)
        raise SplitCheckpointError(
            f"{folder}: is not a split checkpoint (no {MANIFEST_NAME}): make one with shardconv split {folder} --tp N"
            f"{f', {remedy}' if remedy else ''}"
        ) from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ShardconvError as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error.message}") from error
    except (ValueError, RecursionError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error}") from error
    return manifest


def _read(path: AnyPath) -> bytes:
    """The contents of a manifest.

    Raises:
        ValueError: if the file cannot hold one.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is not a regular file")  # reading a pipe could block forever
    if file_bytes(path) > _MAX_BYTES:
        raise ValueError("it is too large")
    return path.read_bytes() if not isinstance(path, RemotePath) else path.file.read_all(_MAX_BYTES)


def _refuse_without_manifest(path: AnyPath) -> None:
    """Refuse rank files whose manifest is missing."""
    folder = path.parent if path.is_file() else path
    names = [path.name] if path.is_file() else [file.name for file in path.glob("*.safetensors")]
    try:
        refuse_rank_files(folder, names)
        refuse_sharded_state(folder, names)
    except SourceError as error:
        raise SplitCheckpointError(error.message) from error


def write_manifest(manifest: Manifest, folder: Path, created_by: str, *, mode: int) -> None:
    """Write a manifest into a folder, with the permissions ``mode`` before the umask."""
    with create(folder / MANIFEST_NAME, mode) as file:
        file.write(seal(replace(manifest, created_by=created_by)))

"""Read and write the manifest of a split checkpoint, shardconv.json."""

import json
from pathlib import Path

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_json import from_json, to_json
from shardconv.files.fileio import create, file_bytes
from shardconv.files.paths import locked, missing_hint, unfinished
from shardconv.files.storage.table import remote_file
from shardconv.files.weight_formats import refuse_rank_files, refuse_sharded_state
from shardconv.support.errors import PlanError, SourceError, SplitCheckpointError

_MAX_BYTES = 2**30


def is_split(path: Path) -> bool:
    """Whether a path is the folder of a split checkpoint."""
    return (path / MANIFEST_NAME).exists()


def read_manifest(folder: Path, *, remedy: str = "") -> Manifest:
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
        return from_json(_read(path))
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
    except (SourceError, PlanError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error.message}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error}") from error


def _read(path: Path) -> dict[str, object]:
    """The JSON object in a manifest.

    Raises:
        ValueError: if the file cannot hold one.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is not a regular file")  # reading a pipe could block forever
    if file_bytes(path) > _MAX_BYTES:
        raise ValueError("it is too large")
    try:
        data = json.loads(path.read_bytes() if (remote := remote_file(path)) is None else remote.read_all(_MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"it is truncated or damaged: copy it again, or split the source again ({error})") from error
    if isinstance(data, dict):
        return data
    raise ValueError("it is not a JSON object")


def _refuse_without_manifest(path: Path) -> None:
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
    text = json.dumps(to_json(manifest, created_by), separators=(",", ":"))
    with create(folder / MANIFEST_NAME, mode) as file:
        file.write(text.encode())

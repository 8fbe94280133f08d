"""The manifest of a padded checkpoint: the true sizes, the source's headers and config, and checksums of its files."""

import json
from dataclasses import replace
from pathlib import Path

from shardconv import __version__
from shardconv.checkpoint.fileio import create
from shardconv.checkpoint.layout import FoundFiles, lay_out_padded
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.manifest_format import CHECKSUM_KEY, checksum
from shardconv.errors import PlanError, SourceError, SplitCheckpointError

#: The manifest of a padded checkpoint, and its format.
PADDING_NAME, _FORMAT_VERSION = "shardconv-padding.json", 1


def with_files(manifest: Manifest) -> Manifest:
    """The manifest of files that have the names of the source's files, and padded tensors."""
    names = tuple(name for name, _ in manifest.parts)
    layout = lay_out_padded([header for _, header in manifest.parts], manifest.tensors, manifest.plan)
    return replace(manifest, found=FoundFiles(names, layout, ()))


def write_padding(
    manifest: Manifest, checksums: tuple[tuple[str, ...], ...] | None, config: str, folder: Path, *, mode: int
) -> None:
    """Write the manifest of a padded checkpoint.

    Args:
        manifest: of the source, with the auxiliary files that were copied.
        checksums: of the padded files.
        config: the text of the source's config.
        folder: of the padded checkpoint.
        mode: permissions of the manifest.
    """
    body = {
        "format_version": _FORMAT_VERSION,
        "split": replace(manifest, found=None).to_json(f"shardconv {__version__}"),
        "checksums": checksums,
        "config": config,
    }
    with create(folder / PADDING_NAME, mode) as file:
        file.write(json.dumps({**body, CHECKSUM_KEY: checksum(body)}, separators=(",", ":")).encode())


def read_padding(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a padded checkpoint, and the text of the source's config.

    Raises:
        SplitCheckpointError: if there is none, or it is not what was written.
    """
    path = folder / PADDING_NAME
    try:
        data = json.loads(path.read_bytes())
        body = {key: value for key, value in data.items() if key != CHECKSUM_KEY}
        if data["format_version"] != _FORMAT_VERSION or data[CHECKSUM_KEY] != checksum(body):
            raise ValueError("it is of another version, or was changed after it was written")
        manifest = with_files(Manifest.from_json(data["split"]))
        return replace(manifest, checksums=tuple(map(tuple, data["checksums"]))), data["config"]
    except FileNotFoundError as error:
        raise SplitCheckpointError(f"{folder}: is not a padded checkpoint (no {PADDING_NAME})") from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SourceError, PlanError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error}") from error

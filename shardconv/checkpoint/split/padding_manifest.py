"""The manifest of a padded checkpoint: original sizes, headers and config of the source, and checksums."""

import json
from dataclasses import replace
from pathlib import Path

from shardconv import __version__
from shardconv.checkpoint.engine.layout import ExplicitFiles, lay_out_padded
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_format import CHECKSUM_KEY, checksum
from shardconv.checkpoint.split.manifest_json import from_json, to_json
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath
from shardconv.support.errors import PlanError, SourceError, SplitCheckpointError, one_line

#: File name and format version of the manifest of a padded checkpoint.
PADDING_NAME, _FORMAT_VERSION = "shardconv-padding.json", 1


def with_files(manifest: Manifest) -> Manifest:
    """The manifest for padded tensors in files with the names of the source files."""
    names = tuple(name for name, _ in manifest.source_files)
    layout = lay_out_padded([header for _, header in manifest.source_files], manifest.tensors, manifest.plan)
    return replace(manifest, explicit_files=ExplicitFiles(names, layout, ()))


def write_padding(
    manifest: Manifest, checksums: tuple[tuple[str, ...], ...], config: str, folder: Path, *, mode: int
) -> None:
    """Write the manifest of a padded checkpoint.

    Args:
        manifest: of the source, with the copied auxiliary files.
        checksums: of the padded files.
        config: the text of the source's config.
        folder: of the padded checkpoint.
        mode: permissions of the manifest.
    """
    body = {
        "format_version": _FORMAT_VERSION,
        "split": to_json(replace(manifest, explicit_files=None), f"shardconv {__version__}"),
        "checksums": checksums,
        "config": config,
    }
    with create(folder / PADDING_NAME, mode) as file:
        file.write(json.dumps({**body, CHECKSUM_KEY: checksum(body)}, separators=(",", ":")).encode())


def read_padding(folder: AnyPath) -> tuple[Manifest, str]:
    """Read the manifest of a padded checkpoint, and the text of the source's config.

    Raises:
        SplitCheckpointError: if there is none, or it was changed.
    """
    path = folder / PADDING_NAME
    try:
        data = json.loads(path.read_bytes())
        body = {key: value for key, value in data.items() if key != CHECKSUM_KEY}
        if data["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"its format version is not supported (expected {_FORMAT_VERSION})")
        if data[CHECKSUM_KEY] != checksum(body):
            raise ValueError("its checksum does not match")
        manifest = with_files(from_json(data["split"]))
        return replace(manifest, checksums=tuple(map(tuple, data["checksums"]))), data["config"]
    except FileNotFoundError as error:
        raise SplitCheckpointError(
            f"{folder}: is not a padded checkpoint (no {PADDING_NAME}): pass the folder that shardconv pad wrote; "
            f"shardconv merge restores the source of a split checkpoint"
        ) from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SourceError, PlanError) as error:
        raise SplitCheckpointError(
            f"{path}: is damaged or not supported ({one_line(error)}): run shardconv pad again"
        ) from error

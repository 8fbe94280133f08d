"""The manifest of a padded checkpoint: original sizes, headers and config of the source, and checksums."""

from pathlib import Path

from msgspec.structs import replace

from shardconv import __version__
from shardconv.checkpoint.engine.layout import ExplicitFiles, lay_out_padded
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_format import check_manifest, seal, unseal
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath
from shardconv.support.errors import ShardconvError, SplitCheckpointError, one_line
from shardconv.support.structs import Data

#: File name of the manifest of a padded checkpoint.
PADDING_NAME = "shardconv-padding.json"


class _PaddingManifest(Data, frozen=True, kw_only=True, tag_field="format_version", tag=1):
    """The keys of a manifest of a padded checkpoint; the tag is the version of the format.

    Attributes:
        split: a manifest for one rank, whose placements have the padding.
        checksums: for each file the checksum of each stripe.
        config: the text of the source's config.
    """

    split: Manifest
    checksums: tuple[tuple[str, ...], ...]
    config: str


def with_files(manifest: Manifest) -> Manifest:
    """The manifest for padded tensors in files with the names of the source files."""
    names = tuple(name for name, _ in manifest.source_files)
    layout = lay_out_padded([header for _, header in manifest.source_files], manifest.tensors, manifest.plan)
    return replace(manifest, explicit_files=ExplicitFiles(names, layout))


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
    split = replace(manifest, explicit_files=None, created_by=f"shardconv {__version__}")
    with create(folder / PADDING_NAME, mode) as file:
        file.write(seal(_PaddingManifest(split=split, checksums=checksums, config=config)))


def read_padding(folder: AnyPath) -> tuple[Manifest, str]:
    """Read the manifest of a padded checkpoint, and the text of the source's config.

    Raises:
        SplitCheckpointError: if there is none, or it was changed.
    """
    path = folder / PADDING_NAME
    try:
        stored = unseal(path.read_bytes(), _PaddingManifest)
        check_manifest(stored.split)
        return replace(with_files(stored.split), checksums=stored.checksums), stored.config
    except FileNotFoundError as error:
        raise SplitCheckpointError(
            f"{folder}: is not a padded checkpoint (no {PADDING_NAME}): pass the folder that shardconv pad wrote; "
            f"shardconv merge restores the source of a split checkpoint"
        ) from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, ShardconvError) as error:
        raise SplitCheckpointError(
            f"{path}: is damaged or not supported ({one_line(error)}): run shardconv pad again"
        ) from error

"""Manifests of checkpoints and of pipelines in files: their form, and checks of untrusted ones.

A manifest is JSON in one form only: in the order of the fields, without fields that have their default, without spaces,
and with the checksum of all other fields last. The tag of its class is the version of its format.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash
from msgspec import DecodeError, Struct, ValidationError, json
from msgspec.structs import replace

from shardconv import __version__
from shardconv.checkpoint.engine.geometry import geometry
from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PADDING_NAME, PIPELINE_NAME
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.containers.safetensors import Header, parse_header
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath, Compressed, RemotePath, file_bytes, is_portable_name
from shardconv.files.paths import locked, missing_hint, unfinished
from shardconv.files.weight_formats import refuse_rank_files, refuse_sharded_state
from shardconv.plan.planner import MAX_TP
from shardconv.support.errors import ShardconvError, SourceError, SplitCheckpointError
from shardconv.support.structs import located

T = TypeVar("T", bound=Struct)

# --- the form of a file -----------------------------------------------------------------------------------------------

_MAX_BYTES = 2**30


class _Version(Struct):
    """The key that every version has."""

    format_version: int


def encode(data: Struct) -> bytes:
    """Encode data without its checksum; equal data have equal bytes."""
    return json.encode(data, enc_hook=_stored_text)


def write_sealed(data: Struct, path: Path, *, mode: int) -> None:
    """Write a new file with the permissions ``mode`` before the umask; ``data`` has a field ``created_by``."""
    body = encode(replace(data, created_by=f"shardconv {__version__}"))
    with create(path, mode) as file:
        file.write(body[:-1] + _end(body))


def read_sealed(path: AnyPath, kind: type[T], check: Callable[[T], None], remedy: str) -> T:
    """Read and check a file, whose contents are untrusted.

    Args:
        path: the file.
        kind: the class of its data.
        check: raises ValueError or PlanError if fields do not fit together.
        remedy: the remedy for a file that cannot be used.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is none.
        SplitCheckpointError: if it cannot be read or used.
    """
    try:
        data = _unseal(_read(path), kind)
        check(data)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ShardconvError, ValueError, RecursionError) as error:
        reason, *own = error.args if isinstance(error, ShardconvError) else (error,)
        raise SplitCheckpointError(f"{path}: cannot be used: {reason}: {(own or [remedy])[0]}") from error
    return data


def _read(path: AnyPath) -> bytes:
    """The contents of a file.

    Raises:
        ValueError: if it cannot be one of these.
    """
    if not path.is_file() and path.exists():
        raise ValueError("it is not a regular file")  # reading a pipe could block forever
    if file_bytes(path) > _MAX_BYTES:
        raise ValueError("it is too large")
    return path.read_bytes() if not isinstance(path, RemotePath) else path.file.read_all(_MAX_BYTES)


def _unseal(text: bytes, kind: type[T]) -> T:
    """Decode the contents of a file.

    Raises:
        ValueError: if it is not of this kind and version, or was changed after it was written.
        SplitCheckpointError: if it is one of a later version.
        SourceError: if the header of a source file is not valid.
        PlanError: if the options of a plan contradict each other.
    """
    _check_version(text, int(kind.__struct_config__.tag or 0))
    end = text[-len(_end(b"")) :]
    body = bytearray(text)
    del text  # it may have many megabytes
    body[-len(end) :] = b"}"
    if end != _end(body):
        raise ValueError("it was changed after it was written (its checksum differs)")
    try:
        data = json.decode(body, type=kind, dec_hook=_parsed_text)
    except ValidationError as error:
        raise ValueError(located(error)) from error
    del body
    if end != _end(encode(data)):  # the decoder keeps the last of duplicated keys
        raise ValueError("it is not in the form that shardconv writes, for example because a key is duplicated")
    return data


def _end(body: bytes | bytearray) -> bytes:
    """The end of a file: the key of the checksum, which ``body`` does not have."""
    return b',"manifest_checksum":"%s"}' % xxhash.xxh3_128_hexdigest(body).encode()


def _check_version(text: bytes, expected: int) -> None:
    try:
        version = json.decode(text, type=_Version).format_version
    except ValidationError as error:
        raise ValueError("it is not a manifest of shardconv") from error
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is truncated or damaged ({error})") from error
    if version > expected:
        raise SplitCheckpointError(
            f"its format version is too new (got {version}, expected at most {expected})", "update shardconv"
        )
    if version != expected:
        raise ValueError(f"its format version is not supported (got {version}, expected {expected})")


def _stored_text(value: object) -> str:
    """A header or an index as it is stored."""
    assert isinstance(value, Header | Compressed)
    return value.raw().decode()


def _parsed_text(kind: type, text: object) -> Header | Compressed:
    if not isinstance(text, str):
        raise ValueError(f"is {text!r:.60} (expected a text)")  # noqa: TRY004 - untrusted data
    return parse_header(text.encode(), None, Path("header")) if kind is Header else Compressed(text.encode())


# --- manifests of checkpoints -----------------------------------------------------------------------------------------

_MIN_STRIPE_BYTES = 2**12
#: The remedy for a manifest that cannot be used, by its name.
_REMEDIES = {
    MANIFEST_NAME: "copy it again, or split the source again",
    PADDING_NAME: "copy it again, or run shardconv pad again",
}
#: Files of transformers with the full tensors of a model, or their index.
_UNSHARDED = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def is_split(path: AnyPath) -> bool:
    """Whether a path is the folder of a split checkpoint."""
    return (path / MANIFEST_NAME).exists()


def read_manifest(folder: AnyPath, *, name: str = MANIFEST_NAME, remedy: str = "") -> Manifest:
    """Read and check the manifest of a split or padded checkpoint.

    Args:
        folder: the checkpoint.
        name: of the manifest, of a split or padded checkpoint.
        remedy: another remedy for the message that it is not a split checkpoint.

    Raises:
        SplitCheckpointError: if the folder is not such a checkpoint, or its manifest is not valid.
    """
    if not folder.exists():
        raise SplitCheckpointError(f"{folder}: does not exist{missing_hint(folder)}")
    try:
        return read_sealed(folder / name, Manifest, partial(_check_manifest, name=name), _REMEDIES[name])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SplitCheckpointError(f"{folder}: {_missing(folder, name, remedy)}") from error


def _missing(folder: AnyPath, name: str, remedy: str) -> str:
    """The problem and the remedy for a folder without its manifest.

    Raises:
        SplitCheckpointError: if it has rank files whose manifest is missing.
    """
    if name == PADDING_NAME:
        return (
            f"is not a padded checkpoint (no {name}): pass the folder that shardconv pad wrote; shardconv merge "
            f"restores the source of a split checkpoint"
        )
    if problem := unfinished(folder) or locked(folder):
        return problem
    if (folder / PIPELINE_NAME).exists():
        return f"is a split pipeline (expected a split checkpoint): pass the folder of a component in {folder}"
    if is_split(folder.parent) and folder.is_file():
        return f"belongs to a split checkpoint: pass its folder {folder.parent}"
    _refuse_without_manifest(folder)
    unsharded = ", but already unsharded" if any((folder / file).exists() for file in _UNSHARDED) else ""
    return (
        f"is not a split checkpoint (no {name}){unsharded}: make a split one with shardconv split {folder} --tp N"
        f"{f', {remedy}' if remedy else ''}"
    )


def _refuse_without_manifest(path: AnyPath) -> None:
    """Refuse rank files whose manifest is missing."""
    folder = path.parent if path.is_file() else path
    names = [path.name] if path.is_file() else [file.name for file in path.glob("*.safetensors")]
    try:
        refuse_rank_files(folder, names)
        refuse_sharded_state(folder, names)
    except SourceError as error:
        raise SplitCheckpointError(error.message) from error


def write_manifest(manifest: Manifest, folder: Path, *, mode: int) -> None:
    """Write a manifest into a folder, with the permissions ``mode`` before the umask."""
    write_sealed(manifest, folder / manifest.file_name, mode=mode)


def comparable(manifest: Manifest) -> str:
    """The text of a manifest, without the name of the program that wrote it."""
    return encode(replace(manifest, created_by="")).decode()


def _check_manifest(manifest: Manifest, name: str) -> None:
    """Check an untrusted manifest: sizes before they are used, and names, which may not lead out of its folder.

    Raises:
        ValueError: if its fields do not fit together.
        PlanError: if rules, layout and plan do not fit together.
    """
    if manifest.num_ranks > MAX_TP:
        raise ValueError(f"its number of ranks is invalid (got {manifest.num_ranks}, expected at most {MAX_TP})")
    ranks = manifest.ranks
    if not (ranks and list(ranks) == sorted({*ranks}) and 0 <= ranks[0] <= ranks[-1] < manifest.num_ranks):
        raise ValueError(f"its ranks are not ascending ranks of {manifest.num_ranks}")
    if manifest.file_name != name:
        raise ValueError(f"it belongs to a {'padded' if manifest.is_padded else 'split'} checkpoint")
    if not isinstance(manifest.config, dict | None):
        raise ValueError(f"config: is not an object (got {manifest.config_text!r:.40})")  # noqa: TRY004 - untrusted data
    manifest.plan.rules.check()
    _check_tensors(manifest)
    _check_checksums(manifest)
    _check_names(manifest)


def _check_tensors(manifest: Manifest) -> None:
    """Check that plan, source files and layout fit together."""
    if manifest.plan.tensors.keys() != manifest.tensors.keys():
        raise ValueError("its plan and its source files have different tensors")
    for name, spec in manifest.tensors.items():
        geometry(manifest.plan.placement(name), spec.dtype, spec.shape)  # raises ValueError if it does not fit
    manifest.checked_for_layout()
    if manifest.stripe_bytes < _MIN_STRIPE_BYTES:
        raise ValueError(f"its stripe_bytes is too small (got {manifest.stripe_bytes}, expected {_MIN_STRIPE_BYTES})")


def _check_checksums(manifest: Manifest) -> None:
    """Check that there is one checksum for each of the folder's ranks and each stripe."""
    if manifest.checksums is None:
        return
    num_bytes = sum(header.data_bytes for _, header in manifest.source_files)
    if any(len(rank) < num_bytes // manifest.stripe_bytes for rank in manifest.checksums):
        raise ValueError("it has too few checksums for its tensors")  # checked before stripes are computed
    counts = {len(manifest.checksums), *(len(rank) - len(manifest.stripes) for rank in manifest.checksums)}
    if counts != {len(manifest.ranks), 0}:
        raise ValueError("the number of its checksums does not match its tensors")


def _check_names(manifest: Manifest) -> None:
    """Check that no name leads out of the folder, and that no two files have the same name."""
    names = [name for name, _ in manifest.source_files] + ([manifest.index[0]] if manifest.index else [])
    rank_files = [*manifest.rank_files, *manifest.rank_indexes]
    for name in [*names, *rank_files, *manifest.adapters]:
        if not is_portable_name(name):
            raise ValueError(f"{name!r:.100} is not a valid file name")
    for name in manifest.auxiliary_files:
        if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
            raise ValueError(f"{name!r:.100} is not a valid file name")
    auxiliary_files = manifest.auxiliary_files
    for files in ([*names, *auxiliary_files], [manifest.file_name, *rank_files, *auxiliary_files]):
        if len({*files}) != len(files):
            raise ValueError("two of its files have the same name")

"""Pad: a checkpoint becomes one whose heads and widths divide, with its config changed; and unpad, the inverse.

Both are a copy by the placements of one rank, in the names and files of the source. The manifest of the padding has the
true sizes, the source's headers and the source's config.
"""

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardconv import __version__
from shardconv.checkpoint.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.fileio import InputFiles, create, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.layout import FoundFiles, lay_out_padded, lay_out_parts
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.manifest_format import CHECKSUM_KEY, checksum
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, as_names
from shardconv.checkpoint.shards import ShardReader
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.write import check_readable, copy_files, copy_side_files, read_ranks, side_bytes, side_paths
from shardconv.errors import PlanError, SourceError, SplitCheckpointError, UsageError
from shardconv.plan.padded_config import VOCABULARY, ConfigChange, change_config
from shardconv.plan.plan import TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.sizes import PaddingReport

#: Whether a model of a config has such tensors.
Check = Callable[[Mapping[str, Any], Mapping[str, TensorSpec]], None]

#: The manifest of a padded checkpoint, and its format.
PADDING_NAME, _FORMAT_VERSION = "shardconv-padding.json", 1


@dataclass(frozen=True, slots=True)
class PadReport:
    """What a padding did, or with ``dry_run`` would do.

    Attributes:
        path: the padded checkpoint.
        tp: the tensor parallel size that its sizes are a multiple for.
        family: whose rules were used.
        num_tensors: number of tensors.
        source_bytes: bytes of the source's weights.
        num_bytes: bytes of the padded weights.
        padding: what is padded, from which count to which.
        config: the fields of config.json that change.
        notes: how the padded checkpoint may differ from the source; empty where it does not.
        left_out: name to reason of files in the source's folder that were left out; hidden folders have a / behind.
        seconds: wall time.
        dry_run: whether nothing was written.
        destination_exists: whether a checkpoint was at ``path`` before, which only ``overwrite`` replaces.
    """

    path: str
    tp: int
    family: str
    num_tensors: int
    source_bytes: int
    num_bytes: int
    padding: PaddingReport
    config: tuple[ConfigChange, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float
    dry_run: bool
    destination_exists: bool


@dataclass(frozen=True, slots=True)
class UnpadReport:
    """What an unpadding did, or with ``dry_run`` would do; attributes as of :class:`PadReport`."""

    path: str
    num_tensors: int
    num_bytes: int
    seconds: float
    dry_run: bool
    destination_exists: bool


def pad(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    tp: int,
    vocab_multiple: int = 1,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    check: Check | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
) -> PadReport:
    """Pad a Hugging Face checkpoint with zeros, so that engines which read its config.json can shard it.

    Args:
        src: a folder with config.json.
        dst: the folder to write; by default ``NAME-padN`` in the current folder.
        tp: the tensor parallel size that heads and widths are padded for.
        vocab_multiple: pad the vocabulary to a multiple of this, too. The logits of padding are zero, and not minus
            infinity: it is for engines that cannot shard the vocabulary otherwise.
        overwrite: replace what is at ``dst``.
        dry_run: plan and check, write nothing; a checkpoint at ``dst`` is then not an error.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.
        check: called with the new config and the padded tensors before anything is written; raises if it refuses them.
        follow_links: read files that are links to outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out.

    Raises:
        SourceError: if the source cannot be read, or has no config.json.
        PlanError: if outputs would not be equal, or config.json cannot say what is padded.
        UsageError: if nothing is to be padded.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    source = open_source(local_path(src), follow_links=follow_links, ignore=as_names(ignore))
    config, manifest, changes, padding = _planned(source, tp, vocab_multiple, check)
    target = local_path(dst) if dst is not None else Path(f"{source.name}-pad{tp}")
    paths = (source.path, *(part.path for part in source.parts), *source.side_files.values())
    check_apart(target, paths)
    names = [*source.side_files, PADDING_NAME]
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=names)
    if not dry_run:
        _write_padded(source, manifest, config, target, overwrite=overwrite, threads=threads, progress=progress)
    return PadReport(
        path=str(target),
        tp=tp,
        family=str(manifest.plan.family),
        num_tensors=len(manifest.tensors),
        source_bytes=source.num_bytes,
        num_bytes=sum(header.data_bytes for header in manifest.rank_layout.headers),
        padding=padding,
        config=changes,
        notes=tuple(_note(change) for change in changes if change.field.endswith(VOCABULARY)),
        left_out=source.left_out,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
    )


def _note(change: ConfigChange) -> str:
    return (
        f"the logits of tokens from {change.before} on are zero, and not minus infinity: where tokens are sampled, or "
        f"the largest logit may be negative, mask them in the engine"
    )


def _planned(
    source: Source, tp: int, vocab_multiple: int, check: Check | None
) -> tuple[dict[str, Any], Manifest, tuple[ConfigChange, ...], PaddingReport]:
    """The new config, the manifest, the changes of the config, and what is padded."""
    if source.config is None or not source.is_folder:
        raise SourceError(f"{source.path}: is not a folder with {CONFIG_NAME}, which changes with the padding")
    if PADDING_NAME in source.side_files:
        raise UsageError(f"{source.path}: is padded already ({PADDING_NAME}): shardconv unpad {source.path} first")
    config = copy.deepcopy(source.config)
    request = PlanRequest(pad=tp)
    rules = replace(resolve(source.specs, config, request).resolver.rules, vocab_multiple=vocab_multiple)
    resolver = Resolver(source.specs, rules)
    plan, padding = resolver.plan(1), resolver.padding(1)
    if not padding.units:
        raise UsageError(f"{source.path}: nothing is to be padded for tp {tp}: use it as it is")
    changes = change_config(resolver, source.specs, may_add=check is not None)
    padded = {
        name: TensorSpec(spec.dtype, plan.placement(name).shard_shape(spec.shape, 0))
        for name, spec in source.specs.items()
    }
    resolve(padded, config, PlanRequest()).resolver.plan(tp)  # refuses sizes that are not those of the new config
    if check is not None:
        check(config, padded)
    manifest = Manifest.of_source(source, plan, request, stripe_bytes=STRIPE_BYTES, checksums=False)
    others = {name: "" for name in source.side_files if name != CONFIG_NAME}
    return config, _with_files(replace(manifest, side_files=others)), changes, padding


def _with_files(manifest: Manifest) -> Manifest:
    """The manifest of files that have the names of the source's files, and padded tensors."""
    names = tuple(name for name, _ in manifest.parts)
    layout = lay_out_padded([header for _, header in manifest.parts], manifest.tensors, manifest.plan)
    return replace(manifest, found=FoundFiles(names, layout, ()))


def _write_padded(
    source: Source,
    manifest: Manifest,
    config: dict[str, Any],
    target: Path,
    *,
    overwrite: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    layout, parts = manifest.rank_layout, manifest.part_layout
    side_files = {name: source.side_files[name] for name in manifest.side_files}
    config_mode = permissions([source.side_files[CONFIG_NAME]])
    original = _text_of(source.side_files[CONFIG_NAME], source.config)
    total = sum(layout.file_bytes) + side_bytes(source.side_files)
    with (
        InputFiles([part.path for part in source.parts], parts.heads, parts.file_bytes) as inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            side_files=[*source.side_files, PADDING_NAME],
            mode=permissions([source.path]),
        ) as stage,
    ):
        names = list(manifest.tensors)
        reader = ShardReader(parts.shards, inputs, labels=[part.name for part in source.parts], names=names)
        digests = copy_files(
            reader, inputs, manifest.rank_paths(stage), layout, manifest.stripes,
            identify=lambda _: layout.heads, threads=threads, progress=progress,
        )  # fmt: skip
        copied = copy_side_files(side_files, stage)
        with create(stage / CONFIG_NAME, config_mode) as file:
            file.write((json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
        if manifest.index is not None:
            with create(stage / manifest.index[0], inputs.mode) as file:
                file.write(_index(manifest.index[1], sum(header.data_bytes for header in layout.headers)).encode())
        body = {
            "format_version": _FORMAT_VERSION,
            "split": replace(manifest, side_files=copied, found=None).to_json(f"shardconv {__version__}"),
            "checksums": digests,
            "config": original,
        }
        with create(stage / PADDING_NAME, inputs.mode & config_mode) as file:  # the config is in it
            file.write(json.dumps({**body, CHECKSUM_KEY: checksum(body)}, separators=(",", ":")).encode())


def _text_of(path: Path, expected: dict[str, Any] | None) -> str:
    """The text of a config, which is the one that was planned with."""
    text = path.read_bytes().decode()
    if json.loads(text.removeprefix("\ufeff")) != expected:
        raise SourceError(f"{path}: changed after the plan was made; run the command again")
    return text


def _index(text: str, total: int) -> str:
    """An index whose tensors have so many bytes together."""
    index = json.loads(text)
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = total
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def unpad(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> UnpadReport:
    """Write the checkpoint that :func:`pad` padded, byte for byte; bytes are checked against their checksums.

    Args:
        src: the padded checkpoint.
        dst: the folder to write; by default ``NAME-unpadded`` in the current folder.
        overwrite: replace what is at ``dst``.
        dry_run: check what can be checked without reading the data, write nothing.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Raises:
        SplitCheckpointError: if the folder is not a padded checkpoint, or bytes are not those that were written.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    folder = local_path(src)
    manifest, config = _read(folder)
    target = local_path(dst) if dst is not None else Path(f"{folder.resolve().name}-unpadded")
    check_apart(target, [folder])
    names = [*manifest.side_files, CONFIG_NAME]
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=names)
    if dry_run:
        check_readable(manifest, folder)
    else:
        _write_unpadded(manifest, config, folder, target, overwrite=overwrite, threads=threads, progress=progress)
    return UnpadReport(
        path=str(target),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.file_bytes for _, header in manifest.parts),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
    )


def _read(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a padded checkpoint, and the text of the source's config."""
    path = folder / PADDING_NAME
    try:
        data = json.loads(path.read_bytes())
        body = {key: value for key, value in data.items() if key != CHECKSUM_KEY}
        if data["format_version"] != _FORMAT_VERSION or data[CHECKSUM_KEY] != checksum(body):
            raise ValueError("it is of another version, or was changed after it was written")
        manifest = _with_files(Manifest.from_json(data["split"]))
        return replace(manifest, checksums=tuple(map(tuple, data["checksums"]))), data["config"]
    except FileNotFoundError as error:
        raise SplitCheckpointError(f"{folder}: is not a padded checkpoint (no {PADDING_NAME})") from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SourceError, PlanError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error}") from error


def _write_unpadded(
    manifest: Manifest,
    config: str,
    folder: Path,
    target: Path,
    *,
    overwrite: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    side_files = side_paths(manifest, folder)
    layout = lay_out_parts([header for _, header in manifest.parts], manifest.tensors)
    reader, inputs = read_ranks(manifest, folder)
    total = sum(layout.file_bytes) + side_bytes(side_files) + len(config)
    with (
        inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            side_files=[*side_files, CONFIG_NAME],
            mode=permissions([folder]),
        ) as stage,
    ):
        paths = [stage / name for name, _ in manifest.parts]
        copy_files(reader, inputs, paths, layout, manifest.stripes, threads=threads, progress=progress)
        copy_side_files(side_files, stage, manifest.side_files)
        texts = {CONFIG_NAME: config} | dict([manifest.index] if manifest.index else [])
        for name, text in texts.items():
            with create(stage / name, permissions([folder / name])) as file:
                file.write(text.encode())

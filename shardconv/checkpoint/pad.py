"""Pad: a checkpoint becomes one whose heads and widths divide, with its config changed.

A copy by the placements of one rank, in the names and files of the source.
"""

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardconv.checkpoint.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.fileio import InputFiles, create, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.padding_manifest import PADDING_NAME, with_files, write_padding
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, as_names
from shardconv.checkpoint.shards import ShardReader
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.write import copy_files, copy_side_files, side_bytes
from shardconv.errors import SourceError, UsageError
from shardconv.plan.padded_config import VOCABULARY, ConfigChange, change_config
from shardconv.plan.plan import TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.sizes import PaddingReport

#: Whether a model of a config has such tensors.
Check = Callable[[Mapping[str, Any], Mapping[str, TensorSpec]], None]


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
class _Planned:
    """What is written: the new config, the manifest, the fields of the config that change, and what is padded."""

    config: dict[str, Any]
    manifest: Manifest
    changes: tuple[ConfigChange, ...]
    padding: PaddingReport

    @property
    def num_bytes(self) -> int:
        """Bytes of the padded weights."""
        return sum(header.data_bytes for header in self.manifest.rank_layout.headers)


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
    planned = _planned(source, tp, vocab_multiple, check)
    target = local_path(dst) if dst is not None else Path(f"{source.name}-pad{tp}")
    check_apart(target, (source.path, *(part.path for part in source.parts), *source.side_files.values()))
    names = [*source.side_files, PADDING_NAME]
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=names)
    if not dry_run:
        _write(source, planned, target, overwrite=overwrite, threads=threads, progress=progress)
    return PadReport(
        path=str(target),
        tp=tp,
        family=str(planned.manifest.plan.family),
        num_tensors=len(planned.manifest.tensors),
        source_bytes=source.num_bytes,
        num_bytes=planned.num_bytes,
        padding=planned.padding,
        config=planned.changes,
        notes=tuple(_note(change) for change in planned.changes if change.field.endswith(VOCABULARY)),
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


def _planned(source: Source, tp: int, vocab_multiple: int, check: Check | None) -> _Planned:
    """Plan the padding, change a copy of the config, and check that they fit each other."""
    if source.config is None or not source.is_folder:
        raise SourceError(f"{source.path}: is not a folder with {CONFIG_NAME}, which changes with the padding")
    if PADDING_NAME in source.side_files:
        raise UsageError(f"{source.path}: is padded already ({PADDING_NAME}): shardconv unpad {source.path} first")
    config, request = copy.deepcopy(source.config), PlanRequest(pad=tp)
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
    return _Planned(config, with_files(replace(manifest, side_files=others)), changes, padding)


def _write(
    source: Source, planned: _Planned, target: Path, *, overwrite: bool, threads: int | None, progress: Progress | None
) -> None:
    parts = planned.manifest.part_layout
    total = sum(planned.manifest.rank_layout.file_bytes) + side_bytes(source.side_files)
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
        _write_files(source, planned, inputs, stage, threads=threads, progress=progress)


def _write_files(
    source: Source,
    planned: _Planned,
    inputs: InputFiles,
    folder: Path,
    *,
    threads: int | None,
    progress: Progress | None,
) -> None:
    manifest, labels = planned.manifest, [part.name for part in source.parts]
    layout = manifest.rank_layout
    config_mode = permissions([source.side_files[CONFIG_NAME]])
    original = _text_of(source.side_files[CONFIG_NAME], source.config)
    reader = ShardReader(manifest.part_layout.shards, inputs, labels=labels, names=list(manifest.tensors))
    digests = copy_files(
        reader, inputs, manifest.rank_paths(folder), layout, manifest.stripes,
        identify=lambda _: layout.heads, threads=threads, progress=progress,
    )  # fmt: skip
    copied = copy_side_files({name: source.side_files[name] for name in manifest.side_files}, folder)
    with create(folder / CONFIG_NAME, config_mode) as file:
        file.write((json.dumps(planned.config, indent=2, ensure_ascii=False) + "\n").encode())
    if manifest.index is not None:
        with create(folder / manifest.index[0], inputs.mode) as file:
            file.write(_index(manifest.index[1], planned.num_bytes).encode())
    mode = inputs.mode & config_mode  # the config is in it
    write_padding(replace(manifest, side_files=copied), digests, original, folder, mode=mode)


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

"""Split: a source becomes a folder with one file a rank."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from shardconv import __version__
from shardconv.checkpoint.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.fileio import InputFiles, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.manifest import Manifest, write_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import PlanOptions, StrPath, plan_source
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.shards import ShardReader
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.staging import check_apart, check_target, staging
from shardconv.checkpoint.write import copy_files, copy_side_files, side_bytes
from shardconv.errors import SourceError
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest
from shardconv.plan.sizes import NO_PADDING, PaddingReport


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What a split did, or with ``dry_run`` would do.

    Attributes:
        path: the split checkpoint.
        tp: number of ranks.
        family: whose rules were used.
        layout: of the rank files.
        num_tensors: number of tensors.
        source_bytes: bytes of the source's weights.
        rank_bytes: bytes of each rank's file.
        assumed: what was concluded or assumed rather than read.
        left_out: name to reason of files in the source's folder that were left out; hidden folders have a / behind.
        seconds: wall time.
        dry_run: whether nothing was written.
        destination_exists: whether a checkpoint was at ``path`` before, which only ``overwrite`` replaces.
        padding: what is padded, and what that costs.
    """

    path: str
    tp: int
    family: str | None
    layout: str
    num_tensors: int
    source_bytes: int
    rank_bytes: tuple[int, ...]
    assumed: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float
    dry_run: bool
    destination_exists: bool
    padding: PaddingReport = NO_PADDING


def split(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    tp: int,
    overwrite: bool = False,
    checksums: bool = True,
    layout: str = NATIVE.name,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> SplitReport:
    """Split a checkpoint for ``tp`` ranks.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder.
        dst: the folder to write; by default ``NAME-tpN`` in the current folder.
        tp: number of ranks.
        overwrite: replace what is at ``dst``.
        checksums: take checksums while the data passes, which verify and merge check.
        layout: names, fusions and files of the shards: "native" for the source's names; "dcp" for these and the offsets
            of the shards, with which torch.distributed.checkpoint loads the folder by its HuggingFaceStorageReader,
            into full tensors or DTensors; "vllm" for files that vLLM loads with load_format="sharded_state".
        dry_run: plan and check, write nothing; a checkpoint at ``dst`` is then not an error.
        threads: how many threads copy; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.
        options: how the source is read and planned: see :class:`PlanOptions`.

    Raises:
        SourceError: if the source cannot be read, or changes meanwhile.
        PlanError: if no plan is known to be right, or the layout does not fit it: dcp has no fused or padded tensors,
            and vllm is for the model types and plans that it knows.
        UsageError: if there is no such layout, or it is an engine's and the options change the plan.
        OutputError: if the destination exists, is in use, or has no room.
    """
    began = time.perf_counter()
    source, request, (resolver, assumed), read = plan_source(src, layout=layout, **options)
    chosen = choose_layout(layout, source.specs, with_settings(source))
    made = resolver.plan(tp, assumed=assumed)
    manifest = Manifest.of_source(source, made, request, stripe_bytes=STRIPE_BYTES, layout=chosen, checksums=checksums)
    target = local_path(dst) if dst is not None else Path(f"{source.name}-tp{tp}")
    check_apart(target, read)
    exists = check_target(target, is_folder=True, overwrite=overwrite, dry_run=dry_run, side_files=source.side_files)
    if not dry_run:
        _write(source, manifest, target, overwrite=overwrite, checksums=checksums, threads=threads, progress=progress)
    return SplitReport(
        path=str(target),
        tp=tp,
        family=made.family,
        layout=layout,
        num_tensors=len(manifest.tensors),
        source_bytes=source.num_bytes,
        rank_bytes=tuple(manifest.rank_layout.file_bytes),
        assumed=assumed,
        left_out=source.left_out,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        padding=resolver.padding(tp),
    )


def split_by(source: Source, target: Path, plan: Plan, request: PlanRequest, layout: FileLayout = NATIVE) -> None:
    """Split a source by an existing plan and layout, with defaults for everything else."""
    manifest = Manifest.of_source(source, plan, request, stripe_bytes=STRIPE_BYTES, layout=layout)
    _write(source, manifest, target, overwrite=False, checksums=True, threads=None, progress=None)


def _write(
    source: Source,
    manifest: Manifest,
    target: Path,
    *,
    overwrite: bool,
    checksums: bool,
    threads: int | None,
    progress: Progress | None,
) -> None:
    layout = manifest.rank_layout
    total = sum(layout.file_bytes) + side_bytes(source.side_files)
    paths = [part.path for part in source.parts]
    parts = manifest.part_layout
    with (
        InputFiles(paths, parts.heads, parts.file_bytes) as inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            side_files=source.side_files,
            mode=permissions([source.path] if source.is_folder else []),
        ) as folder,
    ):
        names = list(manifest.tensors)
        reader = ShardReader(parts.shards, inputs, labels=[part.name for part in source.parts], names=names)
        digests = copy_files(
            reader, inputs, manifest.rank_paths(folder), layout, manifest.stripes,
            identify=manifest.heads_with if checksums else None, threads=threads, progress=progress,
        )  # fmt: skip
        side_files = copy_side_files(source.side_files, folder)
        if source.config is not None and read_json(folder / CONFIG_NAME) != source.config:
            raise SourceError(
                f"{source.side_files[CONFIG_NAME]}: changed after the plan was made; run the command again"
            )
        mode = _manifest_mode(source, inputs.mode)
        write_manifest(manifest.written(digests, side_files), folder, f"shardconv {__version__}", mode=mode)


def _manifest_mode(source: Source, weights_mode: int) -> int:
    """The permissions of the manifest, which merge passes on to the index: those of the index, or else of the weights.

    The config is in the manifest as well, so whoever may not read that may not read the manifest.
    """
    if source.index is None:
        return weights_mode
    config = [source.side_files[CONFIG_NAME]] if source.config is not None else []
    return permissions([source.path / source.index[0], *config])

"""Split a source checkpoint into a folder with one file per rank."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from shardconv import __version__
from shardconv.checkpoint.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.destination import check_disjoint, check_target
from shardconv.checkpoint.fileio import InputFiles, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.manifest_file import write_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import PlanOptions, StrPath, plan_source
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.shards import ShardReader
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.staging import staging
from shardconv.checkpoint.write import auxiliary_bytes, copy_auxiliary, copy_files
from shardconv.errors import SourceError
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest
from shardconv.plan.tp_sizes import NO_PADDING, PaddingReport


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Result of a split, or with ``dry_run`` the expected result.

    Attributes:
        path: the split checkpoint.
        tp: number of ranks.
        family: the model family whose rules were used.
        layout: of the rank files.
        num_tensors: number of tensors.
        source_bytes: bytes of the source's weights.
        rank_bytes: bytes of each rank's file.
        assumed: assumptions of the plan.
        left_out: name to reason of files of the source that were left out; names of hidden folders end with /.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        padding: padded units and their cost.
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
        dst: the folder to write; defaults to ``NAME-tpN`` in the current folder.
        tp: number of ranks.
        overwrite: replace an existing checkpoint at ``dst``.
        checksums: store checksums, which verify and merge check.
        layout: names, fusions and files of the shards: "native" for the source's names; "dcp" for the source's names
            and the offsets of the shards, so that HuggingFaceStorageReader of torch.distributed.checkpoint loads the
            folder into full tensors or DTensors; "vllm" for files that vLLM loads with load_format="sharded_state".
        dry_run: plan and check, but write nothing; an existing checkpoint at ``dst`` is not an error.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.
        options: how the source is read and planned, see :class:`PlanOptions`.

    Raises:
        SourceError: if the source cannot be read, or changes during the split.
        PlanError: if no plan is known to be correct, or the layout does not support it: dcp does not support fused or
            padded tensors, and vllm only supports certain model types and plans.
        UsageError: if the layout is unknown, or it is the layout of an engine and the options change the plan.
        OutputError: if the destination exists, is in use, or has too little free space.
    """
    began = time.perf_counter()
    source, tensors, request, (resolver, assumed), input_paths = plan_source(src, layout=layout, **options)
    file_layout = choose_layout(layout, tensors, with_settings(source))
    plan = resolver.plan(tp, assumed=assumed)
    manifest = Manifest.of_source(
        source, plan, request, stripe_bytes=STRIPE_BYTES, layout=file_layout, checksums=checksums
    )
    target = local_path(dst) if dst is not None else Path(f"{source.name}-tp{tp}")
    check_disjoint(target, input_paths)
    exists = check_target(
        target, is_folder=True, overwrite=overwrite, dry_run=dry_run, auxiliary_files=source.auxiliary_files
    )
    if not dry_run:
        _write(source, manifest, target, overwrite=overwrite, checksums=checksums, threads=threads, progress=progress)
    return SplitReport(
        path=str(target),
        tp=tp,
        family=plan.family,
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
    """Split a source with a given plan and layout, and defaults for all other options."""
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
    total = sum(layout.file_bytes) + auxiliary_bytes(source.auxiliary_files)
    paths = [file.path for file in source.files]
    source_layout = manifest.source_layout
    with (
        InputFiles(paths, source_layout.prefixes, source_layout.file_bytes) as inputs,
        staging(
            target,
            is_folder=True,
            overwrite=overwrite,
            num_bytes=total,
            auxiliary_files=source.auxiliary_files,
            mode=permissions([source.path] if source.is_folder else []),
        ) as folder,
    ):
        labels = [file.name for file in source.files]
        reader = ShardReader(source_layout.shards, inputs, labels=labels, names=list(manifest.tensors))
        stripe_checksums = copy_files(
            reader, inputs, manifest.rank_paths(folder), layout, manifest.stripes,
            identify=manifest.prefixes_with if checksums else None, threads=threads, progress=progress,
        )  # fmt: skip
        auxiliary_files = copy_auxiliary(source.auxiliary_files, folder)
        if source.config is not None and read_json(folder / CONFIG_NAME) != source.config:
            raise SourceError(
                f"{source.auxiliary_files[CONFIG_NAME]}: changed after the plan was made: run the command again"
            )
        mode = _manifest_mode(source, inputs.mode)
        write_manifest(
            manifest.written(stripe_checksums, auxiliary_files), folder, f"shardconv {__version__}", mode=mode
        )


def _manifest_mode(source: Source, weights_mode: int) -> int:
    """Permissions of the manifest, and thereby of a merged index: those of the index, or else of the weights.

    The manifest contains the config, so it is readable only for those who can read the config.
    """
    if source.index is None:
        return weights_mode
    config = [source.auxiliary_files[CONFIG_NAME]] if source.config is not None else []
    return permissions([source.path / source.index[0], *config])

"""Split a source checkpoint into a folder with one file per rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Unpack

from shardconv import __version__
from shardconv.checkpoint.copy import STRIPE_BYTES, Progress, Reader
from shardconv.checkpoint.destination import check_disjoint, check_target
from shardconv.checkpoint.fileio import InputFiles, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.job import journal_of, settings_of
from shardconv.checkpoint.journal import Journal, check_resume
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.manifest_file import write_manifest
from shardconv.checkpoint.meta_writer import check_meta, lay_out_meta, write_meta
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import PlannedSource, PlanOptions, StrPath
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.remote import reads_remote
from shardconv.checkpoint.remote_output import is_remote, refuse_remote, writes_remote
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.source_reader import open_tensors
from shardconv.checkpoint.split_sources import plan_sources
from shardconv.checkpoint.staging import staging
from shardconv.checkpoint.write import auxiliary_bytes, check_config, copy_files, write_auxiliary, write_indexes
from shardconv.errors import UsageError
from shardconv.layouts.choice import choose_layout, with_max_file_size
from shardconv.layouts.external import META
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest
from shardconv.plan.tp_sizes import NO_PADDING, PaddingReport
from shardconv.storage.table import shown


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
        rank_bytes: for each rank the bytes of its files.
        assumed: assumptions of the plan.
        left_out: name to reason of files of the source that were left out; names of hidden folders end with /.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        padding: padded units and their cost.
        derived: why a merge does not give the bytes of the source's files, one phrase each; empty if it does.
        files_per_rank: number of files of each rank.
        adapters: names of the adapters that were split with the model.
        resumed_bytes: bytes of full tensors that an interrupted run had written and that were not copied again.
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
    derived: tuple[str, ...] = ()
    files_per_rank: int = 1
    adapters: tuple[str, ...] = ()
    resumed_bytes: int = 0


@reads_remote("src")
@writes_remote
def split(
    src: StrPath | Source,
    dst: StrPath | None = None,
    *,
    tp: int,
    base: StrPath | None = None,
    adapters: Sequence[StrPath] = (),
    merge_adapter: bool = False,
    overwrite: bool = False,
    checksums: bool = True,
    layout: str = NATIVE.name,
    dtype: str | None = None,
    max_file_size: int | str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> SplitReport:
    """Split a checkpoint for ``tp`` ranks.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, a folder, or a source that is already open.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-tpN`` in the current folder.
        tp: number of ranks.
        base: the base model of ``src``, a LoRA adapter of PEFT: a checkpoint, a split checkpoint, or a config.json or a
            folder with one. ``options`` are then those of the base model.
        adapters: folders of LoRA adapters of PEFT for the model ``src``; each is split into a folder
            ``adapters/NAME`` of ``dst``.
        merge_adapter: merge the only one of ``adapters`` into the weights instead, as ``merge_and_unload`` of PEFT.
        overwrite: replace an existing checkpoint at ``dst``.
        checksums: store checksums, which verify and merge check.
        layout: names, fusions and files of the shards: "native" for the source's names; "dcp" for the source's names
            and the offsets of the shards, so that HuggingFaceStorageReader of torch.distributed.checkpoint loads the
            folder into full tensors or DTensors; "vllm" for files that vLLM loads with load_format="sharded_state";
            "meta" for Meta's consolidated.NN.pth and params.json of a Llama or Mistral, without a manifest.
        dtype: convert floating-point tensors to "bf16", "fp16" or "fp32", rounded to nearest, ties to even; a merge
            then gives the converted tensors. Tensors that are wider than most are kept. By default nothing is
            converted.
        max_file_size: maximum bytes of a rank file, as a number or such as "5GB"; larger ones become several files with
            an index. A tensor is never divided over files, so one that is larger has a file of its own. By default
            each rank has one file. Not for layout meta.
        dry_run: plan and check, but write nothing; an existing checkpoint at ``dst`` is not an error.
        resume: continue an interrupted run of the same arguments, if there is one: stripes that it finished are not
            copied again. If this run fails, finished stripes are kept.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.
        options: how the source is read and planned, see :class:`PlanOptions`.

    Raises:
        SourceError: if the source cannot be read, changes during the split, or has an element that is too large for
            ``dtype``.
        PlanError: if no plan is known to be correct, or the layout does not support it: dcp does not support fused or
            padded tensors, and vllm only supports certain model types and plans; or a ``dtype`` is given for a
            quantized source.
        UsageError: if the layout, dtype or size is unknown, or it is the layout of an engine and the options change
            the plan.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is not
            that of the same arguments.
    """
    began = time.perf_counter()
    check_resume(resume=resume, dry_run=dry_run, checksums=checksums)
    planned, of_adapters = plan_sources(src, base, adapters, layout, options, merge_adapter=merge_adapter, dtype=dtype)
    source = planned.source
    target = local_path(dst) if dst is not None else Path(f"{source.name}-tp{tp}")
    if layout == META:
        refuse_remote(target, "layout meta")
        output = _meta_output(planned, tp, of_adapters, max_file_size)
    else:
        is_identified = checksums and not is_remote(target)
        output = _output(planned, tp, of_adapters, layout, max_file_size, checksums=is_identified)
    check_disjoint(target, [*planned.paths, *(path for one in of_adapters.values() for path in one.paths)])
    exists = check_target(
        target, is_folder=True, overwrite=overwrite, dry_run=dry_run, auxiliary_files=source.auxiliary_names
    )
    resumed_bytes = 0
    if not dry_run:
        job = _Writing(
            overwrite=overwrite, checksums=checksums, resume=resume, read=planned.paths, threads=threads,
            progress=progress,
        )  # fmt: skip
        resumed_bytes = output.write(target, job)
    return SplitReport(
        path=shown(target),
        tp=tp,
        family=output.plan.family,
        layout=layout,
        num_tensors=len(source.specs),
        source_bytes=source.num_bytes,
        rank_bytes=output.rank_bytes,
        assumed=output.plan.assumed,
        left_out=source.left_out,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        destination_exists=exists,
        padding=planned.resolution.resolver.padding(tp),
        derived=source.derived,
        files_per_rank=output.files_per_rank,
        adapters=tuple(of_adapters),
        resumed_bytes=resumed_bytes,
    )


def _adapter_manifest(planned: PlannedSource, tp: int, *, checksums: bool) -> Manifest:
    resolver, assumed = planned.resolution
    plan = resolver.plan(tp, assumed=assumed)
    return Manifest.of_source(planned.source, plan, planned.request, stripe_bytes=STRIPE_BYTES, checksums=checksums)


class _Output(NamedTuple):
    """What a split writes.

    Attributes:
        plan: the plan.
        rank_bytes: bytes of each rank's files.
        files_per_rank: number of files of each rank.
        write: writes it to a folder, and returns the bytes that an interrupted run had written.
    """

    plan: Plan
    rank_bytes: tuple[int, ...]
    files_per_rank: int
    write: Callable[[Path, "_Writing"], int]


def _meta_output(
    planned: PlannedSource, tp: int, adapters: Mapping[str, PlannedSource], max_file_size: int | str | None
) -> _Output:
    """The files of layout meta."""
    if max_file_size is not None:
        raise UsageError("layout meta has one file per rank: remove --max-file-size")
    if adapters:
        raise UsageError("layout meta does not hold adapters: pass --merge-adapter, or split them alone (--base)")
    source = planned.source
    check_meta(source, tp)
    plan = planned.plan(tp)
    files = lay_out_meta(source, plan)

    def write(target: Path, job: "_Writing") -> int:
        manifest = Manifest.of_source(source, plan, planned.request, stripe_bytes=STRIPE_BYTES, checksums=False)
        settings = settings_of("split", manifest) | {"layout": META}
        journal = partial(journal_of, settings, read=job.read, resume=job.resume) if job.checksums else None
        return write_meta(
            source, files, target, journal, overwrite=job.overwrite, threads=job.threads, progress=job.progress
        )

    return _Output(plan, tuple(files.file_bytes), 1, write)


def _output(
    planned: PlannedSource,
    tp: int,
    adapters: Mapping[str, PlannedSource],
    layout: str,
    max_file_size: int | str | None,
    *,
    checksums: bool,
) -> _Output:
    """A split checkpoint, with those of its adapters in it."""
    source = planned.source
    file_layout = with_max_file_size(choose_layout(layout, planned.tensors, with_settings(source)), max_file_size)
    plan = planned.plan(tp)
    manifest = Manifest.of_source(
        source, plan, planned.request, stripe_bytes=STRIPE_BYTES, layout=file_layout, checksums=checksums,
        adapters=tuple(adapters),
    )  # fmt: skip
    nested = {name: (one.source, _adapter_manifest(one, tp, checksums=checksums)) for name, one in adapters.items()}

    def write(target: Path, job: "_Writing") -> int:
        return job.write(source, manifest, target, nested)

    return _Output(plan, manifest.rank_layout.rank_bytes, manifest.files_per_rank, write)


def split_by(source: Source, target: Path, plan: Plan, request: PlanRequest, layout: FileLayout = NATIVE) -> None:
    """Split a source with a given plan and layout, and defaults for all other options."""
    manifest = Manifest.of_source(source, plan, request, stripe_bytes=STRIPE_BYTES, layout=layout)
    _Writing().write(source, manifest, target)


@dataclass(frozen=True, slots=True)
class _Writing:
    """How split checkpoints are written; see :func:`split`."""

    overwrite: bool = False
    checksums: bool = True
    resume: bool = False
    read: tuple[Path, ...] = ()
    threads: int | None = None
    progress: Progress | None = None

    def write(
        self,
        source: Source,
        manifest: Manifest,
        target: Path,
        adapters: Mapping[str, tuple[Source, Manifest]] = MappingProxyType({}),
    ) -> int:
        """Write a split checkpoint, with adapters in folders in it.

        Returns:
            Bytes of full tensors that an interrupted run had written.
        """
        layout = manifest.rank_layout
        total = sum(_num_bytes(*one) for one in ((source, manifest), *adapters.values()))
        reader, inputs = open_tensors(source, manifest.tensors, manifest.plan)
        with (
            inputs,
            staging(
                target,
                journal=(journal := self._journal(manifest, reader, inputs)),
                is_folder=True,
                overwrite=self.overwrite,
                num_bytes=total,
                auxiliary_files=source.auxiliary_names,
                mode=permissions([source.path] if source.is_folder else []),
            ) as folder,
        ):
            stripe_checksums = copy_files(
                reader, inputs, manifest.rank_paths(folder), layout, manifest.stripes,
                identify=manifest.prefixes_with if self.checksums else None, journal=journal, threads=self.threads,
                progress=self.progress,
            )  # fmt: skip
            auxiliary_files = write_auxiliary(source, folder)
            check_config(source, folder)
            paths = manifest.adapter_folders(folder)
            for name, (of_adapter, adapter_manifest) in adapters.items():
                replace(self, overwrite=False, resume=False, progress=None).write(
                    of_adapter, adapter_manifest, paths[name]
                )
            write_indexes(manifest, folder, inputs.mode)
            mode = _manifest_mode(source, inputs.mode)
            write_manifest(
                manifest.written(stripe_checksums, auxiliary_files), folder, f"shardconv {__version__}", mode=mode
            )
        return 0 if journal is None else journal.resumed_bytes

    def _journal(self, manifest: Manifest, reader: Reader, inputs: InputFiles) -> Journal | None:
        if not self.checksums:
            return None
        return journal_of(
            settings_of("split", manifest), reader, inputs, manifest.rank_files, manifest.rank_layout, read=self.read,
            resume=self.resume,
        )  # fmt: skip


def _num_bytes(source: Source, manifest: Manifest) -> int:
    return sum(manifest.rank_layout.file_bytes) + auxiliary_bytes(source.auxiliary_files)


def _manifest_mode(source: Source, weights_mode: int) -> int:
    """Permissions of the manifest, and thereby of a merged index: those of the index, or else of the weights.

    The manifest contains the config, so it is readable only for those who can read the config.
    """
    if source.index_path is None:
        return weights_mode
    config = [source.auxiliary_files[CONFIG_NAME]] if CONFIG_NAME in source.auxiliary_files else []
    return permissions([source.index_path, *config])

"""Pad a checkpoint and its config, so that heads and widths are divisible by the tensor parallel size, and undo it.

The tensors are copied with a padded plan for one rank, into files with the names of the source files. torch is imported
only to compare the padded tensors with the model class in transformers.
"""

import copy
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.engine.layout import PADDING_NAME
from shardconv.checkpoint.operations.merge import write_full
from shardconv.checkpoint.operations.pipeline import (
    on_pipelines,
    open_padded_pipeline,
    open_source_pipeline,
)
from shardconv.checkpoint.operations.written_pipeline import Written
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles, NewText
from shardconv.checkpoint.output.combined import config_changes, listed, padding_of_all, path_keys, texts, total
from shardconv.checkpoint.output.destination import Destination, find_destination
from shardconv.checkpoint.output.job import settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Weights, WriteOptions, WriteReport
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import StrPath, refuse_other_contents
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_files import with_total_size
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import read_manifest, write_manifest
from shardconv.checkpoint.split.split_folders import as_folders
from shardconv.files.folder import AnyPath, permissions
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.plan.padded_config import VOCABULARY, ConfigChange, change_config
from shardconv.plan.planner import MAX_TP, PaddingReport, Planner, padding_report
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.rule_set import MAX_MULTIPLE
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError, SourceError, UsageError, check_count, option


class PadReport(WriteReport, frozen=True, kw_only=True):
    """Result of padding a checkpoint.

    Attributes:
        tp: the tensor parallel size that it is padded for.
        family: the model family whose rules were used.
        source_bytes: bytes of the source's weights.
        num_bytes: bytes of the padded weights.
        padding: padded units, with their counts before and after.
        config: the fields of config.json that change.
        notes: possible differences in outputs; empty if there are none.
        left_out: name to reason of files of the source that were left out; names of hidden folders end with /.
    """

    tp: int
    family: Annotated[str, listed]
    source_bytes: Annotated[int, total]
    num_bytes: Annotated[int, total]
    padding: Annotated[PaddingReport, padding_of_all]
    config: Annotated[tuple[ConfigChange, ...], config_changes]
    notes: Annotated[tuple[str, ...], texts]
    left_out: Annotated[Mapping[str, str], path_keys]


class _Planned(Struct, frozen=True):
    """The new config, the manifest, the changed fields of the config, and the padding."""

    config: dict[str, object]
    manifest: Manifest
    changes: tuple[ConfigChange, ...]
    padding: PaddingReport

    @property
    def num_bytes(self) -> int:
        """Bytes of the padded weights."""
        return sum(header.data_bytes for header in self.manifest.rank_layout.headers)


@checked
@on_pipelines(Written("pad", open_source_pipeline, "{name}-pad{tp}"))
def pad(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath,
    dst: StrPath | None = None,
    *,
    tp: int,
    vocab_multiple: int = 1,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    check_model: bool = True,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    components: tuple[str, ...] = (),
) -> PadReport:
    """Pad a Hugging Face checkpoint with zeros, so that engines which read its config.json can shard it.

    Args:
        src: a folder with config.json.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-padN`` in the current folder.
        tp: the tensor parallel size that heads and widths are padded for.
        vocab_multiple: also pad the vocabulary to a multiple of this, for engines that cannot shard it otherwise. The
            logits of padding are zero, not minus infinity.
        check_model: before writing, compare the padded tensors with the model class in transformers, and run a small
            model with as many heads. False for an engine that accepts configs that transformers refuses; then no field
            is added to the config.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out.
        components: names of the components of a pipeline that are padded; empty for all that are sharded.
        overwrite, dry_run, resume, threads, progress: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SourceError: if the source cannot be read, or does not have a config.json.
        PlanError: if outputs would differ, config.json cannot express the padded sizes, or ``check_model`` finds a
            difference.
        UsageError: if a number is not positive, nothing needs padding, or the destination is in the source or
            contains it.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run had
            other arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress)
    given = find_destination(dst, resume=resume)
    check_count(tp, "tp", MAX_TP)
    check_count(vocab_multiple, "vocab_multiple", MAX_MULTIPLE)
    if components:
        raise UsageError(f"{src}: {option(components=[*components])} only applies to pipelines: remove it")
    source = open_source(open_path(src), follow_links=follow_links, ignore=ignore)
    planned = _plan_padding(source, tp, vocab_multiple, check_model=check_model)
    destination = given or Destination(Path(f"{source.name}-pad{tp}"))
    writer = _writer(source, planned.config, destination, how)
    read = (source.path, *source.paths, *source.auxiliary_files.values())
    return PadReport(
        **writer.run(read, partial(_write, source=source, planned=planned), began=began),
        tp=tp,
        family=str(planned.manifest.plan.family),
        num_tensors=len(planned.manifest.tensors),
        source_bytes=source.num_bytes,
        num_bytes=planned.num_bytes,
        padding=planned.padding,
        config=planned.changes,
        notes=tuple(_note(change) for change in planned.changes if change.field.endswith(VOCABULARY)),
        left_out=source.left_out,
    )


def _note(change: ConfigChange) -> str:
    return (
        f"the logits of tokens from {change.before} on are zero, not minus infinity: mask them in the engine if tokens "
        f"are sampled or the largest logit may be negative"
    )


def _plan_padding(source: Source, tp: int, vocab_multiple: int, *, check_model: bool) -> _Planned:
    """Plan the padding, change a copy of the config, and check that they match."""
    if source.config is None or not source.is_folder:
        raise SourceError(f"{source.path}: is not a folder with {CONFIG_NAME}: pass a folder that has one")
    refuse_other_contents(source)
    if source.layout is not None:
        raise SourceError(f"{source.path}: holds rank files of another tool: merge them first")
    if PADDING_NAME in source.auxiliary_files:
        raise UsageError(f"{source.path}: is already padded ({PADDING_NAME}): shardconv unpad {source.path} first")
    if source.has_quantization:
        raise PlanError(
            f"{source.path}: is quantized, and shardconv pad only supports unquantized checkpoints: pad the "
            f"unquantized checkpoint and quantize the result, or pad the shards (shardconv split --tp {tp} --pad)"
        )
    config, request = copy.deepcopy(source.config), PlanRequest(pad=tp)
    rules = replace(planner_for(source.specs, config, request).rules, vocab_multiple=vocab_multiple)
    planner = Planner(source.specs, rules)
    plan, padding = planner.plan(1), padding_report(planner, 1)
    if not padding.units:
        raise UsageError(f"{source.path}: does not need padding for tp {tp}: use it unchanged")
    changes = change_config(planner, source.specs, may_add=check_model)
    padded = plan.shards(source.specs, 0)
    planner_for(padded, config, PlanRequest()).plan(tp)  # raises PlanError if they do not match the new config
    if check_model:
        from shardconv.proof.model_check import require_padded  # noqa: PLC0415 - imports torch

        require_padded(config, padded)
    manifest = Manifest.of_source(source, plan, request, checksums=False)
    original = _text_of(source.auxiliary_files[CONFIG_NAME], source.config)
    return _Planned(config, replace(manifest, original_config=original), changes, padding)


def _writer(
    source: Source, config: Mapping[str, object], destination: Destination, options: WriteOptions
) -> CheckpointWriter:
    """The writer of a checkpoint with the auxiliary files of a source, but another config."""
    copied = {name: path for name, path in source.auxiliary_files.items() if name != CONFIG_NAME}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    made = {CONFIG_NAME: NewText(text, permissions([source.auxiliary_files[CONFIG_NAME]]))}
    auxiliary = AuxiliaryFiles(copied, made)
    return CheckpointWriter(destination, options, auxiliary, like=source.path, added_files=(PADDING_NAME,))


def _write(writer: CheckpointWriter, source: Source, planned: _Planned) -> int:
    """Write the padded checkpoint; returns the bytes of full tensors that an interrupted run had written."""
    manifest = planned.manifest
    weights = Weights.of_layout(
        manifest.rank_files, manifest.rank_layout, manifest.stripes, lambda _: manifest.rank_layout.prefixes
    )
    reader, inputs = open_tensors(source, manifest.tensors, manifest.plan)
    settings, read = settings_of("pad", manifest), source.auxiliary_files.values()
    with writer.writing(reader, inputs, weights, settings, read) as staged:
        if manifest.index is not None:
            name, index = manifest.index
            staged.write(name, with_total_size(index.raw(), planned.num_bytes), staged.mode)
        copied = {name: one for name, one in staged.auxiliary_files.items() if name != CONFIG_NAME}
        mode = staged.mode & permissions([source.auxiliary_files[CONFIG_NAME]])  # the manifest contains the config
        write_manifest(manifest.written(staged.checksums, copied), staged.path, mode=mode)
    return staged.resumed_bytes


def _text_of(path: AnyPath, expected: dict[str, object] | None) -> str:
    """Read the text of a config, and check that it is the config of the plan."""
    text = path.read_bytes().decode()
    if json.loads(text.removeprefix("\ufeff")) != expected:
        raise SourceError(f"{path}: changed after the plan was made: run the command again")
    return text


class UnpadReport(WriteReport, frozen=True, kw_only=True):
    """Result of unpadding.

    Attributes:
        num_bytes: bytes of all tensors.
        derived: the reasons why the files differ from the padded ones, one phrase each; empty for safetensors files.
    """

    num_bytes: Annotated[int, total]
    derived: Annotated[tuple[str, ...], texts] = ()


@checked
@on_pipelines(Written("unpad", open_padded_pipeline, "{name}-unpadded"))
def unpad(  # noqa: D417 - WriteOptions has the descriptions
    src: SourcePath,
    dst: StrPath | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> UnpadReport:
    """Restore the checkpoint that :func:`~shardconv.pad` padded, byte for byte, and check its checksums.

    Args:
        src: the padded checkpoint.
        dst: the folder to write, or its URL in an object store; defaults to ``NAME-unpadded`` in the current folder.
        overwrite, dry_run, resume, threads, progress: how it is written, see
            :class:`~shardconv.WriteOptions`.

    Raises:
        SplitCheckpointError: if the folder is not a padded checkpoint, or bytes differ from their checksums.
        OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run had
            other arguments.
    """
    began = time.perf_counter()
    how = WriteOptions(overwrite=overwrite, dry_run=dry_run, resume=resume, threads=threads, progress=progress)
    given = find_destination(dst, resume=resume)
    folder = open_path(src)
    manifest = read_manifest(folder, name=PADDING_NAME)
    padded = as_folders(folder, manifest)
    destination = given or Destination(Path(f"{folder.resolve().name}-unpadded"))
    copied = AuxiliaryFiles.of_split(manifest, folder)
    made = {CONFIG_NAME: NewText(str(manifest.original_config), permissions([folder / CONFIG_NAME]))}
    writer = CheckpointWriter(destination, how, AuxiliaryFiles(copied.copied, made, copied.expected), like=folder)
    write = partial(write_full, split=padded, headers=dict(manifest.source_files), command="unpad")
    return UnpadReport(
        **writer.run([folder], write, began=began, check=padded.check_readable),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(header.data_bytes for _, header in manifest.source_files),
        derived=manifest.derived,
    )

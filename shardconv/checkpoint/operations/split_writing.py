"""Write a split checkpoint: the files of its ranks, auxiliary files, adapters, and the manifest at the end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import Reader
from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.destination import Destination
from shardconv.checkpoint.output.job import Job, settings_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Checksums, Staged, Team, Weights, WriteOptions
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import open_tensors, sample_checksum
from shardconv.checkpoint.split.chosen_ranks import as_option
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import comparable, write_manifest
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, permissions, remote_versions
from shardconv.files.input_files import InputFiles
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest

#: Name to source and manifest of each adapter that is split with its model.
Adapters = Mapping[str, tuple[Source, Manifest]]
_NO_ADAPTERS: Adapters = MappingProxyType({})


def split_by(source: Source, target: Path, plan: Plan, request: PlanRequest, layout: FileLayout = NATIVE) -> None:
    """Split a source with a given plan and layout, and defaults for all other options."""
    manifest = Manifest.of_source(source, plan, request, layout=layout)
    write_split(writer_of(source, Destination(target), WriteOptions()), source, manifest)


def writer_of(
    source: Source,
    destination: Destination,
    options: WriteOptions,
    *,
    ranks: tuple[int, ...] | None = None,
    team: Team | None = None,
    adapters: Adapters = _NO_ADAPTERS,
) -> CheckpointWriter:
    """The writer of a checkpoint with the auxiliary files and the permissions of a source."""
    return CheckpointWriter(
        destination, options, AuxiliaryFiles.of_source(source), like=source.path if source.is_folder else None,
        added_bytes=sum(_num_bytes(*adapter) for adapter in adapters.values()), ranks=ranks, team=team or Team(),
    )  # fmt: skip


def _num_bytes(source: Source, manifest: Manifest) -> int:
    return sum(manifest.rank_layout.file_bytes) + AuxiliaryFiles.of_source(source).num_bytes


def write_split(
    writer: CheckpointWriter,
    source: Source,
    manifest: Manifest,
    adapters: Adapters = _NO_ADAPTERS,
    read: Sequence[AnyPath] = (),
) -> int:
    """Write a split checkpoint, with adapters in folders in it.

    Args:
        writer: its writer.
        source: its source.
        manifest: its manifest, without checksums.
        adapters: the adapters.
        read: all files that the result follows from.

    Returns:
        Bytes of full tensors that an interrupted run had written.
    """
    team = writer.team
    team.meet(writer.destination.path, partial(_facts, (source, manifest), *adapters.values()))
    manifest = manifest.with_ranks(team.folder_ranks(manifest.ranks))
    if not manifest.is_complete:
        manifest = replace(manifest, sample=sample_checksum(source))
    own = team.own_ranks(manifest.ranks)
    settings = settings_of("split", manifest) | {"ranks": None if len(own) == manifest.num_ranks else as_option(own)}
    reader, inputs = open_tensors(source, manifest.tensors, manifest.plan)

    def write_adapters(staged: Staged) -> None:
        for name, (adapter, of_adapter) in adapters.items():
            inner = writer_of(adapter, staged.inner(f"{ADAPTERS}/{name}"), writer.options.inner())
            write_split(inner, adapter, of_adapter.with_ranks(manifest.ranks))

    mode = _manifest_mode(source, inputs.mode)
    return write_ranks(writer, (reader, inputs), manifest, settings, read, write_adapters=write_adapters, mode=mode)


def write_ranks(
    writer: CheckpointWriter,
    opened: tuple[Reader, InputFiles],
    manifest: Manifest,
    settings: Job,
    read: Sequence[AnyPath],
    *,
    write_adapters: Callable[[Staged], None],
    mode: int,
) -> int:
    """Write the files of a split checkpoint: rank files, their indexes, and the manifest.

    Args:
        writer: its writer, whose team writes it together.
        opened: the reader of the full tensors, and its files, which are closed at the end.
        manifest: its manifest, without checksums.
        settings: the command and its options.
        read: other files that the result follows from.
        write_adapters: writes its adapters.
        mode: permissions of the manifest.

    Returns:
        Bytes of full tensors that an interrupted run had written.
    """
    team, has_checksums = writer.team, writer.options.checksums
    own = manifest.with_ranks(team.own_ranks(manifest.ranks))
    rows: list[tuple[str, ...]] = []

    def identify(own_rows: Checksums) -> Iterator[bytes]:
        rows.extend(team.gather(own_rows))
        return own.prefixes_with(tuple(rows))

    stripes = manifest.stripes
    weights = Weights.of_layout(own.rank_files, own.rank_layout, stripes, identify if has_checksums else None)
    with writer.writing(*opened, weights, settings, read) as staged:
        if team.is_leader:
            write_adapters(staged)
            for name, text in manifest.rank_indexes.items():
                staged.write(name, text, staged.mode)
            checksums = tuple(rows) if has_checksums else None
            write_manifest(manifest.written(checksums, staged.auxiliary_files), staged.path, mode=mode)
    return staged.resumed_bytes


def _manifest_mode(source: Source, weights_mode: int) -> int:
    """Permissions of the manifest, and of a merged index: as of the index, or else of the weights.

    The manifest contains the config, so it is readable only for those who can read the config.
    """
    if source.index_path is None:
        return weights_mode
    config = [source.auxiliary_files[CONFIG_NAME]] if CONFIG_NAME in source.auxiliary_files else []
    return permissions([source.index_path, *config])


def _facts(*splits: tuple[Source, Manifest]) -> dict[str, object]:
    """Facts that are equal in all processes that split sources together: plural name to value."""
    return {
        "checkpoints or options": [comparable(replace(manifest, source_name="")) for _, manifest in splits],
        "auxiliary files": [AuxiliaryFiles.of_source(source).checksums() for source, _ in splits],
        "values of tensors": [sample_checksum(source) for source, _ in splits],
        REMOTE_VERSIONS: [remote_versions(source.paths) for source, _ in splits],
    }

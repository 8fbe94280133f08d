"""Verify a split checkpoint bit for bit against its checksums and its source."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint.copy import CopyJob, Progress
from shardconv.checkpoint.fileio import InputFiles
from shardconv.checkpoint.formats import is_weights
from shardconv.checkpoint.layout import lay_out_source
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, as_names
from shardconv.checkpoint.shards import Comparer, ShardReader
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.vllm_folder import read_split
from shardconv.checkpoint.write import checksum_file, is_regular_file, read_ranks
from shardconv.errors import IntegrityError, UsageError
from shardconv.plan.plan import TensorSpec


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        path: the split checkpoint.
        against: the source it was compared with, or None.
        tp: number of ranks.
        layout: of the rank files.
        num_tensors: number of tensors.
        num_bytes: bytes of all rank files; 0 if they cannot be read.
        other_weights: weight files in the folder that are not part of the split checkpoint.
        checked: descriptions of the completed checks.
        is_compared: whether every byte was compared with that of ``against``.
        has_checksums: whether there are checksums; without them only errors in replicas and padding are detected.
        differences: descriptions of all differences; empty if there are none.
        left_out: name to reason of files of ``against`` that were left out.
        seconds: wall time in seconds.
        saved_by: the engine that saved the rank files; None for a split checkpoint.
    """

    path: str
    against: str | None
    tp: int
    layout: str
    num_tensors: int
    num_bytes: int
    other_weights: tuple[str, ...]
    checked: tuple[str, ...]
    is_compared: bool
    has_checksums: bool
    differences: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float
    saved_by: str | None = None


def verify(
    src: StrPath,
    *,
    against: StrPath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a split checkpoint: headers, checksums, equality of replicas, zeros in the padding, auxiliary files.

    Args:
        src: the split checkpoint, or a folder that vLLM saved of a dense unquantized model.
        against: a source to compare every byte of every tensor with.
        follow_links: follow links in ``against`` that point outside of its folder.
        ignore: glob patterns of files of ``against`` to leave out, in addition to the patterns of the split.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if the manifest is missing or not valid, or a file cannot be read.
        SourceError: if ``against`` cannot be read, or holds weights that may or may not belong to it.
        UsageError: if ``ignore`` is given without ``against``, or matches nothing.
    """
    began = time.perf_counter()
    folder = local_path(src)
    if ignore and against is None:
        raise UsageError("--ignore requires --against: add --against SOURCE, or remove --ignore")
    manifest = read_split(folder)
    source = None
    if against is not None:
        source = open_source(
            local_path(against), follow_links=follow_links, ignore=as_names(ignore), optional_ignore=manifest.ignore
        )
    checked = () if manifest.explicit_files else ("auxiliary files",)
    differences = auxiliary_differences(manifest, folder)
    if source is not None:
        differences += _tensor_differences(manifest, source) + _file_differences(manifest, source)
    ranks = _compare_ranks(manifest, folder, source, threads=threads, progress=progress)
    return VerifyReport(
        path=str(src),
        against=None if against is None else str(against),
        tp=manifest.tp,
        layout=manifest.layout.name,
        num_tensors=len(manifest.tensors),
        num_bytes=ranks.num_bytes,
        other_weights=_other_weights(manifest, folder),
        checked=(*checked, *ranks.checked, *([f"every tensor of {against}"] if ranks.is_compared else [])),
        is_compared=ranks.is_compared,
        has_checksums=manifest.checksums is not None,
        differences=(*differences, *ranks.differences),
        left_out={} if source is None else source.left_out,
        seconds=time.perf_counter() - began,
        saved_by=manifest.saved_by,
    )


class _RankFiles(NamedTuple):
    """The comparison of the rank files with their checksums and a source; defaults are for files that are not readable.

    Attributes:
        differences: descriptions of all differences.
        num_bytes: bytes of all rank files.
        checked: descriptions of the completed checks.
        is_compared: whether every byte was compared with the source.
    """

    differences: list[str]
    num_bytes: int = 0
    checked: tuple[str, ...] = ()
    is_compared: bool = False


def _compare_ranks(
    manifest: Manifest, folder: Path, source: Source | None, *, threads: int | None, progress: Progress | None
) -> _RankFiles:
    """Compare the rank files with their checksums, and with a source that has the same tensors."""
    try:
        reader, inputs = read_ranks(manifest, folder)
    except IntegrityError as error:
        return _RankFiles([str(error)])
    is_compared = source is not None and source.specs == manifest.source_tensors
    compared = source if is_compared else None
    with inputs:
        differences = _data_differences(manifest, reader, compared, threads=threads, progress=progress)
        inputs.check_unchanged()
    checked = ("headers", *(["checksums"] if manifest.checksums else []), "replicas equal", "padding zero")
    return _RankFiles(differences, sum(manifest.rank_layout.file_bytes), checked, is_compared)


def _other_weights(manifest: Manifest, folder: Path) -> tuple[str, ...]:
    names = {path.name for path in folder.iterdir() if is_weights(path.name)}
    return tuple(sorted(names - {*manifest.rank_files}))


def auxiliary_differences(manifest: Manifest, folder: Path) -> list[str]:
    """Messages for the missing or changed auxiliary files of a split checkpoint."""
    differences = []
    for name, expected in manifest.auxiliary_files.items():
        path = folder / name
        if not is_regular_file(path, folder):
            differences.append(f"{name}: is missing, not a regular file, or a link out of its folder")
        elif checksum_file(path) != expected:
            differences.append(f"{name}: differs from its checksum")
    return differences


def _tensor_differences(manifest: Manifest, source: Source) -> list[str]:
    specs, source_specs = manifest.source_tensors, source.specs
    differences = [f"{name}: is not in {source.path}" for name in specs.keys() - source_specs.keys()]
    differences += [f"{name}: is in {source.path} only" for name in source_specs.keys() - specs.keys()]
    differences += [
        f"{name}: is {_describe(spec)} (expected {_describe(source_specs[name])} as in {source.path})"
        for name, spec in specs.items()
        if name in source_specs and source_specs[name] != spec
    ]
    return sorted(differences)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _file_differences(manifest: Manifest, source: Source) -> list[str]:
    """Differences between the files that merge would write and a source with the same weight files."""
    headers = {file.name: file.header.raw for file in source.files}
    if manifest.explicit_files or headers.keys() != {name for name, _ in manifest.source_files}:
        return []  # other weight files, such as one merged file: only tensors can be compared
    differences = [
        f"{name}: its header differs from the source" for name, h in manifest.source_files if h.raw != headers[name]
    ]
    if manifest.index != source.index:
        differences.append("the index differs from the source")
    for name in sorted(manifest.auxiliary_files.keys() | source.auxiliary_files.keys()):
        path = source.auxiliary_files.get(name)
        if path is None or checksum_file(path) != manifest.auxiliary_files.get(name):
            differences.append(f"{name}: differs from {source.path}")
    return differences


def _data_differences(
    manifest: Manifest, reader: ShardReader, source: Source | None, *, threads: int | None, progress: Progress | None
) -> list[str]:
    differences: list[str] = []

    def add(error: IntegrityError) -> None:
        differences.extend(str(error).splitlines())

    if source is None:
        CopyJob(manifest.stripes, reader, [], add).run(threads=threads, progress=progress)
        return sorted(set(differences))
    names = list(manifest.tensors)
    layout = lay_out_source([file.header for file in source.files], manifest.tensors)
    with InputFiles([file.path for file in source.files], layout.prefixes, layout.file_bytes) as inputs:
        expected = ShardReader(layout.shards, inputs, labels=[file.name for file in source.files], names=names)
        CopyJob(manifest.stripes, reader, [Comparer(expected, names)], add).run(threads=threads, progress=progress)
        inputs.check_unchanged()
    return sorted(set(differences))

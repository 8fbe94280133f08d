"""Verify a split checkpoint bit for bit against its checksums and its source."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.copy import CopyJob, Progress, Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.fileio import Bytes, InputFiles
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
        SplitCheckpointError: if there is no valid manifest, or a file cannot be read.
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
    checked, num_bytes, is_compared = [] if manifest.explicit_files else ["auxiliary files"], 0, False
    differences = auxiliary_differences(manifest, folder)
    if source is not None:
        differences += _tensor_differences(manifest, source) + _file_differences(manifest, source)
    try:
        reader, inputs = read_ranks(manifest, folder)
    except IntegrityError as error:
        differences.append(str(error))
    else:
        num_bytes = sum(manifest.rank_layout.file_bytes)
        with inputs:
            is_compared = source is not None and source.specs == manifest.source_tensors
            differences += _data_differences(
                manifest, reader, source if is_compared else None, threads=threads, progress=progress
            )
            inputs.check_unchanged()
        checked += ["headers", *(["checksums"] if manifest.checksums else []), "replicas equal", "padding zero"]
        checked += [f"every tensor of {against}"] if is_compared else []
    return VerifyReport(
        path=str(src),
        against=None if against is None else str(against),
        tp=manifest.tp,
        layout=manifest.layout.name,
        num_tensors=len(manifest.tensors),
        num_bytes=num_bytes,
        other_weights=_other_weights(manifest, folder),
        checked=tuple(checked),
        is_compared=is_compared,
        has_checksums=manifest.checksums is not None,
        differences=tuple(differences),
        left_out={} if source is None else source.left_out,
        seconds=time.perf_counter() - began,
        saved_by=manifest.saved_by,
    )


def _other_weights(manifest: Manifest, folder: Path) -> tuple[str, ...]:
    names = {path.name for path in folder.iterdir() if is_weights(path.name)}
    return tuple(sorted(names - {*manifest.rank_files}))


def verify_rank(manifest: Manifest, folder: Path, rank: int, progress: Progress | None = None) -> None:
    """Check one rank file against its checksums without reading the others. Does nothing without checksums.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint.
        rank: the rank of the file.
        progress: called with the number of checked bytes of the full tensors and the total.

    Raises:
        IntegrityError: if bytes differ from those that were written.
        SourceError: if the file cannot be read, or has the wrong size.
    """
    layout, path = manifest.rank_layout, manifest.rank_paths(folder)[rank]
    with InputFiles([path], [layout.prefixes[rank]], [layout.file_bytes[rank]]) as inputs:
        verify_open_rank(manifest, inputs, rank, progress)


def verify_open_rank(manifest: Manifest, inputs: InputFiles, rank: int, progress: Progress | None = None) -> None:
    """Check an open rank file like :func:`verify_rank`."""
    if manifest.checksums is None:
        return
    shards, names = manifest.rank_layout.shards, list(manifest.tensors)
    reader = _ChecksumReader(shards, inputs, rank, manifest.checksums[rank], names)
    CopyJob(manifest.stripes, reader, []).run(progress=progress)


class _ChecksumReader:
    """A reader of one rank file that only computes and compares checksums."""

    def __init__(
        self, tensors: Sequence[Shards], files: InputFiles, rank: int, checksums: Sequence[str], names: Sequence[str]
    ) -> None:
        self.tensors = tensors
        self._files, self._rank, self._checksums, self._names = files, rank, checksums, names

    def prefetch(self, stripe: Stripe) -> None:
        """Do nothing: the operating system detects that the file is read sequentially."""

    def gather(self, state: StripeState, span: Span, _block: Bytes, scratch: Scratch, /) -> None:
        """Read the bytes of a span that are in the rank's shard; the block is not changed."""
        shards = self.tensors[span.tensor]
        for rank, _, low, high in shards.geometry.overlaps(span.start, span.stop):
            if rank == self._rank:
                data = scratch.take("shard", high - low)
                self._files.read(0, data, shards.offsets[rank] + low)
                state.update(0, data)

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Compare the checksum of a stripe."""
        running = state.hashes.get(0)
        if running is not None and running.hexdigest() != self._checksums[state.number]:
            first, last = self._names[stripe[0].tensor], self._names[stripe[-1].tensor]
            tensors = first if first == last else f"{first} ... {last}"
            raise IntegrityError(f"{self._files.paths[0]}: the bytes of {tensors} differ from their checksum")


def auxiliary_differences(manifest: Manifest, folder: Path) -> list[str]:
    """Messages for the missing or changed auxiliary files of a split checkpoint."""
    differences = []
    for name, digest in manifest.auxiliary_files.items():
        path = folder / name
        if not is_regular_file(path, folder):
            differences.append(f"{name}: is missing, not a regular file, or a link out of its folder")
        elif checksum_file(path) != digest:
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
    layout = lay_out_source([file.header for file in source.files], names)
    with InputFiles([file.path for file in source.files], layout.prefixes, layout.file_bytes) as inputs:
        expected = ShardReader(layout.shards, inputs, labels=[file.name for file in source.files], names=names)
        CopyJob(manifest.stripes, reader, [Comparer(expected, names)], add).run(threads=threads, progress=progress)
        inputs.check_unchanged()
    return sorted(set(differences))

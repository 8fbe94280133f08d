"""Verify: prove a split checkpoint bit for bit, against its own checksums and against its source."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.copy import CopyJob, Progress, Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.fileio import Bytes, InputFiles
from shardconv.checkpoint.formats import is_weights
from shardconv.checkpoint.layout import lay_out_parts
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, as_names
from shardconv.checkpoint.shards import Comparer, ShardReader
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.vllm_folder import read_split
from shardconv.checkpoint.write import checksum_file, is_side_file, read_ranks
from shardconv.errors import IntegrityError, UsageError


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        path: the split checkpoint.
        against: the source it was compared with, or None.
        tp: number of ranks.
        layout: of the rank files.
        num_tensors: number of tensors.
        num_bytes: bytes of all rank files; 0 where they cannot be read.
        other_weights: files with weights in the folder that are not part of the split checkpoint.
        checked: what was checked to the end, in words.
        is_compared: whether every byte was compared with that of ``against``.
        has_checksums: whether there are checksums; without them a wrong byte shows only in copies and padding.
        differences: what was found wrong; empty where all is as it should be.
        left_out: name to reason of files of ``against`` that were left out.
        seconds: wall time.
        saved_by: the engine that saved the folder itself; None for a split checkpoint.
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
    """Check a split checkpoint: headers, checksums, equality of copies, zeros in the padding, side files.

    Args:
        src: the split checkpoint, or a folder that vLLM saved of a dense unquantized model.
        against: a source to compare every byte of every tensor with.
        follow_links: read files of ``against`` that are links to outside of its folder.
        ignore: glob patterns of files of ``against`` to leave out, besides those that were left out of the split.
        threads: how many threads read; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Raises:
        SplitCheckpointError: if there is no manifest that can be used, or a file cannot be read.
        SourceError: if ``against`` cannot be read, or holds weights of which it is not known whether they belong to it.
        UsageError: if ``ignore`` is given without ``against``, or matches nothing.
    """
    began = time.perf_counter()
    folder = local_path(src)
    if ignore and against is None:
        raise UsageError("--ignore is for --against, whose files it names")
    manifest = read_split(folder)
    source = None
    if against is not None:
        source = open_source(
            local_path(against), follow_links=follow_links, ignore=as_names(ignore), may_ignore=manifest.ignore
        )
    checked, num_bytes, is_compared = [] if manifest.found else ["side files"], 0, False
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
        checked += ["headers", *(["checksums"] if manifest.checksums else []), "copies equal", "padding zero"]
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
    """Check one rank's file against its checksums, and read no other; nothing to do where there are none.

    Args:
        manifest: of the split checkpoint.
        folder: where it is.
        rank: whose file.
        progress: called with bytes done and bytes in all, of the full tensors.

    Raises:
        IntegrityError: if bytes are not those that were written.
        SourceError: if the file cannot be read, or is not as long as it has to be.
    """
    layout, path = manifest.rank_layout, manifest.rank_paths(folder)[rank]
    with InputFiles([path], [layout.heads[rank]], [layout.file_bytes[rank]]) as inputs:
        verify_open_rank(manifest, inputs, rank, progress)


def verify_open_rank(manifest: Manifest, inputs: InputFiles, rank: int, progress: Progress | None = None) -> None:
    """Check a rank file that is open, as :func:`verify_rank`."""
    if manifest.checksums is None:
        return
    shards, names = manifest.rank_layout.shards, list(manifest.tensors)
    reader = _RankReader(shards, inputs, rank, manifest.checksums[rank], names)
    CopyJob(manifest.stripes, reader, []).run(progress=progress)


class _RankReader:
    """A side of a copy that reads what one rank has of it, and takes its checksums."""

    def __init__(
        self, tensors: Sequence[Shards], files: InputFiles, rank: int, checksums: Sequence[str], names: Sequence[str]
    ) -> None:
        self.tensors = tensors
        self._files, self._rank, self._checksums, self._names = files, rank, checksums, names

    def prefetch(self, stripe: Stripe) -> None:
        """The file is read as it lies; the system sees that by itself."""

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:  # noqa: ARG002
        """Read the rank's share of a span; the block stays as it is."""
        shards = self.tensors[span.tensor]
        for rank, _, low, high in shards.geometry.shares(span.start, span.stop):
            if rank == self._rank:
                data = scratch.take("own", high - low)
                self._files.read(0, data, shards.offsets[rank] + low)
                state.update(0, data)

    def finish(self, state: StripeState, stripe: Stripe) -> None:
        """Compare the checksum of a stripe."""
        found = state.hashes.get(0)
        if found is not None and found.hexdigest() != self._checksums[state.number]:
            first, last = self._names[stripe[0].tensor], self._names[stripe[-1].tensor]
            where = first if first == last else f"{first} ... {last}"
            raise IntegrityError(f"{self._files.paths[0]}: the bytes of {where} differ from their checksum")


def auxiliary_differences(manifest: Manifest, folder: Path) -> list[str]:
    """The auxiliary files of a split checkpoint that are missing or changed, each with the reason."""
    differences = []
    for name, digest in manifest.side_files.items():
        path = folder / name
        if not is_side_file(path, folder):
            differences.append(f"{name}: is missing, no regular file, or a link out of its folder")
        elif checksum_file(path) != digest:
            differences.append(f"{name}: differs from its checksum")
    return differences


def _tensor_differences(manifest: Manifest, source: Source) -> list[str]:
    ours, theirs = manifest.source_tensors, source.specs
    differences = [f"{name}: is not in {source.path}" for name in ours.keys() - theirs.keys()]
    differences += [f"{name}: is in {source.path} only" for name in theirs.keys() - ours.keys()]
    differences += [
        f"{name}: is {spec.dtype} {list(spec.shape)}, in {source.path} {theirs[name].dtype} {list(theirs[name].shape)}"
        for name, spec in ours.items()
        if name in theirs and theirs[name] != spec
    ]
    return sorted(differences)


def _file_differences(manifest: Manifest, source: Source) -> list[str]:
    """What merge would write otherwise than it is in a source that has the same weight files."""
    theirs = {part.name: part.header.raw for part in source.parts}
    if manifest.found or theirs.keys() != {name for name, _ in manifest.parts}:
        return []  # a file of all parts, or files that are not known: only tensors can be compared
    differences = [
        f"{name}: its header is not that of the source" for name, h in manifest.parts if h.raw != theirs[name]
    ]
    if manifest.index != source.index:
        differences.append("the index is not that of the source")
    for name in sorted(manifest.side_files.keys() | source.side_files.keys()):
        path = source.side_files.get(name)
        if path is None or checksum_file(path) != manifest.side_files.get(name):
            differences.append(f"{name}: is not as in {source.path}")
    return differences


def _data_differences(
    manifest: Manifest, reader: ShardReader, source: Source | None, *, threads: int | None, progress: Progress | None
) -> list[str]:
    found: list[str] = []

    def note(error: IntegrityError) -> None:
        found.extend(str(error).splitlines())

    if source is None:
        CopyJob(manifest.stripes, reader, [], note).run(threads=threads, progress=progress)
        return sorted(set(found))
    names = list(manifest.tensors)
    parts = lay_out_parts([part.header for part in source.parts], names)
    with InputFiles([part.path for part in source.parts], parts.heads, parts.file_bytes) as inputs:
        theirs = ShardReader(parts.shards, inputs, labels=[part.name for part in source.parts], names=names)
        CopyJob(manifest.stripes, reader, [Comparer(theirs, names)], note).run(threads=threads, progress=progress)
        inputs.check_unchanged()
    return sorted(set(found))

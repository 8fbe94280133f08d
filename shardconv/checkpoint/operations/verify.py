"""Verify a split checkpoint bit for bit against its checksums and its source."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import CopyJob, Reader, Stripe, held_stripes
from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.engine.shards import Comparer
from shardconv.checkpoint.operations.pipeline import check_not_exchanged, on_pipelines, verify_each
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.combined import every, path_keys, paths, some, texts, total, union
from shardconv.checkpoint.sources.dtype_conversion import with_dtype
from shardconv.checkpoint.sources.opening import open_files, open_source
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.split_folders import (
    SplitFolder,
    SplitFolders,
    file_differences,
    is_regular_file,
    open_folders,
)
from shardconv.files.checksums import checksum, checksum_file
from shardconv.files.containers.safetensors import total_bytes
from shardconv.files.folder import AnyPath, Compressed, read_text
from shardconv.files.paths import SourcePath, open_path, open_paths
from shardconv.files.weight_formats import CONFIG_NAME, is_weights
from shardconv.layouts import LAYOUTS
from shardconv.layouts.choice import engine_of
from shardconv.layouts.layout_file import layout_file
from shardconv.plan.plan import TensorSpec
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import IntegrityError, SourceError, SplitCheckpointError, UsageError, option

#: The most differences that are listed if they are most tensors; more are another model.
_MAX_LISTED = 5


class Differences(NamedTuple):
    """The differences of rank files.

    Attributes:
        found: descriptions of all differences.
        is_damaged: whether some are within the rank files, and not only from another source.
        is_readable: whether the rank files could be read.
    """

    found: list[str]
    is_damaged: bool
    is_readable: bool = True


def find_differences(
    stripes: Sequence[Stripe],
    reader: Reader,
    comparer: Comparer | None,
    *,
    threads: int | None,
    progress: Progress | None,
) -> Differences:
    """Find the differences that a reader detects, and those from a source that a comparer reads."""
    found: set[str] = set()

    def add(error: IntegrityError) -> None:
        found.update(str(error).splitlines())

    CopyJob(stripes, reader, [] if comparer is None else [comparer], add).run(threads=threads, progress=progress)
    return Differences(sorted(found), not found <= (set() if comparer is None else comparer.differences))


def is_other_model(specs: Mapping[str, TensorSpec], source: Source) -> bool:
    """Whether so few tensors have the name, dtype and shape of a source's that it is of another model."""
    names = specs.keys() | source.specs.keys()
    num_same = sum(specs.get(name) == source.specs.get(name) for name in names)
    return len(names) - num_same > _MAX_LISTED and 2 * num_same < len(names)


def tensor_differences(specs: Mapping[str, TensorSpec], source: Source) -> list[str]:
    """Descriptions of the tensors whose name, dtype or shape differs from a source; one line for another model."""
    missing, other = specs.keys() - source.specs.keys(), source.specs.keys() - specs.keys()
    changed = {
        name: f"{name}: is {_describe(spec)} (expected {_describe(source.specs[name])} as in {source.path})"
        for name, spec in specs.items()
        if name in source.specs and source.specs[name] != spec
    }
    if is_other_model(specs, source):
        total = len(specs.keys() | source.specs.keys())
        return [
            f"{source.path}: is another model (of {total} tensors, {len(missing)} are missing, {len(other)} are extra, "
            f"and {len(changed)} differ in dtype or shape)"
        ]
    differences = [f"{name}: is not in {source.path}" for name in missing]
    differences += [f"{name}: is in {source.path} only" for name in other]
    return sorted([*differences, *changed.values()])


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


class VerifyReport(Struct, frozen=True):
    """Result of a verification.

    Attributes:
        paths: the folders of the split checkpoint.
        against: the source it was compared with, or None.
        tp: number of ranks of a pipeline stage.
        layout: of the rank files.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors, without replicas and padding; of a folder with some of the ranks, bytes of its
            rank files.
        other_weights: weight files in the folder that are not part of the split checkpoint.
        checked: descriptions of the completed checks.
        is_compared: whether every byte was compared with ``against``.
        has_checksums: whether there are checksums; without them only errors in replicas and padding are detected.
        differences: descriptions of all differences; empty if there are none.
        left_out: name to reason of files of ``against`` that were left out.
        seconds: wall time in seconds.
        external_layout: the layout of files of another tool; None for a split checkpoint of shardconv.
        ranks: the ranks that the folders have, which were checked.
        is_damaged: whether some differences are within the split checkpoint: files differ from their checksums, or
            from each other, and not only from ``against``.
        components: name to class of the components of a pipeline that are split; empty for a model.
        copied: name to class of the other components, with the reason why they are copied.
        pp: number of pipeline stages.
        ep: expert parallel size; 1 if each expert is sharded.
    """

    paths: tuple[str, ...]
    against: str | None
    tp: int
    layout: str
    num_tensors: Annotated[int, total]
    num_bytes: Annotated[int, total]
    other_weights: Annotated[tuple[str, ...], paths]
    checked: Annotated[tuple[str, ...], union]
    is_compared: Annotated[bool, every]
    has_checksums: Annotated[bool, every]
    differences: Annotated[tuple[str, ...], texts]
    left_out: Annotated[Mapping[str, str], path_keys]
    seconds: float
    external_layout: str | None = None
    ranks: tuple[int, ...] = ()
    is_damaged: Annotated[bool, some] = False
    components: Mapping[str, str] = {}
    copied: Mapping[str, str] = {}
    pp: int = 1
    ep: int = 1


@checked
@on_pipelines(verify_each)
def verify(
    src: SourcePath | Sequence[SourcePath],
    *,
    against: SourcePath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    source_layout: str | None = None,
    config: StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a split checkpoint: headers, checksums, equality of replicas, zeros in the padding, auxiliary files.

    In a folder with some of the ranks, these are checked; several folders have all ranks together.

    Args:
        src: the split checkpoint, folders that each have some of the ranks, a folder that vLLM saved of a dense
            unquantized model, or one with rank files of another tool.
        against: a source to compare every byte of every tensor with.
        follow_links: follow links in ``against`` that point outside of its folder.
        ignore: glob patterns of files of ``against`` to leave out, in addition to the patterns of the split.
        source_layout: the layout of ``src``, if it holds rank files of another tool; for a split checkpoint, the layout
            of ``against``. None to detect it.
        config: a config.json to use instead of the config of another tool's rank files in ``src``.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Raises:
        SplitCheckpointError: if the manifest is missing or not valid, or a file cannot be read.
        SourceError: if ``against`` cannot be read, or holds weights that may or may not belong to it.
        UsageError: if ``src`` and ``against`` are exchanged, ``ignore`` or ``follow_links`` is given without
            ``against``, ``ignore`` matches nothing, a layout is given for a folder without rank files of another
            tool, or ``threads`` is not a positive integer.
    """
    began = time.perf_counter()
    _check_options(against, ignore=ignore, follow_links=follow_links)
    other = None if against is None else open_path(against)
    check_not_exchanged(open_paths(src), other)
    split = open_folders(src, source_layout, config=config, allow_missing_ranks=True, has_source=other is not None)
    manifest, external = split.manifest, split.source
    source = None
    if other is not None:
        _check_not_merged(split)
        source = open_source(
            other, follow_links=follow_links, ignore=ignore, optional_ignore=manifest.ignore,
            source_layout=None if external else source_layout,
        )  # fmt: skip
        source = source if manifest.dtype is None else with_dtype(source, manifest.dtype)
    own = () if external else split.folders
    damages = [text for folder in own for text in _folder_differences(folder, len(own))]
    differences = [] if source is None else tensor_differences(manifest.source_tensors, source)
    if source is not None and not external and not is_other_model(manifest.source_tensors, source):
        differences += _file_differences(manifest, source)
    data = _compare_data(split, source, threads=threads, progress=progress)
    for name in manifest.adapters:
        damages += _adapter_differences(name, split, threads)
    is_compared = data.is_readable and source is not None and source.specs == manifest.source_tensors
    report = VerifyReport(
        paths=tuple(map(str, split.paths)),
        against=None if other is None else str(other),
        tp=manifest.tp,
        layout=manifest.layout.name,
        num_tensors=len(manifest.tensors),
        num_bytes=_num_bytes(manifest),
        other_weights=tuple(name for folder in own for name in _other_weights(folder, len(own))),
        checked=(*_checked(split, data), *([_compared(manifest, other)] if is_compared else [])),
        is_compared=is_compared,
        has_checksums=manifest.checksums is not None,
        differences=(*damages, *differences, *data.found),
        left_out={} if source is None else {**source.left_out, **_replaced(manifest)},
        seconds=time.perf_counter() - began,
        ranks=_held(manifest),
        is_damaged=bool(damages) or data.is_damaged,
        pp=manifest.plan.pp,
        ep=manifest.plan.ep,
    )
    return report if external is None else _of_external(report, external)


def _of_external(report: VerifyReport, source: Source) -> VerifyReport:
    """The report on rank files of another tool, whose manifest has the full tensors."""
    key, ranks = str(source.layout), tuple(range(source.num_ranks))
    return replace(report, tp=len(ranks), ranks=ranks, layout=key, external_layout=layout_file(key).title)


def is_right(made_of: Sequence[AnyPath], folder: AnyPath) -> bool:
    """Whether no file of a split checkpoint differs from its checksum, whatever it was made of."""
    del made_of
    try:
        return not verify(folder).differences
    except SplitCheckpointError:
        return False


def is_source_of(folders: Sequence[AnyPath], folder: AnyPath) -> bool:
    """Whether a folder has the files that a merge of the split checkpoint in other folders writes, and no adapters."""
    split = open_folders(folders, None)
    manifest = split.manifest
    try:
        source = open_files(
            folder,
            tuple(name for name, _ in manifest.source_files),
            tuple(manifest.auxiliary_files),
            follow_links=False,
        )
        if manifest.index is not None:
            name = manifest.index[0]
            source = replace(source, index=(name, Compressed(read_text(folder / name).encode())))
        differences = _file_differences(manifest, source) or _compare_data(split, source).found
    except (SourceError, OSError):
        return False
    return not (differences or manifest.adapters)


def _check_options(against: SourcePath | None, *, ignore: tuple[str, ...], follow_links: bool) -> None:
    """Refuse options of ``against`` without it."""
    given = option("ignore") if ignore else option(follow_links=True) if follow_links else ""
    if given and against is None:
        raise UsageError(f"{given} requires {option('against')}: add {option(against='SOURCE')}, or remove {given}")


def _held(manifest: Manifest) -> tuple[int, ...]:
    """The ranks that were checked, ascending."""
    return tuple(sorted(set(manifest.ranks)))


def _num_bytes(manifest: Manifest) -> int:
    if len(_held(manifest)) == manifest.num_ranks:
        return total_bytes(manifest.source_tensors.values())
    return sum(manifest.rank_layout.rank_bytes)


def _compared(manifest: Manifest, compared_with: AnyPath | None) -> str:
    text = f"every tensor of {compared_with}"
    ranks = _held(manifest)
    return text if len(ranks) == manifest.num_ranks else f"{name_ranks(ranks)} of {text}"


def _check_not_merged(split: SplitFolders) -> None:
    """Refuse to compare with a source that an adapter was merged into."""
    if (name := split.manifest.merged_adapter) is not None:
        found = " ".join(map(str, split.paths))
        raise UsageError(
            f"{found}: the adapter {name} is merged into it: merge {found} and compare its tensors, or remove "
            f"{option('against')}"
        )


def _checked(split: SplitFolders, data: Differences) -> Iterator[str]:
    """Yield descriptions of the checks that were completed without a source."""
    manifest = split.manifest
    if (external := split.source) is not None:
        yield from ("names and shapes", "replicas")
        if external.layout in LAYOUTS and engine_of(external.layout):
            yield "padding"
        return
    yield from ("auxiliary files", *(f"adapter {name}" for name in manifest.adapters))
    if data.is_readable:
        yield from ("headers", *(["checksums"] if manifest.checksums else []), "replicas", "padding")


def _adapter_differences(name: str, split: SplitFolders, threads: int | None) -> list[str]:
    """The differences of an adapter of a split checkpoint: from its checksums, and between the folders."""
    try:
        found = verify([folder.path / ADAPTERS / name for folder in split.folders], threads=threads).differences
    except SplitCheckpointError as error:
        found = (error.with_options(),)
    return [f"adapter {name}: {difference}" for difference in found]


def _compare_data(
    split: SplitFolders, source: Source | None, *, threads: int | None = None, progress: Progress | None = None
) -> Differences:
    """Compare the rank files with their checksums, and with the tensors of a source that have the same shapes."""
    manifest, specs = split.manifest, {} if source is None else source.specs
    try:
        reader, inputs = split.open(for_report=True)
    except IntegrityError as error:
        return Differences([error.with_options()], is_damaged=True, is_readable=False)
    stripes = held_stripes(manifest.stripes, reader.tensors)
    common = {name: spec for name, spec in manifest.tensors.items() if specs.get(name) == spec}
    with inputs:
        if source is None or is_other_model(manifest.source_tensors, source):
            found = find_differences(stripes, reader, None, threads=threads, progress=progress)
        else:
            expected, others = open_tensors(source, common, None, for_report=True)
            with others:
                comparer = Comparer(expected, list(common), list(manifest.tensors), reader.tensors)
                found = find_differences(stripes, reader, comparer, threads=threads, progress=progress)
                others.check_unchanged()
        inputs.check_unchanged()
    return found


def _folder_differences(folder: SplitFolder, count: int) -> list[str]:
    """The differences of files other than rank files in one of ``count`` folders."""
    found = file_differences(folder.manifest.auxiliary_files, folder.path) + _index_differences(
        folder.manifest, folder.path
    )
    return [str(folder.path / text) if count > 1 else text for text in found]


def _other_weights(folder: SplitFolder, count: int) -> list[str]:
    """The weights in one of ``count`` folders that are not of the split checkpoint."""
    names = {path.name for path in folder.path.iterdir() if is_weights(path.name)}
    other = sorted(names - {*folder.manifest.rank_files, *folder.manifest.rank_indexes})
    return [str(folder.path / name) if count > 1 else name for name in other]


def _index_differences(manifest: Manifest, folder: AnyPath) -> list[str]:
    """Messages for the missing or changed indexes of ranks, which other programs read."""
    return [
        f"{name}: is missing, or differs from the index of the rank's files"
        for name, text in manifest.rank_indexes.items()
        if not is_regular_file(folder / name, folder) or checksum_file(folder / name) != checksum(text.encode())
    ]


def _file_differences(manifest: Manifest, source: Source) -> list[str]:
    """Differences between the files that merge would write and a source with the same weight files."""
    headers = {file.name: file.header.raw() for file in source.files}
    if headers.keys() != {name for name, _ in manifest.source_files}:
        return []  # other weight files, such as one merged file: only tensors can be compared
    differences = [
        f"{name}: its header differs from the source" for name, h in manifest.source_files if h.raw() != headers[name]
    ]
    if manifest.index != source.index:
        differences.append("the index differs from the source")
    expected = AuxiliaryFiles.of_source(source).checksums()
    names = sorted((manifest.auxiliary_files.keys() | expected.keys()) - _replaced(manifest).keys())
    different = (name for name in names if expected.get(name) != manifest.auxiliary_files.get(name))
    return [*differences, *(f"{name}: differs from {source.path}" for name in different)]


def _replaced(manifest: Manifest) -> dict[str, str]:
    """Name to reason of the files of the source that the split was asked to replace, and that are not compared."""
    return {CONFIG_NAME: "replaced by --config of the split"} if manifest.is_config_given else {}

"""The tensors of a split checkpoint in one folder, of several folders with some ranks each, or of another tool's files.

Rank files are opened with their headers checked. All folders are read through :class:`SplitFolders`: a manifest, and a
reader of the full tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import Reader
from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.checkpoint.sources.opening import open_if_external
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.split.chosen_ranks import as_option, name_ranks, size_suffix
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import encode, read_manifest
from shardconv.files.checksums import checksum_file
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import InputFiles, ModifiedError
from shardconv.files.paths import SourcePath, leads_out, open_paths
from shardconv.files.weight_formats import config_path
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, Reason, TensorPlan
from shardconv.plan.request import PlanRequest
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import IntegrityError, SourceError, SplitCheckpointError, UsageError, option

#: The remedy for a damaged rank file.
AGAIN = "copy it again, or split the source again"


class SplitFolder(NamedTuple):
    """A folder with rank files, and its manifest."""

    path: AnyPath
    manifest: Manifest


def open_ranks(
    manifest: Manifest,
    folders: Sequence[SplitFolder],
    checksums: Sequence[Sequence[str]] | None,
    *,
    for_report: bool = False,
) -> tuple[ShardReader, InputFiles]:
    """Open the rank files of a split checkpoint and check their headers.

    Args:
        manifest: has the ranks of all folders, in order.
        folders: the folders.
        checksums: for each of these ranks the checksum of each stripe; None to check none.
        for_report: whether messages are for a report, which names a single folder and the remedy once for all.

    Raises:
        IntegrityError: if a file is missing, or has the wrong size or header.
        SplitCheckpointError: if a file cannot be read.
    """
    paths = [path for folder in folders for path in _existing_files(folder, for_report=for_report)]
    prefixes = [prefix for folder in folders for prefix in folder.manifest.rank_layout.prefixes]
    layout = manifest.rank_layout
    try:
        inputs = InputFiles(paths, prefixes, layout.file_bytes, remedy="" if for_report else f": {AGAIN}")
    except ModifiedError as error:
        raise IntegrityError(error.message) from error
    except SourceError as error:
        raise SplitCheckpointError(error.message) from error
    labels = [path.name if for_report and len(folders) == 1 else str(path) for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=checksums,
        rank_of=layout.rank_of, remedy="" if for_report else f": {AGAIN}",
    )  # fmt: skip
    return reader, inputs


def _existing_files(folder: SplitFolder, *, for_report: bool) -> list[AnyPath]:
    """The rank files of a folder."""
    paths, manifest = folder.manifest.rank_paths(folder.path), folder.manifest
    for path in paths:
        if not path.is_file():
            expected = f"{manifest.num_ranks} rank files" if manifest.is_complete else name_ranks(manifest.ranks)
            remedy = "" if for_report else ": copy it to this folder, or split the source again"
            raise IntegrityError(f"{path}: is missing (expected {expected}){remedy}")
        if leads_out(path, folder.path):
            raise IntegrityError(f"{path}: is a link out of its folder")
    return paths


def check_ranks(manifest: Manifest, folder: AnyPath, ranks: Sequence[int]) -> None:
    """Check that a folder has ranks.

    Raises:
        SplitCheckpointError: if it does not.
    """
    if missing := [rank for rank in ranks if rank not in manifest.ranks]:
        raise SplitCheckpointError(
            f"{folder}: does not have {name_ranks(missing)} (got {name_ranks(manifest.ranks)} of "
            f"{manifest.num_ranks}): split the source on this host with the same options, {manifest.size_options} "
            f"{option(ranks=as_option(missing))}, or start the ranks on the hosts that have them"
        )


def open_rank_files(manifest: Manifest, folder: AnyPath, rank: int) -> tuple[Manifest, ShardReader, InputFiles]:
    """Open the files of a rank and check their headers.

    Args:
        manifest: of the split checkpoint.
        folder: the split checkpoint.
        rank: the rank.

    Returns:
        The manifest of this rank alone, the reader of its shards, and its files.

    Raises:
        IntegrityError: if a file is missing, or has the wrong size or header.
        SplitCheckpointError: if the folder does not have the rank, or a file cannot be read.
    """
    check_ranks(manifest, folder, [rank])
    own, at = manifest.with_ranks((rank,)), manifest.ranks.index(rank)
    checksums = None if manifest.checksums is None else manifest.checksums[at : at + 1]
    return own, *open_ranks(own, [SplitFolder(folder, own)], checksums)


def auxiliary_paths(manifest: Manifest, folder: AnyPath) -> dict[str, AnyPath]:
    """Name to path of the auxiliary files of a split checkpoint.

    Raises:
        SplitCheckpointError: if one is missing, not a regular file, or a link out of the folder.
    """
    paths = {name: folder / name for name in manifest.auxiliary_files}
    for path in paths.values():
        if not is_regular_file(path, folder):
            raise SplitCheckpointError(
                f"{path}: is missing, not a regular file, or a link out of its folder: restore the file"
            )
    return paths


def is_regular_file(path: AnyPath, folder: AnyPath) -> bool:
    """Whether a path is a regular file, and not a link out of its folder."""
    return path.is_file() and not leads_out(path, folder)


def file_differences(checksums: Mapping[str, str], folder: AnyPath) -> list[str]:
    """Messages for files in a folder that are missing, or differ from their checksums."""
    differences = []
    for name, expected in checksums.items():
        path = folder / name
        if not is_regular_file(path, folder):
            differences.append(f"{name}: is missing, not a regular file, or a link out of its folder")
        elif checksum_file(path) != expected:
            differences.append(f"{name}: differs from its checksum")
    return differences


#: Values of a manifest by their names.
_Properties = dict[str, Callable[[Manifest], object]]
#: Properties of a source and of a split that are the same in all folders of a split.
_OF_SOURCE: _Properties = {
    "files": lambda manifest: (manifest.source_files, manifest.index, manifest.metadata, manifest.is_folder),
    "auxiliary files": lambda manifest: manifest.auxiliary_files,
    "config.json": lambda manifest: manifest.config,
}
#: The same properties in folders with some of the ranks: a folder with all ranks does not have a sample.
_OF_SAMPLED: _Properties = {**_OF_SOURCE, "sampled values": lambda manifest: manifest.sample}
#: Options that change what a manifest records of the source, and are compared before that.
_OF_VALUES: _Properties = {
    "dtype": lambda manifest: manifest.dtype,
    "merged adapter": lambda manifest: manifest.merged_adapter,
}
_OF_SPLIT: _Properties = {
    "tensor parallel size": lambda manifest: manifest.tp,
    "pipeline stages": lambda manifest: manifest.plan.stages,
    "plan": lambda manifest: (encode(manifest.plan), manifest.request),
    "layout": lambda manifest: manifest.layout,
    "checksums": lambda manifest: (manifest.checksums is None, manifest.is_identified, manifest.stripe_bytes),
    "adapters": lambda manifest: manifest.adapters,
}


class SplitFolders(NamedTuple):
    """A split checkpoint in one folder, or in several; or rank files of another tool.

    Attributes:
        manifest: of all ranks, in the order of the folders; a rank that several folders have is repeated. For rank
            files of another tool, the manifest of a split for one rank.
        folders: the folders.
        source: the rank files of another tool; None for a split checkpoint.
    """

    manifest: Manifest
    folders: tuple[SplitFolder, ...]
    source: Source | None = None

    @property
    def first(self) -> AnyPath:
        """The first folder, whose auxiliary files stand for all."""
        return self.folders[0].path

    @property
    def name(self) -> str:
        """The name of the first folder, without its parallel sizes."""
        plan = self.manifest.plan
        return self.first.resolve().name.removesuffix(size_suffix(plan.tp, plan.ep, plan.pp))

    @property
    def paths(self) -> list[AnyPath]:
        """The paths of the folders."""
        return [folder.path for folder in self.folders]

    @property
    def manifests(self) -> list[AnyPath]:
        """The paths of the manifests; none of rank files of another tool."""
        return [] if self.source is not None else [path / self.manifest.file_name for path in self.paths]

    def adapters(self) -> dict[str, "SplitFolders"]:
        """The adapters that were split with it, by their names.

        Raises:
            SplitCheckpointError: as :func:`read_folders`.
        """
        return {name: read_folders([path / ADAPTERS / name for path in self.paths]) for name in self.manifest.adapters}

    def open(self, *, for_report: bool = False) -> tuple[Reader, InputFiles]:
        """Open the files, as a reader of the full tensors.

        Args:
            for_report: whether messages are for a report, which names a single folder and the remedy once for all.

        Raises:
            IntegrityError: if a file is missing, or has the wrong size or header.
            SplitCheckpointError: if a file cannot be read.
        """
        if self.source is not None:
            return open_tensors(self.source, self.manifest.tensors, None, for_report=for_report)
        return open_ranks(self.manifest, self.folders, self.manifest.checksums, for_report=for_report)

    def check_readable(self) -> None:
        """Check the existence, sizes and headers of all files, without reading their data.

        Raises:
            SplitCheckpointError: as :meth:`open`, or if an auxiliary file is missing.
        """
        if self.source is None:
            auxiliary_paths(self.manifest, self.first)
        self.open()[1].close()


def as_folders(path: AnyPath, manifest: Manifest) -> SplitFolders:
    """One folder, which may have some of the ranks."""
    return SplitFolders(manifest, (SplitFolder(path, manifest),))


def open_folders(
    src: SourcePath | Sequence[SourcePath],
    source_layout: str | None,
    *,
    config: str | Path | None = None,
    allow_missing_ranks: bool = False,
    has_source: bool = False,
) -> SplitFolders:
    """Open the folders of a split checkpoint, or one with rank files of another tool.

    Args:
        src: one folder or several.
        source_layout: the layout of another tool's rank files; None to detect it.
        config: a config.json, or a folder with one, to use instead of the config of another tool's rank files.
        allow_missing_ranks: whether ranks may be missing in a single folder.
        has_source: whether there is a source to compare with, whose layout ``source_layout`` may be.

    Raises:
        UsageError: if no folder is given, one is given twice, or there is a layout for several or for a split
            checkpoint.
        SourceError: if rank files of another tool cannot be read.
        SplitCheckpointError: as :func:`read_folders`.
    """
    paths = open_paths(src)
    if not paths:
        raise UsageError("no folder given (expected at least one): pass the folders of a split")
    if twice := next((path for at, path in enumerate(paths) if path in paths[:at]), None):
        raise UsageError(f"{twice}: is given twice: pass each folder once")
    if source_layout is not None and not has_source and len(paths) > 1:
        raise UsageError(
            f"{option('source_layout')} is for one folder (got {len(paths)}): remove it, or pass one folder"
        )
    if len(paths) == 1 and (source := open_if_external(paths[0], source_layout, config_path(config))) is not None:
        return as_folders(paths[0], _full_manifest(source))._replace(source=source)
    if config is not None:
        raise UsageError(
            f"{paths[0]}: is a split checkpoint, which stores its config, and {option('config')} is for files of other "
            f"tools: remove {option('config')}"
        )
    is_partial = allow_missing_ranks and len(paths) == 1
    found = as_folders(paths[0], read_manifest(paths[0])) if is_partial else read_folders(paths)
    if source_layout is not None and not has_source:
        raise UsageError(
            f"{paths[0]}: is a split checkpoint, and {option('source_layout')} is for rank files of other tools: "
            f"remove {option('source_layout')}"
        )
    return found


def _full_manifest(source: Source) -> Manifest:
    """The manifest of a split for one rank, which has the full tensors of a source."""
    full = TensorPlan(Placement.replicated(1), "replicate", (), Reason("merge to full tensors", "*"))
    plan = Plan.of_tensors(1, None, dict.fromkeys(source.specs, full), RuleSet("merge", ()))
    return Manifest.of_source(source, plan, PlanRequest(), checksums=False)


def read_folders(paths: Sequence[AnyPath]) -> SplitFolders:
    """Read the manifests of folders that have all ranks of a split together.

    Raises:
        SplitCheckpointError: if a manifest is not valid, the folders are not of one split, or ranks are missing.
    """
    folders = tuple(SplitFolder(path, read_manifest(path)) for path in paths)
    first = folders[0].manifest
    _check_same(folders, _OF_VALUES, _other_options)
    _check_same([one for one in folders if one.manifest.sample is not None], _OF_SAMPLED, _other_source)
    _check_same(folders, _OF_SOURCE, _other_source)
    _check_same(folders, _OF_SPLIT, _other_options)
    _check_replicas(folders)
    _check_complete(folders)
    if len(folders) == 1:
        return SplitFolders(first, folders)
    ranks = tuple(rank for one in folders for rank in one.manifest.ranks)
    checksums = first.checksums and tuple(rank for one in folders for rank in one.manifest.checksums or ())
    return SplitFolders(replace(first, ranks=ranks, checksums=checksums), folders)


def _check_same(
    folders: Sequence[SplitFolder],
    properties: _Properties,
    error: Callable[[SplitFolder, SplitFolder, str], SplitCheckpointError],
) -> None:
    """Check that all folders have the properties of the first; raise the error for one that does not."""
    for other in folders[1:]:
        of_first, of_other = folders[0].manifest, other.manifest
        if different := [name for name, value in properties.items() if value(of_other) != value(of_first)]:
            raise error(folders[0], other, ", ".join(different))


def _other_source(first: SplitFolder, other: SplitFolder, different: str) -> SplitCheckpointError:
    return SplitCheckpointError(
        f"{other.path}: was split from another source than {first.path} (different {different}): split the same source "
        f"on every host"
    )


def _other_options(first: SplitFolder, other: SplitFolder, different: str) -> SplitCheckpointError:
    return SplitCheckpointError(
        f"{other.path}: was split with other options than {first.path} (different {different}): split with the same "
        f"options on every host"
    )


def _check_replicas(folders: Sequence[SplitFolder]) -> None:
    """Check that stripes of which every rank has all bytes have the same checksum in all folders."""
    first, names = folders[0], list(folders[0].manifest.tensors)
    for number in _replicated_stripes(first.manifest):
        expected = _checksums_of(first, number)
        for other in folders[1:]:
            if _checksums_of(other, number) != expected:
                name = names[first.manifest.stripes[number][0].tensor]
                raise _other_source(first, other, f"bytes of {name}, which every rank has")


def _checksums_of(folder: SplitFolder, stripe: int) -> set[str]:
    return {checksums[stripe] for checksums in folder.manifest.checksums or ()}


def _replicated_stripes(manifest: Manifest) -> Iterator[int]:
    """Yield the numbers of the stripes of which every rank has the same bytes."""
    pp, planned = manifest.plan.pp, [manifest.plan.tensors[name] for name in manifest.tensors]
    is_replicated = [one.placement.dim is None and one.edits is None and len(one.stages) == pp for one in planned]
    for number, stripe in enumerate(manifest.stripes if manifest.checksums else ()):
        if all(is_replicated[span.tensor] for span in stripe):
            yield number


def _check_complete(folders: Sequence[SplitFolder]) -> None:
    """Check that no rank is missing."""
    manifest = folders[0].manifest
    found = sorted({rank for one in folders for rank in one.manifest.ranks})
    if missing := sorted({*range(manifest.num_ranks)} - {*found}):
        given = " ".join(str(one.path) for one in folders)
        raise SplitCheckpointError(
            f"{given}: {name_ranks(missing)} of {manifest.num_ranks} {'are' if len(missing) > 1 else 'is'} missing "
            f"(got {name_ranks(found)}): pass the folders with these, too, or split the source with the same options, "
            f"{manifest.size_options} {option(ranks=as_option(missing))}"
        )

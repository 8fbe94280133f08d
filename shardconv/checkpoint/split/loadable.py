"""Checkpoints that ranks load: a split checkpoint, or a source with the manifest that a split of it would have.

Owns the differences between the two. Whatever loads a checkpoint reads the manifest, and shards from a reader.
"""

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.sources.folder_files import holds_base
from shardconv.checkpoint.sources.planning import PlanOptions, plan_source, refuse_changes
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import sample_checksum
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import comparable, is_split, read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader, RankReader, RankSourceReader, copied_bytes
from shardconv.checkpoint.split.split_folders import check_ranks
from shardconv.files.checksums import checksum_file
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, RemotePath, remote_versions
from shardconv.files.paths import folder_name
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_FILES
from shardconv.plan.plan import Plan
from shardconv.plan.stages import StageChoice, chosen_stages
from shardconv.support.errors import RunError, SourceError, SplitCheckpointError, UsageError, option


class Loadable(Struct, frozen=True):
    """A checkpoint that ranks load.

    Attributes:
        path: the split checkpoint, or the source as the user passed it.
        manifest: of the split checkpoint; of a source, the manifest that its split would have, without checksums.
        source: the source; None for a split checkpoint.
        pipeline: the folder of the pipeline that is loaded with this component; None for a model alone.
    """

    path: AnyPath
    manifest: Manifest
    source: Source | None = None
    pipeline: AnyPath | None = None

    @property
    def folder(self) -> AnyPath:
        """The folder with config.json and the other auxiliary files."""
        return self.path if self.source is None else self.source.folder

    @property
    def adapter_note(self) -> str:
        """The adapters in it, and the command that applies one; "" without any."""
        if self.source is None:
            return unapplied(self.manifest.adapters)
        found = [*adapter_folders(self.path if self.path.is_dir() else self.path.parent, self.source.left_out)]
        if not found:
            return ""
        names = ", ".join(folder_name(folder) for folder in found)
        source, adapter = (shlex.quote(str(path)) for path in (self.path, found[0]))
        return (
            f"adapters that are not applied: {names} (to apply one, shardconv split {source} --adapter {adapter} --tp "
            f"{self.manifest.tp}, and pass --adapter NAME)"
        )

    @property
    def kind(self) -> str:
        """The kind of checkpoint, for messages; the same on all ranks, because each kind has other facts."""
        if self.source is not None:
            return "a source"
        return f"a split checkpoint with {'all' if self.manifest.is_complete else 'some of the'} ranks"

    def reader(self, rank: int, *, verify: bool, names: Collection[str] | None = None) -> RankReader:
        """Open the shards of a rank.

        Args:
            rank: the rank.
            verify: check the rank file of a split checkpoint against its checksums while it is read.
            names: the tensors that are read and verified of a split checkpoint; None for all of the rank.

        Raises:
            SplitCheckpointError: if the rank file cannot be used.
            SourceError: if a file of the source does not match its header.
        """
        if self.source is None:
            return RankFileReader(self.manifest, self.path, rank, verify=verify, names=names)
        return RankSourceReader(self.source, self.manifest.plan, rank)

    def copied_bytes(self, rank: int) -> int:
        """Bytes of the shards of a rank that are copied into memory, because they are not ranges of a mapped file."""
        return 0 if self.source is None else copied_bytes(self.source, self.manifest.plan, rank)

    def fetched_bytes(self, rank: int) -> int:
        """Bytes of the files of a rank that are fetched into memory, because they are remote."""
        if self.source is not None:
            return 0
        own = self.manifest.with_ranks((rank,))
        found = zip(own.rank_paths(self.path), own.rank_layout.file_bytes, strict=True)
        return sum(size for path, size in found if isinstance(path, RemotePath))

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Check that this host has the files of ranks, where the checkpoint is split.

        Raises:
            SplitCheckpointError: if it does not.
        """
        if self.source is not None:
            return
        check_ranks(self.manifest, self.path, ranks)
        files = self.manifest.with_ranks(tuple(ranks)).rank_paths(self.path)
        if missing := next((file for file in files if not file.exists()), None):
            raise SplitCheckpointError(f"{missing}: is missing: copy it to this host, or split the source again")

    def facts(self) -> dict[str, object]:
        """Facts that have to be the same on all ranks: plural name to value, which JSON can represent.

        A manifest has checksums of a split checkpoint, but not of a source, whose folder may have any name on a host.
        Where hosts have some of the ranks, checksums are not compared. Each rank opens remote files by itself, so their
        versions are.

        Raises:
            SourceError: if the source, or a remote file, cannot be read.
        """
        source, manifest = self.source, self.manifest
        if source is None:
            shared, sample, paths = manifest.shared, None, tuple(manifest.rank_paths(self.path))
        else:
            checksums = {name: checksum_file(file) for name, file in source.auxiliary_files.items()}
            shared = replace(manifest, auxiliary_files=checksums, source_name="")
            sample, paths = sample_checksum(source), source.paths
        return {
            "checkpoints": comparable(shared),
            "values of tensors": sample,
            REMOTE_VERSIONS: remote_versions(paths),
        }


def unapplied(adapters: Collection[str]) -> str:
    """A note on adapters that are split with a model, and the option that applies one; "" without any."""
    names = ", ".join(adapters)
    return f"adapters that are not applied: {names} (pass --adapter NAME to apply one)" if names else ""


def open_loadable(
    path: AnyPath, *, tp: int | None, pp: int | None = None, stages: str | Sequence[int] = (), options: PlanOptions
) -> Loadable:
    """Open a split checkpoint, or plan a source for ``tp`` ranks in each of ``pp`` stages.

    Args:
        path: the folder of a split checkpoint, or a source.
        tp: tensor parallel size of a source; None for the size of a split checkpoint.
        pp: number of pipeline stages of a source, as in :func:`~shardconv.split`.
        stages: number of layers of each.
        options: how the source is read and planned; a split checkpoint has its plan.

    Raises:
        UsageError: if options for a plan, or other sizes than its own, are given for a split checkpoint.
        SplitCheckpointError: if the manifest is not valid, or there is none and ``tp`` is None.
        SourceError: if the source cannot be read.
        PlanError: if no plan is known to be correct.
        RunError: if the path is an adapter without its base model.
    """
    if not is_split(path):
        refuse_adapter_alone(path, tp)
    if tp is None or is_split(path):
        manifest = read_manifest(path, remedy=f"or load it without splitting it: {option(tp='N')}")
        _refuse_options(path, manifest, tp, chosen_stages(pp, stages, default=manifest.plan.stages), options)
        return Loadable(path, manifest)
    rules = options.get("rules")
    chosen = chosen_stages(pp, stages, default=rules.stages if isinstance(rules, Plan) else None)
    source, _, request, planner, _ = plan_source(path, **options)
    plan = planner.plan(tp, planner.stages(chosen))
    return Loadable(path, Manifest.of_source(source, plan, request, checksums=False), source)


def _refuse_options(
    path: AnyPath, manifest: Manifest, tp: int | None, chosen: StageChoice, options: PlanOptions
) -> None:
    """Refuse options that a split checkpoint does not use, and sizes other than its own."""
    plan, layers = manifest.plan, ",".join(map(str, chosen.num_layers))
    stages = {"stages": layers} if layers else {"pp": chosen.count}
    own = {"tp": plan.tp, "ep": plan.ep, "pp": plan.pp, "stages": ",".join(map(str, plan.num_layers))}
    given: dict[str, object] = {"tp": tp, "ep": options.get("ep"), **stages}
    if other := {name: size for name, size in given.items() if size not in (None, own[name])}:
        named = " ".join(option(**{name: size}) for name, size in other.items())
        again = " ".join(f"--{name} {size}" for name, size in {"tp": plan.tp, **other}.items())
        raise UsageError(
            f"{path}: is split for {manifest.size_options} (got {named}): remove it, or make another one with "
            f"shardconv reshard {path} {again}"
        )
    refuse_changes(path, {**options, "ep": None})


def refuse_other_tp(path: AnyPath, stored: int, tp: int | None) -> None:
    """Refuse a tensor parallel size other than the split pipeline's; None is accepted.

    Raises:
        UsageError: if ``tp`` is another one.
    """
    if tp not in (None, stored):
        raise UsageError(
            f"{path}: is split for {option(tp=stored)} (got {option(tp=tp)}): remove it, or make another one with "
            f"shardconv reshard {path} --tp {tp}"
        )


# --- adapters instead of models ------------------------------------------------------------------------------------


def refuse_adapter_alone(folder: AnyPath, tp: int | None) -> None:
    """Refuse to load an adapter that is not split, without its base model.

    Args:
        folder: the folder that is loaded.
        tp: tensor parallel size; None if it is not given.

    Raises:
        RunError: if the folder has an adapter and no model.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or holds_base([child.name for child in folder.iterdir()]):
        return
    size, name = tp or "N", folder_name(folder)
    raise RunError(
        f"{_described(folder)}: split it with its base model (shardconv split BASE --adapter {folder} --tp {size}), "
        f"then run both (shardconv run BASE-tp{size} --adapter {name})"
    )


def refuse_split_adapter(folder: AnyPath, auxiliary_files: Collection[str]) -> None:
    """Refuse to load a split adapter without its base model.

    Args:
        folder: the split checkpoint.
        auxiliary_files: its auxiliary files.

    Raises:
        RunError: if it is an adapter.
    """
    if ADAPTER_CONFIG in auxiliary_files:
        raise RunError(f"{_described(folder)}: run its base model with it (shardconv run BASE --adapter {folder})")


def _described(folder: AnyPath) -> str:
    try:
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    except SourceError:
        base = None
    of_base = f" of {base:.200}" if base and isinstance(base, str) else ""
    return f"{folder}: is a PEFT adapter{of_base}, not a model"


def adapter_folders(folder: AnyPath, names: Collection[str]) -> Iterator[AnyPath]:
    """Yield the folders of the adapters among files.

    Args:
        folder: the folder of the files.
        names: their names relative to it, with / as separator.
    """
    yield from dict.fromkeys(
        folder / path.parent for path in map(PurePosixPath, sorted(names)) if path.name in ADAPTER_FILES
    )

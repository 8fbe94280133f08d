"""Checkpoints that ranks load: a split checkpoint, or a source with the manifest that a split of it would have.

Owns the differences between the two. Whatever loads a checkpoint reads the manifest, and shards from a reader. Plans of
split checkpoints are the stored ones; installed families are not read.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, RemotePath, read_json, remote_versions
from shardconv.files.paths import folder_name
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_FILES
from shardconv.formats.detect import with_grids
from shardconv.plan.engines import engine_named
from shardconv.plan.families.rule import Rule
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorSpec, logical_tensors
from shardconv.plan.planner import Planner
from shardconv.plan.rule_set import ModelRules
from shardconv.plan.stages import StageChoice, chosen_stages
from shardconv.plan.unused import known_unused
from shardconv.support.errors import PlanError, RunError, SourceError, SplitCheckpointError, UsageError, option


def quantized_tensors(manifest: Manifest) -> Mapping[str, TensorSpec]:
    """The source tensors with the grids that the manifest stores, or else with the grids of its config."""
    tensors, planned = manifest.source_tensors, manifest.plan.tensors
    if not any(one.grid for one in planned.values()):
        return with_grids(tensors, manifest.config)
    return {name: spec._replace(grid=planned[name].grid) for name, spec in tensors.items()}


def loaded_tensors(manifest: Manifest, *, dequantize: bool) -> Mapping[str, TensorSpec]:
    """The source tensors as a model has them: with ``dequantize``, weights instead of the tensors that store them."""
    tensors = quantized_tensors(manifest)
    return logical_tensors(tensors) if dequantize else tensors


def stored_planner(
    manifest: Manifest, engine: str | None, *, ep: int | None = None, pad: int | None = None, dequantize: bool = False
) -> Planner:
    """The planner of the stored rules, which makes the plan for any tensor parallel size.

    Args:
        manifest: of the split checkpoint.
        engine: the engine whose boundaries the plan uses; None for shardconv.
        ep: expert parallel size; None for the stored one.
        pad: as in :class:`~shardconv.plan.request.PlanRequest`; None for the option of the split checkpoint.
        dequantize: plan the weights of quantized layers, instead of the tensors that store them.

    Raises:
        PlanError: if the rules do not fit the checkpoint.
    """
    rules = manifest.plan.rules if ep is None else replace(manifest.plan.rules, ep=ep)
    if engine != manifest.request.engine:
        rules = rules.for_engine(engine_named(engine))
    tensors = loaded_tensors(manifest, dequantize=dequantize)
    return Planner(tensors, rules, assumed=manifest.plan.assumed).padded(manifest.request.pad if pad is None else pad)


def runnable_plan(manifest: Manifest, folder: AnyPath, rank: int = 0, *, dequantize: bool = False) -> Plan:
    """The plan to run the rank files of a split checkpoint with; its rules give exactly the stored placements.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint, for messages.
        rank: the rank, whose tensors the user's rules have to match in memory.
        dequantize: return the plan of the weights of quantized layers, instead of the tensors that store them.

    Raises:
        SplitCheckpointError: if a placement by the rules differs from the stored one.
    """
    stored = manifest.plan
    try:
        plan = stored_planner(manifest, manifest.request.engine).plan(manifest.tp, stored.stages)
    except PlanError as error:
        raise SplitCheckpointError(f"{folder}: {_REASON}: {error.message}. {_remedy(folder)}") from error
    if (name := stored.first_difference(plan)) is None:
        if dequantize:
            planner = stored_planner(manifest, manifest.request.engine, dequantize=True)
            plan = planner.plan(manifest.tp, stored.stages)
        return _relax_unused(plan, rank)
    raise SplitCheckpointError(
        f"{folder}: {_REASON}: {name} was split as {_describe(stored, name)}, and would now be split as "
        f"{_describe(plan, name)}. {_remedy(folder)}"
    )


def _relax_unused(plan: Plan, rank: int) -> Plan:
    """Make user rules and blocks optional if they match only tensors that the model of a rank is known not to use.

    All other user rules must match a parameter in memory: names may differ, and another rule would apply instead.
    """
    unused = known_unused(plan.tensors)
    needed = {
        planned.reason.rule for name, planned in plan.tensors.items() if name not in unused and plan.holds(rank, name)
    }

    def relaxed(model_rules: ModelRules) -> Iterator[Rule]:
        mounts = {rule.mount for rule in model_rules.family.rules if rule.pattern in needed}
        for rule in model_rules.family.rules:
            is_needed = not rule.by_user or rule.pattern in needed
            yield rule if is_needed else replace(rule, optional=True, mount=rule.mount if rule.mount in mounts else "")

    return replace(plan, rules=plan.rules.with_rules(relaxed).without_engine())


def placements_in_memory(manifest: Manifest, plan: Plan, *, dequantize: bool = False) -> dict[str, Placement]:
    """The placements in shardconv's runtime of tensors that the rank files hold replicated for an engine.

    Args:
        manifest: of the split checkpoint.
        plan: the result of :func:`runnable_plan`.
        dequantize: as for the plan.

    Raises:
        SplitCheckpointError: if a tensor is sharded otherwise than in the runtime.
    """
    if plan.tp == 1:
        return {}
    tensors = loaded_tensors(manifest, dequantize=dequantize)
    runtime_plan = Planner(tensors, plan.rules).plan(plan.tp, plan.stages)
    placements = {name: planned.placement for name, planned in runtime_plan.tensors.items()}
    different = {name: placement for name, placement in placements.items() if placement != plan.placement(name)}
    if (name := next((name for name in different if plan.placement(name).dim is not None), None)) is not None:
        raise SplitCheckpointError(
            f"{name}: its shard for {manifest.request.engine} is {plan.placement(name).describe()} (expected the full "
            f"tensor, or {different[name].describe()}): split the source again"
        )
    return different


#: The reason why a plan cannot be executed.
_REASON = "it was written by another version of shardconv, which planned differently"


def _remedy(folder: AnyPath) -> str:
    return f"Merge it and split it again: shardconv merge {folder} -o MERGED; shardconv split MERGED --tp N"


def _describe(plan: Plan, name: str) -> str:
    planned = plan.tensors.get(name)
    return "nothing" if planned is None else f"{planned.style} ({planned.placement.describe()})"


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
            names: the tensors that are read and verified; None for all of the rank.

        Raises:
            SplitCheckpointError: if the rank file cannot be used.
            SourceError: if a file of the source does not match its header.
        """
        if self.source is None:
            return RankFileReader(self.manifest, self.path, rank, verify=verify, names=names)
        return RankSourceReader(self.source, self.manifest.plan, rank, names)

    def copied_bytes(self, rank: int, names: Collection[str]) -> int:
        """Bytes of the shards of tensors of a rank that are copied, because they are not ranges of a mapped file."""
        return 0 if self.source is None else copied_bytes(self.source, self.manifest.plan, rank, names)

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
    refuse_other_sizes(path, manifest.size_options, own, {"tp": tp, "ep": options.get("ep"), **stages})
    refuse_changes(path, {**options, "ep": None})


def refuse_other_sizes(
    path: AnyPath, size_options: str, own: Mapping[str, object], given: Mapping[str, object]
) -> None:
    """Refuse sizes other than those of a split checkpoint or pipeline, with these options.

    Raises:
        UsageError: if a given size is neither None nor its own.
    """
    if other := {name: size for name, size in given.items() if size not in (None, own[name])}:
        named = " ".join(option(**{name: size}) for name, size in other.items())
        again = " ".join(f"--{name} {size}" for name, size in {"tp": own["tp"], **other}.items())
        raise UsageError(
            f"{path}: is split for {size_options} (got {named}): remove it, or make another one with shardconv reshard "
            f"{path} {again}"
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

"""LoRA adapters of PEFT: open one as a source or as a split checkpoint, and plan it by the plan of its base model.

An adapter is split, merged, verified and resharded as a checkpoint of its own. It follows the rules of the base model,
and the grid of each of its tensors names the weight that it covers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Unpack

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.adapters.adapter_settings import Adapter, AdapterSettings, read_settings
from shardconv.checkpoint.adapters.lora_file import LoraFile
from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.sources.folder_files import holds_base
from shardconv.checkpoint.sources.opening import open_files, open_source
from shardconv.checkpoint.sources.planning import (
    PlannedSource,
    PlanOptions,
    StrPath,
    plan_source,
    read_config_alone,
    refuse_changes,
)
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.loadable import quantized_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.checkpoint.split.split_folders import file_differences
from shardconv.files.folder import AnyPath
from shardconv.files.paths import local_path, missing_hint
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DIFFUSERS_LORA
from shardconv.layouts.choice import refuse_adapters
from shardconv.plan.adapter_plan import A, AdapterTensors, with_adapter_grids
from shardconv.plan.families.loading import model_type_of
from shardconv.plan.plan import TensorSpec, logical_tensors
from shardconv.plan.planner import Planner
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.plan.request import PlanRequest
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import PlanError, SourceError, SplitCheckpointError, UsageError, option

#: An adapter that is open.
AnyAdapter = Adapter | LoraFile


class _Base(NamedTuple):
    """The base model of an adapter.

    Attributes:
        tensors: name to dtype and shape, of quantized layers those without quantization; None for a config alone.
        rules: its rules.
        request: the user's options for them.
        assumed: their assumptions.
        model_type: the type of the model; of diffusers, its class.
        paths: all files that were read.
    """

    tensors: Mapping[str, TensorSpec] | None
    rules: RuleSet
    request: PlanRequest
    assumed: tuple[str, ...]
    model_type: str | None
    paths: tuple[AnyPath, ...]


def open_adapter(path: AnyPath, *, follow_links: bool = False, ignore: tuple[str, ...] = ()) -> AnyAdapter:
    """Open an adapter, which may be in the folder of its base model; then only its own files belong to it.

    Args:
        path: the folder of the adapter, or a LoRA file of diffusers or Kohya.
        follow_links: follow links that point outside of the folder.
        ignore: patterns of files to leave out.

    Raises:
        SourceError: if the folder does not hold an adapter, or a file cannot be read.
        PlanError: if the adapter is not of a supported kind.
    """
    if not path.exists():
        raise SourceError(f"{path}: does not exist{missing_hint(path, takes_url=False)}")
    if not (path / ADAPTER_CONFIG).is_file():
        if path.is_file() or (path / DIFFUSERS_LORA).exists():
            return _with_tensors(LoraFile.open(path, follow_links=follow_links))
        raise SourceError(
            f"{path}: does not hold an adapter (expected {ADAPTER_CONFIG} or {DIFFUSERS_LORA}): pass the folder of "
            "an adapter"
        )
    names = [child.name for child in path.iterdir()]
    if holds_base(names):
        weights = next((name for name in ADAPTER_WEIGHTS if name in names), ADAPTER_WEIGHTS[0])
        source = open_files(path, (weights,), (ADAPTER_CONFIG,), follow_links=follow_links)
    else:
        source = open_source(path, follow_links=follow_links, ignore=ignore)
    if ADAPTER_CONFIG not in source.auxiliary_files:
        raise UsageError(
            f"{path}: {ADAPTER_CONFIG} is left out, but is needed to split the adapter: change {option('ignore')}"
        )
    return _with_tensors(Adapter(source, read_settings(source.auxiliary_files[ADAPTER_CONFIG])))


def _with_tensors(adapter: AnyAdapter) -> AnyAdapter:
    if not adapter.source.specs:
        raise PlanError(f"{adapter.source.path}: does not have tensors, so it changes nothing: save the adapter again")
    return adapter


def plan_adapter(
    adapter: AnyAdapter, base: StrPath | PlannedSource, *, layout: str, **options: Unpack[PlanOptions]
) -> PlannedSource:
    """Plan an adapter by the rules of its base model.

    Args:
        adapter: the adapter.
        base: the base model: a checkpoint, a split checkpoint, a config.json or a folder with one; or its plan.
        layout: of the rank files.
        options: how the base model is read and planned, if ``base`` is a path.

    Raises:
        SourceError: if the base model cannot be read.
        PlanError: if the adapter does not fit the base model.
        UsageError: if the base model is padded, or the plan is for an engine.
    """
    of_base = base.request.engine if isinstance(base, PlannedSource) else options.get("engine")
    refuse_adapters(layout, of_base)
    found = _base_of(base, options)
    if found.request.pad:
        raise UsageError(
            f"{adapter.source.path}: {option(pad=True)} is not supported for adapters: split the base model without it"
        )
    rules = found.rules.without_engine().with_optional_rules()
    adapter = adapter.on(found.tensors, rules, found.model_type)
    tensors = fitted(adapter, rules, found.tensors)
    paths = (adapter.source.path, *adapter.source.paths, *adapter.source.auxiliary_files.values(), *found.paths)
    return PlannedSource(
        adapter.source,
        tensors,
        replace(found.request, engine=None, allow_unmatched_rules=False),
        Planner(tensors, rules, assumed=found.assumed, where="the adapter"),
        paths,
    )


def fitted(adapter: Adapter, rules: RuleSet, base: Mapping[str, TensorSpec] | None) -> dict[str, TensorSpec]:
    """The tensors of an adapter with their grids; see :func:`~shardconv.plan.adapter_plan.with_adapter_grids`.

    Raises:
        PlanError: if they do not fit the settings or the base model.
    """
    specs, settings = adapter.source.specs, adapter.settings
    tensors = with_adapter_grids(specs, rules, base, fan_in_fan_out=settings.fan_in_fan_out)
    found = AdapterTensors.of_names(specs)
    for layer in found.layers.values():
        settings.check(layer, specs[layer.tensors[A]].shape[0])
    if base is not None:
        settings.check_saved(found.replaced, base)
    return tensors


def _base_of(base: StrPath | PlannedSource, options: PlanOptions) -> _Base:
    """The base model, by its own plan, by the plan of a split checkpoint, or by the options."""
    if isinstance(base, PlannedSource):
        rules, assumed = base.planner.rules, base.planner.assumed
        model_type = model_type_of(base.source.config or {})
        return _Base(logical_tensors(base.tensors), rules, base.request, assumed, model_type, base.paths)
    path = local_path(base)
    if not path.exists():
        raise SourceError(f"{option(base=path)}: does not exist{missing_hint(path, takes_url=False)}")
    if is_split(path):
        refuse_changes(path, {**options, "follow_links": False})
        manifest = read_manifest(path)
        tensors = logical_tensors(quantized_tensors(manifest))
        plan, model_type = manifest.plan, model_type_of(manifest.config or {})
        return _Base(tensors, plan.rules, manifest.request, plan.assumed, model_type, (path,))
    config, options = read_config_alone(path, options)
    if config is None:
        return _base_of(plan_source(path, **options), options)
    # without quantization, which an adapter does not depend on
    config = {key: value for key, value in config.items() if key != SETTINGS_KEY}
    source = Source(path, is_folder=True, files=(), config=config)
    planned = plan_source(source, allow_unmatched_rules=True, **options)
    return _base_of(planned, options)._replace(tensors=None)


# --- split adapters --------------------------------------------------------------------------------------------------


def adapter_folder(adapter: Path, base: AnyPath) -> AnyPath:
    """The folder of a split adapter, which may be a name among the adapters of the split ``base`` model."""
    named = base / ADAPTERS / adapter
    return named if is_split(named) else adapter


class SplitAdapter(Struct, frozen=True):
    """A split adapter.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        settings: its settings.
    """

    folder: AnyPath
    manifest: Manifest
    settings: AdapterSettings

    @classmethod
    def open(cls, adapter: Path, base: AnyPath, of_base: Manifest) -> "SplitAdapter":
        """Open an adapter.

        Args:
            adapter: its folder, or its name among the adapters of the split base model.
            base: the split base model, or its source.
            of_base: its manifest.

        Raises:
            SplitCheckpointError: if it is not a split adapter for the tensor parallel size and the pipeline stages of
                the base model, or its settings were changed.
        """
        folder, plan = adapter_folder(adapter, base), of_base.plan
        stages = f" --stages {','.join(map(str, plan.num_layers))}" if plan.num_layers else ""
        if not folder.exists():
            names = ", ".join(read_manifest(base).adapters) if is_split(base) else ""
            raise SplitCheckpointError(f"{adapter}: does not exist (adapters of {base}: {names or 'none'}): correct it")
        if not is_split(folder):
            raise SplitCheckpointError(
                f"{adapter}: is not a split adapter (no manifest in {base / ADAPTERS / adapter} or {adapter}): make "
                f"one with shardconv split {adapter} --base {base} --tp {plan.tp}{stages}"
            )
        manifest = read_manifest(folder)
        if ADAPTER_CONFIG not in manifest.auxiliary_files:
            raise SplitCheckpointError(f"{folder}: is a split checkpoint, but not of an adapter: pass it as DIR")
        if (manifest.tp, manifest.plan.num_layers) != (plan.tp, plan.num_layers):
            raise SplitCheckpointError(
                f"{folder}: is split for {manifest.size_options} (expected {of_base.size_options}, as the base model): "
                f"run shardconv reshard {folder} --tp {plan.tp}{stages or ' --pp 1' * (manifest.plan.pp > 1)}"
            )
        if differences := file_differences(manifest.auxiliary_files, folder):
            raise SplitCheckpointError(f"{folder}: {differences[0]}: restore it, or split the adapter again")
        return cls(folder, manifest, read_settings(folder / ADAPTER_CONFIG))

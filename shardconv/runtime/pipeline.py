"""Load pipelines: their sharded components one after the other, and all others by diffusers."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.operations.pipeline import Options, component_errors, open_source_pipeline, open_split_folders
from shardconv.checkpoint.sources.pipeline import Pipeline
from shardconv.checkpoint.sources.planning import PLAN_DEFAULTS, StrPath, given_options
from shardconv.checkpoint.split.loadable import Loadable, open_loadable, refuse_other_sizes
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.checkpoint.split.split_folders import file_differences
from shardconv.checkpoint.split.split_pipeline import is_split_pipeline, read_pipeline_manifest
from shardconv.distributed.agreement import check_same, run_on_all
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, local_copy, remote_versions
from shardconv.files.weight_formats import INDEX_NAME
from shardconv.hf.diffusion import build_pipeline
from shardconv.runtime.device import as_torch_dtype
from shardconv.runtime.rank_tensors import is_quantized
from shardconv.runtime.ranks import connect_ranks
from shardconv.support.errors import SplitCheckpointError, UsageError, option


def load_pipeline(load_one: Callable[..., Any], paths: list[AnyPath], options: Options) -> Any:
    """Load a pipeline, or with the option ``component`` one of its components; see :func:`~shardconv.load`.

    Args:
        load_one: loads a checkpoint.
        paths: the folder of the pipeline.
        options: the arguments of :func:`~shardconv.load` by their names.
    """
    (path,) = paths
    opened: list[tuple[Pipeline, dict[str, Loadable]]] = []
    find = partial(_open, path, options, opened)
    _, device, ranks = connect_ranks(find, options["device"], options["group"])
    axis = ranks.all
    ((pipeline, components),) = opened
    check_same(path, axis, {"files of pipelines": pipeline.expected})
    run_on_all(axis, partial(_check_files, pipeline, verify=options["verify"]))
    own = run_on_all(axis, partial(_own_options, pipeline, components, options))
    progress, loaded = options["progress"], dict[str, nn.Module]()
    for at, (name, component) in enumerate(components.items()):
        step = None if progress is None else partial(_report_step, progress, at, len(components))
        given = {"path": component, "device": device, "group": axis, "component": None, "progress": step}
        loaded[name] = load_one(**{**options, **own[name], **given})
    if options["component"] is not None:
        return loaded[options["component"]]
    dtype = as_torch_dtype(options["dtype"]) or _main_dtype(loaded)
    versions = run_on_all(axis, partial(remote_versions, pipeline.files.values()))
    check_same(path, axis, {REMOTE_VERSIONS: versions})
    built = run_on_all(axis, partial(_build, pipeline, loaded, dtype))
    return built if device.type == "cpu" else built.to(device)


def _build(pipeline: Pipeline, loaded: Mapping[str, nn.Module], dtype: torch.dtype) -> Any:
    """Build a pipeline with the components that are loaded; diffusers loads all others, of a remote one from a copy."""
    with local_copy(pipeline.first, pipeline.files.__contains__, max_bytes=None) as local:
        return build_pipeline(local / INDEX_NAME, loaded, dtype, shown=pipeline.first)


def _own_options(pipeline: Pipeline, components: Mapping[str, Loadable], options: Options) -> dict[str, Options]:
    """Component to its own options: adapters and dequantization where they apply."""
    given: dict[str, Options] = {name: dict(pipeline.own.get(name, {})) for name in components}
    if len(components) == 1:
        return given
    if options["adapter"] is not None:
        adapted = adapted_components(pipeline, options["adapter"])
        given |= {name: {**given[name], "adapter": None} for name in components if name not in adapted}
    if options["dequantize"]:
        quantized = [name for name, one in components.items() if is_quantized(one.manifest)] or components
        given |= {name: {**given[name], "dequantize": False} for name in components if name not in quantized}
    return given


def _open_component(pipeline: Pipeline, name: str, options: Options) -> Loadable:
    plan: Any = {**{one: options[one] for one in PLAN_DEFAULTS if one in options}, **pipeline.own.get(name, {})}
    with component_errors(pipeline, name, options):
        return open_loadable(pipeline.first / name, tp=options["tp"], options=plan)


def _report_step(progress: Callable[[int, int], None], at: int, count: int, done: int, total: int) -> None:
    """Report the progress of one of ``count`` components, each an equal part of the whole."""
    progress(at * total + done, count * total)


def _open(path: AnyPath, options: Options, opened: list[tuple[Pipeline, dict[str, Loadable]]]) -> Loadable:
    """Open a pipeline, and its components that are loaded; return the first, which has the facts that ranks compare."""
    if given := given_options(options, ("model",) if options["component"] is None else ()):
        raise UsageError(f"{path}: {given} is for one component: choose it with {option(component='NAME')}")
    is_split = is_split_pipeline(path)
    if is_split:
        stored = read_pipeline_manifest(path).tp
        refuse_other_sizes(path, option(tp=stored), {"tp": stored}, {"tp": options["tp"]})
    pipeline = (open_split_folders if is_split else open_source_pipeline)([path], options)
    if not is_split and options["tp"] is None:
        raise SplitCheckpointError(
            f"{path}: is not a split pipeline: make one with shardconv split {path} --tp N, or load it without "
            f"splitting it: {option(tp='N')}"
        )
    component = options["component"] or next(iter(pipeline.components))
    if component not in pipeline.components:
        raise UsageError(
            f"{path}: {option(component=component)} is not sharded (expected one of {', '.join(pipeline.components)}): "
            "load it by diffusers"
        )
    names = pipeline.components if options["component"] is None else [component]
    components = {name: _open_component(pipeline, name, options) for name in names}
    opened[:] = [(pipeline, components)]
    return replace(next(iter(components.values())), pipeline=pipeline.first)


def adapted_components(pipeline: Pipeline, adapter: StrPath) -> list[str]:
    """The components of a pipeline that have the adapter of this name.

    Raises:
        UsageError: if none has it.
    """
    found = [name for name in pipeline.components if is_split(pipeline.first / name / ADAPTERS / adapter)]
    if not found:
        raise UsageError(
            f"{pipeline.first}: no component has an adapter {adapter} ({', '.join(pipeline.components)}): split the "
            "pipeline with it, or load one component with it"
        )
    return found


def _check_files(pipeline: Pipeline, *, verify: bool) -> None:
    """Check the files that diffusers reads of a split pipeline; without ``verify``, only those without weights."""
    checksums = {name: one for name, one in (pipeline.expected or {}).items() if verify or name.endswith(".json")}
    if found := file_differences(checksums, pipeline.first):
        raise SplitCheckpointError(f"{pipeline.first}: {found[0]}: restore it, or split the pipeline again")


def _main_dtype(components: Mapping[str, nn.Module]) -> torch.dtype:
    """The floating-point dtype that most parameters have."""
    sizes = Counter[torch.dtype]()
    for component in components.values():
        for parameter in component.parameters():
            sizes[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    return sizes.most_common(1)[0][0]

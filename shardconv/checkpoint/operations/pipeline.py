"""Operations on pipelines: the same operation on each component.

A function that is decorated takes pipelines wherever it takes checkpoints.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from shardconv.checkpoint.adapters.adapter import AnyAdapter
from shardconv.checkpoint.adapters.lora_file import fuse_in_diffusers
from shardconv.checkpoint.engine.layout import PADDING_NAME
from shardconv.checkpoint.operations.split_sources import open_adapters, without_adapters
from shardconv.checkpoint.output.combined import combine
from shardconv.checkpoint.sources.pipeline import Pipeline, is_pipeline, open_pipeline
from shardconv.checkpoint.sources.planning import PLAN_DEFAULTS, given_options, plan_source, record_planners
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.checkpoint.split.split_folders import file_differences
from shardconv.checkpoint.split.split_pipeline import (
    PipelineManifest,
    SplitPipeline,
    component_differences,
    is_split_pipeline,
    open_split_pipeline,
    read_pipeline_manifest,
)
from shardconv.files.checksums import checksum_file
from shardconv.files.folder import AnyPath
from shardconv.files.paths import SourcePath, open_path, open_paths
from shardconv.files.weight_formats import INDEX_NAME
from shardconv.layouts.layout import DCP, NATIVE
from shardconv.plan.engines import SHARDCONV
from shardconv.plan.planner import CANDIDATE_TPS, Planner
from shardconv.support import Progress
from shardconv.support.errors import (
    PlanError,
    ShardconvError,
    SourceError,
    SplitCheckpointError,
    UsageError,
    option,
)
from shardconv.support.formatting import ranges

#: Layouts and engines of components; others are for programs that do not read pipelines.
_OF_PIPELINES = {None, NATIVE.name, DCP.name, SHARDCONV.name}
P = ParamSpec("P")
R = TypeVar("R")
#: The arguments of an operation by their names, including ``**options``.
Options = dict[str, Any]
#: Applies an operation to a pipeline in some folders.
Apply = Callable[[Callable[..., R], list[AnyPath], Options], R]
#: Arguments that are about one model, and are refused if they would apply to several.
_OF_ONE_MODEL = (
    "rules", "replicate", "head_dim", "config", "source_layout", "base",
)  # fmt: skip


def on_pipelines(apply: Apply[R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an operation so that ``apply`` is called where its first argument is a pipeline."""

    def decorate(operation: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(operation)
        first = next(iter(signature.parameters))

        @wraps(operation)
        def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return operation(*args, **kwargs)  # raises an error that names the operation
            src = bound.arguments[first]
            if isinstance(src, Source):
                return operation(*args, **kwargs)
            try:
                paths = open_paths(src)
                has_pipeline = any(map(is_pipeline, paths))
            except ShardconvError:
                return operation(*args, **kwargs)  # reports the error where it is expected, as on all ranks
            if has_pipeline:
                _refuse_stages(paths[0], bound.arguments)
                return apply(operation, paths, _all_options(bound))
            bound.arguments[first] = paths[0] if isinstance(src, SourcePath) else paths
            return operation(*bound.args, **bound.kwargs)

        return dispatch

    return decorate


def _refuse_stages(path: AnyPath, arguments: Options) -> None:
    """Refuse pipeline stages of transformers, whose components run one after the other."""
    if arguments.get("pp") not in {None, 1} or arguments.get("stages"):
        raise UsageError(
            f"{path}: is a pipeline of diffusers, whose models do not have pipeline stages: remove {option('pp')} and "
            f"{option('stages')}"
        )


def _all_options(bound: inspect.BoundArguments) -> Options:
    """All arguments of an operation by their names, with their defaults."""
    bound.apply_defaults()
    named = dict(bound.arguments)
    planned = {**PLAN_DEFAULTS, **named.pop("options")} if "options" in named else {}
    return {**planned, **named}


def open_source_pipeline(paths: Sequence[AnyPath], options: Options) -> Pipeline:
    """Open the pipeline of an operation on a source, and apply its options.

    Raises:
        SourceError: if it cannot be read.
        UsageError: if an option does not apply to it.
    """
    (path,) = paths
    adapters = open_adapters(options.get("adapters", ()), follow_links=options.get("follow_links", False))
    options |= {"adapters": adapters} if adapters else {}
    pipeline = open_pipeline(
        path,
        components=options.pop("components", ()),
        ignore=without_adapters(path, adapters, {"ignore": options.pop("ignore", ())})["ignore"],
        follow_links=options.get("follow_links", False),
    )
    if len(pipeline.components) > 1 and (given := given_options(options, _OF_ONE_MODEL)):
        raise UsageError(
            f"{path}: {given} is for one model, and the pipeline has {', '.join(pipeline.components)}: choose one with "
            f"{option(components=['NAME'])}, or remove it"
        )
    _check_readers(pipeline, options)
    return _with_adapters(pipeline, adapters, options) if adapters else pipeline


def _with_adapters(pipeline: Pipeline, adapters: Sequence[AnyAdapter], options: Options) -> Pipeline:
    """A pipeline whose components have the parts of adapters that are for them."""
    parts = [_parts(pipeline, adapter) for adapter in adapters]
    of_component = {name: [part[name] for part in parts if name in part] for name in pipeline.components}
    is_merged = options["merge_adapter"]
    own = {
        name: {**given, "adapters": of_component[name], "merge_adapter": is_merged and bool(of_component[name])}
        for name, given in pipeline.own.items()
    }
    return replace(pipeline, own=own)


def _parts(pipeline: Pipeline, adapter: AnyAdapter) -> Mapping[str, AnyAdapter]:
    """Component to its part of an adapter: by the names in a LoRA file, or by the folder of an adapter of PEFT.

    Raises:
        UsageError: if the component is unknown, or is not sharded.
    """
    path, sharded = adapter.source.path, pipeline.components
    parts = adapter.parts()
    if [*parts] == [""]:
        inside = [name for name in sharded if str(path).startswith(f"{pipeline.first / name}/")] or [*sharded]
        if len(inside) > 1:
            raise UsageError(
                f"{path}: does not name the component that it is for (expected one of {', '.join(sharded)}): choose it "
                f"with {option(components=['NAME'])}"
            )
        return {inside[0]: adapter}
    if other := next((name for name in parts if name not in sharded), None):
        is_left = pipeline.copied.get(other, "").endswith("not chosen")
        raise UsageError(
            f"{path}: is for {', '.join(parts)}, and {other} is not sharded (expected only {', '.join(sharded)}): "
            f"{f'choose it with {option(components=[other])}' if is_left else fuse_in_diffusers(path)}"
        )
    return parts


def open_split_folders(paths: Sequence[AnyPath], options: Options) -> SplitPipeline:
    """Open the pipeline of an operation on a split one.

    Raises:
        SplitCheckpointError: if it cannot be read.
        UsageError: if an option does not apply to it.
    """
    if given := given_options(options, ("source_layout", "config", "components")):
        raise UsageError(f"{paths[0]}: is a split pipeline, to which {given} does not apply: remove it")
    pipeline = open_split_pipeline(paths)
    _check_readers(pipeline, options)
    return pipeline


def _check_readers(pipeline: Pipeline, options: Options) -> None:
    """Refuse a layout or an engine whose readers do not read pipelines."""
    given = {name: options.get(name) for name in ("layout", "engine") if options.get(name) not in _OF_PIPELINES}
    if given:
        component = pipeline.first / next(iter(pipeline.components))
        raise UsageError(
            f"{pipeline.first}: {option(**given)} is for one model, and its readers do not read pipelines: remove "
            f"it, or pass a component, such as {component}"
        )


def open_padded_pipeline(paths: Sequence[AnyPath], options: Options) -> Pipeline:
    """Open a pipeline with padded components.

    Raises:
        SplitCheckpointError: if no component is padded.
        SourceError: if it cannot be read.
    """
    del options
    (path,) = paths
    padded = [child.name for child in path.iterdir() if (child / PADDING_NAME).exists()]
    if not padded:
        raise SplitCheckpointError(
            f"{path}: does not have a padded component: pass the folder that shardconv pad wrote; shardconv merge "
            "restores the source of a split pipeline"
        )
    return open_pipeline(path, components=sorted(padded))


def report_each(operation: Callable[..., R], paths: list[AnyPath], options: Options) -> R:
    """Report on all components of a pipeline, split or not."""
    opened = open_split_folders if is_split_pipeline(paths[0]) else open_source_pipeline
    pipeline = opened(paths, options)
    reports = call_on_each(operation, pipeline, options)
    return combine(reports, pipeline, source=str(paths[0]))


def verify_each(operation: Callable[..., R], paths: list[AnyPath], options: Options) -> R:
    """Verify all components of a split pipeline, its other files, and that the components are of this split."""
    began, progress = time.perf_counter(), options["progress"]
    if given := given_options(options, ("source_layout",)):
        raise UsageError(f"{paths[0]}: is a split pipeline, to which {given} does not apply: remove it")
    against = None if options["against"] is None else open_path(options["against"])
    check_not_exchanged(paths, against)
    pipeline = open_split_pipeline(paths, for_report=True)
    source = None if against is None else _open_against(pipeline, against, options)
    total, done, reports = sum(pipeline.num_bytes.values()), 0, dict[str, Any]()
    for name, size in pipeline.num_bytes.items():
        own = {**options, "progress": part_of(progress, done, size, total)}
        if source is not None:
            own |= {"against": source.first / name, **source.own[name]}
        reports[name] = call_on(operation, pipeline, name, own)
        done += size
    manifests = {path: read_pipeline_manifest(path) for path in paths}
    damages = [text for path, manifest in manifests.items() for text in _damages(manifest, path, len(paths))]
    ranks = {rank for manifest in manifests.values() for rank in manifest.ranks}
    other = [] if source is None else _other_files(pipeline, source)
    report: Any = combine(
        reports, pipeline if source is None else replace(pipeline, left_out=source.left_out),
        paths=tuple(map(str, paths)), against=None if source is None else str(source.first), tp=pipeline.tp,
        layout=next(iter(reports.values())).layout, ranks=tuple(sorted(ranks)), seconds=time.perf_counter() - began,
    )  # fmt: skip
    verified: R = replace(
        report,
        checked=("components", "other files", *report.checked),
        differences=(*damages, *other, *report.differences),
        is_damaged=bool(damages) or report.is_damaged,
    )
    return verified


def check_not_exchanged(paths: Sequence[AnyPath], other: AnyPath | None) -> None:
    """Refuse to verify a source against its split checkpoint, or split pipeline.

    Args:
        paths: the folders to verify.
        other: the path to compare with, if there is one.

    Raises:
        UsageError: if ``other`` is split, and ``paths`` are not.
    """
    if other is not None and _is_any_split(other) and not any(map(_is_any_split, paths)):
        raise UsageError(
            f"{other}: is a split checkpoint, and {option('against')} takes its source: exchange the two (shardconv "
            f"verify {other} --against {' '.join(map(str, paths))})"
        )


def _is_any_split(path: AnyPath) -> bool:
    return is_split(path) or is_split_pipeline(path)


def _open_against(pipeline: Pipeline, path: AnyPath, options: Options) -> Pipeline:
    """Open the source that a split pipeline is compared with."""
    if not is_pipeline(path):
        raise SourceError(
            f"{path}: is not a pipeline (no {INDEX_NAME}), but {pipeline.first} is: pass the pipeline that was split"
        )
    return open_pipeline(
        path,
        components=[*pipeline.components],
        follow_links=options["follow_links"],
        ignore=options["ignore"],
        optional_ignore=pipeline.ignore,
    )


def _damages(manifest: PipelineManifest, folder: AnyPath, count: int) -> list[str]:
    """The differences of one of ``count`` folders, other than those in its components."""
    found = [*component_differences(manifest, folder), *file_differences(manifest.files, folder)]
    return [f"{folder}: {text}" for text in found] if count > 1 else found


def _other_files(pipeline: SplitPipeline, source: Pipeline) -> list[str]:
    """The files of a split pipeline, without its components, that differ from a source."""
    checksums, expected = {name: checksum_file(path) for name, path in source.files.items()}, pipeline.expected or {}
    names = sorted(checksums.keys() | expected.keys())
    return [f"{name}: differs from {source.first}" for name in names if checksums.get(name) != expected.get(name)]


def call_on_each(operation: Callable[..., R], pipeline: Pipeline, options: Options) -> dict[str, R]:
    """Component to the result of an operation on it."""
    return {name: call_on(operation, pipeline, name, options) for name in pipeline.components}


def call_on(operation: Callable[..., R], pipeline: Pipeline, name: str, options: Options) -> R:
    """Apply an operation to a component; its errors name the component."""
    folders = [path / name for path in pipeline.paths]
    src = folders if len(folders) > 1 else folders[0]
    with component_errors(pipeline, name, options):
        return operation(**{**options, "src": src, **pipeline.own.get(name, {})})


@contextmanager
def component_errors(pipeline: Pipeline, name: str, options: Options) -> Iterator[None]:
    """Make errors in the block name a component; errors about plans also have remedies for the pipeline."""
    try:
        with record_planners() as pipeline.planners[name]:
            yield
    except ShardconvError as error:
        problem, *remedy = error.args
        error.args = (f"component {name} ({pipeline.components[name]}): {problem}", *remedy)
        if isinstance(error, PlanError) and pipeline.expected is None and "rules" in options:  # not of pad
            found = _remedies(pipeline, name, options)
            error.args = (*error.args[:-1], ". ".join([error.args[-1], *found]))
        raise


def _remedies(pipeline: Pipeline, failed: str, options: Options) -> Iterator[str]:
    """The way to pass options for one model, or sizes and components that have plans."""
    tp, names = options.get("tp"), pipeline.components
    planners = {name: found for name in names if (found := _planner(pipeline, name, options)) is not None}
    planned = [name for name, one in planners.items() if tp is None or one.blocked(tp) is None]
    if len(names) > 1 and (failed in planned or failed not in planners):
        yield f"To pass {option('rules')} or {option('replicate')}, also pass {option(components=[failed])}"
    if failed in planned:
        return
    if len(planners) == len(names):
        sizes = [one for one in CANDIDATE_TPS if all(planner.blocked(one) is None for planner in planners.values())]
        yield f"All components support {option('tp')} {ranges(sizes)}"
    if planned and options.get("component") is None:
        unsharded = ", ".join(name for name in names if name not in planned)
        yield f"To leave {unsharded} unsharded, pass {option(components=planned)}"


def _planner(pipeline: Pipeline, name: str, options: Options) -> Planner | None:
    """The planner of a component, which is planned unless an operation was called for it; None if that failed."""
    if name in pipeline.planners:
        return next(iter(pipeline.planners[name]), None)
    given = {**options, **pipeline.own.get(name, {})}
    try:
        return plan_source(pipeline.first / name, **{key: given[key] for key in PLAN_DEFAULTS if key in given}).planner
    except ShardconvError:
        return None


def part_of(progress: Progress | None, start: int, size: int, total: int) -> Progress | None:
    """A callback for the progress of a component of ``size`` bytes, after ``start`` of the ``total`` bytes of all."""
    if progress is None:
        return None
    return lambda done, of_component: progress(start + (done * size // of_component if of_component else size), total)

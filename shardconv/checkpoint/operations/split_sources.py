"""The sources of a split: a model, an adapter, or a model with adapters that are split with it or merged into it."""

from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint import adapters as adapter_modules
from shardconv.checkpoint.adapters.adapter import AnyAdapter, open_adapter, plan_adapter
from shardconv.checkpoint.sources.planning import PlannedSource, PlanOptions, StrPath, plan_source
from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath, is_portable_name
from shardconv.files.paths import SourcePath, local_path, open_path
from shardconv.files.weight_formats import ADAPTER_FILES, DIFFUSERS_LORA
from shardconv.support.errors import UsageError, option


class SplitSources(NamedTuple):
    """The sources of a split.

    Attributes:
        source: the model, or an adapter alone.
        adapters: name to each adapter that is split with the model.
    """

    source: PlannedSource
    adapters: dict[str, PlannedSource]


def plan_sources(
    src: SourcePath | Source,
    base: StrPath | None,
    adapters: Sequence[StrPath | AnyAdapter],
    layout: str,
    options: PlanOptions,
    *,
    merge_adapter: bool,
    dtype: str | None,
) -> SplitSources:
    """Plan a source and its adapters; see :func:`shardconv.split` for the arguments.

    Raises:
        UsageError: if the arguments contradict each other.
        SourceError: if a source cannot be read.
        PlanError: if no plan is known to be correct, or an adapter does not fit.
    """
    if merge_adapter and len(adapters) != 1:
        raise UsageError(
            f"{option(merge_adapter=True)} merges one adapter (got {len(adapters)}): pass "
            f"{option(adapters=['ADAPTER'])}"
        )
    if dtype is not None and (base is not None or (adapters and not merge_adapter)):
        raise UsageError(
            f"{option('dtype')} converts models, not adapters: pass {option(merge_adapter=True)}, or convert the model "
            f"first (shardconv split SRC --tp 1 --dtype {dtype}, shardconv merge), or remove {option('dtype')}"
        )
    if base is not None:
        if adapters:
            raise UsageError(
                f"{option('base')} splits an adapter alone, and {option('adapters')} one with its model: remove one of "
                "the two"
            )
        if isinstance(src, Source):
            raise UsageError(f"{src.path}: is not the folder of an adapter: remove {option('base')}")
        return SplitSources(_plan_alone(open_path(src), base, layout, options), {})
    opened = open_adapters(adapters, follow_links=options.get("follow_links", False))
    src = src if isinstance(src, Source) else open_path(src)
    model = plan_source(src, layout=layout, dtype=dtype, **without_adapters(src, opened, options))
    if not merge_adapter:
        return SplitSources(model, _named([(one, plan_adapter(one, model, layout=layout)) for one in opened]))
    (adapter,) = opened
    return SplitSources(adapter_modules.merge_adapter.with_merged_adapter(model, adapter), {})


def open_adapters(adapters: Sequence[StrPath | AnyAdapter], *, follow_links: bool) -> list[AnyAdapter]:
    """Open the adapters that are not open yet."""
    return [
        one if isinstance(one, AnyAdapter) else open_adapter(local_path(one), follow_links=follow_links)
        for one in adapters
    ]


def _plan_alone(src: AnyPath, base: StrPath, layout: str, options: PlanOptions) -> PlannedSource:
    """Plan an adapter; ``ignore`` has patterns of its files, and other options apply to its base model."""
    follow_links, ignore = options.get("follow_links", False), options.get("ignore", ())
    adapter = open_adapter(src, follow_links=follow_links, ignore=ignore)
    of_base: PlanOptions = {**options, "ignore": ()}
    return plan_adapter(adapter, base, layout=layout, **of_base)


def without_adapters(src: AnyPath | Source, adapters: Sequence[AnyAdapter], options: PlanOptions) -> PlanOptions:
    """The options for a model or a pipeline, which leave out adapters in its folder and in subfolders."""
    if isinstance(src, Source) and adapters:
        return {**options, "follow_links": False}  # of the adapters only
    if not isinstance(src, Path):
        return options
    folder, found = src.resolve(), list[str]()
    for path in (one.source.path.resolve() for one in adapters if isinstance(one.source.path, Path)):
        if path == folder:
            found += [name for name in (*ADAPTER_FILES, DIFFUSERS_LORA) if (folder / name).exists()]
        elif path.is_relative_to(folder):
            found.append(escape(path.relative_to(folder).as_posix()))
    return {**options, "ignore": (*options.get("ignore", ()), *found)} if found else options


def _named(adapters: Sequence[tuple[AnyAdapter, PlannedSource]]) -> dict[str, PlannedSource]:
    """The adapters by the names of their folders."""
    names = [adapter.source.name for adapter, _ in adapters]
    if name := next((name for name in names if not is_portable_name(name)), None):
        raise UsageError(f"{name!r:.100}: is not a name of a folder on every system: rename the folder of the adapter")
    if len({*names}) < len(names):
        raise UsageError("two adapters have the same name, as their folders do: rename one of the folders")
    return {adapter.source.name: planned for adapter, planned in adapters}

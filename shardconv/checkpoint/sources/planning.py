"""Plans of checkpoints on disk: options, source and rules."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

from msgspec.structs import replace

from shardconv.checkpoint.sources.diffusers_classes import refuse_ip_adapters, refuse_original_names
from shardconv.checkpoint.sources.dtype_conversion import with_dtype
from shardconv.checkpoint.sources.opening import open_source, standalone_config
from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath, read_json
from shardconv.files.paths import SourcePath, check_exists, local_path, open_path
from shardconv.files.weight_formats import ADAPTER_FILES, CONFIG_NAME, config_path
from shardconv.formats.detect import with_grids
from shardconv.layouts.choice import engine_of
from shardconv.layouts.layout import NATIVE
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import AUTO, PlanRequest, Rules, plan_file_of, planner_for, request_of
from shardconv.plan.stages import chosen_stages
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError, ShapeError, SourceError, UsageError, option

#: A path that a user passes.
StrPath = str | Path


class PlanOptions(TypedDict, total=False):
    """Options for reading and planning a source.

    Attributes:
        rules: "auto", a family name, a plan file or a Plan: see :data:`~shardconv.plan.request.Rules`.
        replicate: names or patterns of tensors to replicate.
        head_dim: the head size, for checkpoints without a config.
        ep: expert parallel size: 1, the default, shards each expert as other layers; else a multiple of ``tp``, the
            number of ranks of a stage, each of which has whole experts.
        engine: "vllm" to use the boundaries of that engine; None for shardconv's runtime, which also runs
            checkpoints with other boundaries.
        pad: pad units that do not divide with zeros, if outputs stay equal.
        config: a config.json to use instead of the one next to the weights.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of weights and auxiliary files to leave out.
        source_layout: "deepseek", "deepspeed", "meta", "megatron", "dcp" or "vllm" for files of other tools; None to
            detect them.
        components: names of the components of a pipeline of diffusers that are sharded; empty for all that can be.
    """

    rules: Rules
    replicate: tuple[str, ...]
    head_dim: int | None
    ep: int | None
    engine: str | None
    pad: bool
    config: StrPath | None
    follow_links: bool
    ignore: tuple[str, ...]
    source_layout: str | None
    components: tuple[str, ...]


#: Defaults of :class:`PlanOptions`.
PLAN_DEFAULTS: PlanOptions = {
    "rules": AUTO, "replicate": (), "head_dim": None, "ep": None, "engine": None,
    "pad": False, "config": None, "follow_links": False, "ignore": (), "source_layout": None, "components": (),
}  # fmt: skip


#: See :func:`record_planners`.
_recorded: ContextVar[list[Planner] | None] = ContextVar("planners", default=None)

#: The options to open a source.
_OPENING = frozenset({"config", "follow_links", "ignore", "source_layout"})


def refuse_changes(folder: AnyPath, options: PlanOptions) -> None:
    """Refuse options that would change the plan of a split checkpoint.

    Raises:
        UsageError: if an option does not have its default value.
    """
    if named := given_options(options, options):
        raise UsageError(
            f"{folder}: is a split checkpoint, which stores its plan: remove {named}, or pass the source that was split"
        )


def given_options(options: Mapping[str, object], names: Collection[str]) -> str:
    """The named options with other values than their defaults, for a message; "" for none."""
    defaults: Mapping[str, object] = PLAN_DEFAULTS
    given = (one for one, value in options.items() if one in names and (value or None) != (defaults.get(one) or None))
    return ", ".join(map(option, given))


def read_config_alone(path: AnyPath, options: PlanOptions) -> tuple[dict[str, object] | None, PlanOptions]:
    """Read a config without weights, or the config among the options.

    Args:
        path: the config, or a folder that holds it.
        options: the options for its plan.

    Returns:
        The config, None for all other paths; and the options that are left for its plan.

    Raises:
        SourceError: if it cannot be read, or is a link out of its folder.
        UsageError: if an option is for weights.
    """
    config = standalone_config(path, follow_links=options.get("follow_links", False))
    if config is None:
        return None, options
    if named := given_options(options, ("ignore", "source_layout")):
        raise UsageError(f"{named}: only applies to folders with weights (got the config {path}): remove it")
    if (other := options.get("config")) is not None:
        config = read_json(config_path(other) or path)
    return config, {**options, "config": None, "follow_links": False}


class PlannedSource(NamedTuple):
    """A source that is planned.

    Attributes:
        source: the source.
        tensors: its tensors; tensors of quantized layers have their grids.
        request: the user's options for the plan.
        planner: the rules over the tensors, with their assumptions.
        paths: all files that were read.
    """

    source: Source
    tensors: Mapping[str, TensorSpec]
    request: PlanRequest
    planner: Planner
    paths: tuple[AnyPath, ...]


@contextmanager
def record_planners() -> Iterator[list[Planner]]:
    """Return the planners of the sources that are planned in the block, in their order."""
    planners = list[Planner]()
    token = _recorded.set(planners)
    try:
        yield planners
    finally:
        _recorded.reset(token)


def plan_source(
    src: SourcePath | Source,
    *,
    layout: str = NATIVE.name,
    dtype: str | None = None,
    allow_unmatched_rules: bool = False,
    **options: Unpack[PlanOptions],
) -> PlannedSource:
    """Open a source, unless it is a :class:`Source`, and find its rules.

    Options as in :class:`PlanOptions`, errors as in :func:`make_plan`. The plan is for the engine of
    the ``layout``, if it has one. With ``dtype``, floating-point tensors are converted: see
    :func:`~shardconv.checkpoint.sources.dtype_conversion.with_dtype`. With ``allow_unmatched_rules``, rules of
    the user may match nothing.

    Raises:
        TypeError: if an option is unknown.
    """
    if unknown := next((name for name in options if name not in PLAN_DEFAULTS), None):
        raise TypeError(f"option {unknown!r} is unknown (expected one of {', '.join(PLAN_DEFAULTS)}): correct its name")
    given: PlanOptions = {**PLAN_DEFAULTS, **options}
    if isinstance(src, Source) and (late := given_options(given, _OPENING)):
        raise UsageError(
            f"{late}: only applies when a source is opened (got {src.path}, which is open): remove it, or pass the path"
        )
    if components := given["components"]:
        raise UsageError(
            f"{option(components=[*components])}: only applies to pipelines (got "
            f"{src.path if isinstance(src, Source) else src}): remove it"
        )
    source = src if isinstance(src, Source) else _open(src, given)
    refuse_other_contents(source)
    source = source if dtype is None else with_dtype(source, dtype)
    paths: tuple[AnyPath, ...] = (source.path, *source.paths, *source.auxiliary_files.values())
    settings = source.config_with_quantization()
    tensors, rules = with_grids(source.specs, settings), given["rules"]
    request = PlanRequest(
        None, None, tuple(given["replicate"]), given["head_dim"],
        1 if given["ep"] is None else given["ep"],
        given["engine"], allow_unmatched_rules, int(given["pad"]),
    )  # fmt: skip
    if isinstance(rules, Plan):
        request, planner = _planner_of(rules, tensors, request)
        return _record(PlannedSource(source, tensors, request_for(request, layout), planner, paths))
    if (plan_file := plan_file_of(rules)) is not None:
        check_exists(local_path(str(rules)), PlanError)
        paths = (*paths, plan_file)
    named = _named(rules)
    request = request_for(replace(request, family=named.family, plan_file=named.plan_file), layout)
    planner = planner_for(tensors, settings, request)
    assumed = (*source.assumed, *planner.assumed, *_without_class(source.config or {}))
    return _record(PlannedSource(source, tensors, request, planner.assuming(*assumed), paths))


def _record(planned: PlannedSource) -> PlannedSource:
    """Record the planner of a source, in a block of :func:`record_planners`."""
    if (planners := _recorded.get()) is not None:
        planners.append(planned.planner)
    return planned


def _open(src: SourcePath, options: PlanOptions) -> Source:
    config = options["config"]
    return open_source(
        open_path(src), config=config_path(config), follow_links=options["follow_links"],
        ignore=options["ignore"], source_layout=options["source_layout"],
    )  # fmt: skip


def _without_class(config: Mapping[str, object]) -> Iterator[str]:
    """The assumption about a config of transformers that does not name the model class."""
    if isinstance(config.get("model_type"), str) and not config.get("architectures"):
        yield "config.json does not have architectures: shardconv run fails. Add it, or use a config that has it"


def check_shapes(source: Source) -> tuple[str, ...]:
    """Compare the shapes of all tensors with the config, as a plan does.

    Returns:
        The reason why they cannot be compared, as a sentence; () if they are equal.

    Raises:
        SourceError: if a shape contradicts the config.
    """
    settings = source.config_with_quantization()
    if settings is None:
        return (f"shapes are not compared with a config, because the folder does not have {CONFIG_NAME}",)
    try:
        planner_for(with_grids(source.specs, settings), settings, PlanRequest()).plan(1)
    except ShapeError as error:
        raise SourceError(
            f"{source.path}: {error.problem}: correct {CONFIG_NAME}, or remove it to merge without this comparison"
        ) from error
    except PlanError as error:
        return (f"shapes are not compared with the config: {error.with_options()}",)
    return ()


def refuse_other_contents(source: Source) -> None:
    """Refuse sources that are not a model with the names of its class alone.

    Raises:
        SourceError: if the source is an adapter, has original names, or was saved with an IP adapter.
    """
    _refuse_adapter(source)
    refuse_original_names(source)
    refuse_ip_adapters(source)


def _refuse_adapter(source: Source) -> None:
    """Refuse an adapter: its plan needs its base model."""
    if any(file.name in ADAPTER_FILES for file in source.files):
        raise SourceError(
            f"{source.path}: is a PEFT adapter, which is split by the plan of its base model: pass "
            f"{option(base='BASE')} to shardconv plan or split, or split BASE with "
            f"{option(adapters=[str(source.path)])}, also with {option(merge_adapter=True)}"
        )


def _named(rules: Rules) -> PlanRequest:
    """The request for a family or plan file; refuses policies, which apply to modules."""
    try:
        return request_of(rules)
    except TypeError as error:
        raise UsageError(
            f"{error}: a policy matches modules by class, which a checkpoint does not have: use it with convert_model, "
            f"or write its rules to a plan file"
        ) from error


def _planner_of(plan: Plan, tensors: Mapping[str, TensorSpec], options: PlanRequest) -> tuple[PlanRequest, Planner]:
    """The request and planner of a plan that a user passes, with the options beside it.

    Raises:
        UsageError: if other options change the plan.
        PlanError: if the plan does not store its rules, or they give other placements for this source.
    """
    if changed := [*_changed(options), *(["engine"] if options.engine is not None else [])]:
        raise UsageError(
            f"{option(changed[0])} cannot change a plan ({option('rules')} is a Plan): make another one with make_plan"
        )
    planner = Planner(tensors, plan.rules, assumed=plan.assumed)
    if (name := plan.first_difference(planner.plan(plan.tp, plan.stages))) is not None:
        raise PlanError(f"{name}: the plan was made for another checkpoint, or was changed: make it again")
    return PlanRequest(ep=plan.rules.ep, engine=plan.rules.engine, pad=plan.rules.pad), planner


def request_for(request: PlanRequest, layout: str) -> PlanRequest:
    """The request for a plan that the engine of a layout can execute; unchanged for a layout without an engine.

    Args:
        request: the user's options for the plan.
        layout: the name of the layout.

    Raises:
        UsageError: if the layout is unknown, or the user's options change the engine's plan.
    """
    if (engine := engine_of(layout)) is None:
        return request
    if changed := [option("rules" if name in {"family", "plan_file"} else name) for name in _changed(request)]:
        raise UsageError(
            f"{option(layout=layout)} requires the plan of {engine}, which {', '.join(changed)} changes: remove that, "
            f"or use {option(layout='native')}"
        )
    return replace(request, engine=engine)


def changed_options(request: PlanRequest) -> str:
    """The options in a request that change placements, for a message."""
    names = ("replicate", "ep", "engine", "pad")
    return ", ".join(option(name) for name in names if getattr(request, name) != getattr(PlanRequest(), name))


def _changed(request: PlanRequest) -> list[str]:
    """The fields of a request that change the plan of an engine."""
    fields = ("family", "plan_file", "replicate", "head_dim", "ep", "pad")
    return [name for name in fields if getattr(request, name) != getattr(PlanRequest(), name)]


@checked
def make_plan(
    src: SourcePath, *, tp: int, pp: int | None = None, stages: str | Sequence[int] = (), **options: Unpack[PlanOptions]
) -> Plan:
    """Make the plan of a checkpoint from its headers and config, without reading its data.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder.
        tp: number of ranks of a stage.
        pp: number of pipeline stages.
        stages: number of layers of each stage, as in :func:`~shardconv.split`.
        options: see :class:`PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read.
        PlanError: if no plan is known to be correct.
        UsageError: if the family or ``tp`` is not valid, or an option does not apply to the checkpoint.
    """
    chosen, planner = chosen_stages(pp, stages), plan_source(src, **options).planner
    return planner.plan(tp, planner.stages(chosen))

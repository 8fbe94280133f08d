"""Estimates of memory per rank and communication cost of a checkpoint, for several tp sizes.

Bytes of weights follow from the plan and the headers; all else is counted in a dry
run of the converted model, without values, other processes or a GPU. What cannot be counted is left out, with a reason.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from msgspec import Struct

from shardconv.checkpoint.operations.pipeline import Options, call_on, on_pipelines, open_source_pipeline
from shardconv.checkpoint.operations.plan_report import rank_bytes, tensor_reports
from shardconv.checkpoint.sources.planning import PlanOptions, plan_source, read_config_alone
from shardconv.checkpoint.sources.source import Source, SourceFile
from shardconv.convert.model import DTYPE_NAMES
from shardconv.distributed.agreement import attempt
from shardconv.files.containers.safetensors import Header, num_bytes, total_bytes
from shardconv.files.folder import AnyPath, file_bytes, read_json
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import CONFIG_NAME, is_index, is_weights
from shardconv.formats.detect import stored_tensors
from shardconv.formats.settings import describe_settings
from shardconv.hf.names import DiskTensors
from shardconv.hf.package import diffusers_name
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import Planner, padding_report, tp_sizes
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.plan.request import PlanRequest
from shardconv.plan.stages import chosen_stages
from shardconv.runtime.dry_run import SEQ, Call, MetaModel, Usage, denoise, dry_run
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError, RunError, ShardconvError, UsageError, one_line, option
from shardconv.tensor.cost import Link, bytes_sent, collective_time


class Collective(Struct, frozen=True):
    """Collectives of one kind and size.

    Attributes:
        collective: ``all_reduce`` or ``all_gather``.
        num_bytes: bytes of the larger one of input and output.
        count: the number of these collectives.
    """

    collective: str
    num_bytes: int
    count: int


class Traffic(Struct, frozen=True):
    """Communication of a rank in one forward pass.

    Attributes:
        collectives: the collectives of the pass, and the messages between pipeline stages.
        sent_bytes: bytes that each rank sends, by the ring algorithms of :mod:`shardconv.tensor.cost`; of the pipeline
            stage whose ranks send most.
        layer_bytes: bytes sent by layers of the decoder, divided by the number of layers; None if the layers are
            unknown.
        seconds: time of the collectives of all stages on the link, one after the other, without computation.
    """

    collectives: tuple[Collective, ...]
    sent_bytes: float
    layer_bytes: float | None
    seconds: float

    @classmethod
    def of(cls, calls: Sequence[Call], tp: int, num_layers: int, link: Link) -> "Traffic":
        """Sum up the collectives of a pass."""
        counts = Counter((call.collective, call.num_bytes) for call in calls)
        in_layers = sum(bytes_sent(call.collective, call.num_bytes, tp) for call in calls if call.in_layer)
        of_stage: dict[int, float] = {}
        for call in calls:
            of_stage[call.stage] = of_stage.get(call.stage, 0) + bytes_sent(call.collective, call.num_bytes, tp)
        return cls(
            tuple(Collective(kind, size, count) for (kind, size), count in counts.items()),
            max(of_stage.values(), default=0),
            in_layers / num_layers if num_layers else None,
            sum(collective_time(kind, size, tp, link) * count for (kind, size), count in counts.items()),
        )


class TpCost(Struct, frozen=True):
    """Memory and communication of a rank at one tp size. Attributes are None if they are not counted.

    Attributes:
        tp: tensor parallel size.
        weight_bytes: bytes of the rank's tensors as they are stored, or as they would be in memory for a config
            without weights; the maximum over ranks.
        cache_bytes: bytes of the cache after the prompts: keys and values, and states. None for models without a cache.
        activation_bytes: peak memory without weights and cache, by torch's allocations, with fused attention.
        memory_bytes: sum of the three.
        prefill: the pass with the prompts; None for transformers of diffusers.
        decode: the pass that generates the next token of each prompt, or a denoising step; None for other models
            without a cache.
        not_counted: why the dry run was not possible; None if it was.
    """

    tp: int
    weight_bytes: int
    cache_bytes: int | None
    activation_bytes: int | None
    memory_bytes: int | None
    prefill: Traffic | None
    decode: Traffic | None
    not_counted: str | None

    @classmethod
    def of(cls, tp: int, weight_bytes: int, usage: Usage, link: Link) -> "TpCost":
        """Sum up a dry run."""
        passes = (usage.prefill, usage.decode)
        prefill, decode = (None if one is None else Traffic.of(one, tp, usage.num_layers, link) for one in passes)
        memory = weight_bytes + usage.activation_bytes + (usage.cache_bytes or 0)
        return cls(tp, weight_bytes, usage.cache_bytes, usage.activation_bytes, memory, prefill, decode, None)


class CostReport(Struct, frozen=True):
    """Memory and communication cost of a source at several tp sizes.

    Attributes:
        source: the path.
        family: the family whose rules were used.
        model: the model class of transformers; None if there is none, and only weights are counted.
        dtype: dtype of activations and cache.
        num_layers: number of layers of the decoder, or of the model if it has none; 0 if unknown.
        batch: prompts per batch.
        seq: tokens per prompt; None for models without text.
        link: the link between the ranks.
        costs: the cost at each tp size.
        notes: notes on the figures.
        stages: number of layers of each pipeline stage; empty for one stage.
        height: height in pixels of the result of a denoising step; None for models that do not make pictures.
        width: its width.
        frames: its number of frames.
    """

    source: str
    family: str
    model: str | None
    dtype: str
    num_layers: int
    batch: int
    seq: int | None
    link: Link
    costs: tuple[TpCost, ...]
    notes: tuple[str, ...]
    stages: tuple[int, ...] = ()
    height: int | None = None
    width: int | None = None
    frames: int | None = None


class PipelineCost(Struct, frozen=True):
    """Memory and communication cost of a pipeline of diffusers.

    Attributes:
        source: the path.
        components: name to the cost of each component that is sharded.
        copied_bytes: bytes of the weights of the other components, which every rank holds.
        weight_bytes: tensor parallel size to the bytes of all weights on a rank, the maximum over ranks, for the sizes
            of all components.
    """

    source: str
    components: Mapping[str, CostReport]
    copied_bytes: int
    weight_bytes: Mapping[int, int]

    @classmethod
    def of(cls, source: str, components: Mapping[str, CostReport], copied_bytes: int) -> "PipelineCost":
        """Sum up the weights of the components."""
        first, *others = ({cost.tp: cost.weight_bytes for cost in one.costs} for one in components.values())
        tps = [tp for tp in first if all(tp in one for one in others)]
        weights = {tp: copied_bytes + sum(one[tp] for one in (first, *others)) for tp in tps}
        return cls(source, components, copied_bytes, weights)


#: The largest tp size that is counted by default.
MAX_TP = 64
#: The number of tp sizes with padding that are counted by default.
NUM_PADDED = 3
#: Sizes of the result of a denoising step.
_OF_RESULT = ("height", "width", "frames")
#: Config fields with the number of MTP layers, which the classes of transformers leave out.
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def cost_of_each(operation: Callable[..., CostReport], paths: list[AnyPath], options: Options) -> Any:
    """Estimate the cost of each component of a pipeline, and of all: a :class:`PipelineCost`."""
    pipeline = open_source_pipeline(paths, options)
    without_size = {**options, **dict.fromkeys(_OF_RESULT)}
    diffusers = {name for name in pipeline.components if _is_diffuser(pipeline.first / name)}
    reports = {  # without a component of diffusers, all refuse a size
        name: call_on(operation, pipeline, name, without_size if diffusers and name not in diffusers else options)
        for name in pipeline.components
    }
    copied = sum(file_bytes(path) for name, path in pipeline.files.items() if is_weights(name) and not is_index(name))
    return PipelineCost.of(str(paths[0]), reports, copied)


def _is_diffuser(component: AnyPath) -> bool:
    """Whether a component is of diffusers, and not of transformers."""
    return (component / CONFIG_NAME).exists() and diffusers_name(read_json(component / CONFIG_NAME)) is not None


@checked
@on_pipelines(cost_of_each)
def estimate_cost(
    src: SourcePath,
    *,
    tps: Sequence[int] | None = None,
    pp: int | None = None,
    stages: str | Sequence[int] = (),
    batch: int = 1,
    seq: int | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> CostReport:
    """Estimate memory per rank and communication cost, from headers and config, or from a config alone.

    The model of transformers is built on torch's meta device, converted as by :func:`~shardconv.convert_model`, and
    called as by ``generate``: once with the prompts, and once with a token for each, so collectives are counted as in a
    real run. In encoder-decoder models the encoder processes the prompts, and the decoder starts with one token. Images
    and audio are not counted. A transformer of diffusers is called once, as in one denoising step.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder, with a config that names a class of
            transformers; or such a config alone, or a folder with a config and without weights: weights are then those
            of the class. Of a pipeline of diffusers, the result is a
            :class:`~shardconv.runtime.estimate.PipelineCost`.
        tps: tensor parallel sizes; by default the supported ones up to :data:`MAX_TP`, with ``pad`` also, of those up
            to :data:`~shardconv.plan.planner.MAX_PADDED_TP` that need it, the :data:`NUM_PADDED` with the least.
        pp: number of pipeline stages, as in :func:`~shardconv.split`. Memory is of the rank with most.
        stages: number of layers of each.
        batch: prompts per batch.
        seq: tokens per prompt; by default :data:`~shardconv.runtime.dry_run.SEQ`, or the maximum of the model if it is
            smaller; for a transformer of diffusers, the number of its pipeline.
        height: height in pixels of the result of a denoising step; by default the pipeline's, as for the others.
        width: width in pixels.
        frames: the number of frames.
        link: the link between the ranks; by default the default of :class:`~shardconv.tensor.cost.Link`.
        progress: called with the number of tp sizes that are done, and with the number of all.
        options: see :class:`~shardconv.checkpoint.sources.planning.PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read.
        RunError: if there is a config alone, and transformers does not have the model.
        PlanError: if no rules exist for the model, or a tp size is unsupported.
        UsageError: if the family or a tp size is not valid, or an option does not apply to the model.

    Example:
        >>> report = shardconv.estimate_cost("llama", tps=[2, 4])  # doctest: +SKIP
        >>> [cost.memory_bytes for cost in report.costs]  # doctest: +SKIP
    """
    given = {"batch": batch, "seq": seq, "height": height, "width": width, "frames": frames}
    chosen, path = chosen_stages(pp, stages), open_path(src)
    config, for_plan = read_config_alone(path, options)
    opened, made = (path, ()) if config is None else _without_weights(path, config)
    source, _, request, planner, _ = plan_source(opened, **for_plan)
    sizes = _default_sizes(planner) if tps is None else tps
    pipeline_stages = planner.stages(chosen)
    plans = [planner.plan(size, pipeline_stages) for size in sizes]
    num_layers = () if pipeline_stages is None else pipeline_stages.num_layers
    _check_size(source, {name: size for name in _OF_RESULT if (size := given[name]) is not None})
    link = Link() if link is None else link
    stored = _stored_dtype(source)
    models, problem = attempt(partial(_model_of, source, stored))
    model = models[0] if models else None
    if model is not None:
        model.check_sizes({name: size for name, size in given.items() if size is not None})
    inputs, problem = attempt(partial(model.input_sizes, given)) if model else ([], problem)
    shown = inputs[0] if inputs else dict[str, Any]({**given, "seq": seq or SEQ})
    count = partial(_count, model, request, sizes=inputs[0], stages=num_layers) if model and inputs else None
    notes = () if model is None else _notes(source, model, stored, shown["seq"], has_weights=config is None)
    return CostReport(
        source=str(path),
        family=planner.rules.family,
        model=model.name if model else None,
        dtype=_name(model.dtype if model else stored),
        num_layers=model.num_layers if model else 0,
        **shown,
        link=link,
        costs=tuple(_costs(source, plans, count or problem, link, progress)),
        stages=num_layers,
        notes=(*planner.assumed, *made, *notes, *_size_notes(planner, sizes)),
    )


def _costs(
    source: Source,
    plans: Sequence[Plan],
    count: Callable[[int], Usage] | ShardconvError | None,
    link: Link,
    progress: Progress | None,
) -> Iterator[TpCost]:
    """The cost of each plan; ``count`` runs a model at a tensor parallel size, or is the reason why there is none."""
    for number, plan in enumerate(plans):
        if progress is not None:
            progress(number, len(plans))
        weights = max(rank_bytes(tensor_reports(source.specs, plan), plan.num_ranks))
        usages, error = attempt(partial(count, plan.tp)) if callable(count) else ([], count)
        if error is None:
            yield TpCost.of(plan.tp, weights, usages[0], link)
        else:
            reason = error.with_options().strip().splitlines()[0]
            yield TpCost(plan.tp, weights, None, None, None, None, None, reason)
    if progress is not None:
        progress(len(plans), len(plans))


def _check_size(source: Source, given: Mapping[str, int]) -> None:
    """Refuse the size of a result for a model without one."""
    if given and diffusers_name(source.config or {}) is None:
        raise UsageError(f"{source.path}: {option(**given)} is for transformers of diffusers: remove it")


def _count(model: MetaModel, request: PlanRequest, tp: int, sizes: Mapping[str, Any], stages: Sequence[int]) -> Usage:
    """Count a denoising step, or a prompt and a token."""
    if model.is_diffuser:
        return denoise(model, request, tp, sizes)
    return dry_run(model, request, tp, sizes["batch"], sizes["seq"], stages)


def _default_sizes(planner: Planner) -> list[int]:
    """The tensor parallel sizes that are counted by default."""
    sizes = tp_sizes(planner)
    cheapest = sorted(sizes.padded if planner.rules.pad else (), key=lambda one: one.memory)[:NUM_PADDED]
    return sorted([*(one.tp for one in cheapest), *(size for size in sizes.supported if size <= MAX_TP)])


def _size_notes(planner: Planner, sizes: Sequence[int]) -> Iterator[str]:
    """The reason if only one rank is supported, and the cost of sizes that need padding."""
    if list(sizes) == [1]:
        _, error = attempt(partial(planner.plan, 2))
        if error is not None:
            yield error.with_options()
    unpadded = planner.padded(0)
    costs = {size: padding_report(planner, size).memory for size in sizes if unpadded.blocked(size) is not None}
    if costs:
        listed = ", ".join(f"tp {tp} ({cost:.1%})" for tp, cost in costs.items())
        yield f"padded with zeros (additional memory): {listed}"


def _without_weights(path: AnyPath, config: dict[str, object]) -> tuple[Source, tuple[str, ...]]:
    """Describe the checkpoint of a config without weights, as transformers and quantization libraries write it.

    Returns:
        The checkpoint, and notes on its tensors.
    """
    model, disk = _on_disk(path, config)
    specs = {name: TensorSpec(DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in disk.tensors.items()}
    origin = "the dtype of the config" if model.has_config_dtype else "assumed, as the config does not have a dtype"
    written = f"no weights found: the tensors of {model.name} are counted as save_pretrained writes them"
    dtype = f"in {_name(model.dtype)} ({origin})"
    notes = []
    if fields := [name for name in _MTP_LAYERS if config.get(name)]:
        notes.append(f"MTP layers ({fields[0]}) are not counted: {model.name} does not have them")
    source = _source(path, config, specs)
    if not source.has_quantization:
        return source, (f"{written}, {dtype}", *notes)
    settings = source.config_with_quantization() or {}
    kind = describe_settings(settings)
    try:
        quantized = stored_tensors(specs, settings, disk.matrices)
    except PlanError as error:
        notes.append(
            f"the config asks for quantized weights ({kind}), and unquantized ones are counted, as the config alone "
            f"does not determine the others: they are smaller, and may support fewer tp sizes ({error.with_options()})"
        )
        return _source(path, _unquantized(config), specs), (f"{written}, {dtype}", *notes)
    by_config = f"linear layers and experts as quantized by the config ({kind}), the others {dtype}"
    return _source(path, config, quantized), (f"{written}, {by_config}", *notes)


def _unquantized(config: Mapping[str, object]) -> dict[str, object]:
    """The config, and the configs of its submodels, without quantization settings."""
    return {
        key: _unquantized(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != SETTINGS_KEY
    }


def _on_disk(path: AnyPath, config: Mapping[str, object]) -> tuple[MetaModel, DiskTensors]:
    """Build the model of a config without weights, and return the tensors of its unquantized checkpoint."""
    try:
        model = MetaModel(config, torch.float32)
        return model, model.on_disk()
    except ShardconvError:
        raise
    except Exception as error:
        null = [name for name, value in config.items() if value is None] if "NoneType" in str(error) else []
        fields = f" (null in the config: {', '.join(null)})" if null else ""
        raise RunError(f"{path}: the model cannot be built from its config: {one_line(error)}{fields}") from error


def _source(path: AnyPath, config: dict[str, object], specs: Mapping[str, TensorSpec]) -> Source:
    """The source of one file with these tensors."""
    header = Header(b"", specs, None, total_bytes(specs.values()))
    file = SourceFile("model.safetensors", path / "model.safetensors", header)
    return Source(path, is_folder=False, files=(file,), config=config)


def _stored_dtype(source: Source) -> torch.dtype:
    """Return the floating-point dtype of most bytes; bfloat16 if all weights are quantized."""
    sizes: Counter[str] = Counter()
    for spec in source.specs.values():
        sizes[spec.dtype] += num_bytes(spec.dtype, spec.shape)
    known = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point and dtype.itemsize > 1}
    return next((known[name] for name, _ in sizes.most_common() if name in known), torch.bfloat16)


def _model_of(source: Source, stored: torch.dtype) -> MetaModel:
    """The model that the config names."""
    if source.config is None:
        raise RunError(f"no config.json names the model: pass {option(config='FILE')}")
    return MetaModel(source.config, stored)


def _notes(
    source: Source, model: MetaModel, stored: torch.dtype, seq: int | None, *, has_weights: bool
) -> Iterator[str]:
    dtype = _name(model.dtype)
    if has_weights and source.has_quantization:
        yield f"the weights are quantized; activations and cache are counted in {dtype}"
    elif has_weights and stored != model.dtype:
        yield (
            f"the weights are stored as {_name(stored)}, and loaded as {dtype} by the config; the bytes of weights are "
            f"those on disk"
        )
    if model.max_length and seq and seq > model.max_length:
        yield f"{seq} tokens are more than the {model.max_length} that the model is made for"
    if model.has_encoder:
        yield "the encoder processes the prompts, and the decoder starts with one token"
    if model.is_diffuser:
        yield (
            "a denoising step calls the transformer once: classifier-free guidance needs two calls, or twice the batch"
        )
    if model.other_inputs:
        yield f"only text is counted, without {', '.join(model.other_inputs)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What a checkpoint would take on each number of ranks: memory of a rank, bytes between ranks, and their time.

Owns the report. Weights are those of the plan, from the headers; all else is counted in a dry run of the real model and
its real conversion, without values, processes or a GPU. What cannot be counted is left out, with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.header import Header, TensorInfo, num_bytes
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.plan_report import rank_bytes, tensor_reports
from shardconv.checkpoint.planning import PlanOptions, StrPath, plan_source
from shardconv.checkpoint.source import Source, standalone_config
from shardconv.checkpoint.source_files import SourceFile
from shardconv.convert.model import DTYPE_NAMES
from shardconv.errors import RunError, ShardconvError
from shardconv.plan.request import PlanRequest
from shardconv.runtime.dry_run import MetaModel, Usage, dry_run
from shardconv.runtime.meter import Call
from shardconv.tensor.cost import Link, bytes_sent, collective_time

#: Of the supported sizes, those up to here are counted if none is asked for: more ranks share no layer in practice.
MAX_TP = 64
#: Tokens of a prompt, if nothing is said; fewer for models that are made for fewer.
SEQ = 2048


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
        collective: ``all_reduce`` or ``all_gather``.
        num_bytes: of the largest tensor that a rank holds before or after.
        count: how many there are.
    """

    collective: str
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one pass through the model.

    Attributes:
        collectives: all that the pass calls.
        sent_bytes: bytes that each rank sends, by the ring algorithms of :mod:`shardconv.tensor.cost`.
        layer_bytes: those of them that layers of the decoder send, by the number of these layers; None where it is not
            known which modules the layers are.
        seconds: what the collectives take on the link, one after the other, without what is computed between them.
    """

    collectives: tuple[Collective, ...]
    sent_bytes: float
    layer_bytes: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TpCost:
    """What a rank takes at one number of ranks. All but ``tp`` and ``weight_bytes`` is None where it is not counted.

    Attributes:
        tp: the number of ranks.
        weight_bytes: of its tensors as they are stored, or would be in memory if there are none yet; of the rank that
            has most.
        cache_bytes: what it keeps of the prompts for the tokens that follow: keys and values, and states. None also for
            models that keep nothing.
        activation_bytes: the most that is alive at once beside weights and cache, as torch allocates it for the
            operations of the model, with attention as one kernel.
        memory_bytes: all three.
        prefill: the pass that reads the prompts.
        decode: the pass that makes the next token of each prompt; None also for models that keep nothing.
        not_counted: why the model could not be run without values; None where it could.
    """

    tp: int
    weight_bytes: int
    cache_bytes: int | None
    activation_bytes: int | None
    memory_bytes: int | None
    prefill: Traffic | None
    decode: Traffic | None
    not_counted: str | None


@dataclass(frozen=True, slots=True)
class CostReport:
    """What ``shardconv plan --cost`` says of a source.

    Attributes:
        source: the path.
        family: whose rules were used.
        model: the class of transformers; None where there is none, and only weights are counted.
        dtype: of activations and cache.
        num_layers: of the decoder, or of the model if it has none; 0 where it is not known.
        batch: prompts that are read at once.
        seq: tokens of each prompt.
        link: what connects the ranks.
        costs: one for each number of ranks.
        notes: what is to be known of the figures.
    """

    source: str
    family: str
    model: str | None
    dtype: str
    num_layers: int
    batch: int
    seq: int
    link: Link
    costs: tuple[TpCost, ...]
    notes: tuple[str, ...]


def estimate_cost(
    src: StrPath,
    *,
    tps: Sequence[int] | None = None,
    batch: int = 1,
    seq: int | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> CostReport:
    """Count what each rank would hold and send, from headers and config, or from a config alone.

    The model of transformers is built on torch's meta device, which has shapes and no values, converted as
    :func:`~shardconv.convert_model` does, and called as its ``generate`` calls it: once with the prompts, and once with
    a token for each. So the collectives are those of a real run. An encoder, where there is one, reads the prompts, and
    the decoder begins with one token. Of models that see or hear, text alone is counted.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder, with a config that names a class of transformers; or
            that config alone, or a folder that holds no weights beside it: then weights are those of the class.
        tps: numbers of ranks; by default the supported ones up to :data:`MAX_TP`.
        batch: prompts at once.
        seq: tokens of each prompt; by default :data:`SEQ`, or as many as the model is made for if these are fewer.
        link: what connects the ranks; by default :class:`~shardconv.tensor.cost.Link` as it is made without arguments.
        progress: called with the numbers of ranks that are done, and with how many there are.
        options: see :class:`~shardconv.checkpoint.planning.PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read.
        RunError: if there is a config alone, and transformers has no such model.
        PlanError: if there are no rules for it, or it cannot be cut for one of ``tps``.
        ValueError: if ``batch`` or ``seq`` is less than 1.

    Example:
        >>> report = shardconv.estimate_cost("llama", tps=[2, 4])  # doctest: +SKIP
        >>> [cost.memory_bytes for cost in report.costs]  # doctest: +SKIP
    """
    if batch < 1 or (seq is not None and seq < 1):
        raise ValueError(f"batch = {batch}, seq = {seq}: both have to be at least 1")
    alone = standalone_config(local_path(src), follow_links=options.get("follow_links", False))
    if alone is not None and (other := options.get("config")) is not None:
        alone = read_json(local_path(other))
    opened = src if alone is None else _without_weights(local_path(src), alone)
    source, request, (resolver, assumed), _ = plan_source(opened, **options)
    sizes = [size for size in resolver.tp_sizes().supported if size <= MAX_TP] if tps is None else tps
    plans = [resolver.plan(size) for size in sizes]
    link = Link() if link is None else link
    stored = _stored_dtype(source)
    model, problem = _model(source, stored)
    seq = seq or min(SEQ, (model and model.max_length) or SEQ)
    costs = []
    for number, plan in enumerate(plans):
        if progress is not None:
            progress(number, len(plans))
        usage, why_not = _usage(model, request, plan.tp, batch, seq) if model else (None, problem)
        costs.append(_cost(plan.tp, max(rank_bytes(tensor_reports(source.specs, plan), plan.tp)), usage, why_not, link))
    if progress is not None:
        progress(len(plans), len(plans))
    return CostReport(
        source=str(src),
        family=resolver.rules.family,
        model=model.name if model else None,
        dtype=_name(model.dtype if model else stored),
        num_layers=model.num_layers if model else 0,
        batch=batch,
        seq=seq,
        link=link,
        costs=tuple(costs),
        notes=(*assumed, *(_notes(source, model, stored, seq, is_there=alone is None) if model else ())),
    )


def _without_weights(path: Path, config: dict[str, Any]) -> Source:
    """What a config says of a checkpoint that is not there; the names are those that the model has in memory."""
    try:
        specs = MetaModel(config, torch.float32).specs()
    except ShardconvError:
        raise
    except Exception as error:
        raise RunError(f"{path}: transformers makes no model of it: {_reason(error)}") from error
    tensors, start = {}, 0
    for name, spec in specs.items():
        stop = start + num_bytes(spec.dtype, spec.shape)
        tensors[name] = TensorInfo(spec.dtype, spec.shape, start, stop)
        start = stop
    file = SourceFile("model.safetensors", path / "model.safetensors", Header(b"", tensors, None))
    return Source(path, is_folder=False, files=(file,), config=config)


def _stored_dtype(source: Source) -> torch.dtype:
    """The dtype that most bytes of numbers have; bfloat16 where all are quantised, as nothing computes with these."""
    sizes: Counter[str] = Counter()
    for spec in source.specs.values():
        sizes[spec.dtype] += num_bytes(spec.dtype, spec.shape)
    known = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point and dtype.itemsize > 1}
    return next((known[name] for name, _ in sizes.most_common() if name in known), torch.bfloat16)


def _model(source: Source, stored: torch.dtype) -> tuple[MetaModel | None, str | None]:
    """The model that the config names, or why there is none."""
    if source.config is None:
        return None, "there is no config.json that names the model; --config FILE gives one"
    try:
        return MetaModel(source.config, stored), None
    except Exception as error:  # noqa: BLE001 - whatever transformers says of a config, the weights are known
        return None, _reason(error)


def _usage(model: MetaModel, request: PlanRequest, tp: int, batch: int, seq: int) -> tuple[Usage | None, str | None]:
    """What a dry run takes, or why there was none."""
    try:
        return dry_run(model, request, tp=tp, batch=batch, seq=seq), None
    except Exception as error:  # noqa: BLE001 - likewise, of a model that needs values to run
        return None, _reason(error)


def _reason(error: Exception) -> str:
    """An error in one line, under its name where it is not one of ours."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return text if isinstance(error, ShardconvError) else f"{type(error).__name__}: {text}"


def _cost(tp: int, weights: int, usage: Usage | None, why_not: str | None, link: Link) -> TpCost:
    if usage is None:
        return TpCost(tp, weights, None, None, None, None, None, why_not)
    prefill = _traffic(usage.prefill, tp, usage.num_layers, link)
    decode = None if usage.decode is None else _traffic(usage.decode, tp, usage.num_layers, link)
    memory = weights + usage.activation_bytes + (usage.cache_bytes or 0)
    return TpCost(tp, weights, usage.cache_bytes, usage.activation_bytes, memory, prefill, decode, None)


def _traffic(calls: Sequence[Call], tp: int, num_layers: int, link: Link) -> Traffic:
    counts = Counter((call.collective, call.num_bytes) for call in calls)
    in_layers = sum(bytes_sent(call.collective, call.num_bytes, tp) for call in calls if call.in_layer)
    return Traffic(
        tuple(Collective(kind, size, count) for (kind, size), count in counts.items()),
        sum(bytes_sent(kind, size, tp) * count for (kind, size), count in counts.items()),
        in_layers / num_layers if num_layers else None,
        sum(collective_time(kind, size, tp, link) * count for (kind, size), count in counts.items()),
    )


def _notes(source: Source, model: MetaModel, stored: torch.dtype, seq: int, *, is_there: bool) -> Iterator[str]:
    is_quantised = bool((source.config or {}).get("quantization_config"))
    if not is_there:
        said = "as the config says" if model.is_dtype_given else "which is assumed, as the config says nothing"
        yield f"no weights are there: they are counted as {model.name} has them in {_name(model.dtype)}, {said}"
        if is_quantised:
            yield "the config asks for quantised weights, which are smaller: those of the model without it are counted"
    elif is_quantised:
        yield f"the weights are quantised; activations and cache are those of the model in {_name(model.dtype)}"
    elif stored != model.dtype:
        yield (
            f"the weights are stored as {_name(stored)}, and loaded as {_name(model.dtype)}, as the config says; their "
            f"bytes are those on disk"
        )
    if model.max_length and seq > model.max_length:
        yield f"{seq} tokens are more than the {model.max_length} that the model is made for"
    if model.has_encoder:
        yield "the encoder reads the prompts, and the decoder begins with one token"
    if model.senses:
        yield f"text alone is counted, without {', '.join(model.senses)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The folder of a proof: the small model, and at several tensor parallel sizes the results of one process per rank."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist
from msgspec import Struct

from shardconv.checkpoint.operations.split_writing import split_by
from shardconv.checkpoint.sources.source import Source
from shardconv.convert.model import config_fields
from shardconv.convert.protocols import PretrainedModel
from shardconv.distributed import Axis, as_axis
from shardconv.files.folder import read_json
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.hf.build import head_sizes, small_model
from shardconv.hf.classes import model_class
from shardconv.hf.package import isolated
from shardconv.hf.small import HEADS, SAME
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import OutputDifferences, compare, write_reference, writing
from shardconv.runtime.launch import launch
from shardconv.support import Progress
from shardconv.support.errors import OutputError, RunError, ShardconvError, is_connection_error

#: The largest relative differences that are rounding. Sums are taken rank by rank in float32. Gradients have more
#: sums: in mobilebert, which does not normalize, they differ by 1.01e-3 in float32, and by 2e-12 in float64.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-4, 2e-3


class Proof(Struct, frozen=True):
    """Differences between the sharded and the unsharded model at one tensor parallel size.

    Attributes:
        tp: the tensor parallel size.
        output: the largest difference of the outputs over all ranks, relative to the largest output; None if the
            sharded model failed to run.
        tokens: whether the greedy tokens are equal on all ranks; None if the model does not generate text.
        gradient: the largest difference of a gradient, relative to the largest value of that gradient; None without
            gradients.
        sharded_fraction: fraction of the elements of matrices that is sharded.
        note: why the gradients are not from training mode or do not exist, or why the model failed to run; else "".
    """

    tp: int
    output: float | None
    tokens: bool | None
    gradient: float | None
    sharded_fraction: float
    note: str

    @property
    def has_passed(self) -> bool:
        """Whether all differences are rounding."""
        is_near = self.output is not None and self.output <= OUTPUT_LIMIT
        return is_near and self.tokens is not False and (self.gradient or 0.0) <= GRADIENT_LIMIT


#: Names in the folder of a proof: the task of the ranks, the split small model, and the result of a rank.
TASK, SPLIT, RESULT = "task.json", "tp{tp}", "result-{tp}-{rank}.json"
#: The small model, and the results of the unsharded model.
SMALL, REFERENCE = "small", "reference.pt"


def prove_all(
    folder: Path, small: Source, plans: Mapping[int, Plan], request: PlanRequest, progress: Progress | None
) -> tuple[Proof, ...]:
    """Compare at all tensor parallel sizes, one after the other, in processes that are started once.

    Args:
        folder: with the small model and its results.
        small: the small model.
        plans: tensor parallel size to plan.
        request: the options of the plans.
        progress: called with the number of sizes that were compared, and of all.
    """
    if not plans:
        return ()
    for tp, plan in plans.items():
        split_by(small, folder / SPLIT.format(tp=tp), plan, request)
    (folder / TASK).write_bytes(msgspec.json.encode((request, [*plans])))
    try:
        launch(["prove-rank", str(folder)], max(plans), partial(_report, progress, folder, [*plans]))
    except RunError:
        if not any(result.problem for tp in plans for result in _results(folder, tp)):
            raise
    results = {tp: _results(folder, tp) for tp in plans}
    return tuple(
        _proof(tp, results[tp], sharded_fraction(small.specs, plan)) for tp, plan in plans.items() if results[tp]
    )


def _report(progress: Progress | None, folder: Path, tps: Sequence[int]) -> None:
    """Report how many sizes were compared on all ranks."""
    if progress is not None:
        done = sum(len(list(folder.glob(RESULT.format(tp=tp, rank="*")))) == tp for tp in tps)
        progress(done, len(tps))


def _results(folder: Path, tp: int) -> list[OutputDifferences]:
    """The results of the ranks, the earliest first."""
    paths = folder.glob(RESULT.format(tp=tp, rank="*"))
    return [
        OutputDifferences(*json.loads(path.read_text()))
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    ]


def _proof(tp: int, results: list[OutputDifferences], fraction: float) -> Proof:
    if problems := [result.problem for result in results if result.problem]:
        return Proof(tp, None, None, None, fraction, problems[0])
    tokens = {result.tokens for result in results}
    return Proof(
        tp,
        max(result.output for result in results),
        None if tokens == {None} else tokens == {True},
        max((result.gradient for result in results if result.gradient is not None), default=None),
        fraction,
        results[0].note,
    )


def sharded_fraction(specs: Mapping[str, TensorSpec], plan: Plan) -> float:
    """The fraction of the elements of matrices that is sharded."""
    matrices = {name: math.prod(spec.shape) for name, spec in specs.items() if sum(size > 1 for size in spec.shape) > 1}
    sharded = sum(numel for name, numel in matrices.items() if _is_sharded(plan.tensors[name].placement))
    return sharded / max(sum(matrices.values()), 1)


def _is_sharded(placement: Placement) -> bool:
    """Whether no rank holds the full tensor."""
    return placement.dim is not None and max(map(placement.local_size, range(placement.num_ranks))) < placement.size


def prove_rank(folder: Path) -> None:
    """Compare on this rank at every tensor parallel size of the task, and write the results to the folder.

    Raises:
        RunError: if the sharded model fails to run.
    """
    request, tps = msgspec.json.decode((folder / TASK).read_bytes(), type=tuple[PlanRequest, list[int]])
    rank = dist.get_rank()
    for tp in tps:
        group = dist.new_group(list(range(tp)))
        if rank < tp:
            result = _compare(folder, as_axis(group), request)
            _write(result, folder / RESULT.format(tp=tp, rank=rank))
            if result.problem:
                raise RunError(result.problem)


def _write(result: OutputDifferences, path: Path) -> None:
    """Write a result whole or not at all: the launcher stops this process when another rank fails."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.rename(path)


def _compare(folder: Path, axis: Axis, request: PlanRequest) -> OutputDifferences:
    kind = model_class(read_json(folder / SMALL / CONFIG_NAME)).kind
    try:
        return compare(axis, kind, folder / SMALL, folder / SPLIT.format(tp=axis.size), request, folder / REFERENCE)
    except ShardconvError:
        raise
    except Exception as error:
        if is_connection_error(error):
            raise
        problem = f"the sharded small model fails to run: {type(error).__name__}: {error}"
        return OutputDifferences(math.inf, None, None, "", problem=problem)


# --- small models -----------------------------------------------------------------------------------------------------

#: The largest number of heads of a small model; a proof starts one process per rank.
MAX_HEADS = 64


def heads_for(tps: Sequence[int]) -> int:
    """The number of heads with which a small model supports tensor parallel sizes; the default number if possible."""
    needed = math.lcm(*tps) if tps else HEADS
    if HEADS % needed == 0 or needed > MAX_HEADS:
        return HEADS
    return needed if needed % 2 == 0 else 2 * needed  # half as many KV heads


def write_small_model(
    config: Mapping[str, object], folder: Path, *, heads: int | None = None, has_real_counts: bool = False
) -> tuple[PretrainedModel, str]:
    """Build a small model, save it, run it, and save the results.

    Its heads have the size of the source's, unless such a model cannot be built or run.

    Args:
        config: of the source.
        folder: where the model and its results are written.
        heads: its number of heads, if a model with that number can be built.
        has_real_counts: whether it has as many heads as the source instead, if such a model can be built.

    Returns:
        The model, and which of its heads are smaller than the source's; "" if there are none.

    Raises:
        RunError: if no small model can be built and run.
        OutputError: if it cannot be written.
    """
    counts = dict.fromkeys([*([SAME] if has_real_counts else [heads or HEADS]), HEADS])
    attempts = [(count, is_real) for count in counts for is_real in (True, False)]
    with isolated():
        for count, has_real_heads in attempts[:-1]:
            try:
                model = _saved(small_model(config, has_real_heads=has_real_heads, heads=count), folder)
            except RunError:
                continue
            break
        else:
            model = _saved(small_model(config), folder)
    return model, _smaller_heads(config, model)


def _saved(model: PretrainedModel, folder: Path) -> PretrainedModel:
    """The model, after it and its results were saved."""
    with writing(folder / SMALL):
        model.save_pretrained(folder / SMALL)
    try:
        write_reference(type(model), folder / SMALL, folder / REFERENCE)
    except (OSError, OutputError):
        raise
    except Exception as error:
        raise RunError(f"a small {type(model).__name__} failed to run: {type(error).__name__}: {error}") from error
    return model


def _smaller_heads(config: Mapping[str, object], model: PretrainedModel) -> str:
    found, real = head_sizes(config_fields(model)), head_sizes(model_class(config).config.to_dict())
    smaller = [
        f"{found[place]} features instead of {size}" + (f" in {place}" if place else "")
        for place, size in real.items()
        if found.get(place, size) != size
    ]
    return f"the small model has heads of {', '.join(smaller)}" if smaller else ""

"""Verdicts on split models: compared with the unsharded model in outputs, tokens and gradients."""

from pathlib import Path
from typing import Any

from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import write_reference
from shardconv.proof.ranks import REFERENCE
from tools.model_matrix.trial import check, verdict_of, worst


def verdict(run: Any, layout: str, kind: Any, source: Path, split: Path, request: PlanRequest) -> str:
    """``right``, ``wrong: `` and the differences, or ``fails: `` and the error.

    Args:
        run: the fixture that runs a function on ranks.
        layout: its name for the ranks.
        kind: the class of the model.
        source: the model.
        split: the same, split with the request.
        request: also for the conversion in memory.
    """
    reference = split.parent / REFERENCE
    write_reference(kind, source, reference)
    found = worst(run(layout, check, kind.__name__, source, split, request, reference))
    if not isinstance(found, str) and found.gradient is None:
        return f"wrong: {found}"
    result = verdict_of(found)
    return result if result == "passed" else f"{result}: {found}"

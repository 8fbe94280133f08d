"""``shardconv plan --prove``: run and print the proof of a plan, and the hidden command of one of its ranks."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardconv.commands.options import PATH, SourcePath
from shardconv.support.console import Console
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import counted

if TYPE_CHECKING:
    from shardconv.proof.prove import ProofReport


def show_proof(
    src: SourcePath, console: Console, tps: tuple[int, ...], options: dict[str, Any], *, check_model: bool
) -> None:
    """Prove the plan. Exits 3 where the sharded model differs from the unsharded one."""
    with ImportPhase():
        from shardconv.proof.prove import PipelineProof, prove
    with console.progress("prove", counts=True) as progress:
        report = prove(src, tps=tps, check_model=check_model, progress=progress, **options)
    models = [*report.components.values()] if isinstance(report, PipelineProof) else [report]
    gaps = [line for one in models for line in _gaps(one)]
    lines = [line for one in models for line in (*_proof_lines(one), *_gaps(one), _verdict(one))]
    console.report(report, lines, quiet_warnings=gaps if report.is_proven else lines)
    if not report.is_proven:
        sys.exit(3 if all(one.proofs for one in models) else 1)


def _proof_lines(report: "ProofReport") -> list[str]:
    numel = f"{report.num_parameters:,} randomly initialized parameters"
    lines = [f"{report.source}: family {report.family}, tried on a small {report.model} of {numel}"]
    for proof in report.proofs:
        tokens = {True: ", greedy tokens equal", False: ", greedy tokens differ", None: ""}[proof.tokens]
        gradients = "" if proof.gradient is None else f", gradients to {proof.gradient:.0e}"
        found = "" if proof.output is None else f"outputs to {proof.output:.0e}{gradients} of the largest{tokens}; "
        verdict = "passed" if proof.has_passed else "failed" if found else "failed to run"
        lines.append(
            f"tp {proof.tp}: {verdict}: {found}{proof.sharded_fraction:.0%} of the elements of matrices are sharded"
        )
    if report.num_grids:
        verdict = "failed" if report.grid_differences else "passed"
        kinds = counted(report.num_grids, "kind")
        lines.append(
            f"{kinds} of quantized weights: {verdict}: dequantized shards are shards of the dequantized weight"
        )
        lines += [f"differs: {line}" for line in report.grid_differences]
    return lines


def _gaps(report: "ProofReport") -> list[str]:
    """Limits of the proofs: sizes that were skipped, smaller heads, and tensors that are not covered."""
    lines = list(dict.fromkeys(f"tp {proof.tp}: {proof.note}" for proof in report.proofs if proof.note))
    lines += [report.note] if report.note else []
    lines += [f"not tried: {text}" for text in report.skipped]
    lines += [f"not covered, as the small model does not have this tensor: {name}" for name in report.unreached]
    if {proof.tp for proof in report.proofs} - set(report.supported_tp):
        lines.append(f"supported tp of {report.source} itself: {', '.join(map(str, report.supported_tp)) or 'none'}")
    return lines


def _verdict(report: "ProofReport") -> str:
    tried = ", ".join(str(proof.tp) for proof in report.proofs)
    if report.is_proven:
        return f"proven for tp {tried}{', except for the tensors that are not covered' if report.unreached else ''}"
    return "not proven: do not split with this plan" if tried else "not proven: no tensor parallel size was tried"


@click.command(hidden=True)
@click.argument("folder", type=PATH)
def prove_rank(folder: Path) -> None:
    """Run one rank of a proof."""
    gc.enable()
    from shardconv.proof.ranks import prove_rank as run
    from shardconv.runtime.launch import join, leave

    join()
    run(folder)
    leave()

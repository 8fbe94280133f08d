"""Prove a plan: a small model of the same shape, split by the same rules, computes what the plain one computes.

Owns the way from a source to a verdict. Nothing is read of the source but headers and config; the small model has
random numbers. What the proof does not reach, as tensors that the small model has not, is said.
"""

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import PlanOptions, StrPath, as_names, plan_source
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.split import split_by
from shardconv.errors import PlanError, RunError, ShardconvError, is_connection_error
from shardconv.hf.classes import model_class
from shardconv.hf.heads import head_sizes
from shardconv.hf.small import HEADS, SAME
from shardconv.plan.family import Family, Mount
from shardconv.plan.matcher import Matcher, name_regex
from shardconv.plan.padding import Heads
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, family_of, resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.rule_format import parse_unit

#: The largest differences that are rounding: sums are taken rank by rank, in float32, in gradients more often.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3

#: The numbers of ranks that are tried: small models have four heads and two kv heads.
PROOF_TPS = (2, 4)
#: What is tried besides where the plan allows it, which then may cut what is not to be cut, as heads.
_BEYOND = (8,)
#: The most heads of a small model; a proof starts a process for each rank.
MAX_HEADS = 64

#: What is in the folder of a proof: what ranks find there, and what they leave.
TASK, SMALL, SPLIT, REFERENCE, RESULT = "task.json", "small", "tp{tp}", "reference.pt", "result-{tp}-{rank}.json"
#: In the result of a rank on which the model does not run: why.
PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found at one number of ranks.

    Attributes:
        tp: the number of ranks.
        output: the largest difference of outputs, of the largest number in them; the worst rank's. None where the split
            model does not run.
        tokens: whether greedy tokens are equal on all ranks; None for models that generate none.
        gradient: the largest difference of gradients, of the largest number in each; None where there are none.
        cut: the share of the bytes in matrices of which no rank holds all.
        note: why gradients are not those of training, or not there, or why the model does not run; else "".
    """

    tp: int
    output: float | None
    tokens: bool | None
    gradient: float | None
    cut: float
    note: str

    @property
    def is_right(self) -> bool:
        """Whether all differences are rounding."""
        is_near = self.output is not None and self.output <= OUTPUT_LIMIT
        return is_near and self.tokens is not False and (self.gradient or 0.0) <= GRADIENT_LIMIT


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The verdict on a source's plan.

    Attributes:
        source: the path.
        family: whose rules were used.
        model: the class of the small model.
        num_parameters: of the small model.
        proofs: one for each number of ranks that was tried.
        skipped: tp sizes for which the small model cannot be sharded, and why.
        note: which heads of the small model are smaller than those of the source; "" where none are.
        supported_tp: the numbers of ranks for which the source itself can be cut.
        unreached: kinds of tensors of the source that the small model has not, so that nothing is proven of them.
        is_proven: whether every proof is right, and there is one.
    """

    source: str
    family: str
    model: str
    num_parameters: int
    proofs: tuple[Proof, ...]
    skipped: tuple[str, ...]
    note: str
    supported_tp: tuple[int, ...]
    unreached: tuple[str, ...]
    is_proven: bool


def prove(
    src: StrPath, *, tps: Sequence[int] = (), check_model: bool = True, **options: Unpack[PlanOptions]
) -> ProofReport:
    """Prove the plan of a source, on a small model and the CPU.

    The small model has heads of the source's size, and with ``pad`` as many, where such a model can be made. A tensor
    parallel size at which it would be padded in other places than the source is not tried.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder; with a config that names a class of transformers.
        tps: numbers of ranks to try; if none, 2 and 4, and 8 if the small model, of four heads, may be cut for it.
        check_model: compare names and shapes of the source with the model that its config names first.
        options: see :class:`~shardconv.checkpoint.planning.PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read, or with ``check_model`` does not have the tensors of its model.
        PlanError: if there are no rules for it.
        RunError: if the small model cannot be built or run.

    Example:
        >>> shardconv.prove("llama").is_proven  # doctest: +SKIP
        True
    """
    planned_source = plan_source(src, **options)
    source, request = planned_source.source, replace(planned_source.request, may_miss=True)
    config = _checked_config(source)
    if check_model:
        from shardconv.proof.model_check import require_model  # noqa: PLC0415 - imports torch

        require_model(config, source.specs, str(src))
    own = planned_source.resolution.resolver
    possible, impossible = _plans(own, tps)
    with TemporaryDirectory(prefix="shardconv-") as name:
        folder = Path(name)
        model, note = _model_to_try(config, folder, heads=_heads_for([*possible]), has_real_counts=bool(request.pad))
        small = open_source(folder / SMALL)
        resolver = resolve(small.specs, small.config, request).resolver
        plans, not_small = ({}, {}) if impossible and not possible else _tried(resolver, [*possible])
        untried = {tp: reason for tp in plans if (reason := _other_heads(own, resolver, tp))}
        plans = {tp: plan for tp, plan in plans.items() if tp not in untried}
        proofs = _proofs(folder, small, plans, request)
        numel = sum(parameter.numel() for parameter in model.parameters())
    return ProofReport(
        source=str(src),
        family=own.rules.family,
        model=type(model).__name__,
        num_parameters=numel,
        proofs=proofs,
        skipped=(
            *_skipped(str(src), impossible, not_small, has_plan_file=request.plan_file is not None),
            *(f"tp {tp}: not tried: {reason}" for tp, reason in untried.items()),
        ),
        note=note,
        supported_tp=own.tp_sizes().usable(pad=bool(request.pad)),
        unreached=tuple(sorted(_kinds(source.specs) - _kinds(small.specs))),
        is_proven=bool(proofs) and all(proof.is_right for proof in proofs),
    )


def _checked_config(source: Source) -> Mapping[str, Any]:
    """The config of a source, which names the class of the small model."""
    if source.config is None:
        raise RunError(
            f"{source.path}: a proof builds a small model from config.json, and this source does not have one: pass "
            f"--config FILE"
        )
    return source.config


def _heads_for(tps: Sequence[int]) -> int:
    """The number of heads with which a small model can be sharded for tp sizes: the usual one where that suffices."""
    needed = math.lcm(*tps) if tps else HEADS
    if HEADS % needed == 0 or needed > MAX_HEADS:
        return HEADS
    return needed if needed % 2 == 0 else 2 * needed  # half as many KV heads


def _other_heads(source: Resolver, small: Resolver, tp: int) -> str:
    """Why a small model does not prove how a source is padded: its padding is elsewhere. "" where it does."""
    own, others = _padded_heads(source, tp), _padded_heads(small, tp)
    if own <= others:
        return ""
    wanted, found = (
        " and ".join(sorted(f"{one.query_heads}/{one.kv_heads}" for _, one in heads)) or "none that are padded"
        for heads in (own - others, others)
    )
    return (
        f"which places have padding depends on the numbers of query and KV heads, which are {wanted} in the source and "
        f"{found} in the small model"
    )


def _padded_heads(resolver: Resolver, tp: int) -> set[tuple[str, Heads]]:
    """The heads that a plan pads in groups, each with the submodel that has them."""
    if not resolver.rules.pad or resolver.blocked(tp) is not None:
        return set()
    paddings = ((one.scope, one.scope.padding(one.rule, one.unit)) for one in resolver.padded_rules(tp))
    return {(scope.at, padding.heads) for scope, padding in paddings if padding and padding.heads}


def _model_to_try(
    config: Mapping[str, Any], folder: Path, *, heads: int | None = None, has_real_counts: bool = False
) -> tuple[Any, str]:
    """A small model, written and run, of heads of the real size where one can be made; and which are smaller.

    Args:
        config: of the source.
        folder: where it is written.
        heads: how many heads it has, where a model with so many can be made.
        has_real_counts: whether it has as many heads as the source instead, where such a model can be made.
    """
    from shardconv.hf.build import small_model  # noqa: PLC0415 - imports torch
    from shardconv.hf.isolation import isolated  # noqa: PLC0415 - likewise

    counts = dict.fromkeys([*([SAME] if has_real_counts else [heads or HEADS]), HEADS])
    attempts = [(count, is_real) for count in counts for is_real in (True, False)]
    with isolated():
        for count, has_real_heads in attempts[:-1]:
            try:
                model = _written(small_model(config, has_real_heads=has_real_heads, heads=count), folder)
            except RunError:
                continue
            break
        else:
            model = _written(small_model(config), folder)
    return model, _smaller_heads(config, model)


def _smaller_heads(config: Mapping[str, Any], model: Any) -> str:
    found = head_sizes(model.config.to_dict())
    real = head_sizes(model_class(config)[1].to_dict())
    smaller = [
        f"{found[place]} features instead of {size}" + (f" in {place}" if place else "")
        for place, size in real.items()
        if found.get(place, size) != size
    ]
    return f"the small model has heads of {', '.join(smaller)}" if smaller else ""


def _written(model: Any, folder: Path) -> Any:
    """The model, when it is in a folder beside what it computes."""
    from shardconv.proof.compare import write_reference  # noqa: PLC0415 - which needs torch

    model.save_pretrained(folder / SMALL)
    try:
        write_reference(type(model), folder / SMALL, folder / REFERENCE)
    except OSError:
        raise
    except Exception as error:
        raise RunError(f"a small {type(model).__name__} cannot be run: {type(error).__name__}: {error}") from error
    return model


def propose_plan(
    src: StrPath,
    *,
    config: StrPath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    by_heads: bool = True,
) -> str:
    """Propose a plan file for a source, from the modules of a small model of its class and what flows between them.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder; with a config that names a class of transformers.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out.
        by_heads: whether attention is cut by heads, where names tell how; else its layers give whole outputs.

    Returns:
        The text of a plan file. It is a proposal: prove it by :func:`prove`, with ``plan``.

    Raises:
        SourceError: if the checkpoint cannot be read.
        RunError: if the small model cannot be built.

    Example:
        >>> text = shardconv.propose_plan("llama")  # doctest: +SKIP
    """
    from shardconv.hf.build import small_model  # noqa: PLC0415 - imports torch
    from shardconv.hf.inputs import example_inputs  # noqa: PLC0415 - likewise
    from shardconv.proof.mount import expanded, with_blocks  # noqa: PLC0415
    from shardconv.proof.propose import propose, to_toml  # noqa: PLC0415

    beside = None if config is None else local_path(config)
    source = open_source(local_path(src), config=beside, follow_links=follow_links, ignore=as_names(ignore))
    model = small_model(_checked_config(source))
    proposal = with_blocks(propose(model, example_inputs(model), by_heads=by_heads), model)
    own = _matched(proposal.rules, source.specs)
    rules = {
        pattern: rule if pattern in own else {**rule, "optional": True} for pattern, rule in proposal.rules.items()
    }
    found = expanded(proposal).rules
    covered = Matcher([(rule.pattern, name_regex(rule.pattern)) for rule in found])
    mounts = {found[match.place].mount for match in map(covered.match, source.specs) if match is not None}
    units = _units(proposal.units, family_of(_checked_config(source)))
    blocks = {path: [_mount(path, name, mounts) for name in names] for path, names in proposal.blocks.items()}
    missing = _kinds(name for name in source.specs if covered.match(name) is None)
    head = [f"# Proposed for {type(model).__name__}; shardconv plan SRC --plan THIS --prove tells whether it is right."]
    head += [f"# On disk, and not in memory, so that no rule is proposed: {name}" for name in sorted(missing)]
    return "\n".join([*head, "", to_toml(replace(proposal, units=units, rules=rules, blocks=blocks))])


def _units(units: Mapping[str, dict[str, Any]], family: Family) -> dict[str, dict[str, Any]]:
    """Units that take the place of others of their names in the family that the plan file is laid over."""
    known = family.units or {}
    return {
        name: {**unit, "override": True} if known.get(name, own := parse_unit(name, unit)) != own else unit
        for name, unit in units.items()
    }


def _mount(path: str, block: str, used: Container[str]) -> str | dict[str, Any]:
    """An entry of ``[blocks]``, optional where the block covers no tensor on disk."""
    return block if Mount(path, block).describe() in used else {"block": block, "optional": True}


def _matched(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The patterns that are the first to match a name."""
    patterns = list(patterns)
    matcher = Matcher([(pattern, name_regex(pattern)) for pattern in patterns])
    return {patterns[match.place] for match in map(matcher.match, names) if match is not None}


def cut_share(specs: Mapping[str, TensorSpec], plan: Plan) -> float:
    """The share of the elements in matrices of which no rank holds all."""
    matrices = {name: math.prod(spec.shape) for name, spec in specs.items() if sum(size > 1 for size in spec.shape) > 1}
    cut = sum(numel for name, numel in matrices.items() if _is_shared_out(plan.tensors[name].placement))
    return cut / max(sum(matrices.values()), 1)


def _is_shared_out(placement: Placement) -> bool:
    """Whether no rank holds all of a tensor."""
    return placement.dim is not None and max(map(placement.local_size, range(placement.tp))) < placement.size


def _kinds(names: Iterable[str]) -> set[str]:
    """Names with a star for each number: the same in all layers."""
    return {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}


def _tried(resolver: Resolver, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """As :func:`_plans`; if none are asked for, of those that are usual, and beyond if that is allowed."""
    plans, reasons = _plans(resolver, tps or PROOF_TPS)
    return plans | ({} if tps else _plans(resolver, _BEYOND)[0]), reasons


def _plans(resolver: Resolver, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """The plan for each tp size, and for the others why there is none."""
    plans, reasons = {}, {}
    for tp in tps:
        try:
            plans[tp] = resolver.plan(tp)
        except PlanError as error:
            reasons[tp] = str(error)
    return plans, reasons


def _skipped(
    source: str, impossible: Mapping[int, str], not_small: Mapping[int, str], *, has_plan_file: bool
) -> Iterator[str]:
    """Why tp sizes were not tried: the source cannot be sharded for them, or the small model cannot."""
    for tp, reason in impossible.items():
        yield f"tp {tp}: {source} cannot be sharded for it: {reason}"
    numbers = " If the plan file has numbers of the large model, write fields of its config instead." * has_plan_file
    for tp, reason in not_small.items():
        yield f"tp {tp}: the small model cannot be sharded for it, though {source} may be: {reason}{numbers}"


def _proofs(folder: Path, small: Source, plans: Mapping[int, Plan], request: PlanRequest) -> tuple[Proof, ...]:
    """Compare for all numbers of ranks, one after the other, in processes that are started once."""
    from shardconv.runtime.launch import launch  # noqa: PLC0415 - which needs torch

    if not plans:
        return ()
    for tp, plan in plans.items():
        split_by(small, folder / SPLIT.format(tp=tp), plan, request)
    (folder / TASK).write_text(json.dumps({"request": request.to_json(), "tps": [*plans]}))
    try:
        launch(["prove-rank", str(folder)], max(plans))
    except RunError:
        if not any(PROBLEM in result for tp in plans for result in _results(folder, tp)):
            raise
    found = {tp: _results(folder, tp) for tp in plans}
    return tuple(_proof(tp, found[tp], cut_share(small.specs, plan)) for tp, plan in plans.items() if found[tp])


def _results(folder: Path, tp: int) -> list[dict[str, Any]]:
    """What ranks left in the folder, the earliest first."""
    paths = folder.glob(RESULT.format(tp=tp, rank="*"))
    return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def _proof(tp: int, found: list[dict[str, Any]], cut: float) -> Proof:
    if problems := [result[PROBLEM] for result in found if PROBLEM in result]:
        return Proof(tp, None, None, None, cut, problems[0])
    tokens = {result["tokens"] for result in found}
    return Proof(
        tp,
        max(result["output"] for result in found),
        None if tokens == {None} else tokens == {True},
        max((result["gradient"] for result in found if result["gradient"] is not None), default=None),
        cut,
        found[0]["note"],
    )


def prove_rank(folder: Path) -> None:
    """Be a rank of a proof: compare, and leave the results in the folder."""
    import torch.distributed as dist  # noqa: PLC0415

    from shardconv.distributed import as_axis  # noqa: PLC0415
    from shardconv.proof.compare import compare  # noqa: PLC0415

    task = json.loads((folder / TASK).read_text())
    kind = model_class(read_json(folder / SMALL / CONFIG_NAME)).kind
    request = PlanRequest.from_json(task["request"])
    rank = dist.get_rank()
    for tp in task["tps"]:
        group = dist.new_group(list(range(tp)))
        if rank < tp:
            split, result = folder / SPLIT.format(tp=tp), folder / RESULT.format(tp=tp, rank=rank)
            try:
                found = compare(as_axis(group), kind, folder / SMALL, split, request, folder / REFERENCE)
            except ShardconvError:
                raise
            except Exception as error:
                if is_connection_error(error):
                    raise
                problem = f"the small model, as the plan cuts it, does not run: {type(error).__name__}: {error}"
                result.write_text(json.dumps({PROBLEM: problem}))
                raise RunError(problem) from error
            result.write_text(json.dumps(found._asdict()))

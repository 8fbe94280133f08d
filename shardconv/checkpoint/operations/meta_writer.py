"""Lay out a source as Meta's rank files: ``consolidated.NN.pth`` and params.json, by the layout that reads them.

The files have the placements of the plan, with Meta's names and Meta's order of query and key rows.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry
from shardconv.checkpoint.operations.foreign_writer import ForeignFiles, NewFile
from shardconv.checkpoint.output.job import Job
from shardconv.checkpoint.sources.meta_params import PARAMS_NAME, head_sizes, params_of_config
from shardconv.checkpoint.sources.planning import PlannedSource
from shardconv.checkpoint.sources.transforms import Concatenation, Transform, rotary_rows
from shardconv.files.containers.torch_files import TorchArchive
from shardconv.layouts import META
from shardconv.layouts.full_shapes import check_layers
from shardconv.layouts.layout_file import layout_file
from shardconv.layouts.relation import find_source
from shardconv.layouts.row_tensors import check_needed
from shardconv.plan.placement import Placement, intervals
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import CANDIDATE_TPS
from shardconv.support.errors import PlanError, option

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_REMEDY = f"use {option(layout='native')}"


class MetaLayout:
    """The layout of Meta's rank files, which does not have options."""

    name = META
    settings: Job = {}  # noqa: RUF012 - never changed

    def plan_tp(self, tp: int) -> int:
        """The number of rank files."""
        return tp

    def check(self, planned: PlannedSource, tp: int) -> None:
        """Check that the files can hold a model of this type, and its sizes on ``tp`` ranks."""
        source, types = planned.source, layout_file(META).types
        config = source.config or {}
        if config.get("model_type") not in types:
            raise PlanError(
                f"layout meta does not support model type {config.get('model_type')!r:.60} (expected one of "
                f"{', '.join(types)}): {_REMEDY}"
            )
        units = [one for name, spec in source.specs.items() if (one := _units(name, spec, config)) is not None]
        if (wrong := next((one for one in units if not one.divides(tp)), None)) is not None:
            parts, rest = divmod(wrong.number, tp)
            sizes = [str(size) for size in CANDIDATE_TPS if all(one.divides(size) for one in units)]
            raise PlanError(
                f"{wrong.tensor}: {wrong.number} {wrong.name} do not divide over {tp} ranks ({wrong.number} = {tp} * "
                f"{parts} + {rest}), and layout meta does not have padding (tp sizes that divide: {', '.join(sizes)}): "
                f"pass one of them, or {_REMEDY}"
            )

    def lay_out(self, planned: PlannedSource, plan: Plan) -> ForeignFiles:
        """Lay out the files."""
        source, chosen = planned.source, layout_file(META).all_rules
        config, rules = source.config or {}, chosen.rules
        tensors, transforms = dict(source.specs), dict[str, Transform]()
        placements = {name: plan.placement(name) for name in tensors}
        held = {known.target for name in tensors if (known := find_source(rules, name)) is not None}
        check_needed(chosen, held, check_layers(tensors, config))
        is_tied = config.get("tie_word_embeddings") is True
        if (HEAD in tensors) == is_tied:
            wrong, remedy = ("stored", "remove") if is_tied else ("missing", "add")
            raise PlanError(
                f"{HEAD} is {wrong} (tie_word_embeddings of the config is {str(is_tied).lower()}): {remedy} the "
                f"tensor, or correct the config"
            )
        if is_tied:
            spec = tensors[HEAD] = tensors[EMBEDDING]
            placements[HEAD] = placements[EMBEDDING]
            transforms[HEAD] = Concatenation.of_tensor(EMBEDDING, spec)
        names = {}
        for name, spec in tensors.items():
            if (known := find_source(rules, name)) is None:
                raise PlanError(f"{name}: layout meta does not have this tensor: {_REMEDY}")
            options, names[name] = known.rule.options, known.target
            _check_placement(name, placements[name], options.dims)
            if options.rotary:
                transforms[name] = _rotary_rows(name, spec, config, is_query=options.gives_tp)
        archives = tuple(_archive(rank, tensors, placements, names) for rank in range(plan.tp))
        offsets = [archive.offsets for archive in archives]
        shards = tuple(
            Shards(geometry(placements[name], *spec[:2]), range(plan.tp), [each[names[name]] for each in offsets])
            for name, spec in tensors.items()
        )
        intermediate = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
        params = params_of_config(config, intermediate, tp=plan.tp)
        files = [NewFile(f"{archive.root}.pth", archive.file_bytes, archive.pieces) for archive in archives]
        texts = {PARAMS_NAME: json.dumps(params, indent=2) + "\n"}
        return ForeignFiles(files, dict(zip(tensors, shards, strict=True)), tensors, [transforms], texts)


class _Units(NamedTuple):
    """The heads, rows or columns of a tensor that ranks divide, and whether ranks may hold the same head."""

    tensor: str
    name: str
    number: int
    may_repeat: bool

    def divides(self, tp: int) -> bool:
        """Whether every rank gets the same number of them."""
        return self.number % tp == 0 or (self.may_repeat and tp % self.number == 0)


def _units(name: str, spec: TensorSpec, config: Mapping[str, object]) -> _Units | None:
    """The units that ranks divide; None for a tensor that they replicate, or that the layout does not have."""
    known = find_source(layout_file(META).all_rules.rules, name)
    if known is None or not known.rule.options.dims or len(spec.shape) < 2:
        return None
    options, dim = known.rule.options, known.rule.options.dims[0]
    if options.heads is None:
        return _Units(name, ("rows", "columns")[dim], spec.shape[dim], may_repeat=False)
    count = _heads(config, is_query=options.gives_tp)
    return _Units(name, f"heads ({options.heads})", count, may_repeat=not options.gives_tp)


def _heads(config: Mapping[str, object], *, is_query: bool) -> int:
    sizes = head_sizes(config)
    return sizes.heads if is_query else sizes.kv_heads


def _rotary_rows(name: str, spec: TensorSpec, config: Mapping[str, object], *, is_query: bool) -> Transform:
    heads, head_dim = _heads(config, is_query=is_query), head_sizes(config).head_dim
    if spec.shape[0] != heads * head_dim:
        raise PlanError(
            f"{name}: has {spec.shape[0]} rows (expected {heads} heads of {head_dim} by the config): correct the config"
        )
    return rotary_rows(name, spec, head_dim, to_halves=False)


def _archive(
    rank: int, tensors: Mapping[str, TensorSpec], placements: Mapping[str, Placement], names: Mapping[str, str]
) -> TorchArchive:
    local = {
        names[name]: TensorSpec(spec.dtype, placements[name].shard_shape(spec.shape, rank))
        for name, spec in tensors.items()
    }
    return TorchArchive(f"consolidated.{rank:02}", local)


def _check_placement(name: str, placement: Placement, dims: tuple[int, ...]) -> None:
    """Check that ranks have one interval each, of the same size, along a dim of the layout."""
    if placement.dim is None and (not dims or placement.num_ranks == 1):
        return
    is_simple = placement.dim in dims and placement.is_even and not placement.is_padded
    if not is_simple or any(len(intervals(entries)) != 1 for entries in placement.ranks):
        raise PlanError(
            f"{name}: layout meta cannot express its placement (got {placement.describe()}, expected equal intervals): "
            f"choose a tp that divides its heads and sizes, or {_REMEDY}"
        )

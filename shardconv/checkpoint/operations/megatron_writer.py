"""Lay out a source as a checkpoint of Megatron-Core in its format ``torch_dist``.

The files have full tensors, so that they are loaded with any tensor, pipeline and expert parallel size. Loaders read
whole chunks: each expert has its own, as have the gate and up projections.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.operations.foreign_writer import ForeignFiles, NewFile
from shardconv.checkpoint.output.job import Job
from shardconv.checkpoint.sources.megatron_ranks import EMBEDDING
from shardconv.checkpoint.sources.megatron_source import (
    COMMON_NAME,
    FOLDER,
    LATEST_NAME,
    SIZES,
    check_unquantized,
    known_sizes,
)
from shardconv.checkpoint.sources.planning import PlannedSource, changed_options
from shardconv.checkpoint.sources.row_order import JoinedRows, Literal, Rows, WithCopies
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import Transform
from shardconv.files.containers.dcp import METADATA_NAME, Chunk, DcpFile, DcpTensor, metadata_pickle
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import TorchArchive
from shardconv.layouts import MEGATRON
from shardconv.layouts.layout import Constant
from shardconv.layouts.layout_file import ChosenRules, layout_file
from shardconv.layouts.megatron_names import mtp_layers, names_in_files, split_layer
from shardconv.layouts.permutation import permutations
from shardconv.layouts.relation import find_source
from shardconv.layouts.row_pieces import (
    Piece,
    RowTensor,
    check_needed,
    find_copies,
    implied_tensors,
    row_tensors_of_sources,
)
from shardconv.plan.placement import round_up
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import PlanError, UsageError, option

_METADATA = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
#: Further arguments of Megatron-LM with the value of a config field.
_SETTINGS = {
    "ffn_hidden_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}  # fmt: skip
#: Arguments that are true if a layer has a tensor whose name ends with one of these.
_BY_TENSOR = {
    "add_bias_linear": ("linear_proj.bias",), "add_qkv_bias": ("linear_qkv.bias",),
    "qk_layernorm": (".k_layernorm.weight", ".kv_layernorm.weight"),
    "moe_router_enable_expert_bias": ("router.expert_bias",),
    "moe_shared_expert_gate": ("shared_experts.gate_weight",),
}  # fmt: skip
_EXPERTS, _SHARED = "experts.experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"
#: Arguments for rotary embeddings to fields of the config.
_ROTARY = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
#: Version of the state dict in ``common.pt``.
_CHECKPOINT_VERSION = 3.0


class MegatronLayout(NamedTuple):
    """The layout of checkpoints of Megatron-Core.

    Attributes:
        num_files: number of files with chunks.
        stacks_layers: whether a tensor has a dim of layers, instead of one tensor for each layer.
        vocabulary_multiple: the rows of the vocabulary are padded with zeros to a multiple of this, times the number of
            files; None for no padding.
    """

    num_files: int = 1
    stacks_layers: bool = False
    vocabulary_multiple: int | None = None

    def padded(self, rows: int) -> int:
        """The padded number of rows of the vocabulary."""
        multiple = self.vocabulary_multiple
        return rows if multiple is None else round_up(rows, multiple * self.num_files)

    @property
    def name(self) -> str:
        """The name of the layout."""
        return MEGATRON

    @property
    def settings(self) -> Job:
        """The options, by their names in a job."""
        return {
            "tp": self.num_files, "stacked layers": self.stacks_layers,
            "vocabulary multiple": self.vocabulary_multiple,
        }  # fmt: skip

    def plan_tp(self, _tp: int) -> int:
        """One rank, which has full tensors."""
        return 1

    def check(self, planned: PlannedSource, _tp: int) -> None:
        """Check that no option changes placements, which full tensors do not have."""
        if changed := changed_options(planned.request):
            raise UsageError(f"{changed} does not apply to layout {MEGATRON}, which has full tensors: remove it")

    def lay_out(self, planned: PlannedSource, _plan: Plan) -> ForeignFiles:
        """Lay out the files; ``_plan`` has full tensors."""
        return _lay_out(planned, self)


class _Box(NamedTuple):
    """A part of a tensor that is a chunk of its own.

    Attributes:
        name: a name that no source tensor has.
        names: names of the tensor in the files.
        shape: of the tensor.
        offsets: of the box in the tensor.
        spec: dtype and shape of the box.
        pieces: its rows; none for padding.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    spec: TensorSpec
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return num_bytes(self.spec.dtype, self.spec.shape)

    def transform(self) -> Transform:
        """The transform from the source tensors."""
        if not self.pieces:
            return Literal()
        unit = self.num_bytes // sum(piece.size for piece in self.pieces)
        stops = [*accumulate(piece.size * unit for piece in self.pieces)]
        parts = [
            Rows(piece.source, stop - piece.size * unit, stop, piece.start * unit)
            for piece, stop in zip(self.pieces, stops, strict=True)
        ]
        return JoinedRows(tuple(parts), unit)


def _lay_out(planned: PlannedSource, options: MegatronLayout) -> ForeignFiles:
    source = planned.source
    _check_unquantized(planned)
    rules = layout_file(MEGATRON).rules_for(source.config or {})
    check_unquantized(rules.config)
    config, copies = known_sizes(rules.config), find_copies(rules, source.specs)
    specs, transforms = _as_rows(rules, source.specs, config)
    tensors = row_tensors_of_sources(rules.rules, specs, config)
    _check_complete(source, rules, tensors, copies)
    _check_layers(rules, {tensor.name for tensor in tensors}, config["num_hidden_layers"])
    boxes = [*_boxes(tensors, config["num_hidden_layers"], options)]
    files = [DcpFile(f"__{number}_0.distcp") for number in range(options.num_files)]
    shards, found = _add_chunks(files, boxes)
    states = dict.fromkeys(_extra_states(found, options), files[0].add_object([None]))
    others = {
        METADATA_NAME: b"".join(metadata_pickle(found, states)),
        COMMON_NAME: TorchArchive.of_object(_common(rules, found, options)).data,
        "metadata.json": json.dumps(_METADATA).encode(),
    }
    return ForeignFiles(
        files=[NewFile(f"{FOLDER}/{file.name}", file.size, file.literals) for file in files],
        shards=shards,
        tensors={box.name: box.spec for box in boxes},
        layers=[transforms, {box.name: _transform(box, copies) for box in boxes}],
        texts={LATEST_NAME: FOLDER},
        others=[NewFile(f"{FOLDER}/{name}", len(data), {0: data}) for name, data in others.items()],
    )


def _as_rows(
    rules: ChosenRules, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> tuple[dict[str, TensorSpec], dict[str, Transform]]:
    """The source tensors with the rows of file tensors, and the transforms to tensors that the source does not have."""
    specs, transforms = dict(tensors), dict[str, Transform]()
    for name, order in permutations(rules.rules, tensors, config).items():
        dtype, shape = tensors[name][:2]
        if shape != order.source_shape:
            raise PlanError(
                f"{name}: has shape {list(shape)} (expected {list(order.source_shape)} by config.json): correct the "
                f"config, or the tensor"
            )
        specs[name] = order.rows(dtype)
        transforms[name] = arrays.strided.StridedTensor(name, num_bytes(dtype, (1,)), *order.to_file)
    ((dtype, _),) = Counter(spec.dtype for spec in tensors.values()).most_common(1)
    for name, value in implied_tensors(rules, config).items():
        if name in tensors:
            raise PlanError(f"{name}: a {config['model_type']!r:.40} model does not have this tensor")
        constant = Constant(name, dtype, (config["hidden_size"],), value)
        specs[name] = TensorSpec(dtype, constant.shape)
        transforms[name] = Literal(constant.data)
    return specs, transforms


def _add_chunks(files: Sequence[DcpFile], boxes: Sequence[_Box]) -> tuple[dict[str, Shards], dict[str, DcpTensor]]:
    """Add the boxes to the files, of about the same size; returns the positions of the data, and the tensors."""
    total, done = sum(box.num_bytes for box in boxes), 0
    shards: dict[str, Shards] = {}
    found: dict[str, DcpTensor] = {}
    for box in boxes:
        number = min((done + box.num_bytes // 2) * len(files) // max(total, 1), len(files) - 1)
        offset, position = files[number].add_tensor(box.spec)
        done += box.num_bytes
        shards[box.name] = Shards(unsharded(box.num_bytes), (number,), (offset,))
        chunk = Chunk(box.offsets, box.spec.shape, position)
        for name in box.names:
            found.setdefault(name, DcpTensor(TensorSpec(box.spec.dtype, box.shape), [])).chunks.append(chunk)
    return shards, found


def _transform(box: _Box, copies: Mapping[str, str]) -> Transform:
    """The transform from the source tensors, which checks copies of them."""
    for piece in box.pieces[:1]:
        if equal := tuple(copy for copy, original in copies.items() if original == piece.source):
            return WithCopies(box.transform(), piece.source, equal)
    return box.transform()


def _common(rules: ChosenRules, tensors: Mapping[str, DcpTensor], options: MegatronLayout) -> dict[str, object]:
    """The contents of ``common.pt``: what loaders read before they ask for tensors."""
    content = {"non_homogeneous_layers": not options.stacks_layers, "singleton_local_shards": False}
    common = {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0, "content_metadata": content}
    arguments = _arguments(rules, tensors)
    if options.vocabulary_multiple is not None:  # without it, Megatron-LM pads for its tensor parallel size
        arguments["padded_vocab_size"] = tensors[EMBEDDING].spec.shape[0]
    return {**common, "args": Namespace(**arguments)}


def _arguments(rules: ChosenRules, tensors: Mapping[str, DcpTensor]) -> dict[str, object]:
    """The arguments of Megatron-LM that follow from the config, the tensors and the kinds of modules."""
    config, groups = known_sizes(rules.config), rules.groups
    layers = range(config["num_hidden_layers"])
    settings = SIZES | _SETTINGS | {name: field for group in groups for name, field in group.settings.items()}
    found = {name: config[field] for name, field in settings.items() if field in config}
    found |= {name: any(tensor.endswith(end) for tensor in tensors) for name, end in _BY_TENSOR.items()}
    found |= {name: value for group in groups for name, value in group.args.items()}
    experts = next((one.spec.shape for name, one in tensors.items() if name.endswith(_EXPERTS)), None)
    if experts is not None:
        names = [(f"decoder.layers.{layer}.mlp.{_EXPERTS}", f"decoder.layers.mlp.{_EXPERTS}") for layer in layers]
        shared = (one.spec.shape[-1] for name, one in tensors.items() if name.endswith(_SHARED))
        found |= {
            "num_experts": experts[-3], "moe_layer_freq": [int(any(one in tensors for one in each)) for each in names],
            "moe_shared_expert_intermediate_size": next(shared, None),
        }  # fmt: skip
    found["mtp_num_layers"] = len({name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")}) or None
    return found | _rotary(config) | {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "no_save_optim": True, "no_save_rng": True,
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
    }  # fmt: skip


def _rotary(config: Mapping[str, object]) -> dict[str, object]:
    """The arguments for rotary embeddings that the config states, unless they are scaled, or differ between layers."""
    held = config.get("rope_parameters") or config.get("rope_scaling")
    stated = held if isinstance(held, dict) else {}
    is_plain = stated.get("rope_type", stated.get("type", "default")) == "default"
    if not is_plain or any(isinstance(value, dict) for value in stated.values()):
        return {}
    fields = {**config, **stated}
    found = {name: fields[field] for name, field in _ROTARY.items() if fields.get(field) is not None}
    return {"position_embedding_type": "rope", **found}


def _check_layers(rules: ChosenRules, names: Collection[str], num_layers: int) -> None:
    """Check that each layer has the tensors that it needs, and that further layers are MTP layers."""
    mtp = mtp_layers(names, num_layers)
    for layer in [*range(num_layers), *mtp]:
        if (f"decoder.layers.{layer}.eh_proj.weight" in names) != (layer in mtp):
            is_mtp = "is not an MTP layer, as it does not have" if layer in mtp else "is an MTP layer, as it has"
            raise PlanError(
                f"model.layers.{layer} {is_mtp} eh_proj, and config.json has num_hidden_layers {num_layers}: correct "
                f"the config"
            )
    check_needed(rules, names, [*range(num_layers), *mtp])


def _check_unquantized(planned: PlannedSource) -> None:
    if (name := next((name for name, spec in planned.tensors.items() if spec.grid is not None), None)) is not None:
        raise PlanError(
            f"{name}: belongs to a quantized layer, which layout megatron does not have: dequantize the source first, "
            f"or use {option(layout='native')}"
        )


def _check_complete(
    source: Source, rules: ChosenRules, tensors: Iterable[RowTensor], copies: Mapping[str, str]
) -> None:
    """Check that each tensor of the source is in the files, or is a copy of one that is."""
    held = {name for tensor in tensors for name in tensor.sources}
    held |= {copy for copy, original in copies.items() if source.specs.get(original) == source.specs[copy]}
    if (name := next((name for name in source.specs if name not in held), None)) is not None:
        excluded = find_source(rules.others, name)
        fields = rules.fields_of(None if excluded is None else excluded.rule)
        remedy = "correct the config, or " if fields else ""
        raise PlanError(
            f"{name}: layout megatron does not have this tensor for model type "
            f"{rules.config.get('model_type')!r:.60}{fields}: {remedy}use {option(layout='native')}"
        )


class _Target(NamedTuple):
    """The names of a tensor in the files, and the index of its layer, if layers are stacked."""

    names: tuple[str, ...]
    layer: tuple[int, ...] = ()


def _target(tensor: RowTensor, num_layers: int, options: MegatronLayout) -> _Target:
    all_names = (tensor.name, *tensor.also)
    stacked = [found for name in all_names if options.stacks_layers and (found := split_layer(name, num_layers))]
    if stacked:
        return _Target(tuple(name for name, _ in stacked), (stacked[0][1],))
    return _Target(tuple(name for one in all_names for name in names_in_files(one, num_layers)))


def _boxes(tensors: Sequence[RowTensor], num_layers: int, options: MegatronLayout) -> Iterator[_Box]:
    """Yield the chunks, in the order of the tensors."""
    targets = [_target(tensor, num_layers, options) for tensor in tensors]
    stacked: dict[str, list[TensorSpec]] = {}
    for tensor, target in zip(tensors, targets, strict=True):
        if target.layer:
            stacked.setdefault(target.names[0], []).append(tensor.spec)
    for name, specs in stacked.items():
        if len(specs) != num_layers or len({*specs}) > 1:
            raise PlanError(
                f"{name}: cannot be stacked, as not all {num_layers} layers have it with the same dtype and shape: "
                f"remove {option(stacked_layers=True)}"
            )
    for tensor, target in zip(tensors, targets, strict=True):
        yield from _boxes_of(tensor, target, num_layers, options)


def _boxes_of(tensor: RowTensor, target: _Target, num_layers: int, options: MegatronLayout) -> Iterator[_Box]:
    """Yield the chunks of a tensor: one for each segment of each expert, unless segments are interleaved."""
    dtype, shape = tensor.spec[:2]
    rows = shape[tensor.has_experts]
    padded = options.padded(rows) if tensor.is_padded else rows
    full = (*[num_layers] * len(target.layer), *shape[: tensor.has_experts], padded, *tensor.row_shape)

    def box(expert: int, start: int, stop: int, pieces: tuple[Piece, ...]) -> _Box:
        outer = (*target.layer, *[expert] * tensor.has_experts)
        sizes = (*[1] * len(outer), stop - start, *tensor.row_shape)
        offsets = (*outer, start, *[0] * len(tensor.row_shape))
        name = f"{target.names[0]}{list(offsets)}"
        return _Box(name, target.names, full, offsets, TensorSpec(dtype, sizes), pieces)

    for expert, pieces in enumerate(tensor.pieces):
        at = 0
        for group in [pieces] if tensor.is_interleaved else [(piece,) for piece in pieces]:
            size = sum(piece.size for piece in group)
            yield box(expert, at, at + size, group)
            at += size
    if padded > rows:
        yield box(0, rows, padded, ())


def _extra_states(tensors: Mapping[str, DcpTensor], options: MegatronLayout) -> Iterator[str]:
    """Yield the keys of the extra states of modules, one of which a loader asks for with its specs: all are empty."""
    modules: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        num_dims = ("decoder.layers." in name and options.stacks_layers) + (".experts.experts." in name)
        modules[module] = tensor.spec.shape[:num_dims]
        if module.endswith(".linear_proj"):
            modules[f"{module.removesuffix('.linear_proj')}.core_attention"] = tensor.spec.shape[:num_dims]
    for module, sizes in modules.items():
        for index in product(*map(range, sizes)) if sizes else [(0,)]:
            yield f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes or (1,)))}"

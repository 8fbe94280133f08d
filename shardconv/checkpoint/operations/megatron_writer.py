"""Lay out a source as a checkpoint of Megatron-Core in its format ``torch_dist``.

The files have full tensors, so that they are loaded with any tensor, pipeline and expert parallel size. Loaders read
whole chunks: each expert is one, and so is each of the gate and up projections.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from shardconv.checkpoint import engine
from shardconv.checkpoint.operations.foreign_writer import ForeignFiles
from shardconv.checkpoint.output.job import Job
from shardconv.checkpoint.sources.layout_files import FOLDER, LATEST_NAME
from shardconv.checkpoint.sources.megatron_ranks import EMBEDDING
from shardconv.checkpoint.sources.megatron_source import (
    ARGUMENTS,
    COMMON_NAME,
    check_experts,
    check_unquantized,
    known_sizes,
    rotary_arguments,
)
from shardconv.checkpoint.sources.planning import PlannedSource, changed_options
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.transforms import Concatenation, Transform, WithCopies
from shardconv.files.containers.dcp import ChunkPosition, MetadataPickle, frame
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import TorchArchive
from shardconv.files.weight_formats import DCP_METADATA
from shardconv.layouts import MEGATRON
from shardconv.layouts.layout import Constant
from shardconv.layouts.layout_file import ChosenRules, layout_file
from shardconv.layouts.megatron_names import mtp_layers, names_in_files, split_layer
from shardconv.layouts.relation import find_source
from shardconv.layouts.row_tensors import (
    RowTensor,
    SourceRows,
    check_needed,
    find_copies,
    implied_tensors,
    permutations,
    row_tensors_of_sources,
)
from shardconv.plan.placement import round_up
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import PlanError, UsageError, option

_NATIVE = f"use {option(layout='native')}"
_METADATA = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip


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
        source = planned.source
        _check_no_grids(planned)
        rules = layout_file(MEGATRON).rules_for(source.config or {})
        check_unquantized(rules.config)
        config, copies = known_sizes(rules.config), find_copies(rules, source.specs)
        specs, transforms = _as_rows(rules, source.specs, config)
        tensors = row_tensors_of_sources(rules.rules, specs, config)
        _check_complete(source, rules, tensors, copies)
        names = {tensor.name for tensor in tensors}
        _check_layers(rules, names, config["num_hidden_layers"])
        check_experts(names, rules, config)
        if self.stacks_layers:
            _check_stacked(tensors, config["num_hidden_layers"])
        new = _NewFiles(self, config["num_hidden_layers"], specs)
        for tensor in tensors:
            new.add(tensor)
        return ForeignFiles.of_contents(
            new.chunks,
            {f"{FOLDER}/{name}": contents for name, contents in new.others(rules).items()},
            [transforms, _checked_copies(copies, specs)],
            {LATEST_NAME: FOLDER},
        )


class _Box(NamedTuple):
    """A chunk of a tensor: its offsets, its shape, and its rows; none for padding."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: Sequence[SourceRows]


def _as_rows(
    rules: ChosenRules, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> tuple[Mapping[str, TensorSpec], dict[str, Transform]]:
    """The source tensors with the rows of file tensors, and the transforms to tensors that the source does not have."""
    specs, transforms = dict[str, TensorSpec](), dict[str, Transform]()
    for name, order in permutations(rules.rules, tensors, config).items():
        dtype, shape = tensors[name][:2]
        if shape != order.source_shape:
            raise PlanError(
                f"{name}: has shape {list(shape)} (expected {list(order.source_shape)} by config.json): correct the "
                f"config, or the tensor"
            )
        specs[name] = order.rows(dtype)
        transforms[name] = engine.arrays.StridedTensor(name, num_bytes(dtype, (1,)), *order.to_file)
    ((dtype, _),) = Counter(spec.dtype for spec in tensors.values()).most_common(1)
    for name, value in implied_tensors(rules, config).items():
        if name in tensors:
            raise PlanError(f"{name}: a {config['model_type']!r:.40} model does not have this tensor")
        constant = Constant(name, dtype, (config["hidden_size"],), value)
        specs[name] = TensorSpec(dtype, constant.shape)
        transforms[name] = Concatenation.of_parts([constant.data])
    return {**tensors, **specs} if specs else tensors, transforms


def _checked_copies(copies: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, WithCopies]:
    """The tensors of which there are copies, which are compared with them."""
    found: dict[str, WithCopies] = {}
    for original in dict.fromkeys(one for one in copies.values() if one in specs):
        spec, equal = specs[original], tuple(copy for copy, one in copies.items() if one == original)
        found[original] = WithCopies(Concatenation.of_tensor(original, spec), original, equal, _NATIVE)
    return found


class _NewFiles:
    """The files of a checkpoint, to which tensors are added one after the other.

    Args:
        options: of the layout.
        num_layers: number of layers, without MTP layers.
        sources: the source tensors, which have about as many bytes as the files.

    Attributes:
        chunks: name to contents of the files with chunks.
    """

    def __init__(self, options: MegatronLayout, num_layers: int, sources: Mapping[str, TensorSpec]) -> None:
        self._options, self._num_layers = options, num_layers
        self._total, self._done = sum(num_bytes(*spec[:2]) for spec in sources.values()), 0
        self._names = [f"__{number}_0.distcp" for number in range(options.num_files)]
        self.chunks = {f"{FOLDER}/{name}": Concatenation() for name in self._names}
        self._metadata = MetadataPickle()
        self._specs: dict[str, TensorSpec] = {}

    def add(self, tensor: RowTensor) -> None:
        """Add a tensor."""
        target = _target(tensor, self._num_layers, self._options)
        dtype, shape = tensor.spec[:2]
        rows = shape[tensor.has_experts]
        padded = self._options.padded(rows) if tensor.is_padded else rows
        layers = (self._num_layers,) * len(target.layer)
        spec = TensorSpec(dtype, (*layers, *shape[: tensor.has_experts], padded, *tensor.row_shape))
        self._specs |= dict.fromkeys(target.names, spec)
        for box in _boxes(tensor, target.layer, padded):
            position = self._add(TensorSpec(dtype, box.sizes), box.rows)
            for name in target.names:
                self._metadata.add_chunk(name, spec, box.offsets, box.sizes, position)

    def _add(self, spec: TensorSpec, rows: Sequence[SourceRows]) -> ChunkPosition:
        """Add a chunk. All files get about the same size."""
        size, around = num_bytes(*spec[:2]), frame(spec)
        number = min((self._done + size // 2) * len(self._names) // max(self._total, 1), len(self._names) - 1)
        self._done += size
        name = self._names[number]
        contents = self.chunks[f"{FOLDER}/{name}"]
        position = ChunkPosition(name, contents.size, around.size)
        contents.add(around.head, len(around.head))
        unit = size // (sum(one.size for one in rows) or 1)
        for one in rows:
            contents.add(one.source, one.size * unit, one.start * unit)
        if not rows:
            contents.add(b"", size)
        contents.add(around.tail, len(around.tail))
        return position

    def others(self, rules: ChosenRules) -> dict[str, Concatenation]:
        """Name to contents of the other files, after all tensors."""
        name, states = self._names[0], TorchArchive.of_object([None]).data
        contents = self.chunks[f"{FOLDER}/{name}"]
        position = ChunkPosition(name, contents.size, len(states))
        contents.add(states, len(states))
        for key in _extra_states(self._specs, self._options):
            self._metadata.add_object(key, position)
        is_padded = self._options.vocabulary_multiple is not None
        common = _common_state(rules, self._specs, stacks_layers=self._options.stacks_layers, is_padded=is_padded)
        return {
            DCP_METADATA: Concatenation.of_parts(self._metadata.parts()),
            COMMON_NAME: Concatenation.of_parts([TorchArchive.of_object(common).data]),
            "metadata.json": Concatenation.of_parts([json.dumps(_METADATA).encode()]),
        }


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


def _check_no_grids(planned: PlannedSource) -> None:
    """Check that no tensor belongs to a quantized layer."""
    if (name := next((name for name, spec in planned.tensors.items() if spec.grid is not None), None)) is not None:
        raise PlanError(
            f"{name}: belongs to a quantized layer, which layout megatron does not have: dequantize the source first, "
            f"or {_NATIVE}"
        )


def _check_complete(
    source: Source, rules: ChosenRules, tensors: Iterable[RowTensor], copies: Mapping[str, str]
) -> None:
    """Check that each tensor of the source is in the files, or is a copy of one that is."""
    equal = (copy for copy, original in copies.items() if source.specs.get(original) == source.specs[copy])
    missing = dict.fromkeys(source.specs)
    for held in chain(equal, chain.from_iterable(tensor.sources() for tensor in tensors)):
        missing.pop(held, None)
    if (name := next(iter(missing), None)) is not None:
        excluded = find_source(rules.others, name)
        fields = rules.fields_of(None if excluded is None else excluded.rule)
        remedy = "correct the config, or " if fields else ""
        raise PlanError(
            f"{name}: layout megatron does not have this tensor for model type "
            f"{rules.config.get('model_type')!r:.60}{fields}: {remedy}{_NATIVE}"
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


def _check_stacked(tensors: Iterable[RowTensor], num_layers: int) -> None:
    """Check that all layers have the same tensors."""
    stacked: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if (found := split_layer(tensor.name, num_layers)) is not None:
            stacked.setdefault(found[0], []).append(tensor.spec)
    for name, specs in stacked.items():
        if len(specs) != num_layers or len({*specs}) > 1:
            raise PlanError(
                f"{name}: cannot be stacked, as not all {num_layers} layers have it with the same dtype and shape: "
                f"remove {option(stacked_layers=True)}"
            )


def _boxes(tensor: RowTensor, layer: tuple[int, ...], padded: int) -> Iterator[_Box]:
    """Yield the chunks of a tensor: one for each segment of each expert, unless segments are interleaved.

    Args:
        tensor: the tensor.
        layer: its index among stacked layers, if they are stacked.
        padded: the number of rows with padding.
    """

    def box(expert: int, start: int, stop: int, rows: Sequence[SourceRows]) -> _Box:
        outer = (*layer, *[expert] * tensor.has_experts)
        offsets = (*outer, start, *[0] * len(tensor.row_shape))
        return _Box(offsets, (*[1] * len(outer), stop - start, *tensor.row_shape), rows)

    for expert, rows in enumerate(tensor.source_rows()):
        at = 0
        for group in [rows] if tensor.is_interleaved else [[one] for one in rows]:
            size = sum(one.size for one in group)
            yield box(expert, at, at + size, group)
            at += size
        if at < padded:
            yield box(expert, at, padded, [])


def _extra_states(tensors: Mapping[str, TensorSpec], options: MegatronLayout) -> Iterator[str]:
    """Yield the keys of the extra states of modules, one of which a loader asks for with its specs: all are empty."""
    modules: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        num_dims = ("decoder.layers." in name and options.stacks_layers) + (".experts.experts." in name)
        modules[module] = tensor.shape[:num_dims]
        if module.endswith(".linear_proj"):
            modules[f"{module.removesuffix('.linear_proj')}.core_attention"] = tensor.shape[:num_dims]
    for module, sizes in modules.items():
        for index in product(*map(range, sizes)) if sizes else [(0,)]:
            yield f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes or (1,)))}"


# --- common.pt --------------------------------------------------------------------------------------------------------
#
# Loaders read it before they ask for tensors. The arguments of the training program in it follow from the config of
# the source and from the tensors.

#: Further arguments of Megatron-LM with the value of a config field.
_SETTINGS = {
    "ffn_hidden_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
#: Arguments that are true if a layer has a tensor whose name ends with one of these.
_BY_TENSOR = {
    "add_bias_linear": ("linear_proj.bias",), "add_qkv_bias": ("linear_qkv.bias",),
    "qk_layernorm": (".k_layernorm.weight", ".kv_layernorm.weight"),
    "moe_router_enable_expert_bias": ("router.expert_bias",),
    "moe_shared_expert_gate": ("shared_experts.gate_weight",),
}  # fmt: skip
_EXPERTS, _SHARED = "experts.experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"
#: Version of the state dict in ``common.pt``.
_CHECKPOINT_VERSION = 3.0


def _common_state(
    rules: ChosenRules, tensors: Mapping[str, TensorSpec], *, stacks_layers: bool, is_padded: bool
) -> dict[str, object]:
    """The contents of ``common.pt``.

    Args:
        rules: of the layout.
        tensors: name to dtype and shape of the tensors in the files.
        stacks_layers: whether a tensor has a dim of layers.
        is_padded: whether the vocabulary is padded.
    """
    content = {"non_homogeneous_layers": not stacks_layers, "singleton_local_shards": False}
    common = {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0, "content_metadata": content}
    arguments = _arguments(rules, tensors)
    if is_padded:  # otherwise, Megatron-LM pads for its tensor parallel size
        arguments["padded_vocab_size"] = tensors[EMBEDDING].shape[0]
    return {**common, "args": Namespace(**arguments)}


def _arguments(rules: ChosenRules, tensors: Mapping[str, TensorSpec]) -> dict[str, object]:
    """The arguments of Megatron-LM that follow from the config, the tensors and the kinds of modules."""
    config, groups = known_sizes(rules.config), rules.groups
    layers = range(config["num_hidden_layers"])
    settings = ARGUMENTS | _SETTINGS | {name: field for group in groups for name, field in group.settings.items()}
    found = {name: config[field] for name, field in settings.items() if field in config}
    found |= {name: any(tensor.endswith(end) for tensor in tensors) for name, end in _BY_TENSOR.items()}
    found |= {name: value for group in groups for name, value in group.args.items()}
    experts = next((one.shape for name, one in tensors.items() if name.endswith(_EXPERTS)), None)
    if experts is not None:
        names = [(f"decoder.layers.{layer}.mlp.{_EXPERTS}", f"decoder.layers.mlp.{_EXPERTS}") for layer in layers]
        shared = (one.shape[-1] for name, one in tensors.items() if name.endswith(_SHARED))
        found |= {
            "num_experts": experts[-3], "moe_layer_freq": [int(any(one in tensors for one in each)) for each in names],
            "moe_shared_expert_intermediate_size": next(shared, None),
        }  # fmt: skip
    found["mtp_num_layers"] = len({name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")}) or None
    return found | rotary_arguments(config) | {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "no_save_optim": True, "no_save_rng": True,
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
    }  # fmt: skip

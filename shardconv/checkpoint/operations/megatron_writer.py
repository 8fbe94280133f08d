"""Lay out a source as a checkpoint of Megatron-Core in its format ``torch_dist``.

The files have full tensors, so that they are loaded with any tensor, pipeline and expert parallel size. Loaders read
whole chunks: each expert has its own, as have the gate and up projections.
"""

import json
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.operations.foreign_writer import ForeignFiles, NewFile
from shardconv.checkpoint.output.job import Job
from shardconv.checkpoint.sources.megatron_ranks import EMBEDDING
from shardconv.checkpoint.sources.megatron_source import FOLDER, LATEST_NAME, known_sizes
from shardconv.checkpoint.sources.planning import PlannedSource
from shardconv.checkpoint.sources.row_order import JoinedRows, Literal, Rows, WithCopies
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import Transform
from shardconv.files.containers.dcp import METADATA_NAME, Chunk, DcpFile, DcpTensor, metadata_pickle
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import TorchArchive
from shardconv.layouts import MEGATRON
from shardconv.layouts.layout_file import ChosenRules, layout_file
from shardconv.layouts.megatron_names import mtp_layers, names_in_files, split_layer
from shardconv.layouts.row_pieces import Piece, RowTensor, check_needed, find_copies, row_tensors_of_sources
from shardconv.plan.placement import round_up
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, option

_METADATA = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
#: Arguments of Megatron-LM, which loaders read from the checkpoint, to fields of the config.
_SETTINGS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim", "max_position_embeddings": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip
#: Version of the state dict in ``common.pt``.
_CHECKPOINT_VERSION = 3.0


class MegatronOptions(NamedTuple):
    """How a checkpoint of Megatron-Core is written.

    Attributes:
        num_files: number of files with chunks.
        is_stacked: whether a tensor has a dim of layers, instead of one tensor for each layer.
        vocabulary_multiple: the rows of the vocabulary are padded with zeros to a multiple of this, times the number of
            files; None for no padding.
    """

    num_files: int = 1
    is_stacked: bool = False
    vocabulary_multiple: int | None = None

    def padded(self, rows: int) -> int:
        """The padded number of rows of the vocabulary."""
        multiple = self.vocabulary_multiple
        return rows if multiple is None else round_up(rows, multiple * self.num_files)

    @property
    def settings(self) -> Job:
        """The options, by the names in a job."""
        return {
            "tp": self.num_files, "stacked layers": self.is_stacked,
            "vocabulary multiple": self.vocabulary_multiple,
        }  # fmt: skip


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


def lay_out_megatron(planned: PlannedSource, options: MegatronOptions) -> ForeignFiles:
    """Lay out the checkpoint.

    Raises:
        PlanError: if the layout does not have a tensor of the source, or its shape contradicts the config.
    """
    source = planned.source
    _check_unquantized(planned)
    rules = layout_file(MEGATRON).rules_for(source.config or {})
    config, copies = known_sizes(rules.config), find_copies(rules, source.specs)
    tensors = row_tensors_of_sources(rules.rules, source.specs, config)
    _check_complete(source, tensors, copies)
    _check_layers(rules, {tensor.name for tensor in tensors}, config["num_hidden_layers"])
    boxes = [*_boxes(tensors, config["num_hidden_layers"], options)]
    files = [DcpFile(f"__{number}_0.distcp") for number in range(options.num_files)]
    shards, found = _add_chunks(files, boxes)
    states = dict.fromkeys(_extra_states(found, options), files[0].add_object([None]))
    others = {
        METADATA_NAME: b"".join(metadata_pickle(found, states)),
        "common.pt": TorchArchive.of_object(_common(config, found, options)).data,
        "metadata.json": json.dumps(_METADATA).encode(),
    }
    return ForeignFiles(
        files=[NewFile(f"{FOLDER}/{file.name}", file.size, file.literals) for file in files],
        shards=shards,
        tensors={box.name: box.spec for box in boxes},
        transforms={box.name: _transform(box, copies) for box in boxes},
        texts={LATEST_NAME: FOLDER},
        others=[NewFile(f"{FOLDER}/{name}", len(data), {0: data}) for name, data in others.items()],
    )


def _add_chunks(files: Sequence[DcpFile], boxes: Sequence[_Box]) -> tuple[dict[str, Shards], dict[str, DcpTensor]]:
    """Add the boxes to the files, of about the same size; returns the positions of the data, and the tensors."""
    total, done = sum(box.num_bytes for box in boxes), 0
    shards: dict[str, Shards] = {}
    found: dict[str, DcpTensor] = {}
    for box in boxes:
        number = min(done * len(files) // max(total, 1), len(files) - 1)
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


def _common(
    config: Mapping[str, object], tensors: Mapping[str, DcpTensor], options: MegatronOptions
) -> dict[str, object]:
    """The contents of ``common.pt``: what loaders read before they ask for tensors."""
    settings = {name: config[field] for name, field in _SETTINGS.items() if field in config}
    settings |= {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "no_save_optim": True, "no_save_rng": True,
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
    }  # fmt: skip
    if options.vocabulary_multiple is not None:  # without it, Megatron-LM pads for its tensor parallel size
        settings["padded_vocab_size"] = tensors[EMBEDDING].spec.shape[0]
    content = {"non_homogeneous_layers": not options.is_stacked, "singleton_local_shards": False}
    common = {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0, "content_metadata": content}
    return {**common, "args": Namespace(**settings)}


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


def _check_complete(source: Source, tensors: Iterable[RowTensor], copies: Mapping[str, str]) -> None:
    """Check that each tensor of the source is in the files, or is a copy of one that is."""
    held = {name for tensor in tensors for name in tensor.sources}
    held |= {copy for copy, original in copies.items() if source.specs.get(original) == source.specs[copy]}
    if (name := next((name for name in source.specs if name not in held), None)) is not None:
        raise PlanError(
            f"{name}: layout megatron does not have this tensor for model type "
            f"{(source.config or {}).get('model_type')!r:.60} with this config: use {option(layout='native')}"
        )


class _Target(NamedTuple):
    """The names of a tensor in the files, and the index of its layer, if layers are stacked."""

    names: tuple[str, ...]
    layer: tuple[int, ...] = ()


def _target(tensor: RowTensor, num_layers: int, options: MegatronOptions) -> _Target:
    all_names = (tensor.name, *tensor.also)
    stacked = [found for name in all_names if options.is_stacked and (found := split_layer(name, num_layers))]
    if stacked:
        return _Target(tuple(name for name, _ in stacked), (stacked[0][1],))
    return _Target(tuple(name for one in all_names for name in names_in_files(one, num_layers)))


def _boxes(tensors: Sequence[RowTensor], num_layers: int, options: MegatronOptions) -> Iterator[_Box]:
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


def _boxes_of(tensor: RowTensor, target: _Target, num_layers: int, options: MegatronOptions) -> Iterator[_Box]:
    """Yield the chunks of a tensor: one for each segment of each expert, unless segments are interleaved."""
    dtype, shape = tensor.spec[:2]
    rows = shape[tensor.is_stacked]
    padded = options.padded(rows) if tensor.is_padded else rows
    full = (*[num_layers] * len(target.layer), *shape[: tensor.is_stacked], padded, *tensor.row_shape)

    def box(expert: int, start: int, stop: int, pieces: tuple[Piece, ...]) -> _Box:
        outer = (*target.layer, *[expert] * tensor.is_stacked)
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


def _extra_states(tensors: Mapping[str, DcpTensor], options: MegatronOptions) -> Iterator[str]:
    """Yield the keys of the extra states of modules, one of which a loader asks for with its specs: all are empty."""
    modules: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        num_dims = ("decoder.layers." in name and options.is_stacked) + (".experts.experts." in name)
        modules[module] = tensor.spec.shape[:num_dims]
        if module.endswith(".linear_proj"):
            modules[f"{module.removesuffix('.linear_proj')}.core_attention"] = tensor.spec.shape[:num_dims]
    for module, sizes in modules.items():
        for index in product(*map(range, sizes)) if sizes else [(0,)]:
            yield f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes or (1,)))}"

"""Checkpoints of Megatron-Core as a source: the tensors of a Hugging Face checkpoint as rows of GPTModel's tensors."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.checkpoint import engine
from shardconv.checkpoint.sources.dcp_files import (
    TRAINING_STATE,
    ChunkedFiles,
    ListedTensor,
    Metadata,
    list_dcp,
    stored_tensors,
)
from shardconv.checkpoint.sources.folder_files import SourceFolder
from shardconv.checkpoint.sources.layout_files import rank_files
from shardconv.checkpoint.sources.megatron_ranks import EMBEDDING, HEAD, list_ranks
from shardconv.checkpoint.sources.source import StoredTensors
from shardconv.checkpoint.sources.stored_tensors import read_values
from shardconv.checkpoint.sources.transforms import UNTIE, Concatenation, Rows, Transform, TransformsOnUse, WithCopies
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.containers.torch_files import UnpicklerProcess, list_arguments
from shardconv.files.folder import AnyPath
from shardconv.files.weight_formats import CONFIG_NAME, DCP_METADATA
from shardconv.layouts import MEGATRON
from shardconv.layouts.full_shapes import check_layers, positive
from shardconv.layouts.layout import Constant
from shardconv.layouts.layout_file import ChosenRules, layout_file, layout_head
from shardconv.layouts.megatron_names import is_mtp_layer, mtp_layers, name_in_rules, name_of_layer, split_layer
from shardconv.layouts.relation import find_target
from shardconv.layouts.row_tensors import (
    FoundTensors,
    RowTensor,
    check_needed,
    copies_of_layers,
    implied_tensors,
    permutations,
    row_tensors_of_files,
)
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import IntegrityError, PlanError, SourceError, option

_COPY_CONFIG = "copy it into the folder, or pass the config of the Hugging Face checkpoint"
#: The file with arguments of the training program.
COMMON_NAME = "common.pt"
_NO_ARGUMENTS = (
    "heads and other values of config.json that change no shape were not compared, as the checkpoint does not have the "
    "training program's arguments"
)
#: The arguments that have the value of a config field; those for rotary embeddings may be in a table of the config.
ARGUMENTS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "vocab_size": "vocab_size", "norm_epsilon": "rms_norm_eps",
}  # fmt: skip
_ROTARY = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
#: The type of rotary embeddings that ``use_rope_scaling`` is for, and the types whose position_embedding_type is rope.
_SCALED = "llama3"
_ROPE_TYPES = frozenset({"default", "linear", _SCALED})
#: A config field of models whose layers have different rotary bases.
_LOCAL_BASE = "rope_local_base_freq"
#: The config fields that say which layers do not have experts, and their usual values.
_DENSE = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}


def known_sizes(config: Mapping[str, object]) -> dict[str, Any]:
    """A config with the sizes that its class has by default.

    Raises:
        PlanError: if a size is not a positive integer.
    """
    heads = positive(config, "num_attention_heads")
    stated = {name: value for name, value in config.items() if value is not None}
    positive(config, "num_hidden_layers")
    sizes = {"num_key_value_heads": heads, "head_dim": positive(config, "hidden_size") // heads} | stated
    return {**sizes, "num_attention_heads * head_dim": heads * positive(sizes, "head_dim")}


def rotary_arguments(config: Mapping[str, object]) -> dict[str, object]:
    """The arguments for rotary embeddings that the config states, unless they differ between layers."""
    held = config.get("rope_parameters") or config.get("rope_scaling")
    stated = held if isinstance(held, dict) else {}
    if _LOCAL_BASE in config or any(isinstance(value, dict) for value in stated.values()):
        return {}
    fields = {"partial_rotary_factor": 1.0, **config, **stated}
    found = {name: fields[field] for name, field in _ROTARY.items() if fields.get(field) is not None}
    if (kind := stated.get("rope_type", stated.get("type", "default"))) in _ROPE_TYPES:
        found |= {"position_embedding_type": "rope", "use_rope_scaling": kind == _SCALED}
    if kind == _SCALED and "factor" in stated:
        found["rope_scaling_factor"] = stated["factor"]
    return found


class _View(NamedTuple):
    """A tensor by its name in the rules, as a range of a stored tensor, from a byte on."""

    spec: TensorSpec
    stored: str
    start: int


def read_megatron(
    folder: SourceFolder, config: Mapping[str, object] | None
) -> tuple[dict[str, TensorSpec], StoredTensors, tuple[str, ...], tuple[str, ...]]:
    """Read the positions of all weights, under the names of a Hugging Face checkpoint.

    Returns:
        Name to dtype and shape of each tensor, where they are stored, the contents that are left out, and assumptions.

    Raises:
        SourceError: if the config is missing, a tensor is unknown or missing, or contradicts the config.
    """
    if config is None:
        beside = folder.path.absolute().parent / CONFIG_NAME if isinstance(folder.path, Path) else None
        is_beside = beside is not None and beside.is_file()  # the folder is an iteration
        remedy = f"pass {option(config=beside)}" if is_beside else f"{_COPY_CONFIG} ({option('config')})"
        raise SourceError(
            f"{folder.path}: does not have a config.json, which has the model type and its sizes: {remedy}"
        )
    try:
        found = _find(folder, layout_file(MEGATRON).rules_for(config))
    except PlanError as error:
        raise SourceError(
            f"{folder.path}: {error.problem}: pass the config of this model ({option('config')})"
        ) from error
    specs, target_of = _source_tensors(found)
    stored = stored_tensors(folder.path, found.listed).with_layer(_rows(found, target_of))
    for name in _check_constants(stored, specs, implied_tensors(found.rules, found.sizes)):
        del specs[name], target_of[name]
    stored = stored.with_layer(found.tied_embedding() | _reordered(found, specs)).with_layer(_copies(found, specs))
    assumed = () if found.has_arguments else (_NO_ARGUMENTS,)
    return specs, stored, (*found.listed.left_out, *_removed(found.held, found.views)), assumed


class _Found(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
        rules: for its config.
        sizes: the config, with the sizes that its class has by default.
        listed: its tensors.
        views: name in the rules to tensor.
        held: the file tensors.
        has_head: whether it has a head beside the embedding that it is a copy of.
        has_arguments: whether the config was compared with the arguments of the training program.
    """

    rules: ChosenRules
    sizes: Mapping[str, Any]
    listed: ChunkedFiles
    views: Mapping[str, _View]
    held: FoundTensors
    has_head: bool
    has_arguments: bool

    def tied_embedding(self) -> dict[str, Transform]:
        """The embedding, compared with the copy in the head."""
        if not self.has_head:
            return {}
        ((name, spec),) = self.held.tensors[EMBEDDING].sources().items()
        return {name: WithCopies(Concatenation.of_tensor(name, spec), EMBEDDING, (HEAD,), UNTIE)}


def _find(folder: SourceFolder, rules: ChosenRules) -> _Found:
    """Find the tensors of a checkpoint.

    Raises:
        PlanError: if a tensor is unknown or missing, or contradicts the config.
    """
    check_unquantized(rules.config)
    sizes = known_sizes(rules.config)
    num_layers, is_legacy = sizes["num_hidden_layers"], DCP_METADATA not in folder.names
    with UnpicklerProcess() as process:
        listed = list_ranks(folder, rules, num_layers) if is_legacy else list_dcp(process, folder, _select)
        has_arguments = _check_arguments(process, folder, rules, sizes)
    views = _views(listed, num_layers)
    has_head = is_legacy and bool(sizes.get("tie_word_embeddings")) and views.pop(HEAD, None) is not None
    held = row_tensors_of_files(rules.rules, {name: view.spec for name, view in views.items()}, sizes)
    _check(held, listed, views, rules, sizes)
    return _Found(rules, sizes, listed, views, held, has_head, has_arguments)


def _source_tensors(found: _Found) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Name of each source tensor to its dtype and shape, and to the name of its file tensor."""
    specs: dict[str, TensorSpec] = {}
    target_of: dict[str, str] = {}
    for name, tensor in found.held.tensors.items():
        specs |= (sources := tensor.sources())
        target_of |= dict.fromkeys(sources, name)
    return specs, target_of


def _rows(found: _Found, target_of: Mapping[str, str]) -> TransformsOnUse[str]:
    """The rows of each source tensor in its file tensor."""
    held, views = found.held.tensors, found.views  # without the chunks
    rows_of = lru_cache(64)(lambda target: dict(_source_rows(held[target], views[target])))
    return TransformsOnUse(target_of, lambda name, target: rows_of(target)[name])


def _reordered(found: _Found, specs: dict[str, TensorSpec]) -> dict[str, Transform]:
    """The transforms of tensors whose elements are in another order, whose shapes are changed in ``specs``."""
    transforms: dict[str, Transform] = {}
    for name, order in permutations(found.rules.rules, specs, found.sizes).items():
        dtype = specs[name].dtype
        specs[name] = TensorSpec(dtype, order.source_shape)
        transforms[name] = engine.arrays.StridedTensor(name, num_bytes(dtype, (1,)), *order.to_source)
    return transforms


def _copies(found: _Found, specs: dict[str, TensorSpec]) -> dict[str, Transform]:
    """The tensors of MTP layers that are copies of others, which are added to ``specs``."""
    copies = copies_of_layers(found.rules, mtp_layers(found.views, found.sizes["num_hidden_layers"]))
    held = {copy: original for copy, original in copies if original in specs}  # no head where embeddings are tied
    specs |= {copy: specs[original] for copy, original in held.items()}
    return {copy: Concatenation.of_tensor(original, specs[original]) for copy, original in held.items()}


def check_unquantized(config: Mapping[str, object]) -> None:
    """Check that a config is not for a quantized model.

    Raises:
        PlanError: if it is.
    """
    if config.get(SETTINGS_KEY) is not None:
        raise PlanError(
            f"config.json has {SETTINGS_KEY}, and layout megatron does not have quantized tensors: remove "
            f"{SETTINGS_KEY} from a config of unquantized tensors"
        )


def _check_arguments(
    process: UnpicklerProcess, folder: SourceFolder, rules: ChosenRules, sizes: Mapping[str, Any]
) -> bool:
    """Check that the arguments of the training program agree with the config; returns whether they are stored.

    Raises:
        PlanError: if one is not.
        SourceError: if they cannot be read.
    """
    of_rank = (name for name in rank_files(layout_head(MEGATRON), folder.inner_names) if "/" in name)
    names = [*filter(COMMON_NAME.__eq__, folder.inner_names), *of_rank]
    if not names:
        return False
    folder.check_link(f"{folder.inner}{names[0]}")
    try:
        arguments = list_arguments(process, folder.weights_path / names[0])
    except SourceError as error:
        raise SourceError(
            f"{error.message}, or move it to another folder, to read the weights without a comparison of its arguments "
            "with the config"
        ) from error
    for name, (value, what) in _expected_arguments(rules, sizes).items():
        is_used = name != "num_query_groups" or arguments.get("group_query_attention")
        if name in arguments and is_used and arguments[name] != value:
            raise PlanError(f"{what} (expected {arguments[name]} by {names[0]})")
    return not ARGUMENTS.keys().isdisjoint(arguments)


def _expected_arguments(rules: ChosenRules, sizes: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    """Name of each argument that the config decides to its value, and a description of it."""
    fields = ARGUMENTS | {name: field for group in rules.groups for name, field in group.settings.items()}
    stated = [(name, field, sizes[field]) for name, field in fields.items() if field in sizes]
    stated += [(name, _ROTARY.get(name, name), value) for name, value in rotary_arguments(sizes).items()]
    groups, kind = layout_file(MEGATRON).groups.values(), sizes.get("model_type")
    of_type: dict[str, object] = {name: False for one in groups for name, value in one.args.items() if value is True}
    of_type |= {name: value for group in rules.groups for name, value in group.args.items()}
    found = {name: (value, f"{field} is {value} in the config") for name, field, value in stated}
    return found | {name: (value, f"{name} is {value} for model type {kind!r:.40}") for name, value in of_type.items()}


def _check_constants(
    stored: StoredTensors, found: Mapping[str, TensorSpec], implied: Mapping[str, float]
) -> Iterable[str]:
    """Check the values of tensors that the model does not have, as they are constant; returns their names.

    Raises:
        IntegrityError: if a value is not the constant.
    """
    specs = {name: found[name] for name in implied if name in found}
    for name, data in read_values(stored, specs):
        dtype, shape = specs[name][:2]
        if data != Constant(name, dtype, shape, implied[name]).data:
            raise IntegrityError(
                f"{name}: was trained, and the model of config.json has the constant {implied[name]:g} in its place: "
                f"use a config of a model type that has this tensor"
            )
    return specs


def _removed(held: FoundTensors, views: Mapping[str, _View]) -> Iterator[str]:
    """Yield descriptions of the padding that is removed."""
    padding = {
        views[name].spec.shape[0] - tensor.spec.shape[0] for name, tensor in held.tensors.items() if tensor.is_padded
    }
    yield from (f"{rows} rows of padding of the vocabulary" for rows in sorted(padding) if rows)


def _check(
    held: FoundTensors,
    listed: ChunkedFiles,
    views: Mapping[str, _View],
    rules: ChosenRules,
    sizes: Mapping[str, Any],
) -> None:
    """Check that the checkpoint has exactly the tensors of the model.

    Raises:
        PlanError: if one is unknown or missing, or has two names with different bytes.
    """
    if held.unknown:
        excluded = find_target(rules.others, held.unknown[0])
        fields = rules.fields_of(None if excluded is None else excluded.rule)
        raise PlanError(f"tensor {held.unknown[0]} is not one of a {sizes.get('model_type')!r:.40} model{fields}")
    for name, first in held.others.items():
        if listed.tensors[views[name].stored] != listed.tensors[views[first].stored]:
            raise PlanError(f"{name} and {first} are one tensor with two names, but have different bytes")
    names, num_layers = {tensor.name for tensor in held.tensors.values()}, sizes["num_hidden_layers"]
    check_layers((name for name in names if split_layer(name, num_layers)), sizes)
    check_needed(rules, names, [*range(num_layers), *mtp_layers(names, num_layers)])
    check_experts(names, rules, sizes)
    eh_projs = (f"decoder.layers.{layer}.eh_proj.weight" for layer in range(num_layers))
    if (wrong := next((name for name in eh_projs if name in names), None)) is not None:
        raise PlanError(f"{wrong} is of an MTP layer (expected none among the layers, num_hidden_layers {num_layers})")


def check_experts(names: Collection[str], rules: ChosenRules, config: Mapping[str, Any]) -> None:
    """Check that the layers with experts are those of the config, if it states them.

    Raises:
        PlanError: if a layer is not, or a field is not valid.
    """
    fields = chain.from_iterable(group.dense for group in rules.groups)
    stated = {field: config[field] for field in fields if config.get(field) is not None}
    layers = range(config["num_hidden_layers"])
    held = {layer for layer in layers if f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight" in names}
    if not held or not stated:
        return
    first, dense, step = (_DENSE | stated).values()
    if type(first) is not int or not isinstance(dense, list) or type(step) is not int or step < 1:
        raise PlanError(
            f"{', '.join(stated)} of the config are not valid (got {', '.join(map(repr, stated.values()))})"
        )
    expected = {layer for layer in layers if layer >= first and layer not in dense and not (layer + 1) % step}
    for layer in sorted(held ^ expected):
        has, other = ("experts", "an MLP") if layer in held else ("an MLP", "experts")
        raise PlanError(f"layer {layer} has {has} (expected {other} by {', '.join(stated)} of the config)")


def _select(_: AnyPath, listed: Metadata) -> tuple[dict[str, ListedTensor], tuple[str, ...]]:
    """The weights of the model, and descriptions of the other entries."""
    weights = {name: tensor for name, tensor in listed.tensors.items() if _kind(name) is None}
    kinds = {_kind(name) for name in (*listed.tensors, *listed.others)}
    return weights, tuple(sorted(filter(None, kinds)))


def _kind(name: str) -> str | None:
    """The kind of an entry that is not a weight; None for a weight."""
    if "_extra_state" in name:
        return "extra states"
    first = name.partition(".")[0].partition("/")[0]
    return first if TRAINING_STATE.search(first) or first.startswith("chained_") else None


def _views(listed: ChunkedFiles, num_layers: int) -> dict[str, _View]:
    """The tensors by their names in the rules.

    Raises:
        PlanError: if a layer is not in the config, or a tensor has two names with different bytes.
    """
    views: dict[str, _View] = {}
    for stored, (spec, _) in listed.tensors.items():
        for name, view in _views_of(stored, spec, num_layers):
            other = views.setdefault(name, view)
            if (listed.tensors[other.stored], other.start) != (listed.tensors[stored], view.start):
                raise PlanError(f"{stored} and {other.stored} are one tensor with two names, but have different bytes")
    return views


def _views_of(stored: str, spec: TensorSpec, num_layers: int) -> Iterator[tuple[str, _View]]:
    """Yield a stored tensor by its name in the rules: of a stacked one, the tensors of all layers."""
    if name_of_layer(stored, 0) is None:
        if is_mtp_layer(stored, num_layers):
            raise PlanError(f"{stored} is of a layer that the config does not have (num_hidden_layers {num_layers})")
        yield name_in_rules(stored, num_layers), _View(spec, stored, 0)
        return
    if spec.shape[:1] != (num_layers,):
        raise PlanError(f"{stored} has shape {list(spec.shape)} (expected {num_layers} layers, num_hidden_layers)")
    one = TensorSpec(spec.dtype, spec.shape[1:])
    for layer in range(num_layers):
        yield str(name_of_layer(stored, layer)), _View(one, stored, layer * num_bytes(*one[:2]))


def _source_rows(tensor: RowTensor, view: _View) -> Iterator[tuple[str, Concatenation]]:
    """Yield the source tensors in a tensor, as rows of it."""
    unit, at = num_bytes(tensor.spec.dtype, tensor.row_shape), view.start
    found: dict[str, list[Rows]] = {}
    for rows in chain.from_iterable(tensor.source_rows()):
        found.setdefault(rows.source, []).append(Rows(view.stored, rows.start * unit, rows.stop * unit, at))
        at += rows.size * unit
    return ((name, Concatenation.of_rows(sorted(ranges), unit)) for name, ranges in found.items())

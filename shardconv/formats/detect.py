"""The grid of every stored tensor of a quantized checkpoint, from names, dtypes, shapes and quantization settings.

Also the stored tensors that a model has by these settings, for a config without weights. Everything must fit together:
each layer has the tensors of its format with the dtypes and shapes that its settings give, and no tensor is left that
only quantized layers have. What does not fit is an error.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

from shardconv.formats.format import Scheme, Settings
from shardconv.formats.layer import QuantizedLayer
from shardconv.formats.settings import read_settings
from shardconv.plan.families.matcher import kept_layer_keys, without_numbers
from shardconv.plan.grid import NO_DIM, Grid, GridDim
from shardconv.plan.plan import TensorSpec, logical_tensors
from shardconv.plan.quantization import CACHE_SCALE, SETTINGS_KEY
from shardconv.support.errors import PlanError, option

#: A scale or zero point of keys or values.
_SCALE = re.compile(r"(?P<attention>.*attn[^.]*\.)(?P<of>[kv])_(?:scale|zero_point)")
_OTHER_SETTINGS = f"pass {option(config='FILE')} with the quantization_config of this checkpoint"


def with_grids(tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None) -> Mapping[str, TensorSpec]:
    """Add their grids to the tensors of quantized layers.

    Args:
        tensors: name to dtype and shape.
        config: the contents of config.json, with ``quantization_config``; None without a config.

    Raises:
        PlanError: if the quantization is not supported, or settings and tensors contradict each other.
    """
    table = (config or {}).get(SETTINGS_KEY)
    if table is None:
        return tensors
    if not isinstance(table, Mapping):
        raise PlanError(
            f"quantization_config is {table!r:.60} (expected a table): pass {option(config='FILE')} with it"
        )
    found = dict(tensors)
    for stem, stored in _layers(tensors, read_settings(table)):
        for suffix, spec in stored.items():
            found[stem + suffix] = spec
    for name, spec in tensors.items():
        if prod(spec.shape) == 1 and CACHE_SCALE.fullmatch(name) and found[name].grid is None:
            found[name] = spec._replace(grid=Grid("", "", spec.shape, (NO_DIM,) * len(spec.shape), ()))
    if table.get("kv_cache_scheme"):
        found |= {name: found[name]._replace(grid=grid) for name, grid in _cache_grids(found, config or {}).items()}
    return found


def stored_tensors(
    tensors: Mapping[str, TensorSpec], config: Mapping[str, object], matrices: Collection[str]
) -> dict[str, TensorSpec]:
    """The tensors of a model that is stored by quantization settings, with the usual dtypes.

    Args:
        tensors: name to dtype and shape of the tensors of the unquantized model.
        config: the contents of config.json, with ``quantization_config``.
        matrices: names of the weights that may be quantized, of linear layers and of experts.

    Raises:
        PlanError: if the settings are not supported, or do not determine the stored tensors.
    """
    table = config[SETTINGS_KEY]
    if not isinstance(table, Mapping):
        raise PlanError(f"quantization_config is {table!r:.60} (expected a table)")
    settings = read_settings(table)
    if chosen := next((key for key in _CHOICES if table.get(key)), None):
        raise PlanError(f"{chosen} selects layers in a way that only the tensors show")
    found: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        layer = _layer_for(name, spec, settings) if name in matrices else None
        stored = {"": spec} if layer is None else layer.stored(spec.shape)
        found |= {(name if layer is None else layer.stem) + suffix: one for suffix, one in stored.items()}
    if found.keys() == tensors.keys():
        raise PlanError(f"no layer of the model has a weight that {settings.method} is known to quantize")
    with_grids(found, config)
    return found


#: Settings that select the quantized layers of GPTQ and FP8 besides the lists of layers that are not quantized.
_CHOICES = ("dynamic", "lm_head", "modules_in_block_to_quantize", "modules_to_convert")


def _layer_for(name: str, spec: TensorSpec, settings: Settings) -> QuantizedLayer | None:
    """The layer that stores a weight; None if it is not quantized."""
    layer = name.removesuffix(".weight")
    if settings.ignoring(layer):
        return None
    closest = settings.closest(layer, settings.schemes)
    scheme = next((one for one in closest if one.format.is_for(spec.shape)), None)
    if scheme is None and closest and len(spec.shape) > 2:
        raise PlanError(f"{name} has the matrices of all experts, which libraries store in different ways")
    if scheme is None:
        return None
    form = scheme.format
    return QuantizedLayer(name.removesuffix(form.values.weight) + form.values.suffix, {}, scheme)


class _Kind:
    """Tensors with the values of quantized layers, whose names differ in numbers only.

    Args:
        name: the name of one of the tensors.
        schemes: the schemes that the layers may have.
        is_known: whether the checkpoint has a tensor whose name differs in numbers only.

    Attributes:
        companions: for each other tensor that a layer may have, how many characters of the name of its values to keep,
            as the end of a slice, and the text that follows these.
        layers: dtypes and shapes of these tensors to the layer that they form: where the common beginning of their
            names stops, and its tensors with grids by the ends of their names.
    """

    def __init__(self, name: str, schemes: Sequence[Scheme], is_known: Callable[[str], bool]) -> None:
        self.schemes = schemes
        ends = [(_stop(scheme), suffix) for scheme in schemes for suffix in scheme.format.companions]
        self.companions = [(stop, suffix) for stop, suffix in dict.fromkeys(ends) if is_known(name[:stop] + suffix)]
        self.layers: dict[tuple[TensorSpec | None, ...], tuple[int | None, Mapping[str, TensorSpec]]] = {}

    def layer(self, name: str, tensors: Mapping[str, TensorSpec]) -> tuple[str, Mapping[str, TensorSpec]]:
        """The common beginning of the names of a layer's tensors, and the tensors with grids by the ends."""
        stored = tuple([tensors.get(name[:stop] + suffix) for stop, suffix in self.companions])
        if (known := self.layers.get(stored)) is None:
            layers = [QuantizedLayer(name, tensors, scheme) for scheme in self.schemes]
            layer = min(layers, key=lambda layer: len([*layer.missing()]))
            grids = {suffix: tensors[layer.stem + suffix]._replace(grid=grid) for suffix, grid in layer.grids().items()}
            known = self.layers[stored] = _stop(layer.scheme), grids
        return name[: known[0]], known[1]


def _stop(scheme: Scheme) -> int | None:
    """The position at which a layer's name ends in the name of its values."""
    return -len(scheme.format.values.suffix) or None


def _layers(tensors: Mapping[str, TensorSpec], settings: Settings) -> Iterator[tuple[str, Mapping[str, TensorSpec]]]:
    """Yield each layer that has the values of a format, as :meth:`_Kind.layer`."""
    key, keys = (str, [*tensors]) if settings.names_numbers else (without_numbers, kept_layer_keys(tensors))
    kinds, known = dict[tuple[str, TensorSpec], _Kind](), set(keys)
    for found, (name, spec) in zip(zip(keys, tensors.values(), strict=True), tensors.items(), strict=True):
        if (kind := kinds.get(found)) is None:
            kind = kinds[found] = _Kind(name, _schemes(name, spec, settings), lambda other: key(other) in known)
        if kind.schemes:
            yield kind.layer(name, tensors)


def _schemes(name: str, spec: TensorSpec, settings: Settings) -> list[Scheme]:
    """The schemes that a tensor may have the values of; empty if it is not of a quantized layer."""
    candidates = [scheme for scheme in settings.schemes if _is_values(name, spec, scheme)]
    if not candidates:
        return []
    layer = candidates[0].layer(name)
    if ignored := settings.ignoring(layer):
        raise PlanError(
            f"{name} is quantized, but the settings leave {layer} unquantized ({ignored!r:.60}): {_OTHER_SETTINGS}"
        )
    if closest := settings.closest(layer, candidates):
        return closest
    raise PlanError(f"{name} is quantized, but no group of the settings has {layer} as a target: {_OTHER_SETTINGS}")


def _is_values(name: str, spec: TensorSpec, scheme: Scheme) -> bool:
    """Whether a tensor has the values of a layer in this format."""
    form = scheme.format
    if not name.endswith(form.values.suffix):
        return False
    if form.values.suffix not in ("", "weight"):  # no other tensor has this name
        return True
    return spec.dtype in form.values.dtypes and len(spec.shape) > 1


def _cache_grids(tensors: Mapping[str, TensorSpec], config: Mapping[str, object]) -> dict[str, Grid]:
    """The grids of scales of a KV cache with several elements, over the weight of the projection.

    Args:
        tensors: name to dtype, shape and grid, which quantized layers have.
        config: the contents of config.json.

    Raises:
        PlanError: if a scale does not have one element per KV head.
    """
    scales = {name: match for name in tensors if (match := _SCALE.fullmatch(name)) and prod(tensors[name].shape) != 1}
    matrices = logical_tensors(tensors) if scales else {}
    heads = _kv_heads(config)
    grids = {}
    for name, match in scales.items():
        weight = f"{match['of']}_proj.weight"
        matrix, shape = matrices.get(match["attention"] + weight), tensors[name].shape
        if matrix is None or not heads or matrix.shape[0] % heads or shape not in ((heads,), (heads, 1, 1)):
            raise PlanError(
                f"{name} has shape {list(shape)}, which is not supported (expected one element, or one per KV head, "
                f"of which there are {heads or 'an unknown number'}, beside a {weight}): quantize the KV cache with "
                f"one scale per layer"
            )
        dims = (GridDim(0, matrix.shape[0] // heads, 1, "KV head"), *(NO_DIM,) * (len(shape) - 1))
        grids[name] = Grid(name.removeprefix(match["attention"]), weight, matrix.shape, dims, ("output", "input"))
    return grids


def _kv_heads(config: Mapping[str, object]) -> int:
    """The number of KV heads in the config; 0 if it does not have one."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    heads = fields.get("num_key_value_heads", fields.get("num_attention_heads"))
    return heads if type(heads) is int and heads > 0 else 0

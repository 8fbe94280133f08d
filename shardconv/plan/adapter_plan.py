"""Adapters: the grids by which the tensors of a LoRA adapter of PEFT cover the weights of their base model.

A layer with weight W, which maps input to output features, has A of shape [rank, input], B of shape [output, rank] and,
with DoRA, a magnitude of shape [output]. Each covers W by a grid, so its placement follows from W's: B is sharded
where output features are, and A where input features are. An embedding maps the vocabulary to the embedding dim, so its
A covers the vocabulary. Tensors that replace tensors of the base model have the same placement.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from shardconv.plan.families.matcher import Matcher
from shardconv.plan.families.rule import STYLES, Rule
from shardconv.plan.grid import NO_DIM, Grid, GridDim
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import ModelRules, RuleSet
from shardconv.plan.tensor_groups import matcher_of
from shardconv.support.errors import PlanError

#: The beginning of the names of an adapter's tensors, before the name of the module in the base model.
PREFIX = "base_model.model."
#: Between the name of an adapted layer and the name of a parameter of its base that the adapter replaces.
_BASE_LAYER = ".base_layer"

#: Roles of tensors in the formula of the layer.
A, B, BIAS, MAGNITUDE = "A", "B", "bias", "magnitude"
#: Axes of the dims of tensors and weights.
OUTPUT, INPUT, _RANK = "output", "input", "rank"
#: For each tensor its dims.
_DIMS = {A: (_RANK, INPUT), B: (OUTPUT, _RANK), BIAS: (OUTPUT,), MAGNITUDE: (OUTPUT,)}
#: End of the name to the role of the tensor.
_LINEAR_SUFFIXES = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": BIAS,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
}
_EMBEDDING_SUFFIXES = {".lora_embedding_A": A, ".lora_embedding_B": B}
#: Role of a tensor of a linear layer to the end of the name that PEFT gives it.
SUFFIXES = {use: suffix for suffix, use in _LINEAR_SUFFIXES.items()}


class AdaptedLayer(Struct, frozen=True):
    """The tensors of an adapter for one layer.

    Attributes:
        module: the name of the layer in the base model.
        is_embedding: whether it is an embedding.
        tensors: role of a tensor, one of A, B, BIAS and MAGNITUDE, to its name in the adapter.
    """

    module: str
    is_embedding: bool
    tensors: Mapping[str, str]


class AdapterTensors(Struct, frozen=True):
    """The tensors of an adapter by their use.

    Attributes:
        layers: name of the module to the tensors of each adapted layer.
        replaced: name of a tensor of the base model to the tensor of the adapter that replaces it.
    """

    layers: Mapping[str, AdaptedLayer] = {}
    replaced: Mapping[str, str] = {}

    @classmethod
    def of_names(cls, names: Collection[str]) -> "AdapterTensors":
        """Classify tensors by their names.

        Raises:
            PlanError: if a name does not belong to a LoRA adapter, or the adapter of a layer is incomplete.
        """
        parts: dict[str, dict[str, str]] = {}
        replaced: dict[str, str] = {}
        for name in names:
            if not name.startswith(PREFIX):
                raise PlanError(f"{name}: is not a tensor of a PEFT adapter (expected a name with {PREFIX}...)")
            suffix = _suffix(name)
            if suffix:
                module = name.removeprefix(PREFIX).removesuffix(suffix)
                _add(parts.setdefault(module, {}), {**_LINEAR_SUFFIXES, **_EMBEDDING_SUFFIXES}[suffix], name)
            elif ".lora_" in name or ".token_adapter." in name:
                raise PlanError(
                    f"{name}: is not supported (expected lora_A, lora_B or lora_magnitude_vector): {_MERGE}"
                )
            else:
                _add(replaced, base_name(name), name)
        layers = {module: _layer(module, tensors) for module, tensors in parts.items()}
        return cls(layers, replaced)


_MERGE = "merge the adapter into its base model with PEFT"
_ONE = "save the adapter again with PEFT"
_OTHER_BASE = "pass the base model that the adapter was trained on"
#: Padding of a weight is padding of its adapter, whose products are zero.
_PADDED = (1, 1)


def _suffix(name: str) -> str:
    """The end of the name, which identifies the use of the tensor; "" for a tensor that replaces one of the base."""
    return next((suffix for suffix in (*_LINEAR_SUFFIXES, *_EMBEDDING_SUFFIXES) if name.endswith(suffix)), "")


def _add(names: dict[str, str], use: str, name: str) -> None:
    """Add the tensor for a use, which must be the only one."""
    if (other := names.setdefault(use, name)) != name:
        raise PlanError(f"{name}: is for the same weight as {other} (expected one of the two): {_ONE}")


def base_name(name: str) -> str:
    """The name of the base tensor that a tensor of an adapter replaces."""
    module, _, parameter = name.removeprefix(PREFIX).rpartition(".")
    return f"{module.removesuffix(_BASE_LAYER)}.{parameter}"


def _layer(module: str, tensors: Mapping[str, str]) -> AdaptedLayer:
    for part in (A, B):
        if part not in tensors:
            found = next(iter(tensors.values()))
            raise PlanError(f"{found}: the adapter of {module} does not have its {part}: complete the adapter")
    if BIAS in tensors and MAGNITUDE in tensors:
        raise PlanError(f"{tensors[BIAS]}: is not supported beside a magnitude vector, as PEFT does not compute it")
    endings = {tensors[part].endswith(tuple(_EMBEDDING_SUFFIXES)) for part in (A, B)}
    if len(endings) > 1:
        raise PlanError(f"{module}: A is for a linear layer and B for an embedding, or the reverse: save it again")
    return AdaptedLayer(module, endings.pop(), tensors)


def in_base(name: str, base: Collection[str], rules: RuleSet) -> str | None:
    """The name on disk of a tensor or module of the base model, which may lack a prefix; None without one."""
    return next((candidate for candidate in other_names(name, rules) if candidate in base), None)


def other_names(name: str, rules: RuleSet) -> tuple[str, ...]:
    """A name of a tensor or module of the base model, and its names with and without a prefix."""
    prefixes = [prefix for model_rules in rules.models for prefix in model_rules.family.prefix]
    return (
        name,
        *(name.removeprefix(prefix) for prefix in prefixes),
        *(f"{prefix}{name}" for prefix in prefixes),
    )


def with_adapter_grids(
    tensors: Mapping[str, TensorSpec],
    rules: RuleSet,
    base: Mapping[str, TensorSpec] | None,
    *,
    fan_in_fan_out: bool = False,
) -> dict[str, TensorSpec]:
    """The tensors of an adapter, each with its grid over a weight of the base model.

    Args:
        tensors: name to dtype and shape.
        rules: rules of the base model.
        base: name to dtype and shape of the tensors of the base model; None if only its config is known.
        fan_in_fan_out: whether square weights that no rule shards are stored as [input, output].

    Raises:
        PlanError: if the adapter is incomplete, or does not fit the base model.
    """
    found = AdapterTensors.of_names(tensors)
    fit = _Fit(tensors, rules, base, fan_in_fan_out, matcher_of(rules))
    grids: dict[str, Grid] = {}
    for layer in found.layers.values():
        grids |= fit.layer_grids(layer)
    for target, name in found.replaced.items():
        grids[name] = fit.replaced_grid(target, name)
    if base is not None:
        _check_distinct([*found.replaced, *(f"{module}.weight" for module in found.layers)], base, rules)
    return {name: spec._replace(grid=grids[name]) for name, spec in tensors.items()}


def _check_distinct(targets: Collection[str], base: Collection[str], rules: RuleSet) -> None:
    """Refuse two names of one tensor of the base model, with and without a prefix."""
    known: dict[str, str] = {}
    for target in targets:
        found = in_base(target, base, rules)
        if found is not None and (other := known.setdefault(found, target)) != target:
            raise PlanError(
                f"{target} and {other}: are both {found} of the base model (expected one of the two): {_ONE}"
            )


class _Fit(Struct, frozen=True):
    """An adapter on its base model; see :func:`with_adapter_grids`, and :func:`matcher_of` for ``matching``."""

    tensors: Mapping[str, TensorSpec]
    rules: RuleSet
    base: Mapping[str, TensorSpec] | None
    fan_in_fan_out: bool
    matching: tuple[list[tuple[Rule, ModelRules]], Matcher]

    def layer_grids(self, layer: AdaptedLayer) -> dict[str, Grid]:
        """The grid of each tensor of an adapted layer."""
        weight = f"{layer.module}.weight"
        sizes = self._sizes(layer)
        shape = self._base_shape(weight, layer.tensors[A])
        dims = self._weight_dims(layer, sizes, shape)
        logical = tuple(sizes[dim] for dim in dims)
        if shape is not None and shape != logical:
            raise PlanError(
                f"{layer.tensors[B]}: is for a weight of {list(logical)} ({' x '.join(dims)}), and {weight} of the "
                f"base model has {list(shape)}: {_OTHER_BASE}"
            )
        return {
            name: Grid(
                _suffix(name),
                ".weight",
                logical,
                tuple(NO_DIM if dim == _RANK else GridDim(dims.index(dim)) for dim in _DIMS[part]),
                dims,
                padding=_PADDED,
                prefix=PREFIX,
            )
            for part, name in layer.tensors.items()
        }

    def replaced_grid(self, target: str, name: str) -> Grid:
        """The grid of a tensor that replaces one of the base model, which covers it element by element."""
        shape = self._base_shape(target, name)
        own = self.tensors[name].shape
        if shape is not None and shape != own:
            raise PlanError(
                f"{name}: has shape {list(own)}, and {target} of the base model {list(shape)}: {_OTHER_BASE}, or "
                f"resize its embeddings"
            )
        suffix = f".{target.rpartition('.')[2]}"
        old = f"{_BASE_LAYER}{suffix}" if name.endswith(f"{_BASE_LAYER}{suffix}") else suffix
        dims = tuple(map(GridDim, range(len(own))))
        return Grid(old, suffix, own, dims, ("",) * len(own), padding=(1,) * len(own), prefix=PREFIX)

    def _sizes(self, layer: AdaptedLayer) -> dict[str, int]:
        """The output features, input features and rank of an adapted layer, on which its tensors agree."""
        sizes: dict[str, int] = {}
        for part, name in layer.tensors.items():
            shape = self.tensors[name].shape
            if len(shape) != len(_DIMS[part]):
                raise PlanError(
                    f"{name}: has shape {list(shape)} (expected {len(_DIMS[part])} dims): adapters of convolutions and "
                    f"of parameters with more dims are not supported: {_MERGE}"
                )
            for dim, size in zip(_DIMS[part], shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise PlanError(
                        f"{name}: has {dim} {size} (expected {sizes[dim]}, as in {layer.tensors[A]}): the adapter is "
                        f"damaged"
                    )
        return sizes

    def _base_shape(self, target: str, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the base model; None if only its config is known."""
        if self.base is None:
            return None
        if (found := in_base(target, self.base, self.rules)) is None:
            raise PlanError(f"{name}: the base model does not have {target}: {_OTHER_BASE}; of a tied head, {_MERGE}")
        return self.base[found].shape

    def _weight_dims(
        self, layer: AdaptedLayer, sizes: Mapping[str, int], shape: tuple[int, ...] | None
    ) -> tuple[str, str]:
        """The names of the weight's dims: [output, input], or the reverse for embeddings and transposed weights."""
        straight, reverse = (OUTPUT, INPUT), (INPUT, OUTPUT)
        rule = self._rule(layer)
        if layer.is_embedding or rule is None or STYLES[rule.style].weight is not None:
            return reverse if layer.is_embedding or (rule is not None and rule.transposed) else straight
        fitting = [dims for dims in (straight, reverse) if shape is None or shape == tuple(sizes[dim] for dim in dims)]
        return reverse if fitting == [reverse] or (len(fitting) > 1 and self.fan_in_fan_out) else straight

    def _rule(self, layer: AdaptedLayer) -> Rule | None:
        """The rule of the weight that is adapted; None if no rule matches it, which the planner refuses."""
        ruled, matcher = self.matching
        match = matcher.match(f"{layer.module}.weight")
        return None if match is None else ruled[match.pattern_index][0]

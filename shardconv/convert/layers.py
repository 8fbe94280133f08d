"""Conversion of all linear layers or all embeddings of a module along one ``dim``.

Owns the choice of these layers, of layers that are converted with them because they are tied, and the refusals.
"""

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch
from torch import nn

from shardconv.convert.engine import Conversion, LayerSpec, Preparation, convert
from shardconv.convert.feature_checks import check_chains, check_inputs
from shardconv.convert.forward_reader import Problem
from shardconv.convert.overrides import Overrides, is_read_only
from shardconv.convert.unchanged_counts import (
    IN_CODE,
    Examined,
    check_counts,
    count_overrides,
    examine_forwards,
    holders_of,
    named_layers,
    owners_outside,
    unaffected_counts,
)
from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    ParallelLinear,
    RowParallelLinear,
    VocabParallelClassifier,
)
from shardconv.layers.parallel_module import ParallelModule, own_parameters
from shardconv.plan.placement import IndivisibleError
from shardconv.support.arguments import checked

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _torch_class(kind: type[ParallelModule]) -> type[nn.Module]:
    """The class of torch whose layers become layers of a parallel class."""
    return nn.Linear if issubclass(kind, ParallelLinear) else nn.Embedding


@checked
def convert_parallel_linear(
    module: ModuleT,
    dim: int | None = None,
    *,
    gather_output: bool = False,
    layer_class: type[ParallelLinear] = ParallelLinear,
    counts: Collection[str] | None = None,
    group: GroupLike = None,
) -> ModuleT:
    """Convert every nn.Linear in a module, or the module itself if it is one, to a parallel layer, in place.

    All ranks have to hold the same values, which is checked. A second conversion with the same ``dim`` changes nothing.
    An embedding whose weight is tied to a linear layer is converted with it, so that they stay tied.

    Args:
        module: a module, or a single nn.Linear.
        dim: the dim of (in_features, out_features) that is sharded: -1 or 1 for column parallel, 0 for row parallel,
            None for neither.
        gather_output: with dim=-1, all-gather the outputs; then ``out_features`` need not divide, and layers with
            padding become :class:`~shardconv.layers.VocabParallelClassifier`.
        layer_class: the class of the converted layers: :class:`~shardconv.layers.ParallelLinear` for the class that
            ``dim`` selects, or a class derived from it.
        counts: the names of attributes of the modules that contain the layers, such as "num_heads", which count units
            of the features that are sharded. Each is divided by the tensor parallel size, once. ``()`` changes none;
            by default, the code of these modules is examined.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``module``, whose layers have the same parameters as before, now shards.

    Raises:
        ValueError: if a size does not divide, a layer was converted otherwise, is of a class derived from nn.Linear, or
            is tied to a layer that is not in ``module`` or cannot be sharded with it; if an nn.Sequential would pass a
            shard to a layer that needs all features; if the forward of a module that contains the layers divides their
            local features by a number that ``counts`` does not name; or if the ranks hold different values. The model
            is then unchanged.

    Example:
        >>> convert_parallel_linear(torch.nn.Linear(20, 30), dim=-1)
        ColumnParallelLinear(in_features=20, out_features=30, bias=True, dim=-1, tp=1)
    """
    spec = LayerSpec(layer_class.class_for(dim), {"gather_output": gather_output})
    return _convert_layers(module, spec, as_axis(group), counts)


@checked
def convert_parallel_embedding(module: ModuleT, dim: int | None = None, *, group: GroupLike = None) -> ModuleT:
    """Convert every nn.Embedding in a module, or the module itself if it is one, to a parallel layer, in place.

    Otherwise as :func:`convert_parallel_linear`. A linear layer whose weight is tied to an embedding is
    converted with it, and still gathers its output.

    Args:
        module: a module, or a single nn.Embedding.
        dim: the dim of the embedding table that is sharded: 0 for vocabulary-parallel, 1 or -1 for
            embedding-dim-parallel, None for neither.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``module``.

    Raises:
        ValueError: as :func:`convert_parallel_linear`.

    Example:
        >>> convert_parallel_embedding(torch.nn.Embedding(64, 8, padding_idx=1), dim=0)
        ParallelEmbedding(64, 8, padding_idx=1, dim=0, tp=1)
    """
    return _convert_layers(module, LayerSpec(ParallelEmbedding, {"dim": -1 if dim == 1 else dim}), as_axis(group))


def _convert_layers(module: ModuleT, spec: LayerSpec, axis: Axis, counts: Collection[str] | None = None) -> ModuleT:
    convert(module, partial(_prepare, module, spec, axis, counts), axis)
    for layer in module.modules():
        if isinstance(layer, ParallelLinear):
            layer.prevent_fusion()  # modules outside of this one may hold it
    if _is_column(spec) and not spec.options["gather_output"]:
        check_inputs(module, axis.size)
    return module


def _prepare(module: nn.Module, spec: LayerSpec, axis: Axis, counts: Collection[str] | None) -> Preparation:
    specs = _specs(module, spec, axis.size)
    conversions = []
    for name, (layer, own) in specs.items():
        try:
            if not _is_converted(name, layer, own, axis):
                conversions.append(_conversion(name, layer, own, axis))
        except ValueError as error:
            raise ValueError(f"{layer_label(module, name, layer)}: {error}") from error
    _check_owners(module, conversions)
    replacements = {one.module: one.replacement for one in conversions}
    prepared = Preparation(conversions, _overrides(module, replacements, axis, counts))
    check_chains(module, prepared.replacements(), axis.size, is_planned=False)
    return prepared


def _overrides(
    module: nn.Module, replacements: Mapping[nn.Module, ParallelModule], axis: Axis, counts: Collection[str] | None
) -> list[Overrides]:
    """The local counts of the modules that contain layers, whose code is examined."""
    layers = (one for one in replacements.values() if isinstance(one, ParallelLinear))
    if axis.size == 1 or all(one.dim is None for one in layers):
        return []
    if counts is not None and not counts:
        return unaffected_counts(replacements)
    outside = owners_outside(module, replacements)
    inside = (one for one in module.modules() if any(layer in replacements for _, layer in named_layers(one)))
    overrides = count_overrides([*outside, *inside], counts or (), axis.size)
    check_counts(examine_forwards(module, replacements, overrides, outside), partial(_remedy, axis.size), ValueError)
    return overrides


def _remedy(tp: int, examined: Examined, problem: Problem | None) -> str:
    if problem is None:
        return "pass the names of attributes with numbers of heads as counts=, or counts=() if none has to be changed"
    count = problem.divisor
    if count is None:
        return f"pass gather_output=True; {IN_CODE}; or, if it is correct on each rank, counts=()"
    if count.owner is not examined.module:
        return f"set it to {count.value // tp} where only this module reads it, and pass counts=()"
    if is_read_only(type(count.owner), count.attribute):
        return f"pass the attributes that property {count.attribute} reads as counts=; or, if it is per rank, counts=()"
    return f'pass counts=["{count.attribute}"] to divide it by {tp}; or, if it already is per rank, counts=()'


def _specs(module: nn.Module, spec: LayerSpec, tp: int) -> dict[str, tuple[nn.Module, LayerSpec]]:
    """Each layer that is converted, by name, and the layer that it becomes."""
    kind = _torch_class(spec.kind)
    found = {name: child for name, child in module.named_modules() if isinstance(child, kind)}
    if not found:
        raise ValueError(f"this {type(module).__name__} does not contain {kind.__name__} layers")
    specs = {name: (child, _with_padding(spec, child, tp)) for name, child in found.items()}
    tied = {name: (child, _tied_spec(spec, child, name)) for name, child in tied_modules(module, found.values())}
    return specs | tied


def _is_column(spec: LayerSpec) -> bool:
    return issubclass(spec.kind, ColumnParallelLinear)


def _with_padding(spec: LayerSpec, layer: nn.Module, tp: int) -> LayerSpec:
    """The layer with padding where gathered outputs allow it and its size needs it."""
    is_gathered = _is_column(spec) and spec.options["gather_output"]
    is_padded = is_gathered and isinstance(layer, nn.Linear) and layer.out_features % tp
    return spec._replace(kind=VocabParallelClassifier) if is_padded else spec


def _tied_spec(spec: LayerSpec, layer: nn.Module, name: str) -> LayerSpec:
    """The layer that shards the same dim of a weight that is tied to one of ``spec``."""
    if issubclass(spec.kind, ParallelLinear) and isinstance(layer, nn.Embedding):
        return LayerSpec(ParallelEmbedding, {"dim": {None: None, -1: 0, 0: -1}[spec.kind.dim]})
    if spec.kind is ParallelEmbedding and isinstance(layer, nn.Linear):
        dim = spec.options["dim"]
        if dim == 0:
            return LayerSpec(VocabParallelClassifier, {"gather_output": True})
        return LayerSpec(ParallelLinear if dim is None else RowParallelLinear, {"gather_output": False})
    raise ValueError(
        f"{name}: a {type(layer).__name__} shares a parameter with a layer to shard, and cannot be sharded with it: "
        f"pass the other layers in an nn.ModuleList"
    )


def _is_converted(name: str, layer: nn.Module, spec: LayerSpec, axis: Axis) -> bool:
    """Whether a layer is parallel already.

    Raises:
        ValueError: if it was converted with other options.
    """
    if not isinstance(layer, ParallelModule):
        return False
    options = {"dim": spec.kind.dim, **spec.options}
    is_same = layer.axis.ranks == axis.ranks and all(getattr(layer, name) == value for name, value in options.items())
    if is_same:
        wanted = Conversion.prepare(name, layer, spec._replace(kind=type(layer)), axis).replacement
        is_same = wanted.placements == layer.placements
    if not is_same:
        expected = ", ".join(f"{option}={value}" for option, value in options.items())
        raise ValueError(
            f"is already converted, to {layer} (expected {expected}): load the unsharded model to convert it in "
            f"another way, or convert the other layers in an nn.ModuleList without it"
        )
    return True


def _conversion(name: str, layer: nn.Module, spec: LayerSpec, axis: Axis) -> Conversion:
    """The conversion of an unsharded layer.

    Raises:
        ValueError: if the layer may not compute what torch's class computes, or its size does not divide.
    """
    _check_unsharded(layer, _torch_class(spec.kind))
    try:
        return Conversion.prepare(name, layer, spec, axis)
    except ValueError as error:
        can_pad = isinstance(error.__cause__, IndivisibleError) and _is_column(spec)
        remedy = (
            ". To pad it, pass gather_output=True; for logits that stay sharded, call "
            "VocabParallelClassifier.convert_parallel_linear"
        )
        raise ValueError(f"{error}{remedy * can_pad}") from error


def _check_unsharded(layer: nn.Module, expected: type[nn.Module]) -> None:
    parameters = own_parameters(layer)
    if type(layer) is not expected or "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise ValueError(
            f"is a {type(layer).__name__} with parameters {', '.join(parameters)}, not torch's {expected.__name__}, "
            f"and may compute something else: convert the modules that hold layers of torch"
        )
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    if "forward" in vars(layer) or any(gradient.is_sparse for gradient in gradients):
        raise ValueError("has a forward of its own, or a sparse gradient: remove these before the conversion")


def _check_owners(module: nn.Module, conversions: Sequence[Conversion]) -> None:
    """Refuse to shard a parameter in place that a module outside uses as the full tensor."""
    layers = [one.replacement for one in conversions]
    shards = list(dict.fromkeys(getattr(layer, own) for layer in layers for own, _ in layer.own_shards()))
    if shards and (owner := owner_outside(module, shards)) is not None:
        names = ", ".join(name or "the layer" for name, _ in tied_modules(module, [owner]))
        raise ValueError(
            f"{names}: tied to {owner}, which is not in this {type(module).__name__} and would compute with a shard: "
            f"convert both in one call, as in an nn.ModuleList, or the whole model"
        )


def tied_modules(module: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Find the other modules in ``module`` that share a parameter with one of the layers."""
    layers = list(layers)
    owned = {id(parameter) for layer in layers for parameter in own_parameters(layer).values()}
    return [
        (name, child)
        for name, child in module.named_modules()
        if not any(child is layer for layer in layers)
        and any(id(parameter) in owned for parameter in own_parameters(child).values())
    ]


def layer_label(module: nn.Module, name: str, layer: nn.Module) -> str:
    """Format the name of a layer for messages, with the names of the layers that it is tied to."""
    label = name or "the layer"
    tied = [other or type(child).__name__ for other, child in tied_modules(module, [layer])]
    return f"{label} (tied to {', '.join(tied)})" if tied else label


def owner_outside(module: nn.Module, parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    """Find a module outside of ``module`` that holds one of the parameters; None if there is none.

    Args:
        module: a module.
        parameters: parameters of modules in it, without duplicates. Nothing but this list and the modules may refer to
            them.
    """
    inside = {id(child._parameters): child._parameters for child in module.modules()}  # noqa: SLF001 - who holds them
    owners = Counter(id(parameter) for held in inside.values() for parameter in held.values())
    counts = zip(parameters, _reference_counts(parameters), strict=True)
    held_elsewhere = [one for one, count in counts if count - owners[id(one)] > _references_without_owner()]
    if not held_elsewhere or not holders_of(held_elsewhere, "_parameters", inside):
        return None
    gc.collect()  # the owner may be unreachable, in a reference cycle
    return next(iter(holders_of(held_elsewhere, "_parameters", inside)), None)


def _reference_counts(parameters: Sequence[nn.Parameter]) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in parameters]


@cache
def _references_without_owner() -> int:
    """Count the references to a parameter that is in a list only, which depends on the version of Python."""
    return _reference_counts([nn.Parameter(torch.empty(0))])[0]

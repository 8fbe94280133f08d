"""Checks that a layer that needs all features does not get the local features of a column parallel layer.

Owns the list of elementwise layers, which compute each feature by itself. Checks nn.Sequential before a conversion,
where the order of the layers is known, and the inputs of layers that are not parallel when they run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from shardconv.layers import ColumnParallelLinear, ParallelDropout, ParallelLinear
from shardconv.layers.features import check_features, is_shard_of
from shardconv.layers.parallel_module import ParallelModule

_Step = tuple[str, nn.Module]
_Producer = tuple[str, ColumnParallelLinear]

#: Classes whose input has a fixed number of features.
_FIXED_FEATURES = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
#: Classes that compute each element by itself, or dropout masks that are the same for all features of a channel.
_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    ParallelDropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink,
    nn.Threshold, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
#: Their forwards: a derived class that has one of these computes the same.
_ELEMENTWISE_FORWARDS = {kind.forward for kind in _ELEMENTWISE}
#: A module of transformers all of whose classes compute each element by itself, some with parameters.
_ACTIVATIONS = "transformers.activations"
_NOT_KNOWN = "is not known to compute each feature by itself"


def check_chains(
    module: nn.Module, replacements: Mapping[nn.Module, ParallelModule], tp: int, *, is_planned: bool
) -> None:
    """Check that no layer that needs all features gets a shard of them, in modules with a known order of calls.

    These are nn.Sequential, torch's transformer layers and nn.AdaptiveLogSoftmaxWithLoss. A Sequential in which the
    sizes of neighbors do not fit is not called as a chain, and is not checked.

    Args:
        module: the module that is converted.
        replacements: the parallel layers that layers become.
        tp: tensor parallel size.
        is_planned: whether a plan or policy names the layers that are sharded. Then a class that torch does not have is
            assumed to compute with shards. Otherwise it is refused, because its computation is unknown.

    Raises:
        ValueError: if such a layer gets a shard; names both layers.
    """
    for layers in _chains(module) if tp > 1 else ():
        found = _find_mismatch([(label, replacements.get(layer, layer)) for label, layer in layers], is_planned)
        if found is not None:
            raise ValueError(_describe(*found, tp))


def _describe(first: _Producer, second: _Step, tp: int) -> str:
    (producer, layer), (name, consumer) = first, second
    size, is_linear = layer.out_features, isinstance(consumer, nn.Linear)
    # the caller's code does not have the name of a parallel layer
    kind = "Linear" if isinstance(consumer, ParallelLinear) else type(consumer).__name__
    needs = "needs all features" if is_linear or _num_features(consumer) else _NOT_KNOWN
    other = f", convert {name} with dim=0 in another call" if is_linear else ""
    unless = f"{name} does not read them" if is_linear else "all operations between linear layers are elementwise"
    return (
        f"{name}: this {kind} {needs}, and column parallel {producer} shards them (got {-(-size // tp)} per rank, "
        f"expected {size}): pass gather_output=True{other}, or, if {unless}, pass the linear layers in an nn.ModuleList"
    )


def _chains(module: nn.Module) -> Iterator[list[_Step]]:
    """Yield the layers, with their names, of each module in ``module`` that calls them in a known order."""
    nested: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child not in nested and _is_chain(child):
            yield list(_steps(name, child, nested))
        for path in _paths(child):
            layers = [(f"{name}.{own}" if name else own, child.get_submodule(own)) for own in path]
            nested |= {layer for _, layer in layers}
            parts = [_steps(label, layer, nested) if _is_chain(layer) else [(label, layer)] for label, layer in layers]
            yield [*chain.from_iterable(parts), (name or "the layer", child)]


def _paths(module: nn.Module) -> list[list[str]]:
    """The layers that a module of torch calls one after the other before it computes with all features."""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if isinstance(module.activation, nn.Module):
            return [["linear1", "activation", "dropout", "linear2"]]
        return [["linear1", "dropout", "linear2"] if _is_elementwise_function(module.activation) else ["linear1"]]
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        return [["head"], *([f"tail.{place}"] for place in range(len(module.tail)))]
    return []


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _steps(name: str, sequential: nn.Module, nested: set[nn.Module]) -> Iterator[_Step]:
    """Yield names and layers in the order of calls, with the layers of a nested Sequential in its place."""
    for own, layer in sequential.named_modules(remove_duplicate=False):  # layers can occur twice
        if not own or "." in own:
            continue
        label = f"{name}.{own}" if name else own
        if _is_chain(layer):
            nested.add(layer)
            yield from _steps(label, layer, nested)
        else:
            yield label, layer


def _find_mismatch(layers: list[_Step], is_planned: bool) -> tuple[_Producer, _Step] | None:
    """Find the first column parallel layer whose shard reaches a layer that may need all features, and that layer."""
    producer: _Producer | None = None
    found: tuple[_Producer, _Step] | None = None
    for label, layer in layers:
        if type(layer).forward is nn.Module.forward:  # cannot be called
            return None
        if producer is not None and not is_elementwise(layer):
            needed = _num_features(layer)
            if needed not in (None, producer[1].out_features):
                return None
            if not (_computes_with_shards(layer) or (is_planned and not is_of_torch(layer))):
                found = found or (producer, (label, layer))
        if isinstance(layer, ColumnParallelLinear) and not layer.gather_output:
            producer = label, layer
        elif not is_elementwise(layer):
            producer = None
    return found


def is_elementwise(layer: nn.Module) -> bool:
    """Whether a layer is known to compute each feature by itself, with gradients that are local, too."""
    if type(layer).__module__ == _ACTIVATIONS:
        return next(layer.parameters(), None) is None  # whose gradients would be for the local features only
    return type(layer).forward in _ELEMENTWISE_FORWARDS and "forward" not in vars(layer)


def _is_elementwise_function(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of half of the features returns half of its result for all features, tried on an example.

    False for a function that raises, such as one for another device.
    """
    example = torch.linspace(-4, 4, 16, device="cpu").view(1, 2, 8)
    try:
        halves = torch.cat([function(half) for half in example.chunk(2, -1)], -1)
        return torch.allclose(halves, function(example), atol=1e-4)
    except Exception:  # noqa: BLE001 - any error of the caller's code
        return False


def _computes_with_shards(layer: nn.Module) -> bool:
    """Whether a layer was converted for inputs whose features are sharded."""
    return isinstance(layer, ParallelModule) and (not isinstance(layer, ParallelLinear) or layer.dim == 0)


def is_of_torch(module: nn.Module) -> bool:
    """Whether the code that computes a module's output is torch's."""
    forward = type(module).forward
    return forward is not nn.Module.forward and str(getattr(forward, "__module__", "")).startswith("torch.nn.")


def _num_features(layer: nn.Module) -> int | None:
    """Return the number of features that a layer needs; None if that is unknown."""
    if isinstance(layer, nn.Linear):
        return layer.in_features or None  # 0 of a lazy layer
    return layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else None


@dataclass(frozen=True)
class _InputCheck:
    """A forward pre-hook that raises if the input of a layer has only the local features."""

    label: str
    tp: int

    def __call__(self, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        """Check the first input; the layer checks others."""
        input = inputs[0] if inputs else None
        needed = _num_features(layer)
        if needed and isinstance(input, Tensor) and input.dim() and is_shard_of(input.shape[-1], needed, self.tp):
            check_features(input, needed, self.tp, f"{self.label} ({layer})".__str__)


def check_inputs(module: nn.Module, tp: int) -> None:
    """Register a check of their inputs with the layers of a converted module that are not parallel."""
    for name, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()  # noqa: SLF001 - of an earlier conversion
        if tp > 1 and type(child) in _FIXED_FEATURES and not any(isinstance(hook, _InputCheck) for hook in hooks):
            child.register_forward_pre_hook(_InputCheck(name or "the layer", tp))

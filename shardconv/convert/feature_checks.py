"""Checks that no layer that needs all features gets the local features of a column parallel layer.

Owns the check of nn.Sequential before a conversion, where the order of the layers is known, and the check of the inputs
of layers that are not parallel, when they run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardconv.layers import ColumnParallelLinear, RowParallelLinear
from shardconv.layers.features import check_features, is_shard_of
from shardconv.layers.sharding import ParallelModule

#: Classes whose input has a fixed number of features, each with the function that reads the number.
_FEATURES: dict[type[nn.Module], Callable[[Any], int]] = {
    nn.Linear: lambda layer: layer.in_features,
    nn.LayerNorm: lambda layer: layer.normalized_shape[-1],
    nn.RMSNorm: lambda layer: layer.normalized_shape[-1],
}
#: Classes that compute with all features along ``dim``, however many there are; where it is None, along the last.
_ACROSS_FEATURES = (nn.Softmax, nn.LogSoftmax, nn.GLU)
#: Classes that compute each element by itself.
_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip


def check_chains(module: nn.Module, becomes: Mapping[nn.Module, ParallelModule], tp: int) -> None:
    """Check that no nn.Sequential passes a shard of features to a layer that needs all of them.

    A Sequential in which the sizes of neighbors do not fit is not called as a chain, and is not checked.

    Args:
        module: the module that is converted.
        becomes: the parallel layers that layers become.
        tp: tensor parallel size.

    Raises:
        ValueError: with the names of both layers, if one does.
    """
    nested: set[nn.Module] = set()
    for name, child in module.named_modules():
        if tp == 1 or child in nested or not _is_chain(child):
            continue
        layers = [(label, becomes.get(layer, layer)) for label, layer in _steps(name, child, nested)]
        if (found := _break_in(layers)) is None:
            continue
        (first, producer), (second, consumer) = found
        size = producer.out_features
        other = f", convert {second} with dim=0 in another call" if isinstance(consumer, nn.Linear) else ""
        raise ValueError(
            f"{second}: the input of this {type(consumer).__name__} is sharded (got {-(-size // tp)} features per rank "
            f"from column parallel {first}, expected all {size}): pass gather_output=True{other}, or pass layers that "
            f"are not called one after the other in an nn.ModuleList"
        )


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _steps(name: str, chain: nn.Module, nested: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Name and layer in the order of calls, with the layers of a nested Sequential in its place."""
    for own, layer in chain._modules.items():  # noqa: SLF001 - also layers that occur twice
        label = f"{name}.{own}" if name else own
        if layer is not None and _is_chain(layer):
            nested.add(layer)
            yield from _steps(label, layer, nested)
        elif layer is not None:
            yield label, layer


_Step = tuple[str, Any]


def _break_in(layers: list[_Step]) -> tuple[_Step, _Step] | None:
    """The first column parallel layer whose shard reaches a layer that needs all features, and that layer."""
    producer: _Step | None = None
    found: tuple[_Step, _Step] | None = None
    for label, layer in layers:
        if producer is not None and (needed := _needed(layer, producer[1].out_features)) is not None:
            if needed != producer[1].out_features:
                return None
            is_row = isinstance(layer, RowParallelLinear)
            found = found or (None if is_row else (producer, (label, layer)))
        if isinstance(layer, ColumnParallelLinear) and not layer.gather_output:
            producer = label, layer
        elif not isinstance(layer, _ELEMENTWISE):
            producer = None
    return found


def _needed(layer: nn.Module, given: int) -> int | None:
    """The number of features that a layer needs, None if unknown; ``given`` if it needs all features of its input."""
    if isinstance(layer, _ACROSS_FEATURES):
        return None if layer.dim == 0 else given  # 0 is the batch
    read = next((read for kind, read in _FEATURES.items() if isinstance(layer, kind)), None)
    return None if read is None else read(layer)


@dataclass(frozen=True)
class _InputCheck:
    """A forward pre-hook that raises if the input of a layer has only the local features."""

    label: str
    tp: int

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Check the first input; other wrong inputs are left to the layer."""
        input = inputs[0] if inputs else None
        needed = _needed(layer, 0)
        if needed and isinstance(input, Tensor) and input.dim() and is_shard_of(input.shape[-1], needed, self.tp):
            check_features(input, needed, self.tp, f"{self.label} ({layer})".__str__)


def check_inputs(module: nn.Module, tp: int) -> None:
    """Register a check of their inputs with the layers of a converted module that are not parallel."""
    for name, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()  # noqa: SLF001 - of an earlier conversion
        if tp > 1 and type(child) in _FEATURES and not any(isinstance(hook, _InputCheck) for hook in hooks):
            child.register_forward_pre_hook(_InputCheck(name or "the layer", tp))

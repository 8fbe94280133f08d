"""Checks that no layer that needs all features gets the local features of a column parallel layer.

Owns the check of nn.Sequential before a conversion, where the order of the layers is known, and the check of the inputs
of layers that are not parallel, when they run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shardconv.layers import ColumnParallelLinear, RowParallelLinear
from shardconv.layers.features import check_features, is_shard_of
from shardconv.layers.parallel_module import ParallelModule

#: Classes whose input has a fixed number of features.
_FIXED_FEATURES = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
#: Classes that compute with all features along ``dim``, however many there are; where it is None, along the last.
_ACROSS_FEATURES = (nn.Softmax, nn.LogSoftmax, nn.GLU)
#: Classes that compute each element by itself.
_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip


def check_chains(module: nn.Module, replacements: Mapping[nn.Module, ParallelModule], tp: int) -> None:
    """Check that no nn.Sequential passes a shard of features to a layer that needs all of them.

    A Sequential in which the sizes of neighbors do not fit is not called as a chain, and is not checked.

    Args:
        module: the module that is converted.
        replacements: the parallel layers that layers become.
        tp: tensor parallel size.

    Raises:
        ValueError: with the names of both layers, if one does.
    """
    nested: set[nn.Module] = set()
    for name, child in module.named_modules():
        if tp == 1 or child in nested or not _is_chain(child):
            continue
        layers = [(label, replacements.get(layer, layer)) for label, layer in _steps(name, child, nested)]
        if (found := _find_mismatch(layers)) is None:
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
    """Yield names and layers in the order of calls, with the layers of a nested Sequential in its place."""
    for own, layer in chain.named_modules(remove_duplicate=False):  # layers can occur twice
        if not own or "." in own:
            continue
        label = f"{name}.{own}" if name else own
        if _is_chain(layer):
            nested.add(layer)
            yield from _steps(label, layer, nested)
        else:
            yield label, layer


_Step = tuple[str, nn.Module]
_Producer = tuple[str, ColumnParallelLinear]


def _find_mismatch(layers: list[_Step]) -> tuple[_Producer, _Step] | None:
    """Find the first column parallel layer whose shard reaches a layer that needs all features, and that layer."""
    producer: _Producer | None = None
    found: tuple[_Producer, _Step] | None = None
    for label, layer in layers:
        if producer is not None and (needed := _num_features(layer, producer[1].out_features)) is not None:
            if needed != producer[1].out_features:
                return None
            is_row = isinstance(layer, RowParallelLinear)
            found = found or (None if is_row else (producer, (label, layer)))
        if isinstance(layer, ColumnParallelLinear) and not layer.gather_output:
            producer = label, layer
        elif not isinstance(layer, _ELEMENTWISE):
            producer = None
    return found


def _num_features(layer: nn.Module, given: int) -> int | None:
    """Return the number of features that a layer needs, ``given`` if it needs all that there are; None if unknown."""
    if isinstance(layer, _ACROSS_FEATURES):
        return None if layer.dim == 0 else given  # 0 is the batch
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else None


@dataclass(frozen=True)
class _InputCheck:
    """A forward pre-hook that raises if the input of a layer has only the local features."""

    label: str
    tp: int

    def __call__(self, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        """Check the first input; the layer checks others."""
        input = inputs[0] if inputs else None
        needed = _num_features(layer, 0)
        if needed and isinstance(input, Tensor) and input.dim() and is_shard_of(input.shape[-1], needed, self.tp):
            check_features(input, needed, self.tp, f"{self.label} ({layer})".__str__)


def check_inputs(module: nn.Module, tp: int) -> None:
    """Register a check of their inputs with the layers of a converted module that are not parallel."""
    for name, child in module.named_modules():
        hooks = child._forward_pre_hooks.values()  # noqa: SLF001 - of an earlier conversion
        if tp > 1 and type(child) in _FIXED_FEATURES and not any(isinstance(hook, _InputCheck) for hook in hooks):
            child.register_forward_pre_hook(_InputCheck(name or "the layer", tp))

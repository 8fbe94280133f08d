"""The conversion engine: check a conversion on all ranks, then change the modules in place.

Owns the order of every conversion. :mod:`~shardconv.convert.layers` prepares conversions from ``dim=``, and
:mod:`~shardconv.convert.model` from the plan of a family, a plan file or policies; the engine knows none of these.

Modules and parameters keep their identity: whatever refers to them still does, so shared modules stay shared and tied
parameters stay tied. Nothing is changed before all ranks have passed all checks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardconv.convert.converted_model import refuse_methods
from shardconv.convert.multihead_attention import check_readers, turn_off_fused_paths
from shardconv.convert.overrides import Overrides, apply_overrides
from shardconv.distributed import Axis
from shardconv.distributed.agreement import digest, same_on_all_ranks
from shardconv.layers.parallel_module import ParallelModule, own_parameters
from shardconv.layers.runtime_classes import converted_class
from shardconv.layers.sharding import bytes_of, take_shard


class LayerSpec(NamedTuple):
    """The parallel layer that a module becomes.

    Attributes:
        kind: the parallel class.
        options: keyword arguments of its ``set_up``; for an embedding also its ``dim``.
    """

    kind: type[ParallelModule]
    options: Mapping[str, object]


class Conversion(NamedTuple):
    """A module and the parallel module that it becomes.

    Attributes:
        name: the module's name in the model.
        module: the module, unchanged so far.
        replacement: the parallel module. It has the module's attributes, and its parameters, which are still full.
    """

    name: str
    module: nn.Module
    replacement: ParallelModule

    @classmethod
    def prepare(cls, name: str, module: nn.Module, spec: LayerSpec, axis: Axis) -> "Conversion":
        """Construct the parallel module; the module and its parameters are not changed.

        Raises:
            ValueError: if the module cannot be sharded like this.
        """
        replacement: Any = object.__new__(converted_class(spec.kind, type(module)))
        replacement.__dict__.update(module.__dict__)
        replacement.name_in_model = name
        replacement.set_up(axis, **spec.options)
        return cls(name, module, replacement)

    def apply(self) -> None:
        """Change the module into its replacement, in place."""
        self.module.__class__ = type(self.replacement)
        self.module.__dict__.update(self.replacement.__dict__)
        self.replacement.describe_parameters()


#: A tensor to compare over the ranks: the name of its module, its name there, and the tensor.
NamedTensor = tuple[str, str, Tensor]


def own_tensors(modules: Iterable[tuple[str, nn.Module]]) -> list[NamedTensor]:
    """The parameters and buffers of modules, by the name of the module and their name in it."""
    tensors = [
        (label, name, tensor)
        for label, module in modules
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]
    # some models register buffers in the order of a set, which differs between processes
    return sorted(tensors, key=lambda one: one[:2])


class Preparation(NamedTuple):
    """A conversion that is ready to be checked.

    Attributes:
        conversions: the modules that become parallel.
        overrides: the per-rank attributes of modules.
        description: text that has to be the same on all ranks, such as the rules.
    """

    conversions: Sequence[Conversion]
    overrides: Sequence[Overrides] = ()
    description: str = ""

    def replacements(self) -> dict[nn.Module, ParallelModule]:
        """Each module that becomes parallel, with its replacement."""
        return {one.module: one.replacement for one in self.conversions}

    def tensors(self) -> list[NamedTensor]:
        """The parameters of the modules that become parallel."""
        owned = ((one.name, own_parameters(one.module)) for one in self.conversions)
        return [(label, name, parameter) for label, parameters in owned for name, parameter in parameters.items()]


def convert(
    module: nn.Module,
    prepare: Callable[[], Preparation],
    axis: Axis,
    tensors: Sequence[NamedTensor] | None = None,
    everyone: Axis | None = None,
) -> None:
    """Convert modules in place. If a check fails on any rank, all ranks raise, and the modules are unchanged.

    Args:
        module: the module that contains them.
        prepare: prepares the conversion, and raises if this rank cannot convert.
        axis: the ranks.
        tensors: the tensors whose values have to be the same on all ranks; by default the parameters of the modules
            that become parallel.
        everyone: the ranks of all data groups, if these share experts; the checks include all of them.
    """
    prepared, problem = Preparation(()), None
    try:
        prepared = prepare()
        check_readers(module, prepared.replacements())
    except Exception as error:  # noqa: BLE001 - all ranks have to raise, whatever it is
        problem = error
    compared = prepared.tensors() if tensors is None and problem is None else tensors or ()
    check_same_on_all_ranks(compared, problem, everyone or axis, prepared.description)
    shard_parameters([one.replacement for one in prepared.conversions])
    for conversion in prepared.conversions:
        conversion.apply()
    apply_overrides(module, prepared.overrides, axis)
    turn_off_fused_paths(module)
    refuse_methods(module)


def check_same_on_all_ranks(
    named: Sequence[NamedTensor], problem: Exception | None, axis: Axis, description: str = ""
) -> None:
    """Check that all ranks are about to convert the same layers with the same values. All ranks call it.

    Args:
        named: the tensors.
        problem: the error that prevents this rank from converting; raised after all ranks have reported theirs.
        axis: the ranks.
        description: text that has to be the same, too.

    Raises:
        ValueError: if ranks differ, or another rank has a problem.
    """
    if axis.size > 1:
        shapes = [(label, name, value.shape, value.dtype, value.is_meta) for label, name, value in named]
        described = digest(repr((shapes, description, str(problem))).encode())
        if not same_on_all_ranks([described], axis)[0] and problem is None:
            raise ValueError(
                f"the ranks {list(axis.ranks)} do not hold the same layers, of the same shapes and on the same kind of "
                f"device, or one cannot convert them"
            )
    if problem is not None:
        raise problem
    named = [found for found in named if not found[-1].is_meta] if axis.size > 1 else []
    if not named:
        return
    equal = same_on_all_ranks([_digest_of(tensor) for *_, tensor in named], axis)
    pairs = zip(named, equal, strict=True)
    labels = list(dict.fromkeys(label or "the layer" for (label, *_), same in pairs if not same))
    if labels:
        raise ValueError(
            f"the ranks {list(axis.ranks)} hold different values in {', '.join(labels[:3])}"
            f"{' ...' if labels[3:] else ''}: seed all ranks alike, or load the same checkpoint on all, before "
            f"converting"
        )


def _digest_of(tensor: Tensor) -> int:
    return digest(bytes_of(tensor.cpu()).numpy().data)


class _Shards(NamedTuple):
    """A parameter, and this rank's shard of it and of its gradient."""

    parameter: nn.Parameter
    shard: Tensor
    gradient: Tensor | None


def shard_parameters(replacements: Sequence[ParallelModule]) -> None:
    """Shard parameters in place, with their gradients; a parameter that several modules share is sharded once.

    All shards are made before the first parameter is changed, so that running out of memory changes nothing.
    """
    made: dict[int, _Shards] = {}
    for layer in replacements:
        for name, placement in layer.own_shards():
            parameter, rank = getattr(layer, name), layer.axis.rank
            if id(parameter) not in made:
                gradient = None if parameter.grad is None else take_shard(parameter.grad, placement, rank).clone()
                made[id(parameter)] = _Shards(parameter, take_shard(parameter.data, placement, rank).clone(), gradient)
    for parameter, shard, gradient in made.values():
        parameter.grad = None
        parameter.data = shard
        parameter.grad = gradient

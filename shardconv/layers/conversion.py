"""Plain layers become parallel ones, in place, with their values, options, hooks and ties.

Layers and parameters keep their identity: what held them still does, so what is shared or tied stays so. All is checked
before anything changes.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.layers.embedding import ParallelEmbedding
from shardconv.layers.linear import ParallelLinear, VocabParallelClassifier
from shardconv.layers.sharding import ParallelModule, take_shard

_PLAIN: dict[type[ParallelModule], type[nn.Module]] = {
    ParallelLinear: nn.Linear,
    VocabParallelClassifier: nn.Linear,
    ParallelEmbedding: nn.Embedding,
}


class _Target(NamedTuple):
    """What a layer is to become."""

    kind: type[ParallelModule]
    dim: int | None
    options: dict[str, Any]


class _Change(NamedTuple):
    """A layer, its name, and the layer that it becomes, which has all but the shards."""

    name: str
    layer: nn.Module
    shell: ParallelModule


def convert_parallel_linear(
    module: nn.Module, dim: int | None = None, *, gather_output: bool = False, group: GroupLike = None
) -> Any:
    """Cut every nn.Linear in a module over the ranks.

    The ranks have to hold the same values; that is checked. A second conversion with the same ``dim`` changes nothing.
    An embedding whose weight is tied to that of a linear layer is converted with it, so that they stay tied.

    Args:
        module: a module, or a bare nn.Linear.
        dim: the dim of (in_features, out_features) that is cut: -1 or 1 for columns, 0 for rows, None for none.
        gather_output: with dim=-1, whether the layers give full outputs.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``module``, converted in place; of a bare nn.Linear a new layer, and the old one is as it was.

    Raises:
        ValueError: if a size does not divide, a layer was converted otherwise, is of a class derived from nn.Linear, or
            is tied to what cannot be cut with it, or the ranks hold different values. The model is then as it was.

    Example:
        >>> convert_parallel_linear(torch.nn.Linear(20, 30), dim=-1)
        ParallelLinear(in_features=20, out_features=30, bias=True, dim=-1, tp=1)
    """
    return _convert(module, _Target(ParallelLinear, dim, {"gather_output": gather_output}), as_axis(group))


def convert_parallel_embedding(module: nn.Module, dim: int | None = None, *, group: GroupLike = None) -> Any:
    """Cut every nn.Embedding in a module over the ranks; otherwise as :func:`convert_parallel_linear`.

    A linear layer whose weight is tied to that of an embedding is converted with it, and still gives full outputs.

    Args:
        module: a module, or a bare nn.Embedding.
        dim: the dim of the table that is cut: 0 for words, 1 or -1 for features, None for none.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``module``, converted in place; of a bare nn.Embedding a new layer, and the old one is as it was.

    Raises:
        ValueError: as :func:`convert_parallel_linear`.

    Example:
        >>> convert_parallel_embedding(torch.nn.Embedding(64, 8, padding_idx=1), dim=0)
        ParallelEmbedding(64, 8, padding_idx=1, dim=0, tp=1)
    """
    return _convert(module, _Target(ParallelEmbedding, dim, {}), as_axis(group))


def _convert(module: nn.Module, target: _Target, axis: Axis) -> Any:
    found = {name: child for name, child in module.named_modules() if _is_kind(child, target.kind)}
    targets = dict.fromkeys(found, target)
    for name, child in _tied(module, found.values()):
        found[name], targets[name] = child, _tied_target(target, child, name)
    changes = [
        _Change(name, child, _shell(name, child, targets[name], axis))
        for name, child in found.items()
        if not _is_converted(name, child, targets[name], axis)
    ]
    _check_values(changes, axis)
    if changes and changes[0].layer is module:
        return _new_layer(changes[0].shell)
    done: set[int] = set()
    for change in changes:
        _cut_parameters(change.shell, done)
        change.layer.__class__ = type(change.shell)
        change.layer.__dict__.update(change.shell.__dict__)
    return module


def _is_kind(child: nn.Module, kind: type[ParallelModule]) -> bool:
    return isinstance(child, (kind, _PLAIN[kind]))


def _is_converted(name: str, child: nn.Module, target: _Target, axis: Axis) -> bool:
    if not isinstance(child, ParallelModule):
        return False
    shell: Any = object.__new__(type(child))
    shell.__dict__.update(child.__dict__)
    shell.dim = target.dim
    shell.set_up(axis)
    if shell.placements != child.placements or child.axis.ranks != axis.ranks:
        label = name or "the layer"
        raise ValueError(f"{label}: is split already, as {child}; load the plain model to split it otherwise")
    return True


def _shell(name: str, child: nn.Module, target: _Target, axis: Axis) -> ParallelModule:
    """The layer that ``child`` becomes: all of its state, but for shards.

    Raises:
        ValueError: if it cannot become one.
    """
    label = name or "the layer"
    plain = _PLAIN[target.kind]
    parameters = _own_parameters(child)
    if type(child) is not plain or "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise ValueError(
            f"{label}: is a {type(child).__name__} with parameters {', '.join(parameters)}, not a plain "
            f"{plain.__name__}, and may compute something else; convert the parts of the model that hold plain layers"
        )
    shell: Any = object.__new__(target.kind)
    shell.__dict__.update(child.__dict__)
    shell.dim = target.dim
    try:
        shell.set_up(axis, **target.options)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    return shell


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _tied(module: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Other modules that hold a parameter of one of the layers."""
    layers = list(layers)
    owned = {id(parameter) for layer in layers for parameter in _own_parameters(layer).values()}
    others = {}
    for name, child in module.named_modules():
        if any(child is layer for layer in layers):
            continue
        if any(id(parameter) in owned for parameter in _own_parameters(child).values()):
            others[name] = child
    return list(others.items())


def _tied_target(target: _Target, child: nn.Module, name: str) -> _Target:
    """What a layer becomes that is tied to one that becomes ``target``: what cuts the same dim of the weight."""
    if target.kind is ParallelLinear and isinstance(child, (nn.Embedding, ParallelEmbedding)):
        return _Target(ParallelEmbedding, {None: None, -1: 0, 1: 0, 0: 1}.get(target.dim), {})
    if target.kind is ParallelEmbedding and isinstance(child, (nn.Linear, ParallelLinear)):
        dim = {None: None, 0: -1, 1: 0, -1: 0}.get(target.dim)
        return _Target(VocabParallelClassifier, dim, {"gather_output": dim == -1})
    raise ValueError(
        f"{name}: a {type(child).__name__} has a parameter in common with a layer that is to be split, and cannot be "
        f"split with it"
    )


def _check_values(changes: list[_Change], axis: Axis) -> None:
    """Check that all ranks hold the same bytes."""
    parameters = [
        parameter for change in changes for parameter in _own_parameters(change.layer).values() if not parameter.is_meta
    ]
    if axis.size == 1 or not parameters:
        return
    sums = torch.stack([_byte_sum(parameter) for parameter in parameters]).to(parameters[0].device)
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=axis.group)
    if not torch.equal(low, high):
        names = [change.name or "the layer" for change in changes]
        raise ValueError(
            f"the ranks {list(axis.ranks)} hold different values in {', '.join(names[:3])}{' ...' if names[3:] else ''}"
            f": seed all ranks alike, or load the same checkpoint on all, before converting"
        )


def _byte_sum(parameter: nn.Parameter) -> torch.Tensor:
    data = parameter.detach().contiguous().view(-1)
    return data.view(torch.uint8).sum(dtype=torch.int64) if data.numel() else data.new_zeros((), dtype=torch.int64)


def _cut_parameters(shell: ParallelModule, done: set[int]) -> None:
    """Cut the parameters, in place: what refers to one of them still does."""
    for name, placement in shell.own_shards():
        parameter = getattr(shell, name)
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        gradient, parameter.grad = parameter.grad, None
        parameter.data = take_shard(parameter.data, placement, shell.axis.rank).clone()
        if gradient is not None:
            parameter.grad = take_shard(gradient, placement, shell.axis.rank).clone()
    shell.describe_parameters()


def _new_layer(shell: ParallelModule) -> ParallelModule:
    """The layer with parameters of its own."""
    shell.__dict__["_parameters"] = dict(shell.__dict__["_parameters"])
    for name, parameter in _own_parameters(shell).items():
        setattr(shell, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    _cut_parameters(shell, set())
    return shell

"""Plain layers become parallel ones, in place, with their values, options, hooks and ties.

Layers and parameters keep their identity: what held them still does, so what is shared or tied stays so. All is checked
before anything changes.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from shardconv.distributed import Axis, GroupLike, as_axis, reduce_from_tp
from shardconv.layers.chain import check_chains, watch_inputs
from shardconv.layers.embedding import ParallelEmbedding
from shardconv.layers.linear import ParallelLinear, VocabParallelClassifier, weight_dim
from shardconv.layers.sharding import ParallelModule, take_shard
from shardconv.layers.ties import layer_label, own_parameters, owner_outside, tied_modules
from shardconv.plan.placement import IndivisibleError

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
        dim: the dim of (in_features, out_features) that is sharded: -1 or 1 for column parallel, 0 for row parallel,
            None for neither.
        gather_output: with dim=-1, all-gather the outputs; then ``out_features`` need not divide, and layers with
            padding become :class:`~shardconv.layers.VocabParallelClassifier`.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``module``, converted in place; of a bare nn.Linear a new layer, and the old one is as it was.

    Raises:
        ValueError: if a size does not divide, a layer was converted otherwise, is of a class derived from nn.Linear, or
            is tied to a layer that is not in ``module`` or cannot be sharded with it; if an nn.Sequential would pass a
            shard to a layer that needs all features; or if the ranks hold different values. The model is then as it
            was.

    Example:
        >>> convert_parallel_linear(torch.nn.Linear(20, 30), dim=-1)
        ParallelLinear(in_features=20, out_features=30, bias=True, dim=-1, tp=1)
    """
    return convert_linear(module, dim, ParallelLinear, gather_output=gather_output, group=group)


def convert_linear(
    module: nn.Module,
    dim: int | None,
    kind: type[ParallelModule],
    *,
    gather_output: bool = False,
    group: GroupLike = None,
) -> Any:
    """:func:`convert_parallel_linear`, to a class of parallel linear layers."""
    return _convert(module, _Target(kind, dim, {"gather_output": gather_output}), as_axis(group))


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
    changes: list[_Change] = []
    problem: ValueError | None = None
    try:
        changes = _changes(module, target, axis)
    except ValueError as error:
        problem = error
    tensors = [
        (change.name, name, parameter) for change in changes for name, parameter in own_parameters(change.layer).items()
    ]
    check_alike(tensors, problem, axis)
    if changes and changes[0].layer is module:
        return _new_layer(changes[0].shell)
    cut_parameters([change.shell for change in changes])
    for change in changes:
        change.layer.__class__ = type(change.shell)
        change.layer.__dict__.update(change.shell.__dict__)
        change.shell.describe_parameters()
    if _is_column(target) and not target.options["gather_output"]:
        watch_inputs(module, axis.size)
    return module


def _is_column(target: _Target) -> bool:
    return issubclass(target.kind, ParallelLinear) and weight_dim(target.dim) == 0


def _changes(module: nn.Module, target: _Target, axis: Axis) -> list[_Change]:
    found = {name: child for name, child in module.named_modules() if _is_kind(child, target.kind)}
    if not found:
        raise ValueError(f"there is no {_PLAIN[target.kind].__name__} in this {type(module).__name__}")
    targets = {name: _padded_target(target, child, axis.size) for name, child in found.items()}
    for name, child in tied_modules(module, found.values()):
        found[name], targets[name] = child, _tied_target(target, child, name)
    changes = []
    for name, child in found.items():
        try:
            if not _is_converted(child, targets[name], axis):
                changes.append(_Change(name, child, _shell(name, child, targets[name], axis)))
        except ValueError as error:
            raise ValueError(f"{layer_label(module, name, child)}: {error}") from error
    check_chains(module, {change.layer: change.shell for change in changes}, axis.size)
    if not (changes and changes[0].layer is module):
        _check_owners(module, changes)
    return changes


def _padded_target(target: _Target, layer: nn.Module, tp: int) -> _Target:
    """The target of one layer: full outputs can come of padded ones, too."""
    is_gathered = _is_column(target) and target.options["gather_output"]
    is_padded = is_gathered and isinstance(layer, nn.Linear) and layer.out_features % tp
    return target._replace(kind=VocabParallelClassifier) if is_padded else target


def _check_owners(module: nn.Module, changes: Sequence[_Change]) -> None:
    """Refuse to shard a parameter in place that a module outside uses as the full tensor."""
    shards = list(dict.fromkeys(getattr(shell, own) for _, _, shell in changes for own, _ in shell.own_shards()))
    if shards and (owner := owner_outside(module, shards)) is not None:
        names = ", ".join(name for name, _ in tied_modules(module, [owner]))
        raise ValueError(
            f"{names}: tied to {owner}, which is not in this {type(module).__name__} and would compute with a shard: "
            f"convert both in one call, as in an nn.ModuleList, or the whole model"
        )


def _is_kind(child: nn.Module, kind: type[ParallelModule]) -> bool:
    return isinstance(child, (kind, _PLAIN[kind]))


def _is_converted(child: nn.Module, target: _Target, axis: Axis) -> bool:
    if not isinstance(child, ParallelModule):
        return False
    shell: Any = object.__new__(type(child))
    shell.__dict__.update(child.__dict__)
    shell.dim = target.dim
    shell.set_up(axis, **target.options)
    differs = any(getattr(child, name) != value for name, value in target.options.items())
    if differs or shell.placements != child.placements or child.axis.ranks != axis.ranks:
        raise ValueError(
            f"is already parallel, as {child} (expected {_expected(target)}): load the unsharded model to "
            f"convert it otherwise, or convert the other layers in an nn.ModuleList without it"
        )
    return True


def _expected(target: _Target) -> str:
    return ", ".join(f"{name}={value}" for name, value in {"dim": target.dim, **target.options}.items())


def _shell(name: str, child: nn.Module, target: _Target, axis: Axis) -> ParallelModule:
    """The layer that ``child`` becomes: all of its state, but for shards.

    Raises:
        ValueError: if it cannot become one.
    """
    plain = _PLAIN[target.kind]
    parameters = own_parameters(child)
    if type(child) is not plain or "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise ValueError(
            f"is a {type(child).__name__} with parameters {', '.join(parameters)}, not a plain "
            f"{plain.__name__}, and may compute something else; convert the parts of the model that hold plain layers"
        )
    if "forward" in vars(child) or any(
        parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters.values()
    ):
        raise ValueError("has a forward of its own, or a sparse gradient: convert it before, or without it")
    shell: Any = object.__new__(target.kind)
    shell.__dict__.update(child.__dict__)
    shell.dim, shell.name_in_model = target.dim, name
    try:
        shell.set_up(axis, **target.options)
    except ValueError as error:
        can_pad = isinstance(error.__cause__, IndivisibleError) and _is_column(target)
        remedy = (
            ". To pad it, pass gather_output=True; for logits that stay sharded, call "
            "VocabParallelClassifier.convert_parallel_linear"
        )
        raise ValueError(f"{error}{remedy * can_pad}") from error
    return shell


def _tied_target(target: _Target, child: nn.Module, name: str) -> _Target:
    """What a layer becomes that is tied to one that becomes ``target``: what cuts the same dim of the weight."""
    if issubclass(target.kind, ParallelLinear) and isinstance(child, (nn.Embedding, ParallelEmbedding)):
        return _Target(ParallelEmbedding, {None: None, -1: 0, 1: 0, 0: 1}.get(target.dim), {})
    if target.kind is ParallelEmbedding and isinstance(child, (nn.Linear, ParallelLinear)):
        dim = {None: None, 0: -1, 1: 0, -1: 0}.get(target.dim)
        return _Target(VocabParallelClassifier, dim, {"gather_output": dim == -1})
    raise ValueError(
        f"{name}: a {type(child).__name__} has a parameter in common with a layer that is to be split, and cannot be "
        f"split with it"
    )


def check_alike(
    named: Sequence[tuple[str, str, torch.Tensor]], problem: Exception | None, axis: Axis, also: str = ""
) -> None:
    """Check that all ranks are about to do the same, to the same bytes; whatever a rank found, all get here.

    Args:
        named: layer, name and value of each tensor.
        problem: why this rank cannot go on; raised when all know it.
        axis: the ranks.
        also: what else has to be the same.
    """
    if axis.size > 1:
        shapes = [(label, name, value.shape, value.dtype, value.is_meta) for label, name, value in named]
        if not is_alike([digest(repr((shapes, also, str(problem))).encode())], axis)[0] and problem is None:
            raise ValueError(
                f"the ranks {list(axis.ranks)} do not hold the same layers, of the same shapes and on the same kind of "
                f"device, or one cannot convert them"
            )
    if problem is not None:
        raise problem
    named = [found for found in named if not found[-1].is_meta] if axis.size > 1 else []
    if named:
        equal = is_alike([_digest_of(parameter) for *_, parameter in named], axis)
        pairs = zip(named, equal, strict=True)
        labels = list(dict.fromkeys(label or "the layer" for (label, *_), same in pairs if not same))
        if labels:
            raise ValueError(
                f"the ranks {list(axis.ranks)} hold different values in {', '.join(labels[:3])}"
                f"{' ...' if labels[3:] else ''}: seed all ranks alike, or load the same checkpoint on all, before "
                f"converting"
            )


def is_alike(digests: list[int], axis: Axis) -> list[bool]:
    """For each number whether all ranks have the same: the largest of it and of its negative tell."""
    mine = torch.tensor([digests, [-digest for digest in digests]], device=axis.message_device)
    most = reduce_from_tp(mine, op=dist.ReduceOp.MAX, group=axis)
    return [bool(same) for same in (most[0] == -most[1]).tolist()]


def _digest_of(parameter: torch.Tensor) -> int:
    return digest(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def digest(data: Any) -> int:
    """The hash of bytes, for :func:`is_alike`."""
    return xxhash.xxh3_64_intdigest(data) >> 1  # as a whole number that has a sign


def cut_parameters(shells: list[ParallelModule]) -> None:
    """Cut the parameters, in place: what refers to one of them still does. First all is made, then it is put there."""
    made: dict[int, tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = {}
    for shell in shells:
        for name, placement in shell.own_shards():
            parameter = getattr(shell, name)
            if id(parameter) in made:
                continue
            gradient = parameter.grad
            made[id(parameter)] = (
                parameter,
                take_shard(parameter.data, placement, shell.axis.rank).clone(),
                None if gradient is None else take_shard(gradient, placement, shell.axis.rank).clone(),
            )
    for parameter, shard, gradient in made.values():
        parameter.grad = None
        parameter.data = shard
        parameter.grad = gradient


def _new_layer(shell: ParallelModule) -> ParallelModule:
    """The layer with parameters, buffers and hooks of its own."""
    for name, value in shell.__dict__.items():
        if isinstance(value, (dict, set)):
            shell.__dict__[name] = copy.copy(value)
    for name, buffer in shell.named_buffers(recurse=False):
        setattr(shell, name, buffer.clone())
    for name, parameter in own_parameters(shell).items():
        setattr(shell, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    cut_parameters([shell])
    shell.describe_parameters()
    return shell

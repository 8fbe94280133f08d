"""A whole model, converted by the rules of its family: the same rules, and the same placements, as those of split.

Owns what kind of layer each module becomes. The plan is made of the model's own state dict and config, so a rank's file
and a converted module agree by construction.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardconv.convert.heads import ParallelMultiheadAttention
from shardconv.convert.modules import (
    ParallelConv1D,
    ParallelDepthwise,
    ParallelExpertLinear,
    ParallelExperts,
    Sharded,
    mixed,
)
from shardconv.convert.norms import GlobalLayerNorm, GlobalRMSNorm, GroupedRMSNorm
from shardconv.convert.policy import Compiled, compile_policies, policies_in
from shardconv.convert.tell import Told, let_read, tell, told_of
from shardconv.convert.whole import finish
from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.errors import PlanError
from shardconv.layers import ParallelEmbedding, ParallelLinear, VocabParallelClassifier
from shardconv.layers.chain import check_chains
from shardconv.layers.conversion import check_alike, cut_parameters
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.family import NAMES_FAMILY
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec
from shardconv.plan.policy import Policy
from shardconv.plan.quantization import check_quantization
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolve import Resolver
from shardconv.plan.submodels import rules_for
from shardconv.plan.tensor_groups import SCALAR

#: torch's dtypes under the names of safetensors.
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


#: What decides how a model is sharded: a plan that is there, what a user asked of one, or policies.
Request = Plan | PlanRequest | tuple[type[Policy], ...]

#: The style of an embedding that is cut by features, and gives all of them.
_GATHERED_EMBEDDING = "embedding_colwise_gather_output"

#: Classes of torch, and names of those of transformers, that compute what nn.Linear does.
_TORCH_LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_LINEARS = ("Conv1D", "FalconLinear")


class _Target(NamedTuple):
    """What a module becomes: a class, and what its ``set_up`` is given; None where it only gets its shards."""

    kind: type[ParallelModule]
    options: dict[str, Any] | None = None


def convert_model(
    model: nn.Module,
    policy: str | type[Policy] | Sequence[type[Policy]] = "auto",
    *,
    experts: str = "tensor",
    pad: bool = False,
    group: GroupLike = None,
) -> nn.Module:
    """Cut a model over the ranks, in place, by the rules of its family, or by policies.

    The result computes what the model computed, forward, backward and in generation, each rank with its share of heads,
    hidden features, experts' features and words. Full logits come out on every rank. To train with dropout the ranks
    have to be seeded alike, which each pass checks; masks over attention repeat from rank to rank.

    The result compiles with ``torch.compile(fullgraph=True)`` where ``model`` does. Threads can run it at once if they
    call its collectives in the same order on all ranks, as one pass at a time does.

    Args:
        model: a model of transformers, with its values in memory, the same on every rank, or on the meta device; with
            policies, any module.
        policy: ``auto`` for the family of the model's type, or the name of a family; or a class derived from
            :class:`~shardconv.Policy`, or several. What no policy names is then whole on every rank, and its first
            gradient is compared over the ranks.
        experts: "tensor" to cut each expert over all ranks, "expert" to deal them out over the ranks.
        pad: pad heads and widths that do not divide with zeros.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``model``.

    Raises:
        PlanError: if no rules are known for the model, it cannot be cut for so many ranks, or a policy does not fit it.
        ValueError: if a module is of a kind that is not known, or the ranks hold different values. The model is then
            as it was.
        TypeError: if ``policy`` is none of those.

    Example:
        >>> from shardconv import Layer, Policy
        >>> class MlpPolicy(Policy):
        ...     @staticmethod
        ...     def original_layer_class():
        ...         return torch.nn.Sequential
        ...
        ...     @staticmethod
        ...     def mlp_in():
        ...         return [Layer(weight="[0].weight", bias="[0].bias")]
        ...
        ...     @staticmethod
        ...     def mlp_out():
        ...         return [Layer(weight="[-1].weight", bias="[-1].bias")]
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        >>> convert_model(mlp, MlpPolicy)
        Sequential(
          (0): ParallelLinear(in_features=4, out_features=8, bias=True, dim=-1, tp=1)
          (1): Tanh()
          (2): ParallelLinear(in_features=8, out_features=4, bias=True, dim=0, tp=1)
        )
    """
    config: Any = getattr(model, "config", None)
    if isinstance(policy, str):
        request: Request = PlanRequest(None if policy == "auto" else policy, experts=experts, pad=int(pad))
    elif experts != "tensor":
        raise ValueError(f"experts = {experts!r}: policies say themselves how experts are cut")
    elif pad:
        raise ValueError("pad = True: heads and their groups are known of families, not of policies")
    else:
        request = policies_in(policy)
    if config is None and isinstance(policy, str):
        raise ValueError(f"{type(model).__name__} has no config, from which its family would be known")
    axis = as_axis(group)
    return finish(convert_by(model, config.to_dict() if hasattr(config, "to_dict") else {}, request, axis), axis)


def convert_by(
    model: nn.Module, config: Mapping[str, Any], request: Request, axis: Axis, *, has_values: bool = True
) -> nn.Module:
    """Convert a model as :func:`convert_model`, by a plan, or by one that is made for it.

    A plan is executed by its rules, since tensors in memory may have other names than on disk. Where values are loaded
    later, those that are there now are not compared.

    Args:
        model: the model, changed in place.
        config: its config, from which a plan is made; not read where ``request`` is one.
        request: see :data:`Request`.
        axis: the ranks.
        has_values: whether the model has its values already.
    """
    prepared, problem = None, None
    try:
        prepared = _prepare(model, config, request, axis)
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it, whatever it was
        problem = error
    named = [
        (label, name, tensor if has_values else tensor.to("meta"))
        for label, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]
    named.sort(key=lambda one: one[:2])  # some models register buffers in the order of a set, which differs
    rules = prepared.rules if prepared is not None else ""
    check_alike(named, problem, axis, also=repr((_in_order(config), rules)))
    assert prepared is not None
    cut_parameters([shell for _, shell in prepared.shells])
    for module, shell in prepared.shells:
        module.__class__ = type(shell)
        module.__dict__.update(shell.__dict__)
        shell.describe_parameters()
    for told in prepared.told:
        tell(told, axis)
    for told in prepared.told:
        let_read(told, model, axis)
    if prepared.policies is not None:
        prepared.policies.tell(model, axis)
    return model


def _in_order(value: Any) -> Any:
    """The same with all keys in order: some configs make theirs in that of a set, which differs."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _in_order(one)) for key, one in value.items()), key=lambda item: item[0])
    return [_in_order(one) for one in value] if isinstance(value, list | tuple) else value


class _Prepared(NamedTuple):
    """What modules become, and their overrides; nothing of the model is changed yet.

    Attributes:
        rules: the rules, as text that all ranks have alike.
        shells: modules, and what each becomes.
        told: the module overrides, worked out for this rank.
        policies: what policies set besides.
    """

    rules: str
    shells: list[tuple[nn.Module, ParallelModule]]
    told: list[Told]
    policies: Compiled | None


def _prepare(model: nn.Module, config: Mapping[str, Any], request: Request, axis: Axis) -> _Prepared:
    state = model.state_dict()
    if strange := next((tensor.dtype for tensor in state.values() if tensor.dtype not in DTYPE_NAMES), None):
        raise ValueError(f"values of {strange} cannot be split")
    specs = {name: TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    resolver, policies = _resolver(model, specs, config, request, axis.size)
    plan = resolver.plan(axis.size)
    _check_numbers(model, plan)
    shells = []
    for name, module in model.named_modules():
        target = _target(name, module, _own_plans(name, module, plan))
        if policies is not None and target is not None:
            target = target._replace(kind=policies.kinds.get(module, target.kind))
        if target is not None:
            shells.append((module, _shell(name, module, target, plan, axis)))
    shells += _readers(model, dict(shells), plan, axis)
    check_chains(model, dict(shells), axis.size)
    told = [one for scope in resolver.rules.scopes for one in told_of(model, scope, axis)]
    return _Prepared(json.dumps(resolver.rules.to_json(), default=repr), shells, told, policies)


def _readers(
    model: nn.Module, shells: Mapping[nn.Module, ParallelModule], plan: Plan, axis: Axis
) -> list[tuple[nn.Module, ParallelModule]]:
    """Modules that may read the weight of a convolution in them without a call, where ranks hold copies of it."""
    return [
        (module, _shell(name, module, _Target(Sharded), plan, axis))
        for name, module in model.named_modules()
        if module not in shells
        and any(
            isinstance(shell, ParallelDepthwise) and shell.placements["weight"].has_copies
            for shell in map(shells.get, module.children())
        )
    ]


def _resolver(
    model: nn.Module, specs: Mapping[str, TensorSpec], config: Mapping[str, Any], request: Request, tp: int
) -> tuple[Resolver, Compiled | None]:
    """The rules over the tensors of a model, and what policies set besides."""
    if isinstance(request, tuple):
        check_quantization(specs, config)
        policies = compile_policies(model, request, tp)
        return Resolver(specs, rules_for(policies.family, config)), policies
    if isinstance(request, PlanRequest):
        resolver = resolve(specs, config, replace(request, engine=None)).resolver  # whose boundaries are those of files
    else:
        assert request.rules is not None  # see stored_plan
        where = "the model in memory, which does not have the tensors that it matches on disk, or under other names"
        resolver = Resolver(specs, request.rules, where=where)
    if resolver.rules.family == NAMES_FAMILY and not resolver.rules.has_plan_file:
        raise PlanError(
            f"no family is known for model type {config.get('model_type')!r}: names may tell how its tensors are cut, "
            f"but not what has to be told to the modules that compute with them"
        )
    return resolver, None


def _check_numbers(model: nn.Module, plan: Plan) -> None:
    """Refuse trainable numbers that no rule names: whether their gradients are to be summed nothing tells."""
    for name, _ in model.named_parameters():
        if plan.tp > 1 and name in plan.tensors and plan.tensors[name].reason.rule == SCALAR.pattern:
            raise ValueError(f"{name}: is a trainable number by itself, for which no rule of family {plan.family} is")


def _own_plans(name: str, module: nn.Module, plan: Plan) -> dict[str, TensorPlan]:
    prefix = f"{name}." if name else ""
    return {own: plan.tensors[prefix + own] for own in module._parameters if prefix + own in plan.tensors}  # noqa: SLF001


def _target(name: str, module: nn.Module, plans: Mapping[str, TensorPlan]) -> _Target | None:
    """What a module becomes, by its class and by which dim of which of its parameters is cut."""
    cut = {own: planned for own, planned in plans.items() if planned.placement.dim is not None}
    styles = {planned.style for planned in (cut or plans).values()}
    if (cut and "gathered" in styles) or (not cut and "replicated_with_grad_allreduce" in styles):
        return _Target(Sharded)
    if not cut:
        return None
    weight = cut.get("weight")
    if weight is not None and isinstance(module, nn.Embedding):
        gathers = _GATHERED_EMBEDDING in styles
        dim = -1 if weight.placement.dim else 0
        return _Target(ParallelEmbedding, {"dim": dim, "gather_output": gathers, "placement": weight.placement})
    if _GATHERED_EMBEDDING in styles:
        raise ValueError(f"{name}: a {type(module).__name__} is no embedding, whose output can be gathered")
    if weight is not None and _is_linear(module):
        return _linear_target(weight, is_transposed=type(module).__name__ == "Conv1D")
    if "colwise_gather_output" in styles:
        raise ValueError(
            f"{name}: a {type(module).__name__} is no linear layer, whose output can be gathered: see gathered"
        )
    return _Target(_own_kind(name, module, cut))


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes what nn.Linear does; another class of the same name may not."""
    kind = type(module)
    return kind in _TORCH_LINEARS or (kind.__name__ in _LINEARS and kind.__module__.startswith("transformers."))


def _num_dims(parameter: Tensor) -> int:
    """How many dims a parameter has; 1 where all but one have one element."""
    return 1 if parameter.numel() == max(parameter.shape) else parameter.dim()


def _own_kind(name: str, module: nn.Module, cut: Mapping[str, TensorPlan]) -> type[ParallelModule]:
    """What a module becomes that is no layer of torch's and has shards of its own, by their numbers of dims."""
    kind = type(module).__name__
    dims = {_num_dims(module.get_parameter(own)) for own in cut}
    if isinstance(module, nn.MultiheadAttention):
        return ParallelMultiheadAttention
    has_rows = {planned.style for planned in cut.values()} == {"by_rows"}
    if isinstance(module, nn.Linear) and not has_rows:
        raise ValueError(f"{name}: a {kind} may compute something else than nn.Linear")
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups > 1:
        return ParallelDepthwise
    if kind.endswith("RMSNormGated") and hasattr(module, "group_size"):
        return GroupedRMSNorm
    if 3 in dims and "Expert" in kind:
        return ParallelExpertLinear if set(cut) == {"weight"} else ParallelExperts
    if "weight" in cut and dims - {1, 2}:
        raise ValueError(f"{name}: a {kind} with parameters of {max(dims)} dims that are cut is not known")
    may_be_norm = "Norm" in kind and not any(module.children())
    if dims != {1} or has_rows or ("weight" not in cut and not may_be_norm):
        return Sharded
    is_layer_norm = isinstance(module, nn.LayerNorm)
    if not is_layer_norm and (not kind.endswith("RMSNorm") or "weight" not in cut):
        raise ValueError(f"{name}: a {kind} over features that are cut is not known")
    return GlobalLayerNorm if is_layer_norm else GlobalRMSNorm


def _linear_target(weight: TensorPlan, *, is_transposed: bool) -> _Target:
    is_column = (weight.placement.dim == 0) is not is_transposed
    options = {"dim": -1 if is_column else 0, "placement": weight.placement}
    if weight.style == "embedding_rowwise":
        return _Target(VocabParallelClassifier, {**options, "gather_output": True})
    if weight.style == "colwise_gather_output":
        options["gather_output"] = True
    return _Target(ParallelConv1D if is_transposed else ParallelLinear, options)


def _shell(name: str, module: nn.Module, target: _Target, plan: Plan, axis: Axis) -> ParallelModule:
    """The module that ``module`` becomes: all of its state, but for shards."""
    shell: Any = object.__new__(mixed(target.kind, type(module)))
    shell.__dict__.update(module.__dict__)
    shell.name_in_model = name
    plans = _own_plans(name, module, plan)
    placements = {own: planned.placement for own, planned in plans.items() if planned.placement.dim is not None}
    if target.options is None:
        shell.styles = {own: planned.style for own, planned in plans.items()}
        shell.axis, shell.dim, shell.placements = axis, None, placements
        if isinstance(shell, ParallelExperts):
            shell.check_experts(name, type(module).forward)
        if isinstance(shell, ParallelDepthwise):
            shell.check_channels(name)
        if isinstance(shell, GroupedRMSNorm):
            shell.set_groups(name)
        return shell
    if issubclass(target.kind, ParallelConv1D):
        shell.in_features, shell.out_features = shell.nx, shell.nf
    options = dict(target.options)
    shell.dim = options.pop("dim")
    shell.set_up(axis, **options)
    if any(shell.placements.get(own) != placement for own, placement in placements.items()):
        raise ValueError(f"{name}: the plan cuts it as no {target.kind.__name__} is cut")
    return shell

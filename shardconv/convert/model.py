"""A whole model, converted by the rules of its family: the same rules, and the same placements, as those of split.

Owns what kind of layer each module becomes. The plan is made of the model's own state dict and config, so a rank's file
and a converted module agree by construction.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardconv.convert.modules import (
    CopiedInput,
    Gathering,
    GlobalRMSNorm,
    NormsOfHeads,
    ParallelConv1D,
    ParallelExperts,
    Sharded,
    SharedOutput,
    SummedOutput,
    mixed,
)
from shardconv.convert.policy import Compiled, compile_policies, policies_in
from shardconv.convert.whole import RankConfig, finish
from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp
from shardconv.errors import PlanError
from shardconv.layers import ParallelEmbedding, ParallelLinear, VocabParallelClassifier
from shardconv.layers.conversion import check_alike, cut_parameters
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.family import NAMES_FAMILY, InputRule, ModuleRule
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec
from shardconv.plan.policy import Policy
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolve import SCALAR, Resolver
from shardconv.plan.scope import Scope

#: torch's dtypes under the names of safetensors.
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


#: What decides how a model is cut: the rules of a family, with what a user adds to them, or policies.
Request = PlanRequest | tuple[type[Policy], ...]

#: Classes of transformers that compute what nn.Linear does.
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
    group: GroupLike = None,
) -> nn.Module:
    """Cut a model over the ranks, in place, by the rules of its family, or by policies.

    The result computes what the model computed, forward, backward and in generation, each rank with its share of heads,
    hidden features, experts' features and words. Full logits come out on every rank. To train with dropout the ranks
    have to be seeded alike, which the first pass checks; masks over attention repeat from rank to rank.

    Args:
        model: a model of transformers, with its values in memory, the same on every rank, or on the meta device; with
            policies, any module.
        policy: ``auto`` for the family of the model's type, or the name of a family; or a class derived from
            :class:`~shardconv.Policy`, or several. What no policy names is then whole on every rank, and its first
            gradient is compared over the ranks.
        experts: "tensor" to cut each expert over all ranks, "expert" to deal them out over the ranks.
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
        request: Request = PlanRequest(None if policy == "auto" else policy, experts=experts)
    elif experts != "tensor":
        raise ValueError(f"experts = {experts!r}: policies say themselves how experts are cut")
    else:
        request = policies_in(policy)
    if config is None and isinstance(policy, str):
        raise ValueError(f"{type(model).__name__} has no config, from which its family would be known")
    axis = as_axis(group)
    return finish(convert_by(model, config.to_dict() if hasattr(config, "to_dict") else {}, request, axis), axis)


def convert_by(
    model: nn.Module, config: Mapping[str, Any], request: Request, axis: Axis, *, has_values: bool = True
) -> nn.Module:
    """Cut a model as :func:`convert_model`, with a config and with what a user asked of the plan.

    Where values are put in later, those that are there now are not compared.
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
    check_alike(named, problem, axis, also=repr((_in_order(config), request)))
    assert prepared is not None
    cut_parameters([shell for _, shell in prepared.shells])
    for module, shell in prepared.shells:
        module.__class__ = type(shell)
        module.__dict__.update(shell.__dict__)
        shell.describe_parameters()
    for module, rule, scope in prepared.told:
        _tell(module, rule, scope, axis)
        if rule.gathers:
            _become(module, Gathering, axis, read=_read(model, module, rule, scope))
    if prepared.policies is not None:
        prepared.policies.tell(model, axis)
    return model


def _in_order(value: Any) -> Any:
    """The same with all keys in order: some configs make theirs in that of a set, which differs."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _in_order(one)) for key, one in value.items()), key=lambda item: item[0])
    return [_in_order(one) for one in value] if isinstance(value, list | tuple) else value


class _Prepared(NamedTuple):
    """What modules become, and which are told something; nothing of the model is changed yet."""

    shells: list[tuple[nn.Module, ParallelModule]]
    told: list[tuple[nn.Module, ModuleRule, Scope]]
    policies: Compiled | None


def _prepare(model: nn.Module, config: Mapping[str, Any], request: Request, axis: Axis) -> _Prepared:
    state = model.state_dict()
    if strange := next((tensor.dtype for tensor in state.values() if tensor.dtype not in DTYPE_NAMES), None):
        raise ValueError(f"values of {strange} cannot be split")
    specs = {name: TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    policies = None
    if isinstance(request, PlanRequest):
        resolver = _resolver(specs, config, request)
    else:
        policies = compile_policies(model, request, axis.size)
        resolver = Resolver(specs, config, policies.family)
    plan = resolver.plan(axis.size)
    _check_numbers(model, plan)
    shells = []
    for name, module in model.named_modules():
        target = _target(name, module, _own_plans(name, module, plan))
        if policies is not None and target is not None:
            target = target._replace(kind=policies.kinds.get(module, target.kind))
        if target is not None:
            shells.append((module, _shell(name, module, target, plan, axis)))
    return _Prepared(shells, [one for scope in resolver.scopes for one in _told(model, scope)], policies)


def _resolver(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], request: PlanRequest) -> Resolver:
    resolver = resolve(specs, config, request).resolver
    if resolver.family_name == NAMES_FAMILY and request.plan_file is None:
        raise PlanError(
            f"no family is known for model type {config.get('model_type')!r}: names may tell how its tensors are cut, "
            f"but not what has to be told to the modules that compute with them"
        )
    return resolver


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
    styles = {planned.reason.style for planned in plans.values()}
    if "gathered" in styles or (not cut and "replicated_with_grad_allreduce" in styles):
        return _Target(Sharded)
    if not cut:
        return None
    weight = cut.get("weight")
    kind = type(module).__name__
    if weight is not None and isinstance(module, nn.Embedding):
        return _Target(ParallelEmbedding, {"dim": -1 if weight.placement.dim else 0, "gather_output": False})
    if weight is not None and _is_linear(module):
        return _linear_target(weight, is_transposed=kind == "Conv1D")
    if isinstance(module, nn.Linear):
        raise ValueError(f"{name}: a {kind} may compute something else than nn.Linear")  # noqa: TRY004 - as below
    return _Target(_own_kind(name, kind, {len(module.get_parameter(own).shape) for own in cut}, weight))


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes what nn.Linear does; another class of the same name may not."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__ in _LINEARS and kind.__module__.startswith("transformers."))


def _own_kind(name: str, kind: str, dims: set[int], weight: TensorPlan | None) -> type[ParallelModule]:
    """What a module becomes that is no layer of torch's and has shards of its own, by their numbers of dims."""
    if 3 in dims and "Expert" in kind:
        return ParallelExperts
    if dims - {1, 2}:
        raise ValueError(f"{name}: a {kind} with parameters of {max(dims)} dims that are cut is not known")
    if dims != {1} or (weight is None and "Norm" not in kind):
        return Sharded
    if not kind.endswith("RMSNorm") or weight is None:
        raise ValueError(f"{name}: a {kind} over features that are cut is not known")
    return GlobalRMSNorm


def _linear_target(weight: TensorPlan, *, is_transposed: bool) -> _Target:
    is_column = (weight.placement.dim == 0) is not is_transposed
    options = {"dim": -1 if is_column else 0, "placement": weight.placement}
    if weight.reason.style == "embedding_rowwise":
        return _Target(VocabParallelClassifier, {**options, "gather_output": True})
    if weight.reason.style == "colwise_gather_output":
        options["gather_output"] = True
    return _Target(ParallelConv1D if is_transposed else ParallelLinear, options)


def _shell(name: str, module: nn.Module, target: _Target, plan: Plan, axis: Axis) -> ParallelModule:
    """The module that ``module`` becomes: all of its state, but for shards."""
    shell: Any = object.__new__(mixed(target.kind, type(module)))
    shell.__dict__.update(module.__dict__)
    plans = _own_plans(name, module, plan)
    placements = {own: planned.placement for own, planned in plans.items() if planned.placement.dim is not None}
    if target.options is None:
        shell.styles = {own: planned.reason.style for own, planned in plans.items()}
        shell.axis, shell.dim, shell.placements = axis, None, placements
        if isinstance(shell, ParallelExperts):
            shell.check_experts(name, type(module).forward)
        return shell
    if issubclass(target.kind, ParallelConv1D):
        shell.in_features, shell.out_features = shell.nx, shell.nf
    options = dict(target.options)
    shell.dim = options.pop("dim")
    shell.set_up(axis, **options)
    if any(shell.placements.get(own) != placement for own, placement in placements.items()):
        raise ValueError(f"{name}: the plan cuts it as no {target.kind.__name__} is cut")
    return shell


def _told(model: nn.Module, scope: Scope) -> list[tuple[nn.Module, ModuleRule, Scope]]:
    """The modules that have to be told something, each with all of it."""
    rules = list(scope.modules())
    matching = (
        (module, [rule for regex, rule in rules if regex.fullmatch(name)]) for name, module in model.named_modules()
    )
    return [(module, ModuleRule.joined(found), scope) for module, found in matching if found]


def _tell(module: nn.Module, rule: ModuleRule, scope: Scope, axis: Axis) -> None:
    values = {name: scope.on_rank(expression, axis.size) for name, expression in rule.attributes.items()}
    fields = {name.removeprefix("config."): value for name, value in values.items() if name.startswith("config.")}
    if fields:
        module.__dict__["config"] = RankConfig(module.config, fields)
    for name, value in values.items():
        if hasattr(module, name):
            setattr(module, name, value)
    if rule.inputs:
        cuts = {name: _input_cut(one, scope, axis) for name, one in rule.inputs.items()}
        names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(partial(_cut_inputs, cuts, names), with_kwargs=True)
    if rule.norms and hasattr(module, "norms"):
        _become(module, NormsOfHeads, axis, first=scope.local_units(rule.norms, axis.size, axis.rank)[0])
    if rule.shared_output is not None:
        _become(module, SharedOutput, axis, num_shared=scope.on_rank(rule.shared_output, axis.size))
    if rule.copied_input:
        _become(module, CopiedInput, axis)
    if rule.summed_output:
        _become(module, SummedOutput, axis, styles=getattr(module, "styles", {}))


def _read(
    model: nn.Module, reader: nn.Module, rule: ModuleRule, scope: Scope
) -> tuple[tuple[ParallelModule, str], ...]:
    """The shards that a module reads of others: of those in it, if patterns name any of them."""
    patterns = [re.compile(scope.regex(pattern)) for pattern in rule.gathers]
    found = [
        (module, own)
        for name, module in model.named_modules()
        if isinstance(module, ParallelModule)
        for own in module.placements
        if any(regex.fullmatch(f"{name}.{own}") for regex in patterns)
    ]
    inside = set(reader.modules())
    return tuple(one for one in found if one[0] in inside) or tuple(found)


def _become(module: Any, kind: type[ParallelModule], axis: Axis, **attributes: Any) -> None:
    module.__class__ = mixed(kind, type(module))
    module.__dict__.update(axis=axis, dim=None, placements=getattr(module, "placements", {}), **attributes)


def _cut_inputs(
    cuts: Mapping[str, Callable[[Any], Any]],
    names: list[str],
    module: nn.Module,  # noqa: ARG001 - as hooks are called
    inputs: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of arguments that hold something for each unit, keep the rank's."""
    keep: Callable[[str, Any], Any] = lambda name, value: cuts[name](value) if name in cuts else value  # noqa: E731
    kept = tuple(keep(name, value) for name, value in zip(names, inputs, strict=False))
    return (*kept, *inputs[len(kept) :]), {name: keep(name, value) for name, value in options.items()}


def _input_cut(rule: InputRule, scope: Scope, axis: Axis) -> Callable[[Any], Any]:
    """What makes of an argument the rank's."""
    units = scope.local_units(rule.unit, axis.size, axis.rank)
    if rule.size is None:
        return partial(_cut_matrices, rule.dim, units)
    return partial(_cut_features, rule.dim, units, scope.fields().evaluate(rule.size), axis)


def _cut_matrices(dim: int, units: tuple[int, int, int], value: Any) -> Any:
    first, size, count = units
    if not isinstance(value, Tensor) or value.dim() < dim + 3 or value.shape[dim] == 1:
        return value  # not given, of tokens only, or the same for all units
    return value.unflatten(dim, (-1, count)).narrow(dim + 1, first, size).flatten(dim, dim + 1)


def _cut_features(dim: int, units: tuple[int, int, int], width: int, axis: Axis, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    first, size, _ = units
    return copy_to_tp(value, group=axis).narrow(dim, first * width, size * width)

"""Conversion of a model by the plan of its family, of a plan file, of policies, or by a stored plan.

Owns how a request becomes rules over the model's tensors. The plan is made from the model's state dict and config as
``split`` makes it from a checkpoint, so a rank file and a converted model have the same placements.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.json import encode
from msgspec.structs import replace
from torch import nn

from shardconv.convert.converted_model import extend_model_class
from shardconv.convert.engine import Preparation, convert, own_tensors
from shardconv.convert.feature_checks import check_chains, check_inputs
from shardconv.convert.forward_reader import Problem
from shardconv.convert.ip_adapters import refuse_ip_adapters, shard_ip_adapters
from shardconv.convert.layer_specs import check_partial_products, plan_conversions
from shardconv.convert.module_rules import module_overrides
from shardconv.convert.overrides import Overrides, split_config_fields
from shardconv.convert.unchanged_counts import IN_CODE, Examined, UnitCounts, check_counts, examine_forwards
from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.distributed.groups import ParallelGroups, current_groups, has_groups
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.quantization import check_quantization
from shardconv.plan.request import AUTO, PlanRequest, Rules, planner_for, request_of
from shardconv.plan.rule_set import rules_for
from shardconv.plan.tensor_groups import SCALAR
from shardconv.policies import CompiledPolicies, Policy, as_policies, check_first_gradients, compile_policies
from shardconv.support.arguments import checked
from shardconv.support.errors import ConfigError, PlanError, RunError, UsageError, option

#: torch's dtypes under the names of safetensors.
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: The rules of a conversion: a plan, a request to make one, or policies.
Request = Plan | PlanRequest | tuple[type[Policy], ...]


@checked
def convert_model(
    model: ModuleT,
    rules: Rules = AUTO,
    *,
    ep: int = 1,
    pad: bool = False,
    group: GroupLike = None,
) -> ModuleT:
    """Shard a model over the ranks, in place, by the rules of its family, or by policies.

    The result computes the same as the model, forward, backward and in generation, each rank with its local heads,
    hidden features, experts and vocabulary. Every rank returns full logits. To train with dropout the ranks have to be
    seeded alike, which each pass checks; dropout masks over attention weights are the same for the heads of each rank.

    The result compiles with ``torch.compile(fullgraph=True)`` where ``model`` does. Threads can run it at once if they
    call its collectives in the same order on all ranks, as one pass at a time does.

    Args:
        model: a model of transformers, with its values in memory, the same on every rank, or on the meta device; with
            policies or a plan file, any module.
        rules: which rules to use, see :data:`~shardconv.plan.request.Rules`: "auto", a family name, a plan file, a
            Plan, or a class derived from :class:`~shardconv.Policy`, or several. Parameters that no policy names are
            replicated, and their first gradients are compared over the ranks.
        ep: expert parallel size: 1 to shard each expert; the tensor parallel size for whole experts on each rank; or a
            multiple, the number of ranks of all data groups of :func:`~shardconv.init_parallel`. These then run each
            forward and backward pass together, on any numbers of tokens. Gradients of experts are gradients of the sum
            of their losses.
        pad: pad heads and widths that do not divide.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        ``model``.

    Raises:
        PlanError: if no rules are known for the model, the tensor parallel size is unsupported, a policy does not fit
            the model, or the forward of a module of the caller divides local features by a number of the unsharded
            model, which no module override changes.
        UsageError: if the family is unknown, or ``ep`` is not 1 and the model does not have experts, or the groups have
            other sizes.
        ValueError: if the class of a module is not supported, or the ranks hold different values. The model is then
            unchanged.
        TypeError: if a class in ``rules`` is not derived from :class:`~shardconv.Policy`.
        RunError: if torch or transformers is older than shardconv supports.

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
          (0): ColumnParallelLinear(in_features=4, out_features=8, bias=True, dim=-1, tp=1)
          (1): Tanh()
          (2): RowParallelLinear(in_features=8, out_features=4, bias=True, dim=0, tp=1)
        )
    """
    config = config_fields(model)
    axis = as_axis(group)
    request = _request(rules, axis.size, ep=ep, pad=pad)
    if not config and isinstance(request, PlanRequest) and request.plan_file is None:
        raise ValueError(
            f"{type(model).__name__} does not have a config with fields, which the rules of a family read: pass "
            f"rules=FILE with a plan file, or policies"
        )
    try:
        groups = _expert_groups(request, group)
        convert_with_request(model, config, request, axis, groups=groups)
    except ConfigError as error:
        remedy = "set it in the config of the model, or set it in [config] of a plan file"
        raise ConfigError(error.problem, remedy) from error
    extend_model_class(model, axis, axis if groups is None else groups.stage)
    return model


def _expert_groups(request: Request, group: GroupLike) -> ParallelGroups | None:
    """The current groups, if their data groups share experts.

    Raises:
        UsageError: if the number of ranks in the data groups is not ``ep``.
    """
    tp, ep = as_axis(group).size, 1 if isinstance(request, tuple) else request.ep
    if ep <= tp or ep % tp:
        return None
    groups = current_groups() if has_groups() and group is None else None
    if groups is None or groups.tensor.size * groups.data.size != ep:
        raise UsageError(
            f"{option(ep=ep)} needs {ep} ranks in data groups of {tp}: call shardconv.init_parallel(tensor={tp}, "
            f"data={ep // tp}), and pass no group"
        )
    return groups


def config_fields(model: nn.Module) -> dict[str, object]:
    """The fields of a model's config: a mapping, as in diffusers, by ``to_dict``, as in transformers, or attributes.

    Without the names of defaults, which diffusers does not save: they are a set, whose order differs between processes.
    """
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        saved = {name: value for name, value in config.items() if name != "_use_default_values"}
        return {"_class_name": type(model).__name__, **saved}
    to_dict: Callable[[], dict[str, object]] = getattr(config, "to_dict", lambda: dict(getattr(config, "__dict__", {})))
    return to_dict()


def _request(rules: Rules, tp: int, *, ep: int, pad: bool) -> Request:
    """The request for the ``rules`` that a user passes.

    Raises:
        PlanError: if the plan is for another tensor parallel size, or the plan file cannot be read.
        ValueError: if other arguments change a plan or policies.
    """
    if isinstance(rules, str | Path):
        return replace(request_of(rules), ep=ep, pad=int(pad))
    if ep != 1:
        raise ValueError(f"ep is {ep!r} with a plan or a policy: make the plan with ep={ep!r}; policies shard experts")
    if pad:
        raise ValueError("pad is True with a plan or a policy: make the plan with pad=True; policies do not pad")
    if not isinstance(rules, Plan):
        return as_policies(rules)
    if rules.tp != tp:
        raise PlanError(
            f"the plan is for {rules.tp} ranks (expected a plan for {tp}): make it with make_plan(..., tp={tp})"
        )
    return replace(rules, rules=rules.rules.without_engine())


def convert_with_request(
    model: ModuleT,
    config: Mapping[str, object],
    request: Request,
    axis: Axis,
    *,
    groups: ParallelGroups | None = None,
    has_values: bool = True,
) -> ModuleT:
    """Convert a model as :func:`convert_model`, by a plan, or by a plan that is made for it.

    A plan is executed by its rules, as tensors in memory may have other names than on disk.

    Args:
        model: the model, changed in place.
        config: its config, from which a plan is made; not read if ``request`` is a plan.
        request: see :data:`Request`.
        axis: the ranks.
        groups: the groups, whose data groups share experts; None if those of ``axis`` do.
        has_values: whether the model has its values already; if not, they are not compared over the ranks.

    Returns:
        ``model``.
    """

    def prepare() -> Preparation:
        refuse_ip_adapters(model.state_dict())
        return _prepare(model, config, request, axis, groups)

    check_versions()
    tensors = own_tensors(model.named_modules())
    tensors = tensors if has_values else [(label, name, tensor.to("meta")) for label, name, tensor in tensors]
    everyone = axis if groups is None else groups.stage
    convert(model, prepare, axis, tensors, everyone)
    if isinstance(request, tuple):
        check_first_gradients(model, axis)
        check_inputs(model, axis.size)
    shard_ip_adapters(model, partial(_prepare_processors, model, config, request, axis), axis)
    return model


def _prepare_processors(
    model: nn.Module, config: Mapping[str, object], request: Request, axis: Axis, processors: tuple[str, ...]
) -> Preparation:
    """Prepare attention processors of a converted model; policies shard none."""
    if isinstance(request, tuple):
        return Preparation(())
    if isinstance(request, PlanRequest):
        request = replace(request, allow_unmatched_rules=True)
    else:
        request = replace(request, rules=request.rules.with_optional_rules())
    return _prepare(model, config, request, axis, None, processors)


def sort_keys(value: object) -> object:
    """Sort all keys: some configs have the order of a set, which differs between processes."""
    if isinstance(value, Mapping):
        return sorted(((str(key), sort_keys(one)) for key, one in value.items()), key=lambda item: item[0])
    return [sort_keys(one) for one in value] if isinstance(value, list | tuple) else value


def _prepare(
    model: nn.Module,
    config: Mapping[str, object],
    request: Request,
    axis: Axis,
    groups: ParallelGroups | None,
    inside: tuple[str, ...] = ("",),
) -> Preparation:
    """Plan the tensors ``inside`` modules, and prepare the parallel modules and overrides there; changes nothing."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(inside)}
    if unknown := next((tensor.dtype for tensor in state.values() if tensor.dtype not in DTYPE_NAMES), None):
        raise ValueError(f"values of {unknown} cannot be sharded")
    specs = {name: TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    planner, policies = _planner(model, specs, config, request, axis.size)
    if (ep := planner.rules.ep) > axis.size and groups is None:
        raise PlanError(
            f"{option(ep=ep)} is for data groups that share experts, and there is one group of {axis.size} ranks: pass "
            f"{option(ep=axis.size)}"
        )
    plan = planner.plan(axis.size)
    _check_numbers(model, plan)
    classes = {} if policies is None else policies.layer_classes
    prepared = Preparation(plan_conversions(model, plan, classes, axis, groups))
    replacements = prepared.replacements()
    check_chains(model, replacements, axis.size, is_planned=True)
    converted = {module for name, module in model.named_modules() if f"{name}.".startswith(inside)}
    overrides = [
        override
        for model_rules in planner.rules.models
        for override in module_overrides(model, model_rules, axis, replacements)
        if override.module in converted
    ]
    overrides += [] if policies is None else _policy_overrides(policies)
    check_partial_products(prepared.conversions, overrides)
    if policies is not None:
        examined = (one._replace(is_unknown=False) for one in examine_forwards(model, replacements, overrides))
        check_counts(examined, partial(_remedy, policies.family.name), PlanError)
    elif not type(model).__module__.startswith(("transformers.", "diffusers.")):  # proofs compare their outputs
        counts = UnitCounts(model, planner.rules.models[0], plan)
        check_counts(examine_forwards(model, replacements, overrides), counts.remedy, PlanError)
    rules = encode(planner.rules.stored(), enc_hook=repr)
    return prepared._replace(overrides=overrides, description=repr((sort_keys(config), rules)))


def _policy_overrides(policies: CompiledPolicies) -> Iterator[Overrides]:
    for module in {**policies.new_classes, **policies.attributes}:
        fields, attributes = split_config_fields(policies.attributes.get(module, {}))
        new_class = policies.new_classes.get(module)
        yield Overrides(module, new_class=new_class, config_fields=fields, attributes=attributes)


def _remedy(policies: str, _: Examined, problem: Problem | None) -> str:
    """The remedy for policies whose modules divide local features by a number of the unsharded model."""
    is_number = problem is None or problem.divisor is None
    return IN_CODE if is_number else f"return its number per rank from replace_arguments of {policies}"


def _planner(
    model: nn.Module, specs: Mapping[str, TensorSpec], config: Mapping[str, object], request: Request, tp: int
) -> tuple[Planner, CompiledPolicies | None]:
    """Resolve a request to rules over the tensors of a model; the second item is the compiled policies."""
    if isinstance(request, tuple):
        check_quantization(specs, config)
        policies = compile_policies(model, request, tp)
        return Planner(specs, rules_for(policies.family, config)), policies
    if isinstance(request, PlanRequest):
        planner = planner_for(specs, config, replace(request, engine=None))  # an engine restricts files only
    else:
        where = "the model in memory, which may lack tensors of the checkpoint, or have other names for them"
        planner = Planner(specs, request.rules, where=where)
    if planner.rules.family == NAMES_FAMILY and not planner.rules.has_plan_file:
        raise PlanError(
            f"no family is known for model type {config.get('model_type')!r}: tensors may be sharded by their names, "
            f"but the module overrides of such a model are unknown. Pass {option(rules='FILE')} with a plan file, for "
            "a split checkpoint to shardconv split"
        )
    return planner, None


def _check_numbers(model: nn.Module, plan: Plan) -> None:
    """Refuse trainable scalars that no rule names: it is unknown whether their gradients have to be all-reduced."""
    for name, _ in model.named_parameters():
        if plan.tp > 1 and name in plan.tensors and plan.tensors[name].reason.rule == SCALAR.pattern:
            raise ValueError(f"{name}: is a trainable scalar that no rule of family {plan.family} matches")


#: The version of an installed package, whose metadata takes milliseconds to read.
version = cache(metadata.version)
_BOUND = re.compile(r"(torch|transformers|diffusers)>=([\d.]+)")


def check_versions() -> None:
    """Check the packages that are imported.

    Raises:
        RunError: if one is older than shardconv supports.
    """
    for package, bound in _bounds().items():
        if package in sys.modules and _release(version(package)) < _release(bound):
            raise RunError(
                f"{package} {version(package)} is not supported (expected {bound} or later): pip install --upgrade "
                f"'{package}>={bound}'"
            )


@cache
def _bounds() -> dict[str, str]:
    """The oldest version of each package; none if shardconv itself is not installed."""
    try:
        requirements = requires("shardconv") or []
    except PackageNotFoundError:
        return {}
    return {found[1]: found[2] for one in requirements if (found := _BOUND.match(one))}


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a release, without a suffix such as ``+cpu``."""
    release = re.match(r"[\d.]*\d", text)
    return tuple(map(int, release[0].split("."))) if release else ()

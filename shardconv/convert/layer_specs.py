"""The parallel class of each module of a model, by the plan of its parameters.

Owns which classes of modules are supported, and refuses others.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace
from torch import Tensor, nn

from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.convert.feature_checks import is_of_torch
from shardconv.convert.modules import (
    GlobalLayerNorm,
    GlobalRMSNorm,
    GroupedRMSNorm,
    ParallelDepthwise,
    ParallelExpertLinear,
    ParallelExperts,
    Sharded,
)
from shardconv.convert.multihead_attention import ParallelMultiheadAttention
from shardconv.convert.overrides import Overrides
from shardconv.distributed import Axis
from shardconv.distributed.groups import ParallelGroups
from shardconv.layers import ParallelEmbedding, ParallelLinear, VocabParallelClassifier
from shardconv.layers.parallel_module import ParallelModule, own_parameters
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorPlan
from shardconv.support.errors import PlanError

#: The style of an embedding that is embedding-dim-parallel with gathered output.
_GATHERED_EMBEDDING = "embedding_colwise_gather_output"

#: Classes of torch, and names of classes of transformers, with the computation of nn.Linear.
_TORCH_LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_LINEARS = ("Conv1D", "FalconLinear")


def plan_conversions(
    model: nn.Module,
    plan: Plan,
    layer_classes: Mapping[nn.Module, type[ParallelLinear]],
    axis: Axis,
    groups: ParallelGroups | None = None,
) -> list[Conversion]:
    """Choose the modules that become parallel, and their parallel classes.

    Args:
        model: the model.
        plan: its plan.
        layer_classes: parallel classes of linear layers that replace the classes of the plan.
        axis: the ranks.
        groups: the groups, whose data groups share experts; None if those of ``axis`` do.
    """
    conversions = []
    for name, module in model.named_modules():
        plans = _own_plans(name, module, plan)
        if (spec := _layer_spec(name, module, plans)) is not None:
            spec = spec._replace(kind=layer_classes.get(module, spec.kind))
            stage = axis
            if groups is not None and any(planned.style == "expert" for planned in plans.values()):
                stage, spec = groups.stage, spec._replace(options={**spec.options, "data": groups.data})
            conversions.append(_conversion(name, module, spec, plans, stage))
    return conversions + _readers(model, {one.module: one.replacement for one in conversions}, plan, axis)


def _conversion(
    name: str, module: nn.Module, spec: LayerSpec, plans: Mapping[str, TensorPlan], axis: Axis
) -> Conversion:
    conversion = Conversion.prepare(name, module, spec, axis)
    placements = conversion.replacement.placements
    if any(placements.get(own) != placement for own, placement in _placements(plans).items()):
        raise ValueError(f"{name}: the plan does not shard it as a {spec.kind.__name__} requires")
    return conversion


def _readers(
    model: nn.Module, replacements: Mapping[nn.Module, ParallelModule], plan: Plan, axis: Axis
) -> list[Conversion]:
    """Modules that may read the weight of a convolution in them, if several ranks hold the same groups of it."""
    found = []
    for name, module in model.named_modules():
        layers = [replacements.get(child) for child in module.children()]
        is_read = any(
            isinstance(layer, ParallelDepthwise) and layer.placements["weight"].has_replicas for layer in layers
        )
        if is_read and module not in replacements:
            plans = _own_plans(name, module, plan)
            found.append(_conversion(name, module, _own_spec(Sharded, plans), plans, axis))
    return found


def _own_plans(name: str, module: nn.Module, plan: Plan) -> dict[str, TensorPlan]:
    prefix = f"{name}." if name else ""
    plans = {own: plan.tensors[prefix + own] for own in own_parameters(module) if prefix + own in plan.tensors}
    return {
        own: planned if planned.style == "expert" else _in_group(planned, plan.tp) for own, planned in plans.items()
    }


def _in_group(planned: TensorPlan, tp: int) -> TensorPlan:
    """The plan of a tensor in one data group; all data groups have equal shards."""
    return replace(planned, placement=planned.placement.first(tp))


def _placements(plans: Mapping[str, TensorPlan]) -> dict[str, Placement]:
    """The placements of the parameters that are sharded."""
    return {own: planned.placement for own, planned in plans.items() if planned.placement.dim is not None}


def _layer_spec(name: str, module: nn.Module, plans: Mapping[str, TensorPlan]) -> LayerSpec | None:
    """The layer that a module becomes, by its class and the placements of its parameters; None if it stays as it is."""
    sharded = {own: plans[own] for own in _placements(plans)}
    styles = {planned.style for planned in (sharded or plans).values()}
    changed = sharded or [own for own, planned in plans.items() if planned.style == "replicated_with_grad_allreduce"]
    if changed and isinstance(module, nn.RNNBase):  # it computes with a list of its parameters
        raise _unsupported(name, module, changed, "replicate them")
    if (sharded and "gathered" in styles) or (not sharded and "replicated_with_grad_allreduce" in styles):
        return _own_spec(Sharded, plans)
    if not sharded:
        return None
    weight = sharded.get("weight")
    if weight is not None and isinstance(module, nn.Embedding):
        dim, is_gathered = -1 if weight.placement.dim else 0, _GATHERED_EMBEDDING in styles
        options = {"dim": dim, "gather_output": is_gathered, "placement": weight.placement}
        return LayerSpec(ParallelEmbedding, options)
    if _GATHERED_EMBEDDING in styles:
        raise ValueError(f"{name}: a {type(module).__name__} is not an embedding, whose output can be gathered")
    if weight is not None and _is_linear(module):
        return _linear_spec(weight, module)
    if "colwise_gather_output" in styles:
        raise ValueError(
            f"{name}: a {type(module).__name__} is not a linear layer, whose output can be gathered: use the style "
            f"gathered"
        )
    return _own_spec(_own_kind(name, module, sharded), plans)


def _own_spec(kind: type[Sharded], plans: Mapping[str, TensorPlan]) -> LayerSpec:
    """A module that extends its own class, with the placements and styles of its parameters."""
    styles = {own: planned.style for own, planned in plans.items()}
    return LayerSpec(kind, {"placements": _placements(plans), "styles": styles})


def _is_linear(module: nn.Module) -> bool:
    """Whether a module has the computation of nn.Linear; other classes of the same name may not have it."""
    kind = type(module)
    return kind in _TORCH_LINEARS or (kind.__name__ in _LINEARS and kind.__module__.startswith("transformers."))


def _num_dims(parameter: Tensor) -> int:
    """The number of dims of a parameter; 1 if all dims but one have one element."""
    return 1 if parameter.numel() == max(parameter.shape) else parameter.dim()


def _own_kind(name: str, module: nn.Module, sharded: Mapping[str, TensorPlan]) -> type[Sharded]:
    """The parallel class that extends a module's class, by that class and by the dims of the sharded parameters."""
    kind = type(module).__name__
    dims = {_num_dims(module.get_parameter(own)) for own in sharded}
    if type(module).forward is nn.MultiheadAttention.forward:
        return ParallelMultiheadAttention
    has_rows = {planned.style for planned in sharded.values()} == {"by_rows"}
    if isinstance(module, nn.Linear) and not has_rows:
        raise ValueError(f"{name}: a {kind} may compute something else than nn.Linear")
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups > 1:
        return ParallelDepthwise
    if kind.endswith("RMSNormGated") and hasattr(module, "group_size"):
        return GroupedRMSNorm
    if 3 in dims and ("Expert" in kind or name.rpartition(".")[2] == "experts"):
        return ParallelExpertLinear if set(sharded) == {"weight"} else ParallelExperts
    if "weight" in sharded and dims - {1, 2}:
        raise ValueError(f"{name}: a {kind} with sharded parameters of {max(dims)} dims is not supported")
    _check_norm_dims(name, module)
    may_be_norm = "Norm" in kind and not any(module.children())
    if dims != {1} or has_rows or ("weight" not in sharded and not may_be_norm):
        if is_of_torch(module):
            raise _unsupported(name, module, sharded, "replicate them, or use the style gathered")
        return Sharded
    return _norm_kind(name, module, sharded)


def check_partial_products(conversions: Sequence[Conversion], overrides: Sequence[Overrides]) -> None:
    """Check that products with row parallel parameters of 3 dims are all-reduced.

    Raises:
        PlanError: if a module is not of experts, and no override changes its code or states that it is correct.
    """
    known = {one.module for one in overrides if one.is_checked or one.changes_code()}
    for name, module, replacement in conversions:
        if module in known or not isinstance(replacement, Sharded) or replacement.output_is_full:
            continue
        found = [own for own in replacement.placements if replacement.styles[own] in ("rowwise", "packed_rowwise")]
        if found := [own for own in found if module.get_parameter(own).dim() == 3]:
            raise PlanError(
                f"{name}: a {type(module).__name__} multiplies by shards of {', '.join(found)}, and its output is not "
                f"all-reduced: add {name!r} = {{ allreduce_input_grad = true, allreduce_output = true }} to [modules] "
                f"of a plan file"
            )


def _check_norm_dims(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) > 1:
        raise ValueError(
            f"{name}: a {type(module).__name__} over {len(module.normalized_shape)} dims cannot be sharded (expected "
            f"one dim): flatten these dims before it, or replicate its weight and the features"
        )


def _norm_kind(name: str, module: nn.Module, sharded: Mapping[str, TensorPlan]) -> type[Sharded]:
    """The class of a norm over sharded features."""
    kind, is_layer_norm = type(module).__name__, isinstance(module, nn.LayerNorm)
    if not is_layer_norm and (not kind.endswith("RMSNorm") or "weight" not in sharded):
        raise ValueError(f"{name}: a {kind} over sharded features is not supported")
    return GlobalLayerNorm if is_layer_norm else GlobalRMSNorm


def _unsupported(name: str, module: nn.Module, plans: Iterable[str], remedy: str) -> ValueError:
    names = ", ".join(plans)
    return ValueError(f"{name}: a {type(module).__name__} with sharded {names} is not supported: {remedy}")


def _linear_spec(weight: TensorPlan, module: nn.Module) -> LayerSpec:
    options: dict[str, object] = {"placement": weight.placement}
    is_column = weight.placement.dim == 0
    if type(module).__name__ == "Conv1D":
        is_column = not is_column
        options |= {"transposed": True, "in_features": module.nx, "out_features": module.nf}
    is_classifier = weight.style == "embedding_rowwise"
    if is_classifier or weight.style == "colwise_gather_output":
        options["gather_output"] = True
    kind = VocabParallelClassifier if is_classifier else ParallelLinear
    return LayerSpec(kind.class_for(-1 if is_column else 0), options)

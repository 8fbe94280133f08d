"""Policies: Python classes that define how the modules of one class are sharded, with parallelformers' names.

On a model they are rules for its tensors, changes of its modules, and a check of its first gradients. Paths of a
policy, such as ``attention.layers[0].weight``, are found in the modules that it matches. Does not change the model.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis, reduce_from_tp
from shardconv.layers import ColumnParallelLinear, ParallelLinear, ParallelModule, RowParallelLinear
from shardconv.layers.runtime_classes import combined_class
from shardconv.layers.sharding import description
from shardconv.plan.families.family import Family
from shardconv.plan.families.rule import Rule, UnitRule
from shardconv.support.errors import PlanError

#: Method of a policy to the style of the layers that it returns.
STYLE_OF = {
    "attn_qkv": "colwise",
    "attn_out": "rowwise",
    "mlp_in": "colwise",
    "mlp_out": "rowwise",
    "on_shards": "replicated_with_grad_allreduce",
}

#: The rule of tensors that no policy names.
REPLICATE = Rule("**.*", "replicate", origin="default for tensors without a policy")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a module, in a policy.

    Attributes:
        weight: path of the weight, relative to the module: ``.`` precedes an attribute, ``[i]`` indexes a list, from
            its end if negative, as in ``layer[-1].DenseReluDense.wo.weight``.
        bias: path of the bias.
        n_fused: number of equal segments, such as q, k and v, of the sharded dim; each is sharded over all ranks.
        replace: the class that replaces the layer's, derived from :class:`~shardconv.ParallelLinear`, the default.
        reversed: whether the weight is stored (in_features, out_features), as in Conv1D.
        ignore_checker: whether the layer is optional.

    Raises:
        ValueError: if there is neither weight nor bias, or ``n_fused`` is not a positive integer.

    Example:
        >>> Layer(weight="attn.c_attn.weight", bias="attn.c_attn.bias", n_fused=3, reversed=True).n_fused
        3
    """

    weight: str | None = None
    bias: str | None = None
    n_fused: int | None = None
    replace: type | None = None
    reversed: bool | None = None
    ignore_checker: bool = False

    def __post_init__(self) -> None:
        if not self.weight and not self.bias:
            raise ValueError("Layer has neither a weight nor a bias (expected at least one)")
        if self.n_fused is not None and (type(self.n_fused) is not int or self.n_fused < 1):
            raise ValueError(f"n_fused is {self.n_fused!r} (expected a positive integer)")

    @property
    def paths(self) -> dict[str, str]:
        """The paths of the layer's tensors, by ``weight`` and ``bias``."""
        return {leaf: path for leaf, path in (("weight", self.weight), ("bias", self.bias)) if path}

    def rule(self, name: str, shape: Sequence[int], style: str, origin: str, *, is_bias: bool) -> Rule:
        """The rule for one tensor of the layer.

        Args:
            name: name of the tensor.
            shape: shape of the full tensor.
            style: one of the values of :data:`STYLE_OF`.
            origin: the source of the rule, for reports.
            is_bias: whether the tensor is the bias.

        Raises:
            PlanError: if ``n_fused`` does not divide the size of the sharded dim, or the layer is replicated.
        """
        count = self.n_fused or 1
        if is_bias and style == "rowwise":
            return Rule(name, "replicate", origin=origin)
        if count == 1:
            return Rule(name, style, transposed=bool(self.reversed), origin=origin)
        if style not in ("colwise", "rowwise"):
            raise PlanError(f"{origin}: {name}: n_fused is for sharded layers, and this one is replicated: remove it")
        size = shape[self._sharded_dim(style)] if len(shape) > 1 else shape[0]
        if size % count:
            raise PlanError(f"{origin}: {name}: {size} is not a multiple of n_fused = {count}")
        segments = (str(size // count),) * count  # units are named by their size
        return Rule(name, f"packed_{style}", segments=segments, transposed=bool(self.reversed), origin=origin)

    def _sharded_dim(self, style: str) -> int:
        """The dim of the weight that a style shards."""
        return 1 - int((style == "colwise") is not bool(self.reversed))


class Policy(ABC):
    """Base of policies, each of which shards the modules of exactly one class, such as a model's decoder layers.

    The methods have the names of parallelformers: its policies work after their imports are changed. Tensors that no
    policy names are replicated. Pass policies to :func:`~shardconv.convert_model`.

    Args:
        layer: the module to which the policy applies.

    Example:
        >>> class MlpPolicy(Policy):
        ...     @staticmethod
        ...     def original_layer_class():
        ...         return Mlp
        ...
        ...     @staticmethod
        ...     def mlp_in():
        ...         return [Layer(weight="up.weight", bias="up.bias")]
        ...
        ...     @staticmethod
        ...     def mlp_out():
        ...         return [Layer(weight="down.weight", bias="down.bias")]
    """

    def __init__(self, layer: Any) -> None:  # noqa: ANN401 - a module, which needs torch
        self.layer = layer

    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> Mapping[str, Any]:  # noqa: ANN401, ARG004 - any model's
        """Attributes of the module that have another value on each rank.

        Args:
            config: the model's config; None if it does not have one.
            world_size: number of ranks.

        Returns:
            Path of an attribute, relative to the module, to its value per rank, such as ``{"attn.num_heads": 4}``.
            Where layers with ``ignore_checker`` are missing, attributes of their modules may be missing, too.
        """
        return {}

    @staticmethod
    def replace_modules() -> Mapping[type | str, type]:
        """Modules of the model whose class is replaced, keeping their attributes.

        Returns:
            A class, or its name, to the class that replaces it for modules of exactly that class. Only this model
            changes. For the layers of a policy, use ``replace`` of :class:`Layer`.
        """
        return {}

    @staticmethod
    def attn_qkv() -> Sequence[Layer]:
        """Column parallel projections: dim 0 of a weight [out, in] and the bias are sharded."""
        return []

    @staticmethod
    def attn_out() -> Sequence[Layer]:
        """Row parallel projections: dim 1 of a weight [out, in] is sharded; the bias is replicated, and added once.

        Also tables with one value per head, such as relative position biases: dim 1 of [positions, heads] is sharded.
        """
        return []

    @staticmethod
    def mlp_in() -> Sequence[Layer]:
        """Column parallel projections, as in :meth:`attn_qkv`."""
        return []

    @staticmethod
    def mlp_out() -> Sequence[Layer]:
        """Row parallel projections, as in :meth:`attn_out`."""
        return []

    @staticmethod
    def on_shards() -> Sequence[Layer]:
        """Replicated layers that are applied to shards, such as a norm over each head: gradients are all-reduced.

        parallelformers, which does not train, does not have this method.
        """
        return []

    @staticmethod
    @abstractmethod
    def original_layer_class() -> type:
        """The class of modules to which the policy applies; derived classes are not included."""


_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_PATH = re.compile(rf"(?:{_STEP.pattern})(?:\.[^.\[\]]+|\[-?\d+\])*")


class CompiledPolicies(NamedTuple):
    """The rules and changes of policies on one model.

    Attributes:
        family: the rules: one for each tensor that a policy names, and one for all others.
        layer_classes: the parallel classes of linear layers for which a policy names one.
        new_classes: the classes that replace the classes of modules.
        attributes: attributes of modules, or ``config.`` and fields of their config, with their values on each rank.
    """

    family: Family
    layer_classes: dict[nn.Module, type[ParallelLinear]]
    new_classes: dict[nn.Module, type[nn.Module]]
    attributes: dict[nn.Module, dict[str, object]]


def as_policies(policy: object) -> tuple[type[Policy], ...]:
    """Convert a policy, or a list or tuple of policies, to a tuple.

    Raises:
        TypeError: if it is something else, or empty.
    """
    policies = tuple(policy) if isinstance(policy, (list, tuple)) else (policy,)
    wrong = [found for found in policies if not (isinstance(found, type) and issubclass(found, Policy))]
    if wrong or not policies:
        raise TypeError(
            f"policy {wrong[0] if wrong else policy!r:.80} is not a class derived from shardconv.Policy (expected one, "
            f"several, or a family name)"
        )
    return policies


def compile_policies(model: nn.Module, policies: Sequence[type[Policy]], tp: int) -> CompiledPolicies:
    """Compile policies to rules and overrides of a model.

    Raises:
        PlanError: if they name a module, tensor or attribute that the model does not have, contradict each other, or do
            not fit its layers.
    """
    compiler = _Compiler(model, tp)
    for policy in policies:
        compiler.add(policy)
    return compiler.result(", ".join(policy.__name__ for policy in policies))


class _Compiler:
    """Collects the rules and changes of policies on one model."""

    def __init__(self, model: nn.Module, tp: int) -> None:
        self._model, self._tp = model, tp
        self._rules: dict[str, Rule] = {}
        self._owners: dict[nn.Module, str] = {}
        self._found = CompiledPolicies(Family(""), {}, {}, {})

    def add(self, policy: type[Policy]) -> None:
        """Add the rules and changes of one policy, for all modules of its class."""
        kind = policy.original_layer_class()
        named = self._model.named_modules(remove_duplicate=False)
        found = [_MatchedModule(policy, name, module) for name, module in named if _is_of_class(module, kind)]
        if not found:
            raise PlanError(
                f"{policy.__name__}: {type(self._model).__name__} does not have a module of exactly the class "
                f"{getattr(kind, '__qualname__', kind)}, which the policy is for"
            )
        for matched in found:
            self._add_layers(matched)
            self._add_attributes(matched)
        self._add_classes(found[0])  # they apply to the whole model, so once is enough

    def result(self, name: str) -> CompiledPolicies:
        """Return the rules and changes of all policies that were added."""
        _check_biases(self._owners, self._rules)
        _check_ties(self._model, self._rules)
        if both := [self._owners[module] for module in self._found.new_classes if module in self._owners]:
            raise PlanError(
                f"{name}: replace_modules gives {both[0]} another class, and a layer names it: use the layer's replace "
                f"instead"
            )
        units = {unit: UnitRule(int(unit)) for rule in self._rules.values() for unit in rule.segments}
        return self._found._replace(family=Family(name, units=units, rules=(*self._rules.values(), REPLICATE)))

    def _add_layers(self, matched: "_MatchedModule") -> None:
        for style, layer in matched.layers:
            for leaf in layer.paths:
                found = matched.tensor(layer, leaf)
                if found is None:
                    continue
                if found.name in self._rules:
                    raise matched.error(f"{found.name} is named by two layers")
                _check_fits(matched, layer, leaf, style, found)
                self._rules[found.name] = layer.rule(
                    found.name, found.value.shape, style, f"policy {matched.policy_name}", is_bias=leaf == "bias"
                )
                self._owners[found.owner] = found.name
                if layer.replace is not None:
                    kind = _replacement_class(matched, layer.replace, style, found)
                    self._found.layer_classes[found.owner] = kind

    def _add_attributes(self, matched: "_MatchedModule") -> None:
        arguments = matched.policy.replace_arguments(getattr(self._model, "config", None), self._tp)
        for path, value in arguments.items():
            found = matched.attribute(path)
            if found is None:
                continue
            _check_divides(matched, path, found.value, value, self._tp)
            known = self._found.attributes.setdefault(found.owner, {}).setdefault(found.key, value)
            if known != value:
                raise matched.error(f"attribute {path!r} is set twice, to {known!r} and {value!r}")

    def _add_classes(self, matched: "_MatchedModule") -> None:
        for old, new in matched.policy.replace_modules().items():
            if not (isinstance(new, type) and issubclass(new, nn.Module)):
                raise matched.error(f"replace_modules: {new!r:.80} is not a class of modules")
            modules = [module for module in self._model.modules() if old in (type(module), type(module).__qualname__)]
            if not modules:
                raise matched.error(f"replace_modules: the model does not have a module of the class {old!r:.80}")
            for module in modules:
                if self._found.new_classes.setdefault(module, new) is not new:
                    raise matched.error(f"replace_modules: another policy gives {old!r:.80} another class")


class _Target(NamedTuple):
    """The value at the end of a path.

    Attributes:
        owner: the module, other object or list that holds it.
        key: its attribute name or index there; ``config.FIELD`` for a field of the module's config.
        name: its name in the model.
        value: the value.
    """

    owner: Any
    key: str
    name: str
    value: Any


class _MatchedModule:
    """A module that a policy matches, and the lookup of its layers and attributes."""

    def __init__(self, policy: type[Policy], name: str, module: nn.Module) -> None:
        self.name, self.module, self.policy = name, module, policy(module)
        self.policy_name = policy.__name__
        self.layers = [(style, layer) for role, style in STYLE_OF.items() for layer in getattr(self.policy, role)()]
        if wrong := next((layer for _, layer in self.layers if not isinstance(layer, Layer)), None):
            raise self.error(f"{wrong!r:.80} is not a shardconv.Layer")

    def error(self, problem: str) -> PlanError:
        """Make an error that names the policy and the module."""
        return PlanError(f"{self.policy_name}, {type(self.module).__name__} {self.name or '(the model)'}: {problem}")

    def tensor(self, layer: Layer, leaf: str) -> _Target | None:
        """Find the weight or the bias of a layer; None if it is missing and the policy allows that.

        Raises:
            PlanError: if it is missing, or is not a parameter of an unsharded module.
        """
        path = layer.paths[leaf]
        found = self._find(path)
        if found is None or found.value is None:
            if layer.ignore_checker:
                return None
            raise self.error(f"{leaf} {path!r} does not exist: correct the path, or pass ignore_checker=True")
        if not isinstance(found.value, nn.Parameter) or not isinstance(found.owner, nn.Module):
            raise self.error(f"{path!r} is a {type(found.value).__name__}, not a parameter of a module")
        if isinstance(found.owner, ParallelModule):
            raise self.error(f"{path!r} is already sharded: load the unsharded model to shard it otherwise")
        return found

    def attribute(self, path: str) -> _Target | None:
        """Find an attribute to set; None if its module is missing and the policy allows that.

        Raises:
            PlanError: if it is missing, or belongs to an object that several modules may share.
        """
        found = self._find(path)
        if found is None:
            if self._is_optional(path.rpartition(".")[0]):
                return None
            raise self.error(f"attribute {path!r}, which replace_arguments sets, does not exist")
        if isinstance(found.value, (Tensor, nn.Module)):
            raise self.error(f"attribute {path!r}: replace_arguments cannot set a {type(found.value).__name__}")
        if isinstance(found.owner, nn.Module):
            return found
        own = f"config.{found.key}"
        above = path.removesuffix(own)
        holder = self._find(above.removesuffix(".")) if above else None
        module = self.module if holder is None else holder.value
        if above == path or not isinstance(module, nn.Module):
            raise self.error(f"attribute {path!r} is one of a {type(found.owner).__name__}, which others may share")
        return found._replace(owner=module, key=own)

    def _is_optional(self, module_path: str) -> bool:
        """Whether a module is missing that a policy names in optional layers only."""
        paths = [path for _, layer in self.layers if layer.ignore_checker for path in layer.paths.values()]
        is_named = any(path.startswith(f"{module_path}.") for path in paths)
        return is_named and self._find(module_path) is None

    def _find(self, path: str) -> _Target | None:
        """Find the value at the end of a path; None if there is none."""
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise self.error(f"{path!r:.80} is not a path (expected names separated by dots, and [number] for lists)")
        names = [self.name] if self.name else []
        owner: object = None
        found: Any = self.module  # an object of the model, of any type
        for attribute, index in _STEP.findall(path):
            owner = found
            try:
                last = attribute or str(range(len(found))[int(index)])
                found = getattr(found, attribute) if attribute else found[int(last)]
            except (AttributeError, IndexError, TypeError):
                return None
            names.append(last)
        return _Target(owner, names[-1], ".".join(names), found)


def _is_of_class(module: nn.Module, kind: object) -> bool:
    """Whether a module is exactly of a class. A function, as type checkers would narrow the module to ``kind``."""
    return type(module) is kind


def _check_fits(matched: _MatchedModule, layer: Layer, leaf: str, style: str, found: _Target) -> None:
    """Refuse a layer whose class is not supported, or whose shape does not fit its style."""
    kind, shape = type(found.owner).__name__, list(found.value.shape)
    if leaf == "bias" or style not in ("colwise", "rowwise"):
        if leaf == "bias" and len(shape) != 1:
            raise matched.error(f"bias {found.name} has shape {shape} (expected one dim)")
        return
    is_linear = isinstance(found.owner, nn.Linear) or kind == "Conv1D"
    if len(shape) > 1 and not (found.key == "weight" and (is_linear or isinstance(found.owner, nn.Embedding))):
        raise matched.error(f"weight {found.name} is of a {kind} (expected nn.Linear, Conv1D or nn.Embedding)")
    if len(shape) == 1 and style == "rowwise":
        raise matched.error(f"weight {found.name} of shape {shape}: only a matrix has input features to shard")
    if is_linear and bool(layer.reversed) != (kind == "Conv1D"):
        stored = "(in, out): it needs" if kind == "Conv1D" else "(out, in): it cannot have"
        raise matched.error(f"weight {found.name}: a {kind} stores it {stored} reversed=True")


def _check_biases(owners: dict[nn.Module, str], rules: dict[str, Rule]) -> None:
    """Refuse a replicated bias beside a weight whose output features are sharded."""
    for owner, name in owners.items():
        bias = f"{name.removesuffix('weight')}bias"
        is_column = name.endswith("weight") and rules[name].style in ("colwise", "packed_colwise")
        if is_column and bias not in rules and getattr(owner, "bias", None) is not None:
            raise PlanError(
                f"{bias} is not named, and the outputs that it is added to are sharded: name it with {name}"
            )


def _check_ties(model: nn.Module, rules: dict[str, Rule]) -> None:
    """Refuse a tied parameter that is sharded differently in the modules that share it."""
    seen: dict[nn.Parameter, tuple[str, object]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rule = rules.get(name, REPLICATE)
        first, how = seen.setdefault(parameter, (name, (rule.style, rule.segments, rule.transposed)))
        if how != (rule.style, rule.segments, rule.transposed):
            raise PlanError(
                f"{name} is tied to {first}, and the policy shards them differently: name both, or untie them"
            )


def _check_divides(matched: _MatchedModule, path: str, old: object, new: object, tp: int) -> None:
    """Refuse a quotient that ``old // tp`` rounded down: the ranks would hold fewer heads than the model has."""
    if type(old) is int and type(new) is int and old % tp and new == old // tp:
        supported = ", ".join(str(size) for size in range(1, min(old, 256) + 1) if old % size == 0)
        raise matched.error(
            f"attribute {path!r}: {old} is not a multiple of {tp}. Supported tensor parallel sizes: {supported}"
        )


def _replacement_class(matched: _MatchedModule, kind: object, style: str, found: _Target) -> type[ParallelLinear]:
    """Return the parallel class that the policy's ``replace`` gives a layer.

    Args:
        matched: the matched module, for messages.
        kind: the value of ``replace``.
        style: the style of the layer's weight.
        found: the weight.
    """
    if not isinstance(found.owner, nn.Linear) and type(found.owner).__name__ != "Conv1D":
        raise matched.error(f"{found.name}: replace is for linear layers, not for a {type(found.owner).__name__}")
    pair: tuple[type[ParallelLinear], ...] = (ColumnParallelLinear, RowParallelLinear)
    fitting, other = reversed(pair) if style == "rowwise" else pair
    if not (isinstance(kind, type) and issubclass(kind, ParallelLinear)) or issubclass(kind, other):
        raise matched.error(
            f"{found.name}: replace = {getattr(kind, '__name__', kind)} is not derived from "
            f"shardconv.{fitting.__name__} or ParallelLinear: pass one of these, or remove replace"
        )
    if kind is ParallelLinear:
        return fitting
    combined: type[ParallelLinear] = kind if issubclass(kind, fitting) else combined_class(kind, kind, fitting)
    return combined


#: The largest difference of norm or sum, relative to the norm: above rounding, below the effect of a rank's heads.
_TOLERANCE = 0.01


def check_first_gradients(model: nn.Module, axis: Axis) -> None:
    """Compare the first nonzero gradient of each replicated parameter over the ranks, when it is computed.

    They differ where a policy replicates a parameter that the model uses on local heads, such as the weight of a norm
    over each head: each rank then has the gradient of its local heads only.
    """
    for name, parameter in model.named_parameters():
        if axis.size > 1 and parameter.requires_grad and description(parameter) is None:
            handles: list[torch.utils.hooks.RemovableHandle] = []
            handles.append(parameter.register_hook(partial(_compare, name, axis, handles)))


def _compare(name: str, axis: Axis, handles: list[torch.utils.hooks.RemovableHandle], gradient: Tensor) -> None:
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().float()
    local = torch.stack([values.norm(), values.sum()])
    most = reduce_from_tp(torch.cat([local, -local]), op=torch.distributed.ReduceOp.MAX, group=axis)
    norm, spread = most[0], (most[:2] + most[2:]).max()
    if spread > _TOLERANCE * norm:
        raise RuntimeError(
            f"{name}: its gradient is not the same on all ranks. It is replicated, as no layer of the policy shards "
            f"it; if it is used on local heads, as a norm over each head, name it in the policy's on_shards(). "
            f"Otherwise the ranks had different inputs or seeds"
        )
    if norm > 0:
        handles.pop().remove()

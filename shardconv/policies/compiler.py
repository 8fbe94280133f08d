"""Compilation of policies to rules for a model's tensors and to changes of modules.

Owns the checks that policies fit the model. Does not change the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from shardconv.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from shardconv.layers.runtime_classes import combined_class
from shardconv.plan.families.family import Family
from shardconv.plan.families.rule import Rule, UnitRule
from shardconv.policies.paths import MatchedModule, ParameterTarget
from shardconv.policies.policy import REPLICATE, Layer, Policy
from shardconv.support.errors import PlanError


class ModuleChange(NamedTuple):
    """The changes of policies to one module, beside its layers.

    Attributes:
        module: the module.
        new_class: the class that takes the place of its own; None to keep that.
        attributes: attributes, or ``config.`` and fields of its config, with their values on each rank.
    """

    module: nn.Module
    new_class: type[nn.Module] | None
    attributes: dict[str, object]


class CompiledPolicies(NamedTuple):
    """The rules and changes of policies on one model.

    Attributes:
        family: the rules: one for each tensor that a policy names, and one for all others.
        layer_classes: the parallel classes of linear layers for which a policy names one.
        changes: the changes to modules.
    """

    family: Family
    layer_classes: dict[nn.Module, type[ParallelLinear]]
    changes: list[ModuleChange]


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
        PlanError: if the model does not have what they name, they contradict each other, or do not fit its layers.
    """
    compiler = _Compiler(model, tp)
    for policy in policies:
        compiler.add(policy)
    return compiler.result(", ".join(policy.__name__ for policy in policies))


class _Compiler:
    """Collects the rules and overrides of policies on one model."""

    def __init__(self, model: nn.Module, tp: int) -> None:
        self._model, self._tp = model, tp
        self._rules: dict[str, Rule] = {}
        self._owners: dict[nn.Module, str] = {}
        self._layer_classes: dict[nn.Module, type[ParallelLinear]] = {}
        self._new_classes: dict[nn.Module, type[nn.Module]] = {}
        self._attributes: dict[tuple[nn.Module, str], object] = {}

    def add(self, policy: type[Policy]) -> None:
        """Add the rules and overrides of one policy, for all modules of its class."""
        kind = policy.original_layer_class()
        named = self._model.named_modules(remove_duplicate=False)
        found = [MatchedModule(policy, name, module) for name, module in named if _is_of_class(module, kind)]
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
        """Return the rules and overrides of all policies that were added."""
        _check_biases(self._owners, self._rules)
        _check_ties(self._model, self._rules)
        for module in self._new_classes:
            if module in self._owners:
                raise PlanError(
                    f"{name}: replace_modules gives {self._owners[module]} another class, and a layer names it: use "
                    f"the layer's replace instead"
                )
        units = {unit: UnitRule(int(unit)) for rule in self._rules.values() for unit in rule.segments}
        family = Family(name, units=units, rules=(*self._rules.values(), REPLICATE))
        return CompiledPolicies(family, self._layer_classes, self._changes())

    def _changes(self) -> list[ModuleChange]:
        values: dict[nn.Module, dict[str, object]] = {module: {} for module in self._new_classes}
        for (module, name), value in self._attributes.items():
            values.setdefault(module, {})[name] = value
        return [ModuleChange(module, self._new_classes.get(module), own) for module, own in values.items()]

    def _add_layers(self, matched: MatchedModule) -> None:
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
                    self._layer_classes[found.owner] = _replacement_class(matched, layer.replace, style, found)

    def _add_attributes(self, matched: MatchedModule) -> None:
        arguments = matched.policy.replace_arguments(getattr(self._model, "config", None), self._tp)
        for path, value in arguments.items():
            found = matched.attribute(path)
            if found is None:
                continue
            _check_divides(matched, path, found.value, value, self._tp)
            key = (found.module, found.name)
            if self._attributes.setdefault(key, value) != value:
                raise matched.error(f"attribute {path!r} is set twice, to {self._attributes[key]!r} and {value!r}")

    def _add_classes(self, matched: MatchedModule) -> None:
        for old, new in matched.policy.replace_modules().items():
            if not (isinstance(new, type) and issubclass(new, nn.Module)):
                raise matched.error(f"replace_modules: {new!r:.80} is not a class of modules")
            modules = [module for module in self._model.modules() if old in (type(module), type(module).__qualname__)]
            if not modules:
                raise matched.error(f"replace_modules: the model does not have a module of the class {old!r:.80}")
            for module in modules:
                if self._new_classes.setdefault(module, new) is not new:
                    raise matched.error(f"replace_modules: another policy gives {old!r:.80} another class")


def _is_of_class(module: nn.Module, kind: object) -> bool:
    """Whether a class is exactly that of a module. A function, as type checkers would narrow the module to ``kind``."""
    return type(module) is kind


def _check_fits(matched: MatchedModule, layer: Layer, leaf: str, style: str, found: ParameterTarget) -> None:
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


def _check_divides(matched: MatchedModule, path: str, old: object, new: object, tp: int) -> None:
    """Refuse a quotient that ``old // tp`` rounded down: the ranks would hold fewer heads than the model has."""
    if type(old) is int and type(new) is int and old % tp and new == old // tp:
        supported = ", ".join(str(size) for size in range(1, min(old, 256) + 1) if old % size == 0)
        raise matched.error(
            f"attribute {path!r}: {old} is not a multiple of {tp}. Supported tensor parallel sizes: {supported}"
        )


def _replacement_class(
    matched: MatchedModule, kind: object, style: str, found: ParameterTarget
) -> type[ParallelLinear]:
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

"""Compilation of policies to rules for a model's tensors and to module overrides.

Owns the checks that policies fit the model. Does not change the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from shardconv.convert.classes import combined_class
from shardconv.convert.overrides import Overrides
from shardconv.convert.policy_paths import Block, ParameterTarget
from shardconv.errors import PlanError
from shardconv.layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from shardconv.plan.family import Family
from shardconv.plan.policy import REPLICATE, Layer, Policy
from shardconv.plan.rule import Rule, UnitRule


class CompiledPolicies(NamedTuple):
    """The rules and overrides of policies on one model.

    Attributes:
        family: the rules: one for each tensor that a policy names, and one for all others.
        kinds: the classes that linear layers become, where a policy names them.
        overrides: the module overrides.
    """

    family: Family
    kinds: dict[nn.Module, type[ParallelLinear]]
    overrides: list[Overrides]


def as_policies(policy: object) -> tuple[type[Policy], ...]:
    """Return the policies of an argument: one class, or several in a list or tuple.

    Raises:
        TypeError: if it is something else.
    """
    policies = tuple(policy) if isinstance(policy, (list, tuple)) else (policy,)
    for found in policies or (policy,):
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise TypeError(
                f"policy {found!r:.80}: is not a class derived from shardconv.Policy (expected one, or a family name)"
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
        self._kinds: dict[nn.Module, type[ParallelLinear]] = {}
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._attributes: dict[tuple[nn.Module, str], object] = {}

    def add(self, policy: type[Policy]) -> None:
        """Add the rules and overrides of one policy, for all modules of its class."""
        kind = policy.original_layer_class()
        every = self._model.named_modules(remove_duplicate=False)
        blocks = [Block(policy, name, module) for name, module in every if _is_of_class(module, kind)]
        if not blocks:
            raise PlanError(
                f"{policy.__name__}: {type(self._model).__name__} has no module of exactly the class "
                f"{getattr(kind, '__qualname__', kind)}, which the policy is for"
            )
        for block in blocks:
            self._add_layers(block)
            self._add_attributes(block)
        self._add_classes(blocks[0])

    def result(self, name: str) -> CompiledPolicies:
        """Return the rules and overrides of all policies that were added."""
        _check_biases(self._owners, self._rules)
        _check_ties(self._model, self._rules)
        for module in self._classes:
            if module in self._owners:
                raise PlanError(
                    f"{name}: replace_modules gives {self._owners[module]} another class, and a layer names it: use "
                    f"the layer's replace instead"
                )
        units = {part: UnitRule(int(part)) for rule in self._rules.values() for part in rule.parts}
        family = Family(name, units=units, rules=(*self._rules.values(), REPLICATE))
        return CompiledPolicies(family, self._kinds, self._overrides())

    def _overrides(self) -> list[Overrides]:
        values: dict[nn.Module, dict[str, object]] = {module: {} for module in self._classes}
        for (module, name), value in self._attributes.items():
            values.setdefault(module, {})[name] = value
        return [
            Overrides(
                module,
                new_class=self._classes.get(module),
                config_fields={
                    name.removeprefix("config."): value for name, value in own.items() if name.startswith("config.")
                },
                attributes={name: value for name, value in own.items() if not name.startswith("config.")},
            )
            for module, own in values.items()
        ]

    def _add_layers(self, block: Block) -> None:
        for style, layer in block.layers:
            for leaf in layer.paths:
                found = block.tensor(layer, leaf)
                if found is None:
                    continue
                if found.name in self._rules:
                    raise block.error(f"{found.name} is named by two layers")
                _check_fits(block, layer, leaf, style, found)
                self._rules[found.name] = layer.rule(
                    found.name, found.value.shape, style, f"policy {block.policy_name}", is_bias=leaf == "bias"
                )
                self._owners[found.owner] = found.name
                if layer.replace is not None:
                    self._kinds[found.owner] = _replacement_class(block, layer.replace, style, found)

    def _add_attributes(self, block: Block) -> None:
        arguments = block.policy.replace_arguments(getattr(self._model, "config", None), self._tp)
        for path, value in arguments.items():
            found = block.attribute(path)
            if found is None:
                continue
            _check_divides(block, path, found.value, value, self._tp)
            key = (found.module, found.name)
            if self._attributes.setdefault(key, value) != value:
                raise block.error(f"attribute {path!r} is set twice, to {self._attributes[key]!r} and {value!r}")

    def _add_classes(self, block: Block) -> None:
        for old, new in block.policy.replace_modules().items():
            if not (isinstance(new, type) and issubclass(new, nn.Module)):
                raise block.error(f"replace_modules: {new!r:.80} is not a class of modules")
            found = [module for module in self._model.modules() if old in (type(module), type(module).__qualname__)]
            if not found:
                raise block.error(f"replace_modules: the model has no module of the class {old!r:.80}")
            if any(self._classes.setdefault(module, new) is not new for module in found):
                raise block.error(f"replace_modules: another policy gives {old!r:.80} another class")


def _is_of_class(module: nn.Module, kind: object) -> bool:
    return type(module) is kind


def _check_fits(block: Block, layer: Layer, leaf: str, style: str, found: ParameterTarget) -> None:
    """Refuse a layer whose class is not supported, or whose shape does not fit its style."""
    kind, shape = type(found.owner).__name__, list(found.value.shape)
    if leaf == "bias" or style not in ("colwise", "rowwise"):
        if leaf == "bias" and len(shape) != 1:
            raise block.error(f"bias {found.name} of shape {shape} has to have one dim")
        return
    is_linear = isinstance(found.owner, nn.Linear) or kind == "Conv1D"
    if len(shape) > 1 and not (found.key == "weight" and (is_linear or isinstance(found.owner, nn.Embedding))):
        raise block.error(f"weight {found.name}: a {kind} is none of nn.Linear, Conv1D and nn.Embedding")
    if len(shape) == 1 and style == "rowwise":
        raise block.error(f"weight {found.name} of shape {shape}: only a matrix has input features to shard")
    if is_linear and bool(layer.reversed) is not (kind == "Conv1D"):
        stored = "(in, out): it needs" if kind == "Conv1D" else "(out, in): it cannot have"
        raise block.error(f"weight {found.name}: a {kind} stores it {stored} reversed=True")


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
        first, how = seen.setdefault(parameter, (name, (rule.style, rule.parts, rule.transposed)))
        if how != (rule.style, rule.parts, rule.transposed):
            raise PlanError(
                f"{name} is tied to {first}, and the policy shards them differently: name both, or untie them"
            )


def _check_divides(block: Block, path: str, old: object, new: object, tp: int) -> None:
    """Refuse a count that ``//`` rounded down: some heads would be on no rank."""
    if type(old) is int and type(new) is int and old % tp and new == old // tp:
        supported = ", ".join(str(size) for size in range(1, min(old, 256) + 1) if old % size == 0)
        raise block.error(
            f"attribute {path!r}: {old} is not a multiple of {tp}. Supported tensor parallel sizes: {supported}"
        )


def _replacement_class(block: Block, kind: object, style: str, found: ParameterTarget) -> type[ParallelLinear]:
    """Return the class that a layer becomes by the policy's ``replace``."""
    if not isinstance(found.owner, nn.Linear) and type(found.owner).__name__ != "Conv1D":
        raise block.error(f"{found.name}: replace is for linear layers, not for a {type(found.owner).__name__}")
    pair: tuple[type[ParallelLinear], ...] = (ColumnParallelLinear, RowParallelLinear)
    fits, other = reversed(pair) if style == "rowwise" else pair
    if not (isinstance(kind, type) and issubclass(kind, ParallelLinear)) or issubclass(kind, other):
        raise block.error(
            f"{found.name}: replace = {getattr(kind, '__name__', kind)} is not derived from shardconv.{fits.__name__} "
            f"or ParallelLinear: without replace the layer becomes what fits"
        )
    if kind is ParallelLinear:
        return fits
    combined: type[ParallelLinear] = kind if issubclass(kind, fits) else combined_class(kind, kind, fits)
    return combined

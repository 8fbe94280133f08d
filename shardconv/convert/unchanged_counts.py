"""Checks that the code of modules does not read the number of units of the full model.

Owns which modules are examined, and the texts of errors. An attention that reshapes its local features to
the heads of the full model computes wrong numbers, and no shape shows it.
"""

import gc
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import nn

from shardconv.convert.code_values import Count, LocalFeatures
from shardconv.convert.forward_reader import ForwardReader, Problem
from shardconv.convert.overrides import Overrides, is_read_only
from shardconv.layers import ColumnParallelLinear, ParallelEmbedding, ParallelLinear, RowParallelLinear
from shardconv.layers.parallel_module import ParallelModule
from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.placement import IndivisibleError, intervals
from shardconv.plan.plan import Plan
from shardconv.plan.rule_set import ModelRules
from shardconv.support.errors import PlanError

#: The attribute of a module with the values that its counts had before :func:`count_overrides`, by name.
_FULL_COUNTS = "_shardconv_full_counts"
#: The attribute of parallel layers whose features no count depends on, as the caller states by ``counts=()``.
_UNAFFECTED = "_shardconv_unaffected_counts"
#: The letters of layers of an attention whose names do not spell them.
_LETTERS = {"query": "q", "key": "k", "value": "v", "queries": "q", "keys": "k", "values": "v", "attn": "qkv"}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

#: The remedy for a module and its problem: to change a number, or to state that none has to change.
Remedy = Callable[["Examined", Problem | None], str]


class Examined(NamedTuple):
    """A module whose forward was read.

    Attributes:
        path: its name in the model.
        module: the module.
        problems: divisions of local features by numbers of the unsharded model.
        is_unknown: whether it has the layers of an attention, and its code does not show how features are divided.
    """

    path: str
    module: nn.Module
    problems: Sequence[Problem]
    is_unknown: bool


def examine_forwards(
    model: nn.Module,
    replacements: Mapping[nn.Module, ParallelModule],
    overrides: Iterable[Overrides],
    owners: Iterable[nn.Module] = (),
) -> Iterator[Examined]:
    """Read the forwards of the modules that contain layers with shards, or are such layers.

    Skips modules whose class an override replaces, and modules that the rules state to be correct on each rank.

    Args:
        model: the model.
        replacements: the parallel modules that modules become.
        overrides: the module overrides.
        owners: modules outside of the model that contain layers with shards.
    """
    overrides = list(overrides)
    checked = {one.module for one in overrides if one.is_checked or one.new_class is not None}
    overridden = {one.module for one in overrides if one.changes_counts()}
    named = [*model.named_modules(), *(("", owner) for owner in owners)]
    names = {layer: f"{path}.{name}" if path else name for path, one in named for name, layer in named_layers(one)}
    parallel = {layer: replacements.get(layer, layer) for layer in names}
    outputs = {
        layer: _output(names[layer], one)
        for layer, one in parallel.items()
        if isinstance(one, ParallelLinear | ParallelEmbedding)
    }
    modules = [(path, one) for path, one in named if _is_examined(one, parallel)]
    changed = dict([*_changed(overrides), *_recorded(one for _, one in named)])
    reader = ForwardReader(outputs, [one for _, one in modules], changed)
    for path, module in modules:
        if module not in checked:
            reader.read(module)
            is_known = reader.is_understood or module in overridden or _FULL_COUNTS in vars(module)
            yield Examined(
                path, module, reader.problems, not is_known and _is_unread_attention(module, outputs, parallel)
            )


def named_layers(
    module: nn.Module, containers: Collection[type[nn.Module]] = _CONTAINERS, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, also in its containers, with their names in it."""
    for name, child in module.named_children():
        yield f"{prefix}{name}", child
        if isinstance(child, tuple(containers)):
            yield from named_layers(child, containers, f"{prefix}{name}.")


def _is_examined(module: nn.Module, parallel: Mapping[nn.Module, nn.Module]) -> bool:
    if type(module).__module__.startswith("torch."):  # converted with its numbers
        return False
    layers = (module, *(layer for _, layer in named_layers(module)))
    return any(isinstance(parallel.get(one), ParallelModule) for one in layers) and not isinstance(
        module, ParallelLinear | ParallelEmbedding
    )


def _output(name: str, parallel: nn.Module) -> LocalFeatures | None:
    """The local features in the output of a layer; None if it has all features, or no count depends on them."""
    is_column = isinstance(parallel, ColumnParallelLinear) or getattr(parallel, "dim", None) == -1
    if not is_column or getattr(parallel, "gather_output", True) or _UNAFFECTED in vars(parallel):
        return None
    assert isinstance(parallel, ParallelModule)
    placement, rank = parallel.placements["weight"], parallel.axis.rank
    local = placement.local_size(rank)
    is_fused = len(list(intervals(placement.ranks[rank]))) > 1
    return LocalFeatures(name, placement.size, local, is_fused) if local != placement.size else None


def _changed(overrides: Iterable[Overrides]) -> Iterator[tuple[tuple[int, str], tuple[object, object]]]:
    """The attributes that overrides change, with their values in the unsharded model and on this rank."""
    for one in overrides:
        local = {**dict.fromkeys(one.limits), **one.attributes}
        for owner, values in ((one.module, local), (getattr(one.module, "config", None), one.config_fields)):
            yield from (((id(owner), name), (getattr(owner, name, None), value)) for name, value in values.items())


def _recorded(modules: Iterable[nn.Module]) -> Iterator[tuple[tuple[int, str], tuple[object, object]]]:
    """The counts that earlier conversions divided."""
    for module in modules:
        full = vars(module).get(_FULL_COUNTS, {})
        yield from (((id(module), name), (value, getattr(module, name))) for name, value in full.items())


def _is_unread_attention(
    module: nn.Module,
    outputs: Mapping[nn.Module, LocalFeatures | None],
    parallel: Mapping[nn.Module, nn.Module],
) -> bool:
    """Whether a module has the layers of an attention by their names, or could have, and its code is not available."""
    if not any(isinstance(parallel.get(layer), RowParallelLinear) for _, layer in named_layers(module)):
        return False
    shards = {name: shard for name, layer in named_layers(module) if (shard := outputs.get(layer)) is not None}
    letters = set().union(*map(_letters, shards))
    own = {name for name, _ in named_layers(module, (nn.ModuleList, nn.ModuleDict))} & shards.keys()
    could_be = len(own) > 2 or any(shards[name].is_fused for name in own)
    return "q" in letters or len(letters) > 1 or (could_be and not _has_source(module))


def _letters(name: str) -> set[str]:
    """The segments (q, k, v) of a layer, by its name, such as ``to_q``, ``wq``, ``qkv_proj`` or ``query``."""
    parts = (_LETTERS.get(part, part.strip("w0123456789")) for part in re.split(r"[._]", name.lower()))
    return set().union(*(part for part in parts if set(part) <= set("qkv")))


def _has_source(module: nn.Module) -> bool:
    try:
        inspect.getsource(inspect.unwrap(module.forward))
    except (OSError, TypeError):
        return False
    return True


def check_counts(examined: Iterable[Examined], remedy: Remedy, error: type[Exception]) -> None:
    """Refuse modules whose forward divides local features by a number of the unsharded model.

    Args:
        examined: the modules.
        remedy: returns the end of the message.
        error: the class of the error.
    """
    for one in examined:
        kind = type(one.module).__name__
        label = f"{one.path} ({kind})" if one.path else kind
        for problem in one.problems:
            raise error(f"{label}: {_described(one.module, problem)}: {remedy(one, problem)}")
        if one.is_unknown:
            raise error(
                f"{label}: has the sharded layers of an attention, and its code does not show how it divides their "
                f"local features into heads: {remedy(one, None)}"
            )


def _described(module: nn.Module, problem: Problem) -> str:
    shard, count, number = problem
    if isinstance(number, str):
        local = f", and one rank has {shard.local} of its {shard.full} features" if shard.full else ""
        return f"its forward {number} ({shard.layer}{local})"
    divisor = f"{number}, a number in its code" if count is None else f"{_name(module, count)} = {number}"
    return (
        f"its forward divides the features of {shard.layer} by {divisor}, which is correct for all {shard.full} "
        f"features and not for the {shard.local} of one rank"
    )


#: The remedy for a number in code.
IN_CODE = (
    "shard the segments of a fused layer by a plan file, with style packed_colwise; read a number of heads from an "
    "attribute of the module"
)


def _name(module: nn.Module, count: Count) -> str:
    """The name of an attribute, as it is seen from a module."""
    if count.owner is module:
        return count.attribute
    owned = (name for name, value in (*vars(module).items(), *module.named_modules()) if value is count.owner and name)
    return f"{next(owned, type(count.owner).__name__)}.{count.attribute}"


def owners_outside(module: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Find the modules outside of ``module`` that contain one of the layers, also in a container.

    If ``module`` contains only containers and layers, all objects that Python's garbage collector tracks are searched;
    otherwise its own modules contain the layers. A module that holds a layer otherwise than as a
    submodule, such as in a list, is not found.
    """
    inside, known = set(module.modules()), set(layers)
    pending, found = list(layers), dict[nn.Module, None]()
    if any(one not in known and not isinstance(one, _CONTAINERS) for one in inside):
        return []
    while pending:
        new = [one for one in holders_of(pending, "_modules") if one not in inside and one not in found]
        found |= dict.fromkeys(new)
        pending = [one for one in new if isinstance(one, _CONTAINERS)]
    return [one for one in found if not isinstance(one, _CONTAINERS)]


def holders_of(objects: Sequence[object], slot: str, without: Collection[int] = ()) -> list[nn.Module]:
    """Search all objects for the modules that hold some of them; takes tenths of a second.

    Args:
        objects: modules or parameters. Nothing but this list and the modules may refer to them.
        slot: the dict in which a module holds them, ``_modules`` or ``_parameters``.
        without: the ids of dicts of modules that are not searched for.
    """
    dicts = {id(one) for one in gc.get_referrers(*objects) if isinstance(one, dict)}.difference(without)
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)] if dicts else []
    return [one for one in modules if id(vars(one).get(slot)) in dicts]


def unaffected_counts(layers: Iterable[nn.Module]) -> list[Overrides]:
    """Mark layers: the caller states that no count of other modules depends on their features."""
    return [Overrides(layer, attributes={_UNAFFECTED: True}) for layer in layers]


def count_overrides(owners: Iterable[nn.Module], names: Collection[str], tp: int) -> list[Overrides]:
    """Make the overrides that divide counts of modules by the tensor parallel size, once.

    Args:
        owners: the modules that contain the layers.
        names: the names of attributes.
        tp: the tensor parallel size.

    Raises:
        ValueError: if no module has one of the attributes, it cannot be set, or it does not divide.
    """
    owners = list(owners)
    for name in names:
        if not any(_has_count(owner, name) for owner in owners):
            kinds = sorted({type(owner).__name__ for owner in owners})
            raise ValueError(f"counts: {name!r} is not an integer attribute of {', '.join(kinds) or 'a module'}")
    named = [one for one in owners if any(_has_count(one, name) for name in names)]
    return [Overrides(owner, attributes=_local_counts(owner, names, tp)) for owner in named]


def _has_count(owner: nn.Module, name: str) -> bool:
    return type(getattr(owner, name, None)) is int


def _local_counts(owner: nn.Module, names: Collection[str], tp: int) -> dict[str, object]:
    full: dict[str, int] = dict(vars(owner).get(_FULL_COUNTS, {}))
    new = {name: getattr(owner, name) for name in names if name not in full and _has_count(owner, name)}
    for name, value in new.items():
        kind = type(owner).__name__
        if is_read_only(type(owner), name):
            raise ValueError(f"counts: {name} of {kind} is a property without a setter: name the attributes it reads")
        if value % tp:
            raise ValueError(f"counts: {name} = {value} of {kind} is not a multiple of {tp} ranks")
    return {_FULL_COUNTS: full | new, **{name: value // tp for name, value in new.items()}}


class UnitCounts:
    """The numbers of units of a model by a plan, which the remedies for attributes name.

    Args:
        model: the model.
        model_rules: its rules.
        plan: its plan.
    """

    def __init__(self, model: nn.Module, model_rules: ModelRules, plan: Plan) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._rules, self._plan = model_rules, plan

    def remedy(self, examined: Examined, problem: Problem | None) -> str:
        """The line of a plan file that changes a number, or that says that no number has to be changed."""
        pattern = self._pattern(examined.module)
        none = f"{pattern} = {{}} to [modules] of the plan file"
        if problem is None:
            return f"{self._heads(examined)}, or, if no number has to be changed, {none}"
        count = problem.divisor
        if count is None:
            return f"{IN_CODE}; or, if it is correct on each rank, add {none}"
        if id(count.owner) not in self._names and count.owner is not getattr(examined.module, "config", None):
            return f"set it to its number per rank in your code, and add {none}"
        if is_read_only(type(count.owner), count.attribute):
            reads = f"the attributes that property {count.attribute} reads"
            return f"set {reads}; or, if it is correct on each rank, add {none}"
        unit = self._unit(examined.path, count)
        new = self._line(examined.module, count, str(count.value // self._plan.tp) if unit is None else f'"{unit}"')
        return f"add {new} to [modules] of the plan file; or, if it is correct on each rank, {none}"

    def _heads(self, examined: Examined) -> str:
        """The remedy for a module whose code is not understood: a line for the attribute that counts its heads."""
        numbers = vars(examined.module).items()
        counts = (Count(examined.module, *one) for one in numbers if "head" in one[0] and type(one[1]) is int)
        found = ((one, self._unit(examined.path, one)) for one in counts if not re.search("dim|size", one.attribute))
        lines = [self._line(examined.module, one, f'"{unit}"') for one, unit in found if unit is not None]
        if lines:
            return f"add the number of heads per rank, as {lines[0]}"
        return f"add the attributes with its numbers of heads, if it has any, to {self._pattern(examined.module)}"

    def _pattern(self, module: object) -> str:
        return f'"{pattern_for(self._names[id(module)])}"'

    def _line(self, module: nn.Module, count: Count, value: str) -> str:
        is_own = id(count.owner) in self._names
        name = count.attribute if is_own else f'"config.{count.attribute}"'
        return f"{self._pattern(count.owner if is_own else module)} = {{ attributes = {{ {name} = {value} }} }}"

    def _unit(self, path: str, count: Count) -> str | None:
        """The unit of a module's layers whose count in the unsharded model equals this count."""
        rules, tp, prefix = self._rules.at_stage(path), self._plan.tp, f"{path}." if path else ""
        inside = [planned for name, planned in self._plan.tensors.items() if name.startswith(prefix)]
        per_group = {unit for rule in rules.used_rules() if rule.groups != 1 for unit in rule.units}
        for unit in sorted({unit for planned in inside for unit in planned.units} - per_group):
            if unit in rules.family.units and rules.family.units[unit].count is not None:
                with suppress(IndivisibleError, PlanError):  # a rule pads
                    placement = rules.units(unit, tp)
                    if count.value == placement.size != placement.local_size(0):
                        return unit
        return None

"""Config of a padded checkpoint: head counts and widths of the padded tensors.

Padding that a config cannot express, such as for a norm over all heads, is refused: other programs know the
config only.
"""

import re
from collections.abc import Collection, Iterator
from functools import reduce

from msgspec import Struct

from shardconv.plan.families.config_fields import Fields, fields_in, lookup, with_field
from shardconv.plan.planner import Planner
from shardconv.plan.rule_set import ModelRules
from shardconv.plan.tensor_placement import PaddedRule
from shardconv.support.errors import PlanError, option

#: The config field of the vocabulary size.
VOCABULARY = "vocab_size"

#: The config field of the number of KV heads. In latent attention it equals the number of query heads, and is not the
#: count of a unit.
_KV_HEADS = "num_key_value_heads"

#: The remedy for padding that a config cannot express.
_REMEDY = "use shardconv split --pad, whose rank files keep the true sizes"


class ConfigChange(Struct, frozen=True):
    """A changed config field.

    Attributes:
        field: name of the field; with dots for fields of nested configs.
        before: its value before; None if it was missing.
        after: its new value.
    """

    field: str
    before: int | None
    after: int


class _Change(Struct, frozen=True):
    model_rules: ModelRules
    field: str
    value: int


def change_config(planner: Planner, names: Collection[str], *, may_add: bool) -> tuple[ConfigChange, ...]:
    """Set the fields of the configs of a planner's models to the sizes of the tensors that it pads on one rank.

    Args:
        planner: a planner with padding, whose configs are changed in place.
        names: names of all tensors.
        may_add: whether missing fields may be added, because a model built with the config is compared.

    Returns:
        The changed fields.

    Raises:
        PlanError: if a config cannot express the padding.
    """
    padded_rules = list(planner.padded_rules(1))
    changes: dict[tuple[int, str], _Change] = {}
    for padded in padded_rules:
        _check_tensor(padded)
        if (field := _field(padded)) is not None:
            change = _Change(padded.group.model_rules, field, padded.padded)
            first = changes.setdefault((id(padded.group.model_rules.config), field), change)
            if first.value != change.value:
                raise PlanError(f"config field {field} would be both {first.value} and {change.value}: {_REMEDY}")
    changes |= {(id(change.model_rules.config), change.field): change for change in _equal_counts([*changes.values()])}
    for model_rules in planner.rules.models:
        _check_modules(model_rules, names)
    explicit = [
        change for model_rules in planner.rules.models for change in _explicit(model_rules, [*changes.values()])
    ]
    added = [change.field for change in explicit if lookup(change.model_rules.config or {}, change.field) is None]
    if added and not may_add:
        raise PlanError(
            f"config.json does not have {added[0]}, and engines may not read it: add it, or compare the padded tensors "
            f"with transformers' model (remove {option(check_model=False)})"
        )
    applied = tuple(_apply(change) for change in (*changes.values(), *explicit))
    for padded in padded_rules:
        _check_count(padded)
    return applied


def _check_tensor(padded: PaddedRule) -> None:
    if padded.group.name.endswith(".weight") and len(padded.group.spec.shape) == 1:
        raise PlanError(
            f"{padded.group.name} is a norm over all heads, which would divide by the padded number of heads: {_REMEDY}"
        )


def _count(padded: PaddedRule) -> str | int | None:
    """The number of units as an expression; None if it follows from the size of the tensor."""
    unit = padded.group.model_rules.family.units.get(padded.unit or "")
    if padded.unit is None and padded.group.rule.style == "embedding_rowwise":
        return VOCABULARY
    return None if unit is None else unit.count


def _field(padded: PaddedRule) -> str | None:
    """The config field with the number of units; None if it is an expression or follows from the tensor."""
    count = _count(padded)
    return count if isinstance(count, str) and fields_in(count) == {count} else None


def _equal_counts(changes: list[_Change]) -> Iterator[_Change]:
    """The numbers of KV heads that equal a changed number of query heads, and that no unit of a tensor has."""
    for change in changes:
        config, units = change.model_rules.config or {}, change.model_rules.family.units
        counts = {units[name].count for name in change.model_rules.used_units()}
        is_own = _KV_HEADS in {field for count in counts if count is not None for field in fields_in(count)}
        if not is_own and "heads" in change.field and lookup(config, _KV_HEADS) == lookup(config, change.field):
            yield _Change(change.model_rules, _KV_HEADS, change.value)


def _check_count(padded: PaddedRule) -> None:
    """Check that the number of units follows from the changed config."""
    count = _count(padded)
    if count is None or padded.group.model_rules.fields().evaluate(count) != padded.padded:
        source = "is in no known field" if count is None else f"follows from {count}, which is not one field,"
        raise PlanError(
            f"{padded.group.name}: the number of {padded.unit or 'element'}s {source} of config.json, so the config "
            f"cannot express {padded.padded} instead of {padded.size}: {_REMEDY}"
        )


def _check_modules(model_rules: ModelRules, names: Collection[str]) -> None:
    """Refuse padded units for which modules have values that depend on the number of units, such as ALiBi slopes."""
    units = model_rules.family.units
    for regex, rule in model_rules.modules():
        padded = {name for name in rule.units if units[name].count is not None and model_rules.units(name, 1).is_padded}
        if rule.norms and not any(re.match(rf"{regex.pattern}\.norms\.", name) for name in names):
            padded.discard(rule.norms)
        if padded:
            raise PlanError(
                f"modules {rule.pattern} have a value for each {', '.join(sorted(padded))} that depends on their "
                f"number: {_REMEDY}"
            )


def _explicit(model_rules: ModelRules, changes: list[_Change]) -> Iterator[_Change]:
    """The fields that have to become explicit so that units keep their size, such as the head size."""
    new = {change.field: change.value for change in changes if change.model_rules.config is model_rules.config}
    if not new:
        return
    defaults = model_rules.family.config
    sizes = {unit.size for name, unit in model_rules.family.units.items() if name in model_rules.used_units()}
    sizes = {size for size in sizes if "rows" not in fields_in(size)}  # rows is a size of a tensor, not a config field
    fields = {name for size in sizes for name in fields_in(size)}
    config = model_rules.config or {}
    for name in sorted(fields):
        if name in defaults and lookup(config, name) is None and name not in new:
            yield _Change(model_rules, name, model_rules.fields().evaluate(name))
            new[name] = model_rules.fields().evaluate(name)
    changed = reduce(lambda fields, item: with_field(fields, *item), new.items(), config)
    for size in sorted(sizes, key=str):
        before, after = model_rules.fields().evaluate(size), Fields(changed, defaults).evaluate(size)
        if before != after:
            raise PlanError(
                f"{size} would be {after} instead of {before} with the config of the padded checkpoint "
                f"({', '.join(f'{name}={value}' for name, value in new.items())}), and no field sets it: {_REMEDY}"
            )


def _apply(change: _Change) -> ConfigChange:
    config = change.model_rules.config
    assert isinstance(config, dict)
    before = lookup(config, change.field)
    config.update(with_field(config, change.field, change.value))
    return ConfigChange(change.field, before if isinstance(before, int) else None, change.value)

"""The config of a padded checkpoint: with the numbers of heads and widths that the padded tensors have.

Owns whether a config can say it. What a config cannot say, as the number of heads that a norm is over, is refused:
other programs compute by the config alone.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.config_fields import Fields, fields_in, lookup
from shardconv.plan.resolve import Resolver
from shardconv.plan.scope import Scope
from shardconv.plan.tensor_placement import PaddedRule

#: The field that has the size of the vocabulary.
VOCABULARY = "vocab_size"

#: What the user may do instead, where a config cannot say it.
_REMEDY = "use shardconv split --pad, whose rank files keep the true sizes"


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A field of a config that changes.

    Attributes:
        field: with dots where it is of a config in the config.
        before: its value; None where it is not there.
        after: its new value.
    """

    field: str
    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class _Change:
    scope: Scope
    field: str
    value: int


def change_config(resolver: Resolver, names: Collection[str], *, may_add: bool) -> tuple[ConfigChange, ...]:
    """Change the configs of a resolver's scopes to those of the tensors that it pads on one rank.

    Args:
        resolver: with padding, and with configs that may be changed.
        names: of all tensors.
        may_add: whether fields may be added that the config does not have, as a model that is built by it is compared.

    Raises:
        PlanError: if a config cannot say what is padded.
    """
    padded = list(resolver.padded_rules(1))
    changes: dict[tuple[int, str], _Change] = {}
    for one in padded:
        _check_tensor(one)
        if (field := _field(one)) is not None:
            change = _Change(one.scope, field, one.padded)
            before = changes.setdefault((id(one.scope.config), field), change)
            if before.value != change.value:
                raise PlanError(f"{field}: would be {before.value} and {change.value}: {_REMEDY}")
    for scope in resolver.rules.scopes:
        _check_modules(scope, names)
    kept = [change for scope in resolver.rules.scopes for change in _kept(scope, [*changes.values()])]
    added = [change.field for change in kept if lookup(change.scope.config or {}, change.field) is None]
    if added and not may_add:
        raise PlanError(
            f"config.json: does not have {added[0]}, and it is not known whether engines read it: add it, or let the "
            f"padded tensors be compared with transformers' model (without --no-check-model)"
        )
    done = tuple(_apply(change) for change in (*changes.values(), *kept))
    for one in padded:
        _check_count(one)
    return done


def _check_tensor(padded: PaddedRule) -> None:
    if padded.tensor.endswith(".weight") and len(padded.spec.shape) == 1:
        raise PlanError(
            f"{padded.tensor}: is a norm over all heads, which would divide by the number of heads with padding: "
            f"{_REMEDY}"
        )


def _count(padded: PaddedRule) -> str | int | None:
    """How many of a unit there are, as an expression; None where the tensor's own size tells it."""
    unit = (padded.scope.family.units or {}).get(padded.unit or "")
    if padded.unit is None and padded.rule.style == "embedding_rowwise":
        return VOCABULARY
    return None if unit is None else unit.count


def _field(padded: PaddedRule) -> str | None:
    """The config field that has the number of a unit; None where an expression has it."""
    count = _count(padded)
    return count if isinstance(count, str) and fields_in(count) == {count} else None


def _check_count(padded: PaddedRule) -> None:
    """Check that the number of a unit follows from the changed config."""
    count = _count(padded)
    if count is None or padded.scope.fields().evaluate(count) != padded.padded:
        said = "no known field" if count is None else f"{count}, which is not one field,"
        raise PlanError(
            f"{padded.tensor}: its {padded.size} {padded.unit or 'elements'} follow from {said} of config.json, which "
            f"cannot say {padded.padded}: {_REMEDY}"
        )


def _check_modules(scope: Scope, names: Collection[str]) -> None:
    units = scope.family.units or {}
    for regex, rule in scope.modules():
        found = {name for name in rule.units() if units[name].count is not None and scope.units(name, 1).is_padded}
        if rule.norms and not any(re.match(rf"{regex.pattern}\.norms\.", name) for name in names):
            found.discard(rule.norms)
        if found:
            raise PlanError(
                f"modules {rule.pattern}: have something for each {', '.join(sorted(found))} that depends on "
                f"how many there are: {_REMEDY}"
            )


def _kept(scope: Scope, changes: list[_Change]) -> Iterator[_Change]:
    """The fields that become explicit, so that units have the size that they had, as heads of a given width."""
    new = {change.field: change.value for change in changes if change.scope.config is scope.config}
    if not new:
        return
    defaults = scope.family.config or {}
    sizes = {unit.size for name, unit in (scope.family.units or {}).items() if name in scope.used_units()}
    sizes = {size for size in sizes if "rows" not in fields_in(size)}  # of a tensor, not of the config
    fields = {name for size in sizes for name in fields_in(size)}
    config = scope.config or {}
    for name in sorted(fields):
        if name in defaults and lookup(config, name) is None and name not in new:
            yield _Change(scope, name, scope.fields().evaluate(name))
            new[name] = scope.fields().evaluate(name)
    for size in sizes:
        before, after = scope.fields().evaluate(size), Fields(_with(config, new), defaults).evaluate(size)
        if before != after:
            raise PlanError(
                f"{size}: would be {after} instead of {before} with the fields of the padded checkpoint "
                f"({', '.join(f'{name}={value}' for name, value in new.items())}), and no field of its own: {_REMEDY}"
            )


def _with(config: Mapping[str, Any], fields: Mapping[str, int]) -> dict[str, Any]:
    changed = dict(config)
    for name, value in fields.items():
        changed = _set(changed, name.split("."), value)
    return changed


def _set(config: Mapping[str, Any], path: list[str], value: int) -> dict[str, Any]:
    """A copy of a config with another value of a field."""
    first, *rest = path
    return {**config, first: _set(config.get(first) or {}, rest, value) if rest else value}


def _apply(change: _Change) -> ConfigChange:
    config: Any = change.scope.config
    before = lookup(config, change.field)
    config.update(_set(config, change.field.split("."), change.value))
    return ConfigChange(change.field, before, change.value)

"""The rules that a config asks for: those of its family, and of a family for each submodel of a composite model.

Owns which config and which family serve a submodel: its tensors share a prefix, and its config is inside the model's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.config_fields import lookup
from shardconv.plan.family import Family, Part
from shardconv.plan.family_file import family_for, load_family
from shardconv.plan.quantization import DEFAULT_BLOCK, block_size
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.scope import Scope

#: How deep submodels are nested.
_MAX_DEPTH = 4


def rules_for(
    family: Family, config: Mapping[str, Any] | None, *, experts: str = "tensor", uncertain: str = ""
) -> RuleSet:
    """The rules of a family, and of the families of its submodels, with a config.

    Args:
        family: the rules; the user's own are laid over it already.
        config: what config.json holds; None if there is none.
        experts: one of :data:`~shardconv.plan.experts.EXPERT_MODES`.
        uncertain: see :class:`~shardconv.plan.rule_set.RuleSet`.

    Raises:
        PlanError: if the config has submodels nested deeper than any model.
    """
    block = block_size(config) or list(DEFAULT_BLOCK)
    return RuleSet(family.name, tuple(scopes_of(family, config)), experts, uncertain, block)


def scopes_of(family: Family, config: Mapping[str, Any] | None, at: str = "", depth: int = 0) -> Iterator[Scope]:
    """The scopes of a model: its own first, then those of the models in it.

    Raises:
        PlanError: if configs lie in configs deeper than in any model, or a user names one that is not there.
    """
    if depth > _MAX_DEPTH:
        raise PlanError(f"the config has configs in it more than {_MAX_DEPTH} deep, as no model has")
    yield Scope(family, config, at)
    for start, part in (family.parts or {}).items():
        if part.by_user and config is not None and not isinstance(lookup(config, part.field), Mapping):
            raise PlanError(f"part {start!r}: the config has no config {part.field!r} in it: correct or remove it")
        inner, known = _part(part, config or {})
        if known is not None:
            yield from scopes_of(known, inner, f"{at}.{start}" if at else start, depth + 1)


def _part(part: Part, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Family | None]:
    """The config and the family of a model in a model.

    In configs as hubs have them fields of the text may stand in the model's own, and a config in it may have the
    model's type, or none: its family is then that of the type and of what the field says it is.
    """
    found = lookup(config, part.field)
    inner = found if isinstance(found, Mapping) else config
    if part.family:
        return inner, load_family(part.family)
    own = config.get("model_type")
    kind = inner.get("model_type") or own
    if kind == own:
        kind = f"{own}_{part.field.rpartition('.')[2].removesuffix('_config')}"
    return inner, family_for(kind) if isinstance(kind, str) else None

"""Rule set of a model: the rules of its family, and for a composite model those of the family of each submodel.

The tensors of a submodel have a common prefix, and its config is nested in that of the model.
"""

from collections.abc import Iterator, Mapping

from shardconv.plan.config_fields import lookup
from shardconv.plan.family import Family, Submodel
from shardconv.plan.family_file import family_for, load_family
from shardconv.plan.model_rules import ModelRules
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import PlanError

#: The deepest nesting of submodels.
_MAX_DEPTH = 4


def rules_for(
    family: Family, config: Mapping[str, object] | None, *, experts: str = "tensor", uncertain: str = ""
) -> RuleSet:
    """The rule set of a family and of the families of its submodels, for a config.

    Args:
        family: the family, over which the user's rules are already laid.
        config: the contents of config.json; None without a config.
        experts: one of :data:`~shardconv.plan.experts.EXPERT_MODES`.
        uncertain: see :class:`~shardconv.plan.rule_set.RuleSet`.

    Raises:
        PlanError: if submodels are nested too deep, or one that a plan file names does not have a config.
    """
    return RuleSet(family.name, tuple(model_rules_of(family, config)), experts, uncertain)


def model_rules_of(
    family: Family, config: Mapping[str, object] | None, at: str = "", depth: int = 0
) -> Iterator[ModelRules]:
    """The rules of a model, followed by those of its submodels.

    Raises:
        PlanError: if submodels are nested too deep, or one that a plan file names does not have a config.
    """
    if depth > _MAX_DEPTH:
        raise PlanError(f"submodels are nested too deep (expected at most {_MAX_DEPTH} nested configs)")
    yield ModelRules(family, config, at)
    for start, submodel in (family.submodels or {}).items():
        if submodel.by_user and config is not None and not isinstance(lookup(config, submodel.field), Mapping):
            raise PlanError(
                f"submodel {start!r}: the config does not have a nested config {submodel.field!r}: correct or remove it"
            )
        submodel_config, submodel_family = _config_and_family(submodel, config or {})
        if submodel_family is not None:
            yield from model_rules_of(submodel_family, submodel_config, f"{at}.{start}" if at else start, depth + 1)


def _config_and_family(submodel: Submodel, config: Mapping[str, object]) -> tuple[Mapping[str, object], Family | None]:
    """The config and the family of a submodel.

    Configs on the Hub may have the fields of the text model at the top level, and a nested config may have the model's
    ``model_type``, or none. The submodel's type is then the model's with the name of the field appended, such as
    ``qwen2_vl_text`` for ``text_config``.
    """
    nested = lookup(config, submodel.field)
    submodel_config = nested if isinstance(nested, Mapping) else config
    if submodel.family:
        return submodel_config, load_family(submodel.family)
    model_type = config.get("model_type")
    submodel_type = submodel_config.get("model_type") or model_type
    if submodel_type == model_type:
        submodel_type = f"{model_type}_{submodel.field.rpartition('.')[2].removesuffix('_config')}"
    return submodel_config, family_for(submodel_type) if isinstance(submodel_type, str) else None

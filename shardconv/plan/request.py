"""Plan requests: the options of a user, and the rules that follow from them.

The rules are from a family named by the user, else of the config's ``model_type``, else of the names of tensors.
Without a config, head sizes are inferred from shapes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from shardconv.plan.engines import SHARDCONV, engine_named
from shardconv.plan.families.config_fields import with_defaults
from shardconv.plan.families.family import LIBRARIES, NAMES_FAMILY, Family
from shardconv.plan.families.library_plans import library_family
from shardconv.plan.families.loading import expand_family, family_for, load_family, model_type_of, parse_plan_file
from shardconv.plan.families.matcher import Matcher, pattern_for
from shardconv.plan.families.rule import REPLICATE_OPTION, Rule
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.quantization import check_quantization
from shardconv.plan.rule_set import Multiple, RuleSet, rules_for
from shardconv.plan.tensor_groups import matcher_of
from shardconv.plan.tensor_placement import HEAD_FIELDS
from shardconv.support.errors import PlanError, UsageError, check_count, option
from shardconv.support.formatting import counted
from shardconv.support.structs import Data


class PlanRequest(Data, frozen=True):
    """The options of a plan. The manifest stores them for resharding.

    Attributes:
        family: the family to use instead of the one for the config's ``model_type``.
        plan_file: name and text of a plan file, whose rules are tried before the family's.
        replicate: names or patterns of tensors to replicate.
        head_dim: the head size, for checkpoints without a config.
        ep: expert parallel size: the number of ranks that share whole experts; 1 to shard each expert.
        engine: the engine whose boundaries the plan follows, one of :data:`~shardconv.plan.engines.ENGINES`; None for
            shardconv's own runtime.
        allow_unmatched_rules: whether rules of the user may match nothing, as on a small model that lacks some tensors.
        pad: pad counts that tp does not divide to a multiple of this and of tp; 0 for no padding.
    """

    family: str | None = None
    plan_file: tuple[str, str] | None = None
    replicate: tuple[str, ...] = ()
    head_dim: Annotated[int, Meta(ge=1)] | None = None
    ep: Annotated[int, Meta(ge=1)] = 1
    engine: str | None = None
    allow_unmatched_rules: bool = False
    pad: Multiple = 0

    def __post_init__(self) -> None:
        check_count(self.ep, "ep")
        if self.head_dim is not None:
            check_count(self.head_dim, "head_dim")
        if engine_named(self.engine) is SHARDCONV:
            force_setattr(self, "engine", None)  # equal requests have one form
        if self.pad and self.engine:
            raise UsageError(
                f"{option(pad=True)} is not supported with the boundaries of {self.engine}, which reads sizes from "
                "config.json: pad the checkpoint, shardconv pad SRC --multiple-of tp=N -o DIR"
            )


#: Values of ``rules``:
#:
#: - ``"auto"``: the family of the config's ``model_type``;
#: - the name of a family;
#: - the path of a plan file: a ``Path``, or a string that has a slash or a suffix of letters, such as ``.toml``;
#: - a :class:`~shardconv.plan.plan.Plan`, whose rules are used;
#: - classes derived from :class:`~shardconv.Policy`, for models in memory only, as they match modules by class.
Rules: TypeAlias = str | Path | Plan | type | Sequence[type]

#: The default: the family of the config's ``model_type``.
AUTO = "auto"


def plan_file_of(rules: Rules) -> Path | None:
    """Return the path of the plan file that ``rules`` names; None for other rules."""
    if isinstance(rules, str) and ("/" in rules or Path(rules).suffix[1:].isalpha()):
        return Path(rules)
    return rules if isinstance(rules, Path) else None


def request_of(rules: Rules) -> PlanRequest:
    """Return the request for a family or a plan file.

    Raises:
        PlanError: if the plan file cannot be read.
        TypeError: if ``rules`` is a plan or policies.
    """
    if (path := plan_file_of(rules)) is not None:
        return PlanRequest(plan_file=(path.name, _read(path)))
    if not isinstance(rules, str):
        raise TypeError(f"rules is {rules!r:.80} (expected a family name, the path of a plan file, or a Plan)")
    return PlanRequest(family=None if rules == AUTO else rules)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8") from error


def planner_for(
    tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None, request: PlanRequest
) -> Planner:
    """The planner of a checkpoint, by the rules that are found for it.

    Args:
        tensors: name to dtype and shape.
        config: the contents of config.json; None without a config.
        request: the options of the user.

    Raises:
        PlanError: if no rule matches a tensor, options do not fit together, or the plan file is not valid.
        UsageError: if the family is unknown, or an option does not apply to the checkpoint.
    """
    check_quantization(tensors, config)
    user = parse_plan_file(*request.plan_file) if request.plan_file else None
    if user is not None:
        _check_families(user)
    base = family_of(config or {}, request.family or (user.inherits if user else ""))
    if base.name == NAMES_FAMILY and user is None and request.family is None:
        _refuse_diffusers(config or {})
    family = _with_user_rules(base, user, request)
    by_names = _without_user_rule(tensors, family) if base.name == NAMES_FAMILY else frozenset()
    is_by_name = base.name == NAMES_FAMILY
    with_head_fields = tensors if not is_by_name or _reads_heads(family, tensors) else {}
    towers = towers_in(with_head_fields) if is_by_name else []
    assumed_heads = uncertain = ""
    if config is None or request.head_dim is not None or len(towers) > 1:
        config, assumed_heads, uncertain = with_heads(with_head_fields, config, request.head_dim, towers)
    check_pairs(tensors, by_names)
    _check_prefix(tensors, base)
    assumed = [*filter(None, [assumed_heads]), *_assumptions(config, base, user, request, by_names)]
    rules = rules_for(family, config, ep=request.ep, uncertain=uncertain)
    rules = rules.for_engine(engine_named(request.engine))
    rules = rules.with_optional_rules() if request.allow_unmatched_rules else rules
    planner = Planner(tensors, rules, has_ep_option=True)
    planner.check_ep()
    if user is not None:
        replaced = [*_replaced_rules(planner, rules_for(base, config))]
        if blocks := _replaced_blocks(planner, replaced):
            planner = Planner(tensors, rules.without_overrides(blocks), has_ep_option=True)
        changed = {name: (new.style, old.style) for name, new, old in replaced if new.style != old.style}
        if changed and not is_by_name:
            assumed.append(_replacements(user.name, changed))
    return planner.assuming(*assumed).padded(request.pad)


def _refuse_diffusers(config: Mapping[str, object]) -> None:
    """Refuse a model of diffusers without a family: the names of its tensors do not determine how to shard it."""
    if "model_type" not in config and (name := model_type_of(config)) is not None:
        raise PlanError(
            f"no family is known for class {name!r} of diffusers: transformers have families, and VAEs, UNets and "
            f"ControlNets do not: use its folder as it is, or pass {option(rules='FILE')} with a plan file"
        )


def _replaced_rules(planner: Planner, base: RuleSet) -> Iterator[tuple[str, Rule, Rule]]:
    """Yield the name of each tensor that a rule of the user and one of the base match, with both rules."""
    ruled, matcher = matcher_of(base)
    for name, group in planner.group_of.items():
        if group.rule.by_user and (match := matcher.match(name)) is not None:
            yield name, group.rule, ruled[match.pattern_index][0]


def _replaced_blocks(planner: Planner, replaced: Iterable[tuple[str, Rule, Rule]]) -> frozenset[str]:
    """The blocks of the base all of whose tensors are matched by blocks of the user."""
    kept = {group.rule.block for group in planner.group_of.values() if not group.rule.by_user}
    kept |= {old.block for _, new, old in replaced if not new.block}
    return frozenset({old.block for _, _, old in replaced} - kept - {""})


def _without_user_rule(names: Iterable[str], family: Family) -> frozenset[str]:
    """The tensors that no rule of the user matches."""
    patterns = [rule.pattern for rule in family.rules if rule.by_user]
    matcher = Matcher.of_patterns(patterns)
    return frozenset(name for name in names if matcher.match(name) is None)


def _reads_heads(family: Family, names: Iterable[str]) -> bool:
    """Whether a rule that applies to a tensor, or a module override, reads head counts or the head size."""
    matcher = Matcher.of_patterns(rule.pattern for rule in family.rules)
    matched = {match.pattern_index for name in names if (match := matcher.match(name)) is not None}
    applied = replace(family, rules=tuple(family.rules[index] for index in sorted(matched)), config={})
    named = applied.units_named()
    read = replace(applied, units={name: unit for name, unit in family.units.items() if name in named}).fields_read()
    return not HEAD_FIELDS.isdisjoint(with_defaults(read, family.config))


def _check_families(user: Family) -> None:
    """Check that the families exist that a plan file names."""
    submodels = {f"submodel {start!r}": submodel.family for start, submodel in user.submodels.items()}
    inherited = "" if user.inherits in LIBRARIES else user.inherits
    for key, name in {"inherits": inherited, **submodels}.items():
        try:
            if name:
                load_family(name)
        except UsageError as error:
            raise PlanError(f"{user.origin}: {key}: {error.problem}") from error


def _assumptions(
    config: Mapping[str, object],
    base: Family,
    user: Family | None,
    request: PlanRequest,
    by_names: Collection[str],
) -> Iterator[str]:
    """The assumptions of a plan that follow from the family, the plan file and the options, as sentences.

    ``by_names`` are the tensors for which the family of common names has a rule, and the user has none.
    """
    if by_names and NAMES_FAMILY in (request.family, user and user.inherits):
        yield f"{counted(len(by_names), 'tensor')} planned by name, as requested"
    elif by_names:
        model_type = model_type_of(config)
        model = f"model type {model_type!r}" if model_type else "a checkpoint without a config"
        yield f"{model} does not have a family: planned by the names of its tensors"
    if base.name in LIBRARIES:
        yield f"planned by {base.name}' own plan for the model type; shardconv plan --prove compares outputs"
    if user is not None:
        yield f"rules of {user.name} are tried first; {_how_to_compare(config)}"
    for name in request.replicate:
        yield (
            f"{name} is replicated as requested, and layers that depend on it may be sharded, which can change "
            f"outputs: {_how_to_compare(config)}"
        )


def _how_to_compare(config: Mapping[str, object]) -> str:
    """The instruction for comparing outputs with the unsharded model. A proof needs a class of transformers."""
    model_type = model_type_of(config)
    own = "the outputs of shardconv.load(DIR, model=MODULE) with the unsharded module's"
    if model_type is None:
        return f"compare {own}"
    if family_for(model_type) is not None:
        return "shardconv plan --prove compares outputs"
    return (
        f"shardconv plan --prove compares outputs if transformers has a class of {model_type!r}; if not, compare {own}"
    )


def _with_user_rules(base: Family, user: Family | None, request: PlanRequest) -> Family:
    """The family, after the rules of the plan file and of ``--replicate``."""
    family = base
    if user is not None:
        family = expand_family(replace(user, name=base.name), base)
        _check_read(user, family)
    if request.replicate:
        family = Family(family.name, rules=tuple(map(_replicate_rule, request.replicate))).with_base(family)
    return family


def _check_read(user: Family, family: Family) -> None:
    """Check that rules read each config field for which a plan file has a default."""
    if unread := sorted(set(user.config) - family.fields_read()):
        raise PlanError(f"{user.origin}: [config] {unread[0]}: no rule reads this field: correct or remove it")


def _replacements(plan_file: str, replaced: Mapping[str, tuple[str, str]]) -> str:
    """The sentence about tensors whose style in a plan file differs from the family's."""
    shown = [f"{name} ({new} instead of {old})" for name, (new, old) in list(replaced.items())[:3]]
    more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
    return f"{plan_file} replaces rules of the family for {len(replaced)} tensors: {', '.join(shown)}{more}"


def _check_prefix(tensors: Mapping[str, TensorSpec], family: Family) -> None:
    """Refuse a tensor that is stored twice, with and without the prefix that names may lack."""
    prefix = family.prefix[0] if family.prefix else ""
    without = (name for name in tensors if prefix and not name.startswith(prefix))
    duplicate = next((name for name in without if f"{prefix}{name}" in tensors), None)
    if duplicate is not None:
        raise PlanError(
            f"{duplicate} and {prefix}{duplicate} are the same tensor of the model, with and without the prefix "
            f"{prefix!r}: remove one of them from the checkpoint"
        )


def _replicate_rule(name: str) -> Rule:
    try:
        return Rule(name, "replicate", origin=REPLICATE_OPTION, by_user=True)
    except ValueError as error:
        raise UsageError(f"{option(replicate=[name])}: {error}") from error


def family_of(config: Mapping[str, object], name: str = "") -> Family:
    """The family of this name, or without a name the family of the ``model_type`` of a config.

    Raises:
        UsageError: if the family is unknown, or is the plan of a library that has none for the model.
    """
    if name and name not in LIBRARIES:
        return load_family(name)
    model_type = model_type_of(config)
    known = None if name or model_type is None else family_for(model_type)
    found = known or (None if model_type is None else library_family(model_type, name))
    if name and found is None:
        model = "a checkpoint without a config" if model_type is None else f"model type {model_type!r:.60}"
        raise UsageError(
            f"family {name!r}: the installed {name} does not have a tensor parallel plan for {model} whose styles are "
            "all supported: choose another family, or none"
        )
    return found or load_family(NAMES_FAMILY)


# --- head counts by names and shapes ----------------------------------------------------------------------------------

#: The largest head size in common use. If tp is a power of two, a boundary between heads of this size is also one
#: between heads of 32, 64, 80, 96, 128, 192 or any other size that is not divisible by a higher power of two. Where the
#: number of rows is not a multiple of it, this holds for the highest power of two that divides the number of rows.
_ASSUMED_HEAD_DIM = 512

#: Layers whose output is the input of another layer, by name: planning by name requires that their sizes are equal.
_PAIRS = (("q_proj", "o_proj"), ("q_proj", "out_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("w1", "w2"))


def with_heads(
    tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None, head_dim: int | None, towers: list[str]
) -> tuple[dict[str, object], str, str]:
    """Add head counts and head size to a config, by the names and shapes of tensors.

    With several towers, head counts and size of the config or of one tower do not apply to all, and are not used.

    Returns:
        The config; a sentence on how the head size is inferred or assumed; and the assumption, or "".
    """
    sentence = uncertain = ""
    cause, remedy = "no config.json", "--head-dim or --config"
    if len(towers) > 1:
        config = {field: value for field, value in (config or {}).items() if field not in HEAD_FIELDS}
        cause = f"it may differ between {' and '.join(towers)}"
        remedy = "--head-dim, or --rules FILE"
    if head_dim is None and len(towers) < 2 and (inferred := _head_dim_by_shape(tensors)):
        head_dim, source = inferred
        sentence = f"head_dim = {head_dim}, from the shape of {source}"
    elif head_dim is None and (rows := _projected_rows(tensors)):
        head_dim = gcd(_ASSUMED_HEAD_DIM, *rows)
        uncertain = f"head_dim is unknown ({cause}): assuming it is at most {head_dim}"
        sentence = f"{uncertain}. Pass {remedy}."
    if head_dim is None:
        return dict(config or {}), "", ""
    heads = {
        field: spec.shape[0] // head_dim
        for field, suffix in (("num_attention_heads", "q_proj.weight"), ("num_key_value_heads", "k_proj.weight"))
        if (spec := _first(tensors, suffix)) is not None and spec.shape
    }
    return {**heads, **(config or {}), "head_dim": head_dim}, sentence, uncertain


def _head_dim_by_shape(tensors: Mapping[str, TensorSpec]) -> tuple[int, str] | None:
    """The head size by the shape of a norm over single heads, and the name of the norm; None if there is none.

    The size of ``inv_freq`` does not determine it, as rotary embeddings may cover only part of a head.
    """
    query = _first(tensors, "q_proj.weight")
    for name, spec in tensors.items():
        is_norm = name.endswith(".q_norm.weight") and len(spec.shape) == 1
        if is_norm and query is not None and query.shape and 0 < spec.shape[0] < query.shape[0]:
            return spec.shape[0], name
    return None


def _projected_rows(tensors: Mapping[str, TensorSpec]) -> set[int]:
    """The numbers of rows of the query and key projections, all of which are multiples of the head size."""
    suffixes = ("q_proj.weight", "k_proj.weight")
    return {spec.shape[0] for name, spec in tensors.items() if name.endswith(suffixes) and spec.shape}


def towers_in(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The patterns of modules with attention heads, such as encoder and decoder, or text and vision."""
    return sorted({pattern_for(name) for name in tensors if name.endswith(".q_proj.weight")})


def _first(tensors: Mapping[str, TensorSpec], suffix: str) -> TensorSpec | None:
    return next((spec for name, spec in tensors.items() if name.endswith(suffix)), None)


def check_pairs(tensors: Mapping[str, TensorSpec], by_names: Collection[str]) -> None:
    """Check that the output features of layers are the input features of the layers that follow by name.

    Args:
        tensors: name to dtype and shape.
        by_names: the tensors that are planned by name; pairs without any of them are not checked.

    Raises:
        PlanError: if they differ, so that names do not determine the sharding.
    """
    for name, spec in tensors.items() if by_names else ():
        for producer, consumer in _PAIRS:
            if not name.endswith(f".{producer}.weight"):
                continue
            partner = re.sub(rf"{producer}\.weight$", f"{consumer}.weight", name)
            other = tensors.get(partner) if name in by_names or partner in by_names else None
            if other is not None and other.shape[-1:] != spec.shape[-2:-1]:
                raise PlanError(
                    f"{name} of shape {list(spec.shape)}: its output features are not the input features of {partner} "
                    f"of shape {list(other.shape)}, so the names do not determine the sharding: pass {option('rules')}"
                )

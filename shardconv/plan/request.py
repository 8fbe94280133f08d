"""Plan requests: the options of a user, and the rules that follow from them.

The rules are those of a family named by the user, else of the config's ``model_type``, else of the names of tensors.
Without a config, head sizes are inferred from shapes. Reads no files: a plan file is passed as text.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple, Self

from shardconv.errors import PlanError
from shardconv.plan.engines import OWN, engine_named
from shardconv.plan.experts import EXPERT_MODES
from shardconv.plan.family import NAMES_FAMILY, TRANSFORMERS, Family, fields_read
from shardconv.plan.family_file import family_for, laid_over, load_family, parse_plan_file
from shardconv.plan.matcher import pattern_for
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import DEFAULT_BLOCK, SCALE, block_size, check_quantization
from shardconv.plan.resolve import Resolver
from shardconv.plan.rule import Rule
from shardconv.plan.rule_set import MAX_MULTIPLE
from shardconv.plan.submodels import rules_for
from shardconv.plan.tensor_placement import HEAD_FIELDS
from shardconv.plan.transformers_plan import transformers_family

#: The largest head size in common use. If tp is a power of two, a boundary between heads of this size is also one
#: between heads of 32, 64, 80, 96, 128, 192 or any other size that is not divisible by a higher power of two. Where the
#: number of rows is not a multiple of it, this holds for the highest power of two that divides the number of rows.
_ASSUMED_HEAD_DIM = 512

#: Layers whose output is the input of another layer, by name: planning by name requires that their sizes are equal.
_PAIRS = (("q_proj", "o_proj"), ("q_proj", "out_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("w1", "w2"))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of a plan. The manifest stores them for resharding.

    Attributes:
        family: the family to use instead of that of the config's ``model_type``.
        plan_file: name and text of a plan file, whose rules are tried before the family's.
        replicate: names or patterns of tensors to replicate.
        head_dim: the head size, if there is no config.
        experts: one of :data:`~shardconv.plan.experts.EXPERT_MODES`.
        engine: the engine whose boundaries the plan follows, one of :data:`~shardconv.plan.engines.ENGINES`; None for
            shardconv's own runtime.
        may_miss: whether rules of the user may match nothing, as on a small model that lacks some tensors.
        pad: pad counts that tp does not divide to a multiple of this and of tp; 0 for no padding.
    """

    family: str | None = None
    plan_file: tuple[str, str] | None = None
    replicate: tuple[str, ...] = ()
    head_dim: int | None = None
    experts: str = "tensor"
    engine: str | None = None
    may_miss: bool = False
    pad: int = 0

    def __post_init__(self) -> None:
        if self.experts not in EXPERT_MODES:
            raise PlanError(f"experts is {self.experts!r} (expected one of {', '.join(EXPERT_MODES)})")
        if engine_named(self.engine) is OWN:
            object.__setattr__(self, "engine", None)  # equal requests have one form
        if self.pad and self.engine:
            raise PlanError(
                f"--pad is not supported with the boundaries of {self.engine}, which reads sizes from config.json: "
                f"pad the checkpoint, shardconv pad SRC --multiple-of tp=N -o DIR"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plan_file = list(self.plan_file) if self.plan_file else None
        return {
            "family": self.family,
            "plan_file": plan_file,
            "replicate": list(self.replicate),
            "head_dim": self.head_dim,
            "experts": self.experts,
            **({"engine": self.engine} if self.engine else {}),
            **({"may_miss": True} if self.may_miss else {}),  # of proofs only
            **({"pad": self.pad} if self.pad else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a plan request.
        """
        try:
            plan_file = tuple(data["plan_file"]) if data["plan_file"] else None
            experts = data.get("experts", "tensor")
            replicate, may_miss = tuple(data["replicate"]), data.get("may_miss", False)
            pad = data.get("pad", 0)
            if type(pad) is not int or not 0 <= pad <= MAX_MULTIPLE:
                raise ValueError(f"pad is {pad!r:.60} (expected an integer from 0 to {MAX_MULTIPLE})")
            others = {"engine": data.get("engine"), "may_miss": may_miss, "pad": pad}
            return cls(data["family"], plan_file, replicate, data["head_dim"], experts, **others)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan request: {error!r}") from error


class Resolution(NamedTuple):
    """A resolver, and the assumptions and conclusions that it depends on, as sentences."""

    resolver: Resolver
    assumed: tuple[str, ...]


def resolve(tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None, request: PlanRequest) -> Resolution:
    """Find the rules for a checkpoint.

    Args:
        tensors: name to dtype and shape.
        config: the contents of config.json; None without a config.
        request: the options of the user.

    Raises:
        PlanError: if the rules do not cover every tensor.
    """
    check_quantization(tensors, config)
    assumed: list[str] = []
    uncertain = ""
    user = parse_plan_file(*request.plan_file) if request.plan_file else None
    family = family_of(config or {}, request.family or (user.inherits if user else ""))
    towers = _towers(tensors) if family.name == NAMES_FAMILY else []
    if config is None or request.head_dim is not None or len(towers) > 1:
        config, sentence, uncertain = _with_heads(tensors, config, request.head_dim, towers)
        assumed += [sentence] if sentence else []
    if not block_size(config) and any(name.endswith(SCALE) for name in tensors):
        rows, columns = DEFAULT_BLOCK
        assumed.append(f"FP8 block size is not in the config: assuming {rows} by {columns}")
    if family.name == NAMES_FAMILY:
        _check_pairs(tensors)
        model = f"model type {config['model_type']!r}" if config.get("model_type") else "a checkpoint without a config"
        assumed.append(f"{model} has no family: planned by the names of its tensors")
    if family.name == TRANSFORMERS:
        assumed.append("planned by transformers' own plan for the model type; shardconv plan --prove compares outputs")
    _check_prefix(tensors, family)
    base_family = family
    if user is not None:
        assumed.append(f"rules of {user.name} are tried first; shardconv plan --prove compares outputs")
        family = laid_over(replace(user, name=family.name), family)
        family = replace(family, rules=_with_optional(family.rules, request))
        _check_read(user, family)
    if request.replicate:
        assumed += [
            f"{name} is replicated as requested, and layers that depend on it may be sharded, which can change "
            f"outputs: shardconv plan --prove with the same options compares them"
            for name in request.replicate
        ]
        replicate_rules = _with_optional(map(_replicate_rule, request.replicate), request)
        family = Family(family.name, rules=replicate_rules).over(family)
    rules = rules_for(family, config, experts=request.experts, uncertain=uncertain)
    rules = rules.for_engine(engine_named(request.engine))
    resolver = Resolver(tensors, rules)
    if user is not None:
        base_rules = rules_for(base_family, config)
        if blocks := resolver.replaced_blocks(base_rules):
            resolver = Resolver(tensors, rules.without_overrides(blocks))
        if replaced := resolver.replaced(base_rules):
            assumed.append(_replacements(user.name, replaced))
    resolver = resolver.padded(request.pad)
    return Resolution(resolver, tuple(assumed))


def _check_read(user: Family, family: Family) -> None:
    """Check that rules read each config field for which a plan file has a default."""
    if unread := sorted(set(user.config or {}) - fields_read(family)):
        raise PlanError(f"{user.origin}: [config] {unread[0]}: no rule reads this field: correct or remove it")


def _replacements(plan_file: str, replaced: Mapping[str, tuple[str, str]]) -> str:
    """The sentence about tensors whose style in a plan file differs from that of the family."""
    shown = [f"{name} ({new} instead of {old})" for name, (old, new) in list(replaced.items())[:3]]
    more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
    return f"{plan_file} replaces rules of the family for {len(replaced)} tensors: {', '.join(shown)}{more}"


def _check_prefix(tensors: Mapping[str, TensorSpec], family: Family) -> None:
    """Refuse a tensor that is stored twice, with and without the prefix that names may lack."""
    prefix = family.prefix[0] if family.prefix else None
    duplicate = next((name for name in tensors if prefix and f"{prefix}{name}" in tensors), None)
    if duplicate is not None:
        raise PlanError(
            f"{duplicate} and {prefix}{duplicate} are the same tensor of the model, with and without the prefix "
            f"{prefix!r}: remove one of them from the checkpoint"
        )


def _with_optional(rules: Iterable[Rule], request: PlanRequest) -> tuple[Rule, ...]:
    """The rules, of which those of the user are optional if the request allows rules that match nothing."""
    may_miss = request.may_miss
    return tuple(replace(rule, optional=True, mount="") if may_miss and rule.by_user else rule for rule in rules)


def _replicate_rule(name: str) -> Rule:
    try:
        return Rule(name, "replicate", origin="--replicate", by_user=True)
    except ValueError as error:
        raise PlanError(f"--replicate {name!r}: {error}") from error


def family_of(config: Mapping[str, Any], name: str = "") -> Family:
    """The family of this name, or without a name the family of the ``model_type`` of a config."""
    if name and name != TRANSFORMERS:
        return load_family(name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return load_family(name or NAMES_FAMILY)
    known = None if name else family_for(model_type)
    return known or transformers_family(model_type) or load_family(name or NAMES_FAMILY)


def _with_heads(
    tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None, head_dim: int | None, towers: list[str]
) -> tuple[dict[str, Any], str, str]:
    """Add head counts and head size to a config, by the names and shapes of tensors.

    With several towers, head counts and size of the config or of one tower do not apply to all, and are not used.

    Returns:
        The config; a sentence on how the head size is inferred or assumed; and the same sentence if it is assumed,
        else "".
    """
    sentence = uncertain = ""
    cause, remedy = "no config.json", "--head-dim or --config"
    if len(towers) > 1:
        config = {field: value for field, value in (config or {}).items() if field not in HEAD_FIELDS}
        cause = f"it may differ between {' and '.join(towers)}"
        remedy = "--head-dim, or --rules FILE"
    if head_dim is not None and head_dim < 1:
        raise PlanError(f"--head-dim is {head_dim} (expected at least 1)")
    if head_dim is None and len(towers) < 2 and (inferred := _head_dim_by_shape(tensors)):
        head_dim, source = inferred
        sentence = f"head_dim = {head_dim}, from the shape of {source}"
    elif head_dim is None and (rows := _projected_rows(tensors)):
        head_dim = gcd(_ASSUMED_HEAD_DIM, *rows)
        uncertain = f"head_dim is unknown ({cause}): assuming it is at most {_ASSUMED_HEAD_DIM}. Pass {remedy}."
        sentence = uncertain
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


def _towers(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The patterns of modules with attention heads, such as encoder and decoder, or text and vision."""
    return sorted({pattern_for(name) for name in tensors if name.endswith(".q_proj.weight")})


def _first(tensors: Mapping[str, TensorSpec], suffix: str) -> TensorSpec | None:
    return next((spec for name, spec in tensors.items() if name.endswith(suffix)), None)


def _check_pairs(tensors: Mapping[str, TensorSpec]) -> None:
    for name, spec in tensors.items():
        for producer, consumer in _PAIRS:
            if not name.endswith(f".{producer}.weight"):
                continue
            partner = re.sub(rf"{producer}\.weight$", f"{consumer}.weight", name)
            other = tensors.get(partner)
            if other is not None and other.shape[-1:] != spec.shape[-2:-1]:
                raise PlanError(
                    f"{name} of shape {list(spec.shape)}: its output features are not the input features of {partner} "
                    f"of shape {list(other.shape)}, so the names do not determine the sharding: pass --rules"
                )

"""Rules from transformers' tensor-parallel plan of a model type, for types that no family serves.

The plan (``base_model_tp_plan``) is a literal in the source of a config class: transformers is not imported. Tensors
that the plan does not name are replicated, as in transformers.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardconv.plan.families.family import NAMES_FAMILY, TRANSFORMERS, Family
from shardconv.plan.families.loading import load_family
from shardconv.plan.families.rule import STYLES, ModuleRule, Rule, UnitRule

_ORIGIN = f"family {TRANSFORMERS}"

#: Styles of transformers whose names differ in a rule; None for styles of modules, which follow from their tensors.
_STYLES = {
    "rowwise_split_input": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "mla_kv_a_proj": "replicate",
    "moe_tp_experts": None,
    "all_reduce": None,
}

#: Units of layers that are sharded by heads, by the last component of their name.
_HEAD_UNITS = {
    "q_proj": "query_head",
    "k_proj": "kv_head",
    "v_proj": "kv_head",
    "o_proj": "query_head",
    "out_proj": "query_head",
}

#: Module overrides of attention modules that are sharded by heads.
_HEAD_ATTRIBUTES = {
    "num_heads": "query_head",
    "num_attention_heads": "query_head",
    "num_key_value_heads": "kv_head",
    "num_key_value_groups": "query_head // kv_head",
}


@cache
def transformers_family(model_type: str) -> Family | None:
    """The family from the plan of the installed transformers for a model type; None without a plan."""
    plan = next((plan for text in _config_texts(model_type) if (plan := _plan_in(text, model_type))), None)
    styles = {} if plan is None else {name: _STYLES.get(style, style) for name, style in plan.items()}
    if plan is None or any(style is not None and style not in STYLES for style in styles.values()):
        return None
    names = load_family(NAMES_FAMILY)
    rules = [_rule(name, style) for name, style in styles.items() if style is not None]
    if any(name.endswith(".experts.gate_up_proj") for name in plan):  # checkpoints store a tensor per expert
        rules += [_rule("experts.*.{gate_proj,up_proj,w1,w3}", "colwise"), _rule("experts.*.{down_proj,w2}", "rowwise")]
    rules.append(Rule("**.{embed_tokens,lm_head}", "embedding_rowwise", pad=True, origin=_ORIGIN))
    rules.append(Rule("**.*", "replicate", origin=f"{_ORIGIN}, which does not name it"))
    latent = [f"**.{name}" for name, style in plan.items() if style == "mla_kv_a_proj"]
    overrides = [ModuleRule(name, {}, {}, shared_output="qk_rope_head_dim") for name in latent]
    if any(name.endswith(".q_proj") and style == "colwise" for name, style in plan.items()):
        overrides.append(ModuleRule("**.self_attn", _HEAD_ATTRIBUTES, {}))
    units = {**names.units, "element": UnitRule()}
    return Family(TRANSFORMERS, config=names.config, units=units, rules=tuple(rules), modules=tuple(overrides))


def _rule(name: str, style: str) -> Rule:
    last = name.rpartition(".")[2]
    unit = _HEAD_UNITS.get(last) if "attn" in name or "attention" in name else None
    segments = ("element", "element") if STYLES[style].packed else ()
    size = "head_dim" if style == "replicated_with_grad_allreduce" else None
    pad = style == "embedding_rowwise"
    return Rule(
        f"**.{name}", style, unit=None if segments else unit, segments=segments, pad=pad, size=size, origin=_ORIGIN
    )


def _config_texts(model_type: str) -> Iterator[str]:
    """The sources of those files of transformers' configs that mention the model type."""
    spec = importlib.util.find_spec("transformers")  # does not import it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder, "models").glob("*/configuration_*.py")):
            text = path.read_text("utf-8")
            if f'"{model_type}"' in text:
                yield text


def _plan_in(text: str, model_type: str) -> dict[str, str] | None:
    """The plan of the config class of a model type in a source text; None if there is none."""
    for node in ast.parse(text).body:
        fields = dict(_literals(node.body)) if isinstance(node, ast.ClassDef) else {}
        if fields.get("model_type") == model_type and isinstance(plan := fields.get("base_model_tp_plan"), dict):
            return {str(name): str(style) for name, style in plan.items()}
    return None


def _literals(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, object]]:
    """The names to which statements assign literals, with the values."""
    for statement in statements:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                with suppress(ValueError):  # not a literal
                    yield name, ast.literal_eval(value)

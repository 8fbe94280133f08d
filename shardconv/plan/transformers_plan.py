"""transformers' own tensor-parallel plan of a model type, read as data where no family file serves the type.

Owns the way from the source text of a config class to rules. Nothing of transformers is imported or run: the plan is a
literal in the text. What it does not name is whole on every rank, as transformers has it.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardconv.plan.family import FOREIGN, NAMES_FAMILY, Family
from shardconv.plan.family_file import load_family
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.rule import STYLES, Rule, UnitRule

#: Their styles to ours, where the name is another; None for what is said of modules, and follows from their tensors.
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

#: The unit of what is cut by heads, by the last part of its name.
_UNITS = {
    "q_proj": "query_head",
    "k_proj": "kv_head",
    "v_proj": "kv_head",
    "o_proj": "query_head",
    "out_proj": "query_head",
}

_TOLD = {
    "num_heads": "query_head",
    "num_attention_heads": "query_head",
    "num_key_value_heads": "kv_head",
    "num_key_value_groups": "query_head // kv_head",
}


@cache
def foreign_family(model_type: str) -> Family | None:
    """A family made of the plan that the installed transformers has for a type; None where it has none."""
    plan = next((found for text in _config_texts(model_type) if (found := _plan_in(text, model_type))), None)
    styles = {} if plan is None else {name: _STYLES.get(style, style) for name, style in plan.items()}
    if plan is None or any(style is not None and style not in STYLES for style in styles.values()):
        return None
    names = load_family(NAMES_FAMILY)
    own = [_rule(name, style) for name, style in styles.items() if style is not None]
    words = Rule("**.{embed_tokens,lm_head}", "embedding_rowwise", pad=True, origin=f"family {FOREIGN}")
    rest = Rule("**.*", "replicate", origin=f"family {FOREIGN}, which does not name it")
    if any(name.endswith(".experts.gate_up_proj") for name in plan):  # which lie on disk one by one
        own += [_rule("experts.*.{gate_proj,up_proj,w1,w3}", "colwise"), _rule("experts.*.{down_proj,w2}", "rowwise")]
    latent = [f"**.{name}" for name, style in plan.items() if style == "mla_kv_a_proj"]
    told = [ModuleRule(name, {}, {}, shared_output="qk_rope_head_dim") for name in latent]
    if any(name.endswith(".q_proj") and style == "colwise" for name, style in plan.items()):
        told.append(ModuleRule("**.self_attn", _TOLD, {}))
    units = {**(names.units or {}), "part": UnitRule()}
    return Family(FOREIGN, config=names.config, units=units, rules=(*own, words, rest), modules=tuple(told))


def _rule(name: str, style: str) -> Rule:
    last = name.rpartition(".")[2]
    unit = _UNITS.get(last) if "attn" in name or "attention" in name else None
    parts = ("part", "part") if STYLES[style].packed else ()
    size = "head_dim" if style == "replicated_with_grad_allreduce" else None
    pad = style == "embedding_rowwise"
    origin = f"family {FOREIGN}"
    return Rule(f"**.{name}", style, unit=None if parts else unit, parts=parts, pad=pad, size=size, origin=origin)


def _config_texts(model_type: str) -> Iterator[str]:
    """The source of each file that defines configs of this type."""
    found = importlib.util.find_spec("transformers")  # finds it; imports nothing
    for place in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(place, "models").glob("*/configuration_*.py")):
            text = path.read_text("utf-8")
            if f'"{model_type}"' in text:
                yield text


def _plan_in(text: str, model_type: str) -> dict[str, str] | None:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            fields = dict(_literals(node))
            if fields.get("model_type") == model_type and isinstance(plan := fields.get("base_model_tp_plan"), dict):
                return {str(name): str(style) for name, style in plan.items()}
    return None


def _literals(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    """What a class assigns to its names, as far as it is literal."""
    for statement in node.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                try:
                    yield name, ast.literal_eval(value) if value is not None else None
                except ValueError:
                    continue

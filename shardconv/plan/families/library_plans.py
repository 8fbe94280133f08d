"""Rules from the tensor-parallel plans of transformers and diffusers, for types that no family serves.

A plan is a literal in the source of a class, ``base_model_tp_plan`` of a config of transformers or ``_tp_plan`` of a
model of diffusers: neither is imported. Tensors that a plan does not name are replicated, as in these libraries.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shardconv.plan.families.family import DIFFUSERS, NAMES_FAMILY, TRANSFORMERS, Family, Mount
from shardconv.plan.families.loading import expand_family, load_family
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


#: The block of attention modules of diffusers, which has their module overrides and norms.
_ATTENTION = "diffusion_attention"

#: Styles of diffusers with several blocks.
_PACKED = {"PackedColwiseParallel": "packed_colwise", "PackedRowwiseParallel": "packed_rowwise"}


@cache
def library_family(model_type: str, library: str = "") -> Family | None:
    """The family from the plan of an installed library for a model type; None without a plan whose styles are known.

    Args:
        model_type: the type of a model of transformers, or the class of a model of diffusers.
        library: one of :data:`~shardconv.plan.families.family.LIBRARIES`; "" for any.
    """
    found = (family(model_type) for name, family in _FAMILIES.items() if library in ("", name))
    return next(filter(None, found), None)


def _transformers_family(model_type: str) -> Family | None:
    plan = _plan_in("transformers", "models/*/configuration_*.py", "base_model_tp_plan", model_type)
    styles = {name: _STYLES.get(style, style) for name, style in plan.items()}
    if not plan or any(style is not None and style not in STYLES for style in styles.values()):
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


def _diffusers_family(class_name: str) -> Family | None:
    plan = _plan_in("diffusers", "models/**/*.py", "_tp_plan", class_name)
    rules = [_diffusers_rule(name, style) for name, style in plan.items()]
    if not rules or None in rules:
        return None
    replicated = Rule("**.*", "replicate", origin=f"family {DIFFUSERS}, which does not name it")
    attention = dict.fromkeys(filter(None, map(_attention_in, plan)))
    blocks = tuple(Mount(pattern, _ATTENTION) for pattern in attention)
    family = Family(DIFFUSERS, units={"element": UnitRule()}, rules=tuple(filter(None, rules)), blocks=blocks)
    return expand_family(family, Family(DIFFUSERS, rules=(replicated,)))


def _diffusers_rule(name: str, style: object) -> Rule | None:
    """The rule of an entry; None for a style that is unknown, or has blocks of sizes that only the code determines."""
    unit, origin = "head" if _attention_in(name) else "element", f"family {DIFFUSERS}"
    match style:
        case "colwise" | "rowwise":
            return Rule(name, style, unit=unit, origin=origin)
        case (str(kind), list(blocks)) if kind in _PACKED and {*blocks} == {1}:
            return Rule(name, _PACKED[kind], segments=(unit,) * len(blocks), origin=origin)
    return None


def _attention_in(name: str) -> str:
    """The attention module that a layer is in; "" for other layers."""
    *modules, _ = name.split(".")
    last = max((at for at, module in enumerate(modules, 1) if "attn" in module or "attention" in module), default=0)
    return ".".join(modules[:last])


_FAMILIES = {TRANSFORMERS: _transformers_family, DIFFUSERS: _diffusers_family}


def _plan_in(library: str, pattern: str, field: str, model_type: str) -> dict[str, Any]:
    """The plan of a model type in the sources of a library, from the class of this name or type; {} without one."""
    spec = importlib.util.find_spec(library)  # does not import it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(pattern)):
            text = path.read_text("utf-8")
            is_named = field in text and re.search(rf"(\"|class ){re.escape(model_type)}\b", text)
            for node in ast.parse(text).body if is_named else []:
                fields = dict(_literals(node.body)) if isinstance(node, ast.ClassDef) else {}
                if model_type in (fields.get("model_type"), getattr(node, "name", "")) and fields.get(field):
                    return dict(fields[field])
    return {}


def _literals(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """The names to which statements assign literals, with the values; calls in them are tuples."""
    for statement in statements:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                with suppress(ValueError):  # not a literal
                    yield name, ast.literal_eval(_Calls().visit(value))


class _Calls(ast.NodeTransformer):
    """Replace each call by a tuple of the function's name and the arguments."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """The tuple."""
        return ast.Tuple([ast.Constant(ast.unparse(node.func)), *node.args], ast.Load())

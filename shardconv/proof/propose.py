"""Propose a plan file for a source: from a checkpoint to the text of the file."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import to_builtins
from msgspec.structs import replace

from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import StrPath
from shardconv.convert.model import DTYPE_NAMES
from shardconv.convert.protocols import PretrainedModel
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import config_path
from shardconv.hf.build import small_model
from shardconv.hf.inputs import example_inputs
from shardconv.plan.families.family import NAMES_FAMILY, Family, Mount
from shardconv.plan.families.loading import expand_family, load_family
from shardconv.plan.families.matcher import Matcher, name_regex, starred
from shardconv.plan.families.rule import ModuleRule, Rule
from shardconv.plan.placement import Placement
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import family_of
from shardconv.plan.rule_set import RuleSet, rules_for
from shardconv.proof.propose_rules import propose_rules
from shardconv.proof.prove import require_config
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanError

#: The tensor parallel size of the plans that are compared.
_TP = 2

#: The blocks to propose: of modules that many models have.
_COMMON = (
    "attention", "bert_embeddings", "bert_heads", "bert_layer", "decoder", "gated_delta_net", "heads",
    "latent_attention", "layer", "layer_without_attention", "mamba2", "mlp", "mlp_of_any_width", "moe", "norms",
    "packed_experts", "vit_embeddings",
)  # fmt: skip


class _Effect(NamedTuple):
    """The plan that rules give for a model.

    Attributes:
        tensors: style and placement of every tensor.
        overrides: overrides of every module.
    """

    tensors: dict[str, tuple[str, Placement]]
    overrides: dict[str, dict[str, int]]


def with_blocks(proposal: Family, model: PretrainedModel) -> Family:
    """Replace rules by blocks that give the same plan: outer modules first, and blocks with more rules first.

    Args:
        proposal: rules for the modules of a model.
        model: the small model.
    """
    specs = {name: TensorSpec(DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in model.state_dict().items()}
    expected = _effect(proposal, specs, model)
    for path in [] if expected is None else _paths(proposal):
        blocks = {name: _expanded(Family(name, blocks=(Mount(path, name),))) for name in _COMMON}
        covered = {name: len(_covered(proposal, path, block)) for name, block in blocks.items()}
        for name in sorted(blocks, key=lambda name: (-covered[name], len(blocks[name].rules))):
            found = _with_block(proposal, Mount(path, name), blocks[name])
            if found is not None and _effect(found, specs, model) == expected:
                proposal = found
    used = proposal.units_named()
    return replace(proposal, units={name: unit for name, unit in proposal.units.items() if name in used})


def _expanded(proposal: Family) -> Family:
    """The rules of a proposal, including the rules of its blocks."""
    return expand_family(proposal, Family(proposal.name))


def _paths(proposal: Family) -> list[str]:
    """The modules with rules and the modules around them, outer ones first."""
    names = [rule.pattern.split(".") for rule in proposal.rules]
    return sorted(
        {".".join(path[:end]) for path in names for end in range(len(path))}, key=lambda path: path.count(".")
    )


def _covered(proposal: Family, path: str, block: Family) -> set[Rule]:
    """The rules below a module whose tensors have the same style by the rules of a block."""
    matcher = Matcher.of_patterns(rule.pattern for rule in block.rules)
    below = (rule for rule in proposal.rules if not path or rule.pattern.startswith(f"{path}."))
    matches = ((rule, matcher.match(f"{_example(rule.pattern)}.weight")) for rule in below)
    return {
        rule for rule, match in matches if match is not None and block.rules[match.pattern_index].style == rule.style
    }


def _example(pattern: str) -> str:
    """A name that matches a pattern of a proposal."""
    return pattern.replace("*", "0")


def _with_block(proposal: Family, mount: Mount, block: Family) -> Family | None:
    """The proposal with a block instead of the rules that it covers; None if these are fewer than two."""
    covered = _covered(proposal, mount.pattern, block)
    if len(covered) < 2:
        return None
    overridden = [re.compile(name_regex(module.pattern)) for module in block.modules]
    return replace(
        proposal,
        rules=tuple(rule for rule in proposal.rules if rule not in covered),
        modules=tuple(
            module
            for module in proposal.modules
            if not any(regex.fullmatch(_example(module.pattern)) for regex in overridden)
        ),
        blocks=(*proposal.blocks, mount),
    )


def _effect(proposal: Family, specs: Mapping[str, TensorSpec], model: PretrainedModel) -> _Effect | None:
    """The plan of a proposal; None if there is none."""
    rules = rules_for(_expanded(proposal), model.config.to_dict())
    try:
        plan = Planner(specs, rules).plan(_TP)
        tensors = {name: (one.style, one.placement) for name, one in plan.tensors.items()}
        return _Effect(tensors, dict(_overrides(rules, model)))
    except PlanError:
        return None


def _overrides(rules: RuleSet, model: PretrainedModel) -> Iterator[tuple[str, dict[str, int]]]:
    """By module name the attributes that rules change, with their local values."""
    (model_rules,) = rules.models
    modules = list(model_rules.modules())
    for name, module in model.named_modules():
        found = ModuleRule.joined([rule for regex, rule in modules if re.fullmatch(regex, name)])
        values = {
            key: model_rules.on_rank(value, _TP) for key, value in found.attributes.items() if hasattr(module, key)
        }
        yield name, {key: value for key, value in values.items() if getattr(module, key) != value}


@checked
def propose_plan(
    src: SourcePath,
    *,
    config: StrPath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    source_layout: str | None = None,
    by_heads: bool = True,
) -> str:
    """Propose a plan file for a source, from the modules of a small model of its class and their connections.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder, with a config that names a class of
            transformers.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out.
        source_layout: the layout of another tool's rank files; None to detect it.
        by_heads: shard attention by heads if its layers have usual names; else these layers gather their outputs.

    Returns:
        The text of a plan file: write it to a file, and pass its path to :func:`~shardconv.prove` as ``rules``.

    Raises:
        SourceError: if the checkpoint cannot be read.
        RunError: if the small model cannot be built.

    Example:
        >>> text = shardconv.propose_plan("llama")  # doctest: +SKIP
    """
    beside = config_path(config)
    source = open_source(
        open_path(src),
        config=beside,
        follow_links=follow_links,
        ignore=ignore,
        source_layout=source_layout,
    )
    model = small_model(require_config(source))
    proposal = with_blocks(propose_rules(model, example_inputs(model), by_heads=by_heads), model)
    rules = _expanded(proposal).rules
    used = [rules[index] for index in _first_matching(rules, source.specs)]
    matcher = Matcher.of_patterns(rule.pattern for rule in rules)
    missing = {starred(name) for name in source.specs if matcher.match(name) is None}
    head = [f"# Proposed for {type(model).__name__}. Prove it: shardconv plan SRC --rules THIS --prove"]
    head += [f"# No rule: on disk, but not in the model: {name}" for name in sorted(missing)]
    # The module overrides of the model type's family would apply to modules that the proposal shards differently.
    by_name = load_family(NAMES_FAMILY)
    covered = Matcher.of_patterns(rule.pattern for rule in by_name.rules)
    is_covered = all(covered.match(name) is not None for name in missing)
    base = by_name if is_covered else family_of(require_config(source))
    inherits = [f'inherits = "{NAMES_FAMILY}"', ""] if is_covered else []
    return "\n".join([*head, "", *inherits, *to_toml(_for_source(proposal, source.specs, used, base))])


def _for_source(proposal: Family, names: Iterable[str], used: Sequence[Rule], base: Family) -> Family:
    """The proposal, with optional rules and blocks where they match no tensor, and units that override a family's.

    Args:
        proposal: for the small model.
        names: of the tensors of the source.
        used: the rules that match a tensor of the source, including rules of blocks.
        base: the family that the plan file inherits.
    """
    matched, mounts = _first_matching(proposal.rules, names), {rule.mount for rule in used}
    return replace(
        proposal,
        units={
            name: replace(unit, override=base.units.get(name, unit) != unit) for name, unit in proposal.units.items()
        },
        rules=tuple(replace(rule, optional=at not in matched) for at, rule in enumerate(proposal.rules)),
        blocks=tuple(replace(mount, optional=mount.describe() not in mounts) for mount in proposal.blocks),
    )


def _first_matching(rules: Sequence[Rule], names: Iterable[str]) -> set[int]:
    """The indices of the rules that are the first to match a name."""
    matcher = Matcher.of_patterns(rule.pattern for rule in rules)
    return {match.pattern_index for match in map(matcher.match, names) if match is not None}


def to_toml(family: Family) -> Iterator[str]:
    """The lines of a plan file with the blocks, units, rules and module overrides of a family."""
    blocks: dict[str, list[object]] = {}
    for mount in family.blocks:
        entry = {"block": mount.block, "optional": True} if mount.optional else mount.block
        blocks.setdefault(mount.pattern, []).append(entry)
    sections = {
        "blocks": {path: entries[0] if len(entries) == 1 else entries for path, entries in blocks.items()},
        "units": to_builtins(family.units),
        "rules": _merged({rule.pattern: _table(rule) for rule in family.rules}),
        "modules": {rule.pattern: _table(rule) for rule in family.modules},
    }
    for title, table in sections.items():
        width = min(max((len(name) for name in table), default=0), 70) + 2
        lines = [f"{_value(name):{width}} = {_value(row)}" for name, row in table.items()]
        yield from [f"[{title}]", *lines, ""] if table else []


def _table(rule: Rule | ModuleRule) -> dict[str, object]:
    """The fields of a rule that a plan file has."""
    table: dict[str, object] = to_builtins(rule)
    return {name: value for name, value in table.items() if name != "pattern"}


def _merged(rules: Mapping[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Merge equal rules whose patterns differ in the last name only: ``a.b`` and ``a.c`` into ``a.{b,c}``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern, rule in rules.items():
        parent, dot, last = pattern.rpartition(".")
        groups.setdefault((parent + dot, repr(rule)), []).append(last)
    merged: dict[str, dict[str, object]] = {}
    for (start, _), names in groups.items():
        is_choice = len(names) > 1 and "*" not in names
        for name in [f"{{{','.join(names)}}}"] if is_choice else names:
            merged[start + name] = rules[start + names[0]]
    return merged


def _value(value: object) -> str:
    """A value in TOML."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}" if value else "{}"
    return json.dumps(value)

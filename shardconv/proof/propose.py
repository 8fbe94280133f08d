"""Propose a plan file for a source: from a checkpoint to the text of the file."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import StrPath, as_names
from shardconv.checkpoint.sources.source import Source
from shardconv.convert.model import DTYPE_NAMES
from shardconv.convert.protocols import PretrainedModel
from shardconv.files.paths import SourcePath, local_path, open_path
from shardconv.hf.build import small_model
from shardconv.hf.inputs import example_inputs
from shardconv.plan.families.family import NAMES_FAMILY, PLAN_FILE, Family, Mount
from shardconv.plan.families.loading import expand_family, load_family, parse_entry, parse_family
from shardconv.plan.families.matcher import Matcher
from shardconv.plan.families.rule import ModuleRule, UnitRule
from shardconv.plan.placement import Placement
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import family_of
from shardconv.plan.rule_set import RuleSet, rules_for
from shardconv.proof.plan_file import MountTable, UnitTable, to_toml
from shardconv.proof.proposal import Proposal, propose_rules
from shardconv.proof.prove import require_config, without_numbers
from shardconv.support.errors import PlanError

#: The tensor parallel size of the plans that are compared.
_TP = 2

#: The blocks to propose: those of modules that many models have.
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


def with_blocks(proposal: Proposal, model: PretrainedModel) -> Proposal:
    """Replace rules by blocks that give the same plan: outer modules first, and blocks with more rules first.

    Args:
        proposal: rules for the modules of a model.
        model: the small model.
    """
    specs = {name: TensorSpec(DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in model.state_dict().items()}
    expected = _effect(proposal, specs, model)
    for path in [] if expected is None else _paths(proposal):
        for block in _candidates(proposal, path):
            found = _with_block(proposal, path, block)
            if found is not None and _effect(found, specs, model) == expected:
                proposal = found
    return replace(proposal, units=_used_units(proposal))


def expanded(proposal: Proposal) -> Family:
    """The rules of a proposal, including those of its blocks."""
    return expand_family(parse_family("proposal", proposal.tables(), PLAN_FILE), Family("proposal"))


def _paths(proposal: Proposal) -> list[str]:
    """The modules with rules and the modules around them, outer ones first."""
    names = [pattern.split(".") for pattern in proposal.rules]
    return sorted(
        {".".join(path[:end]) for path in names for end in range(len(path))}, key=lambda path: path.count(".")
    )


def _candidates(proposal: Proposal, path: str) -> list[str]:
    """The blocks that cover rules below a module, by the number of these rules; of equal ones the smallest first."""
    families = {block: _mounted(path, block) for block in _COMMON}
    covered = {block: len(_covered(proposal, path, family)) for block, family in families.items()}
    found = [block for block, count in covered.items() if count > 1]
    return sorted(found, key=lambda block: (-covered[block], len(families[block].rules)))


def _mounted(path: str, block: str) -> Family:
    """A family that consists of one block."""
    return expand_family(parse_family("block", {"blocks": {path: block}}, "block"), Family("block"))


def _covered(proposal: Proposal, path: str, family: Family) -> set[str]:
    """The patterns of rules below a module whose tensors have the same style in a family."""
    (model_rules,) = rules_for(family, {}).models
    matcher = Matcher([(rule.pattern, model_rules.regex(rule.pattern)) for rule in family.rules])
    start = f"{path}." if path else ""
    below = ((pattern, rule) for pattern, rule in proposal.rules.items() if pattern.startswith(start))
    matches = ((pattern, rule, matcher.match(f"{pattern.replace('*', '0')}.weight")) for pattern, rule in below)
    return {
        pattern
        for pattern, rule, match in matches
        if match is not None and family.rules[match.pattern_index].style == rule["style"]
    }


def _with_block(proposal: Proposal, path: str, block: str) -> Proposal | None:
    """The proposal with a block instead of the rules that it covers; None if these are fewer than two."""
    family = _mounted(path, block)
    (model_rules,) = rules_for(family, {}).models
    covered = _covered(proposal, path, family)
    if len(covered) < 2:
        return None
    rules = {pattern: rule for pattern, rule in proposal.rules.items() if pattern not in covered}
    overridden = [re.compile(model_rules.regex(module.pattern)) for module in family.modules]
    overrides = {
        pattern: one
        for pattern, one in proposal.overrides.items()
        if not any(regex.fullmatch(pattern.replace("*", "0")) for regex in overridden)
    }
    blocks = {**proposal.blocks, path: [*proposal.blocks.get(path, []), block]}
    return Proposal(proposal.units, rules, overrides, blocks)


def _effect(proposal: Proposal, specs: Mapping[str, TensorSpec], model: PretrainedModel) -> _Effect | None:
    """The plan of a proposal; None if there is none."""
    rules = rules_for(expanded(proposal), model.config.to_dict())
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


def _used_units(proposal: Proposal) -> dict[str, UnitTable]:
    """The units that the rules and overrides of a proposal name."""
    used = {unit for rule in proposal.rules.values() for unit in (rule.get("unit"), *rule.get("segments", ()))}
    for pattern, overrides in proposal.overrides.items():
        used |= parse_entry(ModuleRule, pattern, overrides, pattern=pattern).reads()
    return {name: unit for name, unit in proposal.units.items() if name in used}


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
        The text of a plan file, to be proven by :func:`~shardconv.proof.prove.prove` with ``plan``.

    Raises:
        SourceError: if the checkpoint cannot be read.
        RunError: if the small model cannot be built.

    Example:
        >>> text = shardconv.propose_plan("llama")  # doctest: +SKIP
    """
    beside = None if config is None else local_path(config)
    source = open_source(
        open_path(src), config=beside, follow_links=follow_links, ignore=as_names(ignore), source_layout=source_layout
    )
    model = small_model(require_config(source))
    proposal = with_blocks(propose_rules(model, example_inputs(model), by_heads=by_heads), model)
    rules = expanded(proposal).rules
    matcher = Matcher.of_patterns(rule.pattern for rule in rules)
    mounts = {rules[match.pattern_index].mount for match in map(matcher.match, source.specs) if match is not None}
    missing = without_numbers(name for name in source.specs if matcher.match(name) is None)
    head = [f"# Proposed for {type(model).__name__}. Prove it: shardconv plan SRC --rules THIS --prove"]
    head += [f"# No rule: on disk, but not in the model: {name}" for name in sorted(missing)]
    # The module overrides of the model type's family would apply to modules that the proposal shards differently.
    by_name = load_family(NAMES_FAMILY)
    covered = Matcher.of_patterns(rule.pattern for rule in by_name.rules)
    is_covered = all(covered.match(name) is not None for name in missing)
    base = by_name if is_covered else family_of(require_config(source))
    inherits = [f'inherits = "{NAMES_FAMILY}"', ""] if is_covered else []
    return "\n".join([*head, "", *inherits, to_toml(_for_source(proposal, source, mounts, base).tables())])


def _for_source(proposal: Proposal, source: Source, mounts: Container[str], base: Family) -> Proposal:
    """The proposal, with what matches no tensor of a source made optional, and with units that override a family's.

    Args:
        proposal: for the small model.
        source: the checkpoint.
        mounts: the blocks that match a tensor of the source.
        base: the family that the plan file inherits.
    """
    matched = _matching(proposal.rules, source.specs)
    return replace(
        proposal,
        units=_overriding(proposal.units, base),
        rules={name: rule if name in matched else {**rule, "optional": True} for name, rule in proposal.rules.items()},
        blocks={
            path: [_mount(path, block, mounts) if isinstance(block, str) else block for block in blocks]
            for path, blocks in proposal.blocks.items()
        },
    )


def _overriding(units: Mapping[str, UnitTable], family: Family) -> dict[str, UnitTable]:
    """The units, with ``override`` for those that the family defines differently."""
    known = family.units
    return {
        name: {**unit, "override": True} if known.get(name, own := parse_entry(UnitRule, name, unit)) != own else unit
        for name, unit in units.items()
    }


def _mount(path: str, block: str, used: Container[str]) -> str | MountTable:
    """An entry of ``[blocks]``, optional if no tensor on disk matches the block."""
    return block if Mount(path, block).describe() in used else {"block": block, "optional": True}


def _matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The patterns that are the first to match a name."""
    patterns = list(patterns)
    matcher = Matcher.of_patterns(patterns)
    return {patterns[match.pattern_index] for match in map(matcher.match, names) if match is not None}

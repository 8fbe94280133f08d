"""Propose a plan file for a source: from a checkpoint to the text of the file."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from shardconv.checkpoint.sources.planning import StrPath, as_names
from shardconv.checkpoint.sources.source import Source, open_source
from shardconv.files.paths import SourcePath, local_path, open_path
from shardconv.hf.build import small_model
from shardconv.hf.inputs import example_inputs
from shardconv.plan.family import NAMES_FAMILY, Family, Mount
from shardconv.plan.family_file import load_family
from shardconv.plan.family_format import parse_unit
from shardconv.plan.matcher import Matcher
from shardconv.plan.request import family_of
from shardconv.proof.mount import expanded, with_blocks
from shardconv.proof.plan_file import MountTable, UnitTable, to_toml
from shardconv.proof.proposal import Proposal, propose_rules
from shardconv.proof.prove import require_config, without_numbers


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
    known = family.units or {}
    return {
        name: {**unit, "override": True} if known.get(name, own := parse_unit(name, unit)) != own else unit
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

"""The relation between the tensors of a Hugging Face checkpoint and of its files, as rules that go both ways.

A rule names a file tensor, and its source tensors in order. In a name, ``*`` matches any text, including dots, and
``#`` the index of an expert. ``{a,b}`` expands to two rules, one with ``a`` and one with ``b`` on both sides. Forward,
:func:`file_tensors` gives the file tensors of a checkpoint; backward, :func:`find_target` gives the source tensors of a
file tensor.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Self

import msgspec
from msgspec.structs import replace

from shardconv.layouts.layout import REMEDY, Constant, FileTensor
from shardconv.support.errors import PlanError

_CHOICE = re.compile(r"\{([^}]*)\}")
_WILDCARD = re.compile(r"[*#]")
#: End of the names of the weights of linear layers.
WEIGHT = "weight"


class PermutedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source tensor with all experts, whose elements the file has in another order.

    For example, gpt-oss has the gate and up projections of E experts as [E, H, 2 I], transposed and with columns that
    alternate: ``shape`` is [E, H, I, 2]. Megatron-Core has [E, 2 I, H], with all rows of the gate projection first:
    [E, 2, I, H], so ``order`` is [0, 3, 2, 1].

    Attributes:
        shape: config fields with the sizes of the source's dims, the number of experts first. A number is a factor of
            the dim before it.
        order: the order of these dims in the file. There, a number is a factor of the dim after it: its segments.
    """

    shape: tuple[str | int, ...]
    order: tuple[int, ...]


class RuleTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule in a layout file.

    Attributes:
        sources: names of the source tensors, whose shards are concatenated along dim 0, or stacked over ``#``.
        when: config fields and their required values.
        given: config fields that must be set.
        count: possible names of the config field with the number of experts; empty to skip the check.
        squeeze: whether to remove dim 0, of size 1, of the source.
        dims: the sharded dim, or several of which one gives the expected shape; empty if ranks replicate the tensor.
            Where an engine has the files, the plan has the dims.
        shape: dim to the config field with its expected full size.
        heads: the config field with the number of heads in dim 0; ranks may hold the same head.
        rotary: whether neighboring rows of a head form the pairs that rotary embeddings rotate, and not rows with a
            distance of half a head.
        gives_tp: whether heads of a shard give the number of ranks, which file names do not.
        on_one_rank: whether each tensor is on one rank only.
        also: further names of the file tensor; a file has one of them or all.
        shares: config fields whose values are the shares of its segments in its rows; by default, they are equal. The
            segments are the sources, or parts of the only source.
        unit: the config field with the number of rows of one share.
        groups: the config field with the number of groups that the rows of each segment have: the first groups of all
            segments are followed by their second groups, and so on.
        rows: the config field with the number of rows, of which the file may have more as padding.
        permuted: the order of elements of the only source, if it has all experts.
        is_head: whether the file tensor is a head that is tied to its only source, the embedding.
    """

    sources: tuple[str, ...]
    when: dict[str, object] = {}
    given: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    squeeze: bool = False
    dims: tuple[int, ...] = ()
    shape: dict[int, str] = {}
    heads: str | None = None
    rotary: bool = False
    gives_tp: bool = False
    on_one_rank: bool = False
    also: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    unit: str | None = None
    groups: str | None = None
    rows: str | None = None
    permuted: PermutedTable | None = None
    is_head: bool = False


class ConstantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constant in a layout file: a tensor without a source, beside every file tensor that matches ``beside``."""

    beside: str
    dtype: str
    value: float
    shape: tuple[int, ...] = ()


class Match(NamedTuple):
    """A match of a pattern: the text of each ``*``, and the index at ``#``, or 0."""

    texts: tuple[str, ...]
    expert: int = 0


class Pattern(msgspec.Struct, frozen=True, dict=True):
    """A pattern without ``{}``."""

    text: str

    @cached_property
    def _tail(self) -> str:
        return _WILDCARD.split(self.text)[-1]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        groups = {"*": "(.+)", "#": "(?P<expert>0|[1-9][0-9]{0,5})"}
        return re.compile("".join(groups.get(token, re.escape(token)) for token in re.split(r"([*#])", self.text)))

    def match(self, name: str) -> Match | None:
        """Match a full name."""
        if not name.endswith(self._tail) or (found := self._regex.fullmatch(name)) is None:
            return None
        number = self._regex.groupindex.get("expert")
        texts = tuple(text for at, text in enumerate(found.groups(), 1) if at != number)
        return Match(texts, int(found["expert"]) if number else 0)

    def name(self, match: Match) -> str:
        """The name for a match."""
        texts = iter(match.texts)
        return _WILDCARD.sub(lambda token: next(texts) if token[0] == "*" else str(match.expert), self.text)


class LayoutRule(msgspec.Struct, frozen=True, eq=False):
    """A file tensor of every matching module, and its source tensors.

    Attributes:
        target: the name in the file.
        sources: the names of the source tensors, in order.
        options: its other properties; the names there may have ``{}``.
        also: further names in the file.
        is_last: whether the file has the last source only; the values of the others follow from their grids.
    """

    target: Pattern
    sources: tuple[Pattern, ...]
    options: RuleTable
    also: tuple[Pattern, ...] = ()
    is_last: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the file tensor has a dim of experts that source tensors do not have."""
        return "#" in self.sources[0].text

    @property
    def has_experts(self) -> bool:
        """Whether the file tensor has a dim of experts."""
        return self.is_stacked or self.options.permuted is not None

    def applies(self, config: Mapping[str, object]) -> bool:
        """Whether the rule applies to checkpoints with this config."""
        when = self.options.when
        for name, value in when.items():
            actual = config.get(name, value)
            if type(actual) is not type(value):
                raise PlanError(
                    f"config.json: {name} is {actual!r:.40} (expected a {type(value).__name__}): correct it"
                )
        return when.items() <= config.items() and all(config.get(name) is not None for name in self.options.given)

    def source_names(self, texts: tuple[str, ...], count: int = 1) -> list[str]:
        """The names of the source tensors of one file tensor, in order.

        Args:
            texts: the text that each ``*`` matched.
            count: number of experts.
        """
        return [source.name(Match(texts, expert)) for expert in range(count) for source in self.sources]

    def members(
        self, texts: tuple[str, ...], experts: Mapping[str, int], config: Mapping[str, object], remedy: str = REMEDY
    ) -> tuple[list[str], int]:
        """The source tensors of the file tensor of one module, in order, and the number of experts.

        Args:
            texts: the text that each ``*`` matched.
            experts: the source tensors that exist, each of one expert.
            config: contents of config.json.
            remedy: the remedy in messages.

        Raises:
            PlanError: if a source tensor is missing, or the number of experts differs from the config.
        """
        target, count = self.target.name(Match(texts)), 1 + max(experts.values())
        held, names = {name: name for name in experts}, self.source_names(texts, count)
        if (missing := next((name for name in names if name not in held), None)) is not None:
            raise PlanError(
                f"{missing}: is missing (got {next(iter(experts))}, expected all members of {target}): {remedy}"
            )
        config_count = next((config[field] for field in self.options.count if field in config), None)
        if self.options.count and config_count != count:
            raise PlanError(
                f"{target}: the source has {count} experts (expected {config_count!r:.20} by config.json): {remedy}"
            )
        return [held[name] for name in names], count  # the same objects, as equal ones take much memory

    def with_end(self, end: str, *, is_last: bool) -> Self | None:
        """The rule for the tensors of a quantized layer whose names end with ``end`` instead of ``weight``.

        Returns:
            None if the names of this rule do not end with ``weight``.
        """
        texts = [pattern.text for pattern in (self.target, *self.sources)]
        if not all(text.endswith(WEIGHT) for text in texts):
            return None
        target, *sources = (Pattern(text.removesuffix(WEIGHT) + end) for text in texts)
        return replace(self, target=target, sources=tuple(sources), is_last=is_last)


class ConstantRule(NamedTuple):
    """A constant for every file tensor that matches the pattern ``beside`` of its table."""

    target: Pattern
    table: ConstantTable

    def constants(self, names: Iterable[tuple[str, str]]) -> Iterator[Constant]:
        """The constants of rank files, of which ``names`` has the file tensors, each with its name for rules."""
        table, beside = self.table, Pattern(self.table.beside)
        for name, in_rules in names:
            if (match := beside.match(in_rules)) is not None:
                yield Constant(self.target.name(match), table.dtype, table.shape, table.value, name)


class Related(NamedTuple):
    """A rule, and the match of one of its names."""

    rule: LayoutRule
    match: Match

    @property
    def target(self) -> str:
        """The name of the file tensor."""
        return self.rule.target.name(self.match)

    @property
    def sources(self) -> list[str]:
        """The names of the source tensors, of one expert."""
        return self.rule.source_names(self.match.texts)


def find_source(rules: Iterable[LayoutRule], name: str) -> Related | None:
    """The first rule that has a source tensor of this name."""
    for rule in rules:
        for source in rule.sources:
            if (match := source.match(name)) is not None:
                return Related(rule, match)
    return None


def find_target(rules: Iterable[LayoutRule], name: str) -> Related | None:
    """The first rule that has a file tensor of this name."""
    found = ((rule, target.match(name)) for rule in rules for target in (rule.target, *rule.also))
    return next((Related(rule, match) for rule, match in found if match is not None), None)


def members_of(
    rules: Sequence[LayoutRule], names: Iterable[str]
) -> dict[tuple[LayoutRule, tuple[str, ...]], dict[str, int]]:
    """For each file tensor, by its rule and the texts of its name, the source tensors with the expert of each.

    For each name, the first matching rule applies.
    """
    members: dict[tuple[LayoutRule, tuple[str, ...]], dict[str, int]] = {}
    for name in names:
        if (found := find_source(rules, name)) is not None:
            members.setdefault((found.rule, found.match.texts), {})[name] = found.match.expert
    return members


def file_tensors(
    rules: Sequence[LayoutRule], names: Iterable[str], config: Mapping[str, object]
) -> tuple[FileTensor, ...]:
    """The file tensors of source tensors.

    Raises:
        PlanError: if a source tensor is missing, or the number of experts differs from the config.
    """
    found = members_of(rules, names)
    return tuple(_file_tensor(rule, texts, experts, config) for (rule, texts), experts in found.items())


def _file_tensor(
    rule: LayoutRule, texts: tuple[str, ...], experts: Mapping[str, int], config: Mapping[str, object]
) -> FileTensor:
    """The file tensor of one module, of which these source tensors exist, each of one expert."""
    names, count = rule.members(texts, experts, config)
    step = len(rule.sources)
    kept = tuple(names[step - 1 :: step] if rule.is_last else names)
    implied = tuple(name for name in names if name not in kept)
    target = rule.target.name(Match(texts))
    options, stack = rule.options, count if rule.is_stacked else 0
    return FileTensor(target, kept, stack, options.squeeze, implied=implied, is_head=options.is_head)


def parse_rules(target: str, table: RuleTable) -> Iterator[LayoutRule]:
    """The rules of an entry of a layout file."""
    count = len(table.sources)
    for first, *others in without_choices([target, *table.sources, *table.also]):
        patterns = tuple(map(Pattern, others))
        yield LayoutRule(Pattern(first), patterns[:count], table, patterns[count:])


def parse_constants(target: str, table: ConstantTable) -> Iterator[ConstantRule]:
    """The rules of a constant of a layout file."""
    return (ConstantRule(pattern, table) for pattern in parse_patterns([target]))


def parse_patterns(texts: Iterable[str]) -> tuple[Pattern, ...]:
    """The patterns of texts with ``{}``."""
    return tuple(Pattern(one) for text in texts for (one,) in without_choices([text]))


def without_choices(patterns: Sequence[str]) -> Iterator[list[str]]:
    """Expand ``{a,b}`` in all patterns together: first all with ``a``, then all with ``b``."""
    choices = [found[1].split(",") for pattern in patterns if (found := _CHOICE.search(pattern))]
    if not choices:
        yield list(patterns)
        return
    for texts in zip(*choices, strict=True):
        remaining = iter(texts)
        expanded = [
            _CHOICE.sub(next(remaining), pattern, count=1) if _CHOICE.search(pattern) else pattern
            for pattern in patterns
        ]
        yield from without_choices(expanded)

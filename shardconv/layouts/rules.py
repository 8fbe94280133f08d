"""Rules of a layout: name patterns that determine the file tensors and constants of a checkpoint.

In a pattern, ``*`` matches any text, including dots, and ``#`` the index of an expert. ``{a,b}`` expands to two rules,
one with ``a`` and one with ``b`` on both sides.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple, Required, Self, TypedDict

from shardconv.layouts.layout import REMEDY, Constant, FileTensor
from shardconv.support.errors import PlanError

_CHOICE = re.compile(r"\{([^}]*)\}")
_WILDCARD = re.compile(r"[*#]")
#: End of the names of the weights of linear layers.
WEIGHT = "weight"


class RuleTable(TypedDict, total=False):
    """A rule of a layout file, see :class:`Rule`."""

    sources: Required[list[str]]
    when: dict[str, object]
    given: list[str]
    count: list[str]
    squeeze: bool


class ConstantTable(TypedDict, total=False):
    """A constant of a layout file, beside every file tensor that matches ``beside``."""

    beside: Required[str]
    dtype: Required[str]
    shape: list[int]
    value: Required[float]


class GroupTable(TypedDict, total=False):
    """A group of a layout file, see :class:`Group`."""

    tensors: dict[str, RuleTable | list[str]]
    constants: dict[str, ConstantTable]
    refuse: list[str]
    needs: list[str]
    padded_to: dict[str, int]
    defaults: dict[str, object]


class Match(NamedTuple):
    """A match of a pattern: the text of each ``*``, and the index at ``#``, or 0."""

    texts: tuple[str, ...]
    expert: int


@dataclass(frozen=True)
class Pattern:
    """A pattern without ``{}``."""

    text: str

    @cached_property
    def _tail(self) -> str:
        return _WILDCARD.split(self.text)[-1]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        groups = {"*": "(.+)", "#": "(?P<expert>0|[1-9][0-9]{0,5})"}
        return re.compile("".join(groups.get(token, re.escape(token)) for token in re.split(r"([*#])", self.text)))

    @property
    def is_expert(self) -> bool:
        """Whether it matches tensors of several experts."""
        return "#" in self.text

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


@dataclass(frozen=True, slots=True)
class Rule:
    """A file tensor of every matching module, and its source tensors.

    Attributes:
        target: the name in the file.
        sources: the names of the source tensors, in order.
        when: config fields and their required values.
        given: config fields that must be set.
        count: possible names of the config field with the number of experts; empty to skip the check.
        squeeze: whether to remove dim 0, of size 1, of the source.
        is_last: whether the file has the last source only; the values of the others follow from their grids.
    """

    target: Pattern
    sources: tuple[Pattern, ...]
    when: Mapping[str, object]
    given: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    squeeze: bool = False
    is_last: bool = False

    def applies(self, config: Mapping[str, object]) -> bool:
        """Whether the rule applies to checkpoints with this config."""
        for name, value in self.when.items():
            actual = config.get(name, value)
            if type(actual) is not type(value):
                raise PlanError(
                    f"config.json: {name} is {actual!r:.40} (expected a {type(value).__name__}): correct it"
                )
        return self.when.items() <= config.items() and all(config.get(name) is not None for name in self.given)

    def find(self, name: str) -> tuple[int, Match] | None:
        """The index of the first source that a name matches, and the match."""
        for index, source in enumerate(self.sources):
            if (match := source.match(name)) is not None:
                return index, match
        return None

    def file_tensor(
        self, texts: tuple[str, ...], members: Mapping[tuple[int, int], str], config: Mapping[str, object]
    ) -> FileTensor:
        """The file tensor of one module.

        Args:
            texts: of each ``*``.
            members: (expert, index of the source) to name.
            config: contents of config.json.

        Raises:
            PlanError: if a member is missing, or the number of experts differs from the config.
        """
        target = self.target.name(Match(texts, 0))
        count = 1 + max(expert for expert, _ in members)
        expected = list(product(range(count), range(len(self.sources))))
        for expert, index in expected:
            if (expert, index) not in members:
                missing = self.sources[index].name(Match(texts, expert))
                raise PlanError(
                    f"{missing}: is missing (got {next(iter(members.values()))}, expected all members of {target}): "
                    f"{REMEDY}"
                )
        config_count = next((config[field] for field in self.count if field in config), None)
        if self.count and config_count != count:
            raise PlanError(
                f"{target}: the source has {count} experts (expected {config_count!r:.20} by config.json): {REMEDY}"
            )
        stack = count if self.sources[0].is_expert else 0
        kept = [key for key in expected if not self.is_last or key[1] == len(self.sources) - 1]
        implied = tuple(members[key] for key in expected if key not in kept)
        return FileTensor(target, tuple(members[key] for key in kept), stack, self.squeeze, implied=implied)

    def with_end(self, end: str, *, is_last: bool) -> Self | None:
        """The rule for the tensors of a quantized layer whose names end with ``end`` in place of ``weight``.

        Returns:
            None if the names of this rule do not end with ``weight``.
        """
        texts = [pattern.text for pattern in (self.target, *self.sources)]
        if not all(text.endswith(WEIGHT) for text in texts):
            return None
        target, *sources = (Pattern(text.removesuffix(WEIGHT) + end) for text in texts)
        return replace(self, target=target, sources=tuple(sources), is_last=is_last)


@dataclass(frozen=True, slots=True)
class ConstantRule:
    """A constant for every file tensor that matches the pattern ``beside``."""

    target: Pattern
    beside: Pattern
    constant: Constant

    def constants(self, names: Iterable[str]) -> Iterator[Constant]:
        """The constants of rank files with tensors of these names."""
        template = self.constant
        for name in names:
            if (match := self.beside.match(name)) is not None:
                yield Constant(self.target.name(match), template.dtype, template.shape, template.value)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rules in a layout file, shared by model types.

    Attributes:
        rules: of file tensors.
        constants: rules of constants.
        refuse: patterns of source tensors that the engine does not support.
        needs: names of file tensors that the engine requires.
        padded_to: name of a file tensor to the multiple that its rows are padded to.
        defaults: values of config fields that a config may omit.
    """

    rules: tuple[Rule, ...]
    constants: tuple[ConstantRule, ...]
    refuse: tuple[Pattern, ...]
    needs: tuple[str, ...]
    padded_to: Mapping[str, int]
    defaults: Mapping[str, object]

    @classmethod
    def of_table(cls, table: GroupTable) -> Self:
        """Parse a group of a layout file."""
        _check_keys(table, {"tensors", "constants", "refuse", "needs", "padded_to", "defaults"})
        return cls(
            tuple(rule for target, value in table.get("tensors", {}).items() for rule in _rules(target, value)),
            tuple(
                rule for target, value in table.get("constants", {}).items() for rule in constant_rules(target, value)
            ),
            tuple(pattern for text in table.get("refuse", ()) for pattern in patterns(text)),
            tuple(table.get("needs", ())),
            table.get("padded_to", {}),
            table.get("defaults", {}),
        )


def patterns(text: str) -> list[Pattern]:
    """The patterns of a text with ``{}``."""
    return [Pattern(one) for (one,) in without_choices([text])]


def file_tensors(rules: Sequence[Rule], names: Iterable[str], config: Mapping[str, object]) -> tuple[FileTensor, ...]:
    """The file tensors of source tensors; for each name, the first matching rule applies.

    Raises:
        PlanError: as :meth:`Rule.file_tensor`.
    """
    members: dict[tuple[int, tuple[str, ...]], dict[tuple[int, int], str]] = {}
    for name in names:
        for number, rule in enumerate(rules):
            if (found := rule.find(name)) is not None:
                source, match = found
                members.setdefault((number, match.texts), {})[match.expert, source] = name
                break
    return tuple(rules[number].file_tensor(texts, names_of, config) for (number, texts), names_of in members.items())


def _rules(target: str, value: RuleTable | list[str]) -> Iterator[Rule]:
    table: RuleTable = {"sources": value} if isinstance(value, list) else value
    _check_keys(table, {"sources", "when", "given", "count", "squeeze"})
    given, count = tuple(table.get("given", ())), tuple(table.get("count", ()))
    for first, *others in without_choices([target, *table["sources"]]):
        when, squeeze = table.get("when", {}), table.get("squeeze", False)
        yield Rule(Pattern(first), tuple(map(Pattern, others)), when, given, count, squeeze)


def constant_rules(target: str, table: ConstantTable) -> Iterator[ConstantRule]:
    """Parse a constant of a layout file."""
    _check_keys(table, {"beside", "dtype", "shape", "value"})
    for (text,) in without_choices([target]):
        constant = Constant(text, table["dtype"], tuple(table.get("shape", ())), table["value"])
        yield ConstantRule(Pattern(text), Pattern(table["beside"]), constant)


def without_choices(patterns: Sequence[str]) -> Iterator[list[str]]:
    """Expand ``{a,b}`` in all patterns together: first all with ``a``, then all with ``b``."""
    choices = [found[1].split(",") for pattern in patterns if (found := _CHOICE.search(pattern))]
    if not choices:
        yield list(patterns)
        return
    for texts in zip(*choices, strict=True):
        yield from without_choices(_with_choices(patterns, texts))


def _with_choices(patterns: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Replace the first ``{a,b}`` of each pattern that has one by the next text."""
    remaining = iter(texts)
    return [_CHOICE.sub(lambda _: next(remaining), pattern, count=1) for pattern in patterns]


def _check_keys(table: Mapping[str, object], known: set[str]) -> None:
    if unknown := table.keys() - known:
        raise ValueError(
            f"unknown keys in a layout file (got {', '.join(sorted(unknown))}, expected {', '.join(known)})"
        )

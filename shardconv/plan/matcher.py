"""Match tensor names with the patterns of rules.

In a pattern, ``*`` is any text without a dot, ``{a,b}`` is a or b, and ``**.`` is any number of modules.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardconv.plan.rule import CHOICE

#: Last component of the names of tensors that a rule for their module applies to.
_LEAVES = ("weight", "bias")

_NUMBER = re.compile(r"\.\d+(?=\.)")
_NUMBER_IN_PATTERN = re.compile(r"(?:^|[.{,])[\d*]*\d[\d*]*(?:$|[.},])")


class Match(NamedTuple):
    """The pattern that matches a tensor.

    Attributes:
        pattern_index: index of the pattern, from 0.
        leaf: which tensor of the module it is: ``weight`` or ``bias``.
    """

    pattern_index: int
    leaf: str


class Matcher:
    """Finds the first of several patterns that matches the name of a tensor.

    All patterns are compiled to one regular expression.

    Args:
        patterns: each pattern and its regular expression from :func:`name_regex`.
    """

    def __init__(self, patterns: Sequence[tuple[str, str]]) -> None:
        alternatives = "|".join(f"({regex})" for _, regex in patterns) or "(?!)"
        self._regex = re.compile(f"(?:{alternatives})(?:\\.({'|'.join(_LEAVES)}))?")
        self._has_numbers = any(_NUMBER_IN_PATTERN.search(pattern) for pattern, _ in patterns)
        self._cached_find = lru_cache(maxsize=None)(self._find)

    def match(self, name: str) -> Match | None:
        """The first pattern that matches a tensor; None if there is none."""
        # Without numbers in patterns all layers match alike, and one cached result serves them.
        return self._cached_find(name if self._has_numbers else _NUMBER.sub(".0", name))

    def _find(self, name: str) -> Match | None:
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        *patterns, leaf = match.groups()
        index = next(index for index, text in enumerate(patterns) if text is not None)
        return Match(index, leaf or ("bias" if name.endswith("bias") else "weight"))


def pattern_for(name: str) -> str:
    """The pattern that matches the module of a tensor in every layer."""
    module, _, leaf = name.rpartition(".")
    return _NUMBER.sub(".*", f"{module if leaf in _LEAVES else name}.")[:-1]


def name_regex(pattern: str, prefixes: Sequence[str] = ()) -> str:
    """The regular expression that full names match if a pattern matches them.

    Args:
        pattern: the pattern.
        prefixes: if the pattern begins with the first of these, names may begin with any of them or with none.
    """
    start = ""
    if prefixes and pattern.startswith(prefixes[0]):
        start, pattern = f"(?:{'|'.join(map(re.escape, prefixes))})?", pattern[len(prefixes[0]) :]
    texts = re.split(rf"(\*\*\.|{CHOICE.pattern})", pattern)
    return start + "".join(map(_regex_of, texts))


def _regex_of(text: str) -> str:
    if text == "**.":
        return r"(?:.+\.)?"
    if text.startswith("{"):
        return "(?:" + "|".join(_wildcard_regex(choice) for choice in text[1:-1].split(",")) + ")"
    return _wildcard_regex(text)


def _wildcard_regex(text: str) -> str:
    """The regular expression of a text in which ``*`` is any text without a dot."""
    return "[^.]*".join(map(re.escape, text.split("*")))

"""Which rule covers a tensor's name: patterns of families and of users, as one regular expression.

In a pattern ``*`` is any run of characters but dots, ``{a,b}`` a choice, and ``**.`` any modules or none.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardconv.plan.rule import CHOICE

#: Tensors beside a weight that follow it, by the last part of their name.
_LEAVES = ("weight", "bias", "weight_scale_inv")

_NUMBER = re.compile(r"\.\d+(?=\.)")
_NUMBER_IN_PATTERN = re.compile(r"(?:^|[.{,])[\d*]*\d[\d*]*(?:$|[.},])")


class Match(NamedTuple):
    """The place of the pattern that covers a tensor, and which tensor of the module it is."""

    place: int
    leaf: str


class Matcher:
    """Finds the first of several patterns that matches a tensor's name.

    Args:
        patterns: as text, for whether they have numbers, and as what names have to match.
    """

    def __init__(self, patterns: Sequence[tuple[str, str]]) -> None:
        choice = "|".join(f"({regex})" for _, regex in patterns) or "(?!)"
        self._regex = re.compile(f"(?:{choice})(?:\\.({'|'.join(_LEAVES)}))?")
        self._has_numbers = any(_NUMBER_IN_PATTERN.search(pattern) for pattern, _ in patterns)
        self._found = lru_cache(maxsize=None)(self._find)

    def match(self, name: str) -> Match | None:
        """Which pattern covers a tensor, or None. Where no pattern has a number, all layers have the same answer."""
        return self._found(name if self._has_numbers else _NUMBER.sub(".0", name))

    def _find(self, name: str) -> Match | None:
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        *patterns, leaf = found.groups()
        place = next(place for place, text in enumerate(patterns) if text is not None)
        return Match(place, leaf or ("bias" if name.endswith("bias") else "weight"))


def pattern_for(name: str) -> str:
    """A pattern for the module of a tensor in every layer."""
    module, _, leaf = name.rpartition(".")
    return _NUMBER.sub(".*", f"{module if leaf in _LEAVES else name}.")[:-1]


def name_regex(pattern: str, prefixes: Sequence[str] = ()) -> str:
    """What full names have to match for a pattern.

    Args:
        pattern: see above.
        prefixes: where it begins with the first of these, another of them may stand instead, or none.
    """
    start = ""
    if prefixes and pattern.startswith(prefixes[0]):
        start, pattern = f"(?:{'|'.join(map(re.escape, prefixes))})?", pattern[len(prefixes[0]) :]
    tokens = re.split(rf"(\*\*\.|{CHOICE.pattern})", pattern)
    return start + "".join(_token(token) for token in tokens)


def _token(token: str) -> str:
    if token == "**.":  # noqa: S105 - a pattern's token
        return r"(?:.+\.)?"
    if token.startswith("{"):
        return "(?:" + "|".join(_wild(choice) for choice in token[1:-1].split(",")) + ")"
    return _wild(token)


def _wild(text: str) -> str:
    """The regex of a text in which ``*`` is any text without a dot."""
    return "[^.]*".join(map(re.escape, text.split("*")))

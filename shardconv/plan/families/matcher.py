"""Match tensor names with the patterns of rules.

In a pattern, ``*`` is any text without a dot, ``{a,b}`` is a or b, and ``**.`` is any number of modules.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, partial
from typing import NamedTuple, Self

from shardconv.plan.families.rule import CHOICE

#: Last component of the names of tensors that a rule for their module applies to.
_LEAVES = ("weight", "bias")

#: The end of a pattern whose last component is a text, or a choice of texts.
_END = re.compile(r"(?P<start>.*\.)?(?:(?P<text>[^{}*.]+)|\{(?P<choices>[^{}*]*)\})")
_NUMBER = re.compile(r"\.\d+(?=\.)")
_NUMBER_IN_PATTERN = re.compile(r"(?:^|[.{,])[\d*]*\d[\d*]*(?:$|[.},])")


class PatternMatch(NamedTuple):
    """The pattern that matches a tensor.

    Attributes:
        pattern_index: index of the pattern, from 0.
        leaf: ``bias`` if the name of the tensor ends with it, else ``weight``.
    """

    pattern_index: int
    leaf: str


class Matcher:
    """Finds the first of several patterns that matches the name of a tensor.

    Only patterns whose last component can match the name's are tried. A pattern, without its last component where that
    is a text or a choice of texts, is compiled when it is first tried: many patterns differ in the last one only.

    Args:
        patterns: each pattern, and the function that returns its regular expression or that of its first components;
            the former begins with the latter, see :func:`name_regex`.
        key: a function of :func:`layer_key` for the patterns.
    """

    def __init__(self, patterns: Iterable[tuple[str, Callable[[str], str]]], key: Callable[[str], str]) -> None:
        self._tried: list[tuple[str, bool, Callable[[str], str]]] = []
        self._key = key
        self._by_last: dict[str | None, list[int]] = {}
        for index, (pattern, regex_of) in enumerate(patterns):
            start, lasts = _split_last(pattern)
            self._tried.append((pattern if start is None else start, start is None, regex_of))
            for last in lasts:
                self._by_last.setdefault(last, []).append(index)
        self._cached_find = lru_cache(maxsize=None)(self._find)
        self._cached_regex = lru_cache(maxsize=None)(self._regex)

    @classmethod
    def of_patterns(cls, patterns: Iterable[str]) -> Self:
        """The matcher of patterns without optional prefixes."""
        patterns = [*patterns]
        return cls([(pattern, name_regex) for pattern in patterns], layer_key(patterns))

    def match(self, name: str) -> PatternMatch | None:
        """The first pattern that matches a tensor; None if there is none."""
        return self._cached_find(self._key(name))

    def _find(self, name: str) -> PatternMatch | None:
        module, _, leaf = name.rpartition(".")
        texts = [name, module] if leaf in _LEAVES else [name]
        lasts = [(text, last) for text in texts for last in (text.rpartition(".")[2], None)]
        for index, text in sorted({(index, text) for text, last in lasts for index in self._by_last.get(last, ())}):
            regex, is_whole = self._cached_regex(index)
            if regex.fullmatch(text if is_whole else text[: text.rfind(".") + 1]):
                return PatternMatch(index, "bias" if name.endswith("bias") else "weight")
        return None

    def _regex(self, index: int) -> tuple[re.Pattern[str], bool]:
        """The regular expression of a pattern, and whether it is that of the whole pattern."""
        tried, is_whole, regex_of = self._tried[index]
        return _compiled(regex_of(tried)), is_whole


#: Return a name with 0 instead of each number between dots, such as the numbers of layers and experts.
without_numbers = partial(_NUMBER.sub, ".0")

#: Return a name with a star instead of each of these numbers, so that all layers have the same names.
starred = partial(_NUMBER.sub, ".*")


def layer_key(patterns: Iterable[str]) -> Callable[[str], str]:
    """A function that maps names that differ in numbers of layers only, and match the same patterns, to one name.

    Where a pattern has a number, it returns each name as it is.
    """
    return str if any(map(_NUMBER_IN_PATTERN.search, patterns)) else without_numbers


def layer_keys(names: Collection[str], key: Callable[[str], str] = without_numbers) -> Iterable[str]:
    """The keys of names, by a function of :func:`layer_key`."""
    kept = _kept_keys.get(hash(tuple(names))) if key is without_numbers else None
    return map(key, names) if kept is None else kept


def kept_layer_keys(names: Iterable[str]) -> list[str]:
    """The keys of names without numbers, which :func:`layer_keys` then returns for the same names."""
    names, distinct = tuple(names), dict[str, str]()
    keys = [distinct.setdefault(key, key) for key in map(without_numbers, names)]
    _kept_keys.clear()
    _kept_keys[hash(names)] = keys
    return keys


#: The hash of the last names to their keys: the steps of a plan group the same tensors. The names would stay in use.
_kept_keys: dict[int, list[str]] = {}

_compiled = lru_cache(maxsize=4096)(re.compile)


def _split_last(pattern: str) -> tuple[str | None, set[str | None]]:
    """The pattern before its last component, and the last components of the names that it can match.

    The first is None if the last component is neither a text nor a choice of texts without dots. Of the second, None
    stands for any.
    """
    end = _END.fullmatch(pattern)
    if end is None:
        return None, {None}
    choices = [end["text"]] if end["choices"] is None else end["choices"].split(",")
    has_dots = any("." in choice for choice in choices)
    return None if has_dots else end["start"] or "", {choice.rpartition(".")[2] for choice in choices}


def pattern_for(name: str) -> str:
    """The pattern that matches the module of a tensor in every layer."""
    module, _, leaf = name.rpartition(".")
    return starred(f"{module if leaf in _LEAVES else name}.")[:-1]


@lru_cache(maxsize=4096)
def name_regex(pattern: str, prefixes: tuple[str, ...] = ()) -> str:
    """The regular expression that full names match if a pattern matches them.

    Args:
        pattern: the pattern.
        prefixes: if the pattern begins with the first of these, names may begin with any of them or with none. Each
            ends with a dot.
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

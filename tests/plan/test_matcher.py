"""Matching of names with patterns, compared with every pattern tried on every name."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardconv.plan.families.matcher import Matcher, name_regex

COMPONENTS = ["a", "b", "*", "a*", "*b", "{a,b}", "{a.b,weight}", "a{b,}", "{a,}b", "7", "weight"]
PATTERNS = st.tuples(st.sampled_from(["", "**."]), st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=3)).map(
    lambda parts: parts[0] + ".".join(parts[1])
)
NAMES = st.lists(
    st.sampled_from(["a", "b", "ab", "0", "7", "weight", "bias"]), min_size=1, max_size=4
).map(".".join)  # fmt: skip


def matches(pattern: str, name: str) -> bool:
    """Whether one of the patterns without choices that a pattern stands for matches a name."""
    texts = re.split(r"(\{[^{}]*\})", pattern)
    choices = [text[1:-1].split(",") if text.startswith("{") else [text] for text in texts]
    return any(matches_parts("".join(one).split("."), name.split(".")) for one in itertools.product(*choices))


def matches_parts(pattern: list[str], name: list[str]) -> bool:
    """The same of components, of which ``**`` stands for any number."""
    if not pattern or not name:
        return pattern == name
    if pattern[0] == "**":
        return any(matches_parts(pattern[1:], name[at:]) for at in range(len(name)))
    start, star, end = pattern[0].partition("*")
    fits = len(name[0]) >= len(start + end) and name[0].startswith(start) and name[0].endswith(end)
    return (fits if star else name[0] == start) and matches_parts(pattern[1:], name[1:])


@given(st.lists(PATTERNS, max_size=6), NAMES)
def test_the_first_pattern_that_matches_the_tensor_or_its_module_is_found(patterns, name):
    module, _, leaf = name.rpartition(".")
    texts = [name, module] if leaf in ("weight", "bias") else [name]
    expected = [index for index, one in enumerate(patterns) if any(matches(one, text) for text in texts)]
    found = Matcher.of_patterns(patterns).match(name)
    assert (found and found.pattern_index) == (expected[0] if expected else None)
    assert found is None or found.leaf == ("bias" if name.endswith("bias") else "weight")


@given(st.lists(PATTERNS, max_size=6), NAMES, st.sampled_from(["", "a.", "{b,7}."]), st.sampled_from(["", "b.", "ab."]))
def test_a_pattern_without_its_last_component_matches_as_the_whole(patterns, name, at, start):
    def regex(pattern):
        return name_regex(at) + name_regex(pattern, ("a.", "ab."))

    name = start + name
    module, _, leaf = name.rpartition(".")
    texts = [name, module] if leaf in ("weight", "bias") else [name]
    found = Matcher([(pattern, regex) for pattern in patterns], str).match(name)
    matching = (index for index, one in enumerate(patterns) if any(re.fullmatch(regex(one), text) for text in texts))
    assert (found and found.pattern_index) == next(matching, None)


@pytest.mark.parametrize(
    ("start", "is_prefix"), [("model.", True), ("mtp.", True), ("", True), ("mtp.model.", False), ("a.mtp.", False)]
)
def test_one_of_alternative_prefixes_matches(start, is_prefix):
    regex = name_regex("model.layers.*.norm", ("model.", "mtp."))
    assert bool(re.fullmatch(regex, f"{start}layers.0.norm")) == is_prefix

"""Patterns of quantization settings, which come with a checkpoint: match names in bounded time."""

import re
from fnmatch import fnmatchcase
from time import monotonic

from shardconv.support.errors import PlanError

#: The most repetitions in a pattern, and characters in a name that it is compared with. Each repetition may match at
#: every character, so a match takes time that grows with their power: about 3 seconds at most.
_MAX_REPETITIONS, _MAX_NAME = 5, 128
#: Seconds for all matches of a checkpoint.
MAX_SECONDS = 60
_SIMPLER = "write the names of the layers, or pass --config FILE with simpler patterns"
#: A repetition of an element of a pattern, with the parenthesis that may be before it.
_REPETITION = re.compile(r"(\)?)(?:[*+?]|\{\d*,?\d*\})[?+]?")


def matches(target: str, layer: str, deadline: float) -> bool:
    """Whether a name or pattern of settings matches a layer; ``re:`` begins a regular expression.

    Other names match the layer itself, modules in it, and the end of its name, as the libraries compare them.

    Raises:
        PlanError: if patterns take too long to match.
    """
    if target.startswith("re:"):
        if len(layer) > _MAX_NAME:
            raise PlanError(f"{layer:.60}...: has {len(layer)} characters (expected at most {_MAX_NAME} for patterns)")
        found = re.match(target.removeprefix("re:"), layer) is not None
        if monotonic() > deadline:
            raise PlanError(
                f"quantization_config: its patterns take more than {MAX_SECONDS} seconds to match ({target!r:.60}): "
                f"pass --config FILE with simpler patterns"
            )
        return found
    if "*" in target:  # ModelOpt's patterns
        return fnmatchcase(layer, target)
    return target == layer or layer.endswith(f".{target}") or f".{target}." in f".{layer}."


def check_pattern(pattern: str, key: str, where: str = "quantization_config", remedy: str = _SIMPLER) -> None:
    """Refuse a pattern that is not valid, or that takes too long to match: settings are not trusted.

    A repeated group with a repetition or an alternative in it matches in exponentially many ways.

    Args:
        pattern: the pattern.
        key: the setting that has it.
        where: what has the setting, for the message.
        remedy: what to do instead, for the message.

    Raises:
        PlanError: if the pattern is refused.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"{where}: {key}: {pattern!r:.60} is not a regular expression: {error}") from error
    simple = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))  # a class or an escape is one character
    groups, repetitions, at = [False], 0, 0  # whether each open group has a repetition or an alternative
    while at < len(simple):
        found = _REPETITION.match(simple, at)
        if simple[at] == "(":
            groups.append(False)
            at += 2 if simple[at + 1 : at + 2] == "?" else 1
            continue
        is_group = simple[at] == ")"
        is_choice = groups.pop() if is_group and len(groups) > 1 else False
        if found:
            repetitions += 1
            if is_choice or repetitions > _MAX_REPETITIONS:
                raise PlanError(
                    f"{where}: {key}: the pattern {pattern!r:.60} may take too long to match (expected at most "
                    f"{_MAX_REPETITIONS} repetitions, and none of a group with repetitions or alternatives): {remedy}"
                )
        groups[-1] = groups[-1] or is_choice or found is not None or simple[at] == "|"
        at = found.end() if found else at + 1

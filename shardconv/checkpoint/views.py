"""What ranks or processes see of a checkpoint that has to be the same for all, in words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardconv.formatting import ranges

#: The most hosts or paths of a group that a message names.
_MAX_NAMED = 3


class View(NamedTuple):
    """What one rank or process sees.

    Attributes:
        value: is compared.
        text: the value for people; "" if it is a checksum.
        host: the name of the host.
        path: of the checkpoint; "" if it is not known.
    """

    value: str
    text: str
    host: str
    path: str = ""


def describe_views(views: Sequence[View], noun: str) -> str:
    """Who sees what, with hosts and paths where these are not the same for all.

    Args:
        views: of all ranks or processes, in order.
        noun: what they are: "rank" or "process".
    """
    has_hosts, has_paths = len({one.host for one in views}) > 1, len({one.path for one in views}) > 1
    groups: dict[str, list[int]] = {}
    for at, view in enumerate(views):
        groups.setdefault(view.value, []).append(at)
    names = []
    for members in groups.values():
        hosts = f" on {_some(views[at].host for at in members)}" if has_hosts else ""
        paths = f" in {_some(views[at].path for at in members)}" if has_paths else ""
        names.append(f"{_counted(members, noun)}{hosts}{paths}")
    texts = [views[members[0]].text for members in groups.values()]
    if all(texts):
        return "; ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    first, *others = names
    return f"{first} {'differ' if len(next(iter(groups.values()))) > 1 else 'differs'} from {' and from '.join(others)}"


def _counted(members: Sequence[int], noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural if len(members) > 1 else noun} {ranges(members)}"


def _some(values: Iterable[str]) -> str:
    """Distinct names, the first ones if they are many."""
    distinct = list(dict.fromkeys(values))
    more = len(distinct) - _MAX_NAMED
    return ", ".join(distinct[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

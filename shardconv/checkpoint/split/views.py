"""Messages about a checkpoint that differs between ranks or processes, and has to be the same for all."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from shardconv.support.formatting import ranges

#: The most hosts or paths of a group that a message names.
_MAX_NAMED = 3
#: The name of a fact that is compared: each rank or process opens remote files by itself.
REMOTE_VERSIONS = "versions of remote files"


class View(NamedTuple):
    """The checkpoint as one rank or process sees it.

    Attributes:
        value: compared with those of the others.
        text: the value in words; "" if it is a checksum.
        host: the name of the host.
        path: of the checkpoint; "" if it is not known.
    """

    value: str
    text: str
    host: str
    path: str = ""


def describe_views(views: Sequence[View], noun: str) -> str:
    """Ranks or processes by what they see, with hosts and paths where these differ.

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


def remedy(different: Collection[str], usual: str) -> str:
    """The remedy for facts that differ: ``usual``, unless remote files are the cause."""
    again = "remote files changed meanwhile, or the URLs differ: start again with one URL"
    return again if REMOTE_VERSIONS in different else usual


def _counted(members: Sequence[int], noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural if len(members) > 1 else noun} {ranges(members)}"


def _some(values: Iterable[str]) -> str:
    """Distinct names, the first ones if they are many."""
    distinct = list(dict.fromkeys(values))
    more = len(distinct) - _MAX_NAMED
    return ", ".join(distinct[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

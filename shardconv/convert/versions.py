"""Check the versions of torch and transformers, whose modules a conversion changes.

The bounds are those of shardconv's package metadata.
"""

import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from shardconv.support.errors import RunError

_BOUND = re.compile(r"(torch|transformers)>=([\d.]+)")


def check_versions() -> None:
    """Check the packages that are imported.

    Raises:
        RunError: if one is older than shardconv supports.
    """
    for package, bound in _bounds().items():
        if package in sys.modules and _release(version(package)) < _release(bound):
            raise RunError(
                f"{package} {version(package)} is not supported (expected {bound} or later): pip install --upgrade "
                f"'{package}>={bound}'"
            )


@cache
def _bounds() -> dict[str, str]:
    """The oldest version of each package; none if shardconv itself is not installed."""
    try:
        requirements = requires("shardconv") or []
    except PackageNotFoundError:
        return {}
    return {found[1]: found[2] for one in requirements if (found := _BOUND.match(one))}


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a release, without a suffix such as ``+cpu``."""
    release = re.match(r"[\d.]*\d", text)
    return tuple(map(int, release[0].split("."))) if release else ()

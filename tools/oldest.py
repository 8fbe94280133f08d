"""The oldest versions of dependencies that pyproject.toml allows, as requirements of pip.

python -m tools.oldest EXTRA... prints the requirements of some extras; without extras, of the package itself.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest_versions(extras: Sequence[str]) -> Iterator[str]:
    """Yield ``name==version`` for each dependency that has a lower bound."""
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    by_extra: dict[str, list[str]] = project["optional-dependencies"]
    for requirement in [one for extra in extras for one in by_extra[extra]] if extras else project["dependencies"]:
        if bound := re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement):
            yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(oldest_versions(sys.argv[1:])))

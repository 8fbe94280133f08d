"""The oldest versions of dependencies that pyproject.toml allows, as constraints of pip.

python -m tools.oldest
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
#: The extra that has an environment of its own.
_ELSEWHERE = "vllm"


def oldest_versions() -> Iterator[str]:
    """Yield a line ``name==version`` for each dependency of the package and its extras that has a lower bound."""
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in sorted(extras) if name != _ELSEWHERE)]
    for requirement in (one for each in lists for one in each):
        if bound := re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement):
            yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(oldest_versions()))

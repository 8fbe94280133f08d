"""The ``rules`` argument of public functions, and the option ``--rules``: where the rules of a model come from.

Owns how the argument is interpreted. A family name or a plan file becomes a request; callers use plans and policies
directly.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import PlanError

#: What ``rules`` accepts:
#:
#: - ``"auto"``: the family of the config's ``model_type``;
#: - the name of a family;
#: - the path of a plan file: a ``Path``, or a string that has a slash or a suffix of letters, such as ``.toml``;
#: - a :class:`~shardconv.plan.plan.Plan`, whose rules are used;
#: - classes derived from :class:`~shardconv.Policy`, for models in memory only, as they match modules by class.
Rules: TypeAlias = str | Path | Plan | type | Sequence[type]

#: The default: the family of the config's ``model_type``.
AUTO = "auto"


def plan_file_of(rules: Rules) -> Path | None:
    """Return the path of the plan file that ``rules`` names; None for other rules."""
    if isinstance(rules, str) and ("/" in rules or Path(rules).suffix[1:].isalpha()):
        return Path(rules)
    return rules if isinstance(rules, Path) else None


def request_of(rules: Rules) -> PlanRequest:
    """Return the request for a family or a plan file.

    Raises:
        PlanError: if the plan file cannot be read.
        TypeError: if ``rules`` is a plan or policies.
    """
    if (path := plan_file_of(rules)) is not None:
        return PlanRequest(plan_file=(path.name, _read(path)))
    if not isinstance(rules, str):
        raise TypeError(f"rules is {rules!r:.80} (expected a family name, the path of a plan file, or a Plan)")
    return PlanRequest(family=None if rules == AUTO else rules)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8") from error

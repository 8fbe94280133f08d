"""The ``rules`` argument of public functions, and the option ``--rules``: which rules shard a model.

Owns how the argument is read. A family or a plan file becomes a request; plans and policies are used as they are.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from shardconv.errors import PlanError
from shardconv.plan.plan import Plan
from shardconv.plan.policy import Policy
from shardconv.plan.request import PlanRequest

#: What ``rules`` accepts:
#:
#: - ``"auto"``: the family of the config's ``model_type``;
#: - the name of a family;
#: - the path of a plan file: a ``Path``, or text with a slash, or that ends with ``.toml`` or ``.json``;
#: - a :class:`~shardconv.plan.plan.Plan`, whose rules are used, also for another tp;
#: - policies, which match modules by class, and so apply to models in memory only.
Rules: TypeAlias = str | Path | Plan | type[Policy] | Sequence[type[Policy]]

#: The default: the family of the config's ``model_type``.
AUTO = "auto"


def plan_file_of(rules: Rules) -> Path | None:
    """The path of a plan file; None if ``rules`` is something else."""
    if isinstance(rules, str) and (rules.endswith((".toml", ".json")) or "/" in rules or os.sep in rules):
        return Path(rules)
    return rules if isinstance(rules, Path) else None


def request_of(rules: Rules) -> PlanRequest:
    """The request for the rules of a family or plan file.

    Raises:
        PlanError: if the plan file cannot be read.
        TypeError: if ``rules`` is neither the name of a family nor the path of a plan file.
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

"""One self-contained page: the template, its styles and scripts, and the reports as data.

Text of a checkpoint is data: it is in a block of JSON, which the browser does not execute, and the scripts make text
nodes of it. The content security policy of the page allows its own script and styles, by their checksums, and no
request.
"""

import base64
import html
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardconv import __version__
from shardconv.html.tensors import tensor_table
from shardconv.support.formatting import json_text, visible

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.plan_report import PlanReport
    from shardconv.checkpoint.operations.verify import VerifyReport
    from shardconv.runtime.estimate import CostReport

#: The beginning of every page, by which a page is known before it is replaced.
MARK = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="shardconv">\n'

_ASSETS = Path(__file__).parent / "assets"
#: In the order of their dependencies.
_SCRIPTS = ("base.js", "table.js", "chart.js", "sizes.js", "layers.js", "tensors.js", "cost.js", "verify.js", "page.js")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def write_page(
    plan: "PlanReport | None",
    *,
    no_plan: str | None = None,
    cost: "CostReport | None" = None,
    verify: "VerifyReport | None" = None,
    remedy: str = "",
) -> bytes:
    """The page of a plan, its cost, or a verification.

    Its data are the reports as ``--json`` prints them, the plan without its tensors, and their compact form with a tp.

    Args:
        plan: the plan; None if it is not shown.
        no_plan: why it is not shown.
        cost: the cost at several tp sizes.
        verify: a verification of the split checkpoint whose plan it is.
        remedy: the remedy for its differences.
    """
    table = None if plan is None or plan.tp is None else tensor_table(plan)
    summary = None if plan is None else replace(plan, tensors=())
    found = {"version": __version__, "plan": summary, "no_plan": no_plan, "tensors": table}
    data = json_text({**found, "cost": cost, "verify": verify, "remedy": remedy})
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    parts = {
        "title": html.escape(visible(_title(plan, cost, verify))),
        "style": _asset("page.css"),
        "script": f"'use strict';\n{{\n{script}}}\n",  # a block: its names are not names of the window
        "data": data.replace("<", "\\u003c"),  # no name can close the block of data, or open another
    }
    parts["policy"] = _policy(parts["script"], parts["style"])
    page = _PLACEHOLDER.sub(lambda match: parts[match[1]], _asset("page.html"))
    return page.encode()


def _title(plan: "PlanReport | None", cost: "CostReport | None", verify: "VerifyReport | None") -> str:
    if verify is not None:
        return f"{', '.join(verify.paths)}: verification"
    if plan is not None:
        return f"{plan.source}: plan" + ("" if plan.tp is None else f" for tp {plan.tp}")
    return "cost" if cost is None else f"{cost.source}: cost"


def _policy(script: str, style: str) -> str:
    """The content security policy: no request, and no script or style but these."""
    return (
        f"default-src 'none'; script-src '{_checksum(script)}'; style-src '{_checksum(style)}'; base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _checksum(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")

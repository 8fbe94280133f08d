"""The page without a browser: what it allows, what is data, and its size."""

import base64
import re
from hashlib import sha256

from shardconv.html import MARK, write_page
from tests.support.pages import HOSTILE, Parsed, many_tensors, plan_report, tensor_report


def test_text_of_a_checkpoint_is_data():
    names = [*HOSTILE, "model.norm.weight"]
    page = write_page(plan_report(map(tensor_report, names), source=HOSTILE[0]))
    ordinary = write_page(plan_report([tensor_report("model.norm.weight")]))
    assert Parsed(page).tags == Parsed(ordinary).tags
    data = Parsed(page).data
    assert data["plan"]["source"] == HOSTILE[0]
    patterns = [pattern for pattern, _, _ in data["tensors"]["names"]]
    assert patterns == [name.replace(".0.", ".*.") for name in names]


def test_policy_allows_the_script_and_style_of_the_page_only():
    page = write_page(plan_report([tensor_report("a")]))
    found = Parsed(page)
    (policy,) = [
        attributes["content"] for tag, attributes in found.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    script, style = (
        re.search(rf"<{tag}>(.*?)</{tag}>", page.decode(), re.DOTALL)[1].encode() for tag in ("script", "style")
    )
    directives = dict(each.strip().split(" ", 1) for each in policy.split(";"))
    assert directives == {
        "default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
        "script-src": f"'sha256-{base64.b64encode(sha256(script).digest()).decode()}'",
        "style-src": f"'sha256-{base64.b64encode(sha256(style).digest()).decode()}'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip


def test_page_begins_with_the_mark():
    """By which --overwrite knows a page."""
    assert write_page(plan_report([tensor_report("a")])).startswith(MARK)
    assert MARK.endswith(b'<meta name="generator" content="shardconv">\n')


def test_page_of_100_000_tensors_is_small():
    tensors = many_tensors()
    assert len(tensors) == 100_000
    assert len(write_page(plan_report(tensors))) < 100_000

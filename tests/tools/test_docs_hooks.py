"""Links, docstrings and the generated reference of the documentation site."""

import importlib

import pytest

import shardconv
from tools.docs_hooks import PURPOSES, docstring_markdown, fields_of, report_classes, site_links, with_reference


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](commands.md#split)", "[a](commands.md#split)"),
        ("vllm.md", "[a](../benchmarks/RESULTS.md)", "[a](project/results.md)"),
        ("project/results.md", "[a](../docs/vllm.md#x)", "[a](../vllm.md#x)"),
        ("project/architecture.md", "[a](CONTRIBUTING.md)", "[a](../project/contributing.md)"),
        ("index.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("plan-files.md", "[blocks](../shardconv/plan/families/blocks)", "blocks (`shardconv/plan/families/blocks`)"),
        ("plan-files.md", "[`LICENSE`](../LICENSE)", "`LICENSE`"),
    ],
)
def test_links_lead_to_pages_of_the_site(page, link, expected):
    assert site_links(link, page) == expected


def test_docstrings_become_markdown():
    docstring = "See :class:`~torch.nn.Linear` and :meth:`DeviceMesh.from_group`.\n\nExample:\n    >>> 1\n    1"
    expected = "See `Linear` and `DeviceMesh.from_group`.\n\nExamples:\n    >>> 1\n    1"
    assert docstring_markdown(docstring) == expected


def test_every_public_name_has_a_purpose():
    names = sorted(name for group in PURPOSES.values() for name in group)
    assert names == sorted(set(shardconv.__all__) - {"__version__"})


@pytest.mark.parametrize("path", report_classes())
def test_docstring_of_a_report_has_all_fields(path):
    module, _, name = path.rpartition(".")
    report = getattr(importlib.import_module(module), name)
    names = report._fields if issubclass(report, tuple) else report.__struct_fields__
    assert set(names) <= fields_of(report).keys()


def test_reference_is_generated_from_the_code():
    text = with_reference("# A\n\n<!-- generated: options -->\n")
    assert text.startswith("# A\n\n## shardconv merge\n\n```text\nUsage: shardconv merge")
    assert "\n| `resumed_bytes` | " in with_reference("<!-- generated: reports -->")
    assert with_reference("<!-- generated: api -->").count(":::") == len(shardconv.__all__) - 1

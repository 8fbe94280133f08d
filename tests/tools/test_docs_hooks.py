"""Links and docstrings of the documentation site."""

import pytest

from tools.docs_hooks import docstring_markdown, site_links


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

"""Links of the documentation site."""

import pytest

from tools.docs_hooks import site_links


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](commands.md#split)", "[a](commands.md#split)"),
        ("vllm.md", "[a](../benchmarks/RESULTS.md)", "[a](project/results.md)"),
        ("project/results.md", "[a](../docs/vllm.md#x)", "[a](../vllm.md#x)"),
        ("project/architecture.md", "[a](CONTRIBUTING.md)", "[a](../project/contributing.md)"),
        ("index.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("plan-files.md", "[blocks](../shardconv/plan/blocks)", "blocks (`shardconv/plan/blocks`)"),
        ("plan-files.md", "[`LICENSE`](../LICENSE)", "`LICENSE`"),
    ],
)
def test_links_lead_to_pages_of_the_site(page, link, expected):
    assert site_links(link, page) == expected

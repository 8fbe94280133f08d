"""Tables of the page in a headless browser: search, sort, pages, and printing."""

import re

from tests.html.conftest import focused, names


def test_kinds_with_the_same_pattern_have_their_numbers(show):
    """As the experts of each rank, or layers of another size."""
    page = show("experts")
    assert names(page) == ["layers.{0\u20132}.experts.{0, 1}.up", "layers.{0\u20132}.experts.{2, 3}.up", "norm"]


def test_search_of_a_layer_finds_its_tensors(show):
    page = show("plan")
    page.get_by_role("button", name=re.compile(r"model\.layers\.0")).click()
    page.get_by_role("button", name="Search its tensors").click()
    assert page.evaluate("document.activeElement.value") == "model.layers.{0..2}."
    assert page.locator("#tensors [role=status]").inner_text() == "27 of 30 tensors, 9 kinds"


def test_search_of_some_layers_does_not_find_the_others(show):
    page = show("layers")
    rows = {
        "layers.0\u20132": ("layers.{0..2}.", 3),
        "layers.3": ("layers.3.", 1),
        "layers.4\u201311": ("layers.{4..11}.", 8),
    }
    openers = page.locator("#layers .opener")
    assert openers.all_inner_texts() == list(rows)
    for index, (query, count) in enumerate(rows.values()):
        openers.nth(index).click()
        page.get_by_role("button", name="Search its tensors").click()
        assert page.evaluate("document.activeElement.value") == query
        assert page.locator("#tensors [role=status]").inner_text().startswith(f"{count} of 12 tensors")
        openers.nth(index).click()


def test_shapes_are_sorted_by_their_elements(show):
    """64 elements in 16 rows, 56 in 1 row: a sum of dims would put the longer row last."""
    page = show("shapes")
    page.get_by_role("button", name="Shape").click()
    assert names(page) == ["long", "square"]


def test_printed_page_says_which_rows_it_has(show):
    page = show("many")
    page.get_by_label("Every tensor").check()
    page.set_viewport_size({"width": 700, "height": 900})
    dtype = page.locator("#tensors thead th").nth(1)
    assert not dtype.is_visible()
    page.emulate_media(media="print")
    assert dtype.is_visible()
    assert page.locator("#tensors .pager span").is_visible()
    assert page.locator("#tensors .pager span").inner_text() == "Page 1 of 1,000"
    assert not page.get_by_role("button", name="Last").is_visible()


def test_pager_is_accessible(show):
    """Screen readers announce changes of an element that stays, not a new one; the focus stays in the pager."""
    page = show("many")
    page.get_by_label("Every tensor").check()
    position = page.locator("#tensors [aria-live]").element_handle()
    page.get_by_role("button", name="Next").click()
    assert position.inner_text() == "Page 2 of 1,000"
    assert position.evaluate("node => node.isConnected")
    page.get_by_role("navigation", name="Pages of tensors").get_by_role("button", name="Last").focus()
    page.keyboard.press("Enter")
    assert focused(page) == "First"


def test_search_finds_tensors_among_100_000(show):
    page = show("many")
    status = page.locator("#tensors [role=status]")
    assert status.inner_text() == "100,000 of 100,000 tensors, 35 kinds"
    page.get_by_label("Search names").fill("layers.5.*.12. down")
    page.get_by_label("Every tensor").check()
    assert names(page) == ["model.layers.5.mlp.experts.12.down_proj.weight"]
    page.get_by_label("Search names").fill("replicated")
    assert status.inner_text() == "63 of 100,000 tensors"
    page.get_by_label("Search names").fill("")
    page.get_by_label("Placement").select_option("Replicated")
    assert names(page) == [f"model.layers.{layer}.input_layernorm.weight" for layer in range(63)]


def test_100_000_tensors_are_sorted_and_in_pages(show):
    page = show("many")
    page.get_by_label("Every tensor").check()
    assert len(names(page)) == 100
    assert names(page)[0] == "model.extra_0.weight"
    page.get_by_role("button", name="Last").click()
    assert page.locator("#tensors .pager span").inner_text() == "Page 1,000 of 1,000"
    assert names(page)[-1] == "model.layers.62.mlp.experts.554.up_proj.weight"
    table = page.get_by_role("table", name="Tensors; buttons")
    table.get_by_role("button", name="Per rank").click()
    assert "input_layernorm" in names(page)[0]  # replicated: 64 bytes, the others have 32
    table.get_by_role("button", name="Tensor", exact=True).click()
    table.get_by_role("button", name="Tensor", exact=True).click()
    assert names(page)[0] == "model.layers.62.mlp.experts.554.up_proj.weight"

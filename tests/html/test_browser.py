"""The page in a headless browser: it renders, its controls work, and it makes no request."""

import re
from importlib.resources import files as files_of

import pytest

from shardconv.support.formatting import duration, size
from tests.html.conftest import focused, names
from tests.support.pages import HOSTILE


def test_plan_is_shown(show):
    page = show("plan")
    assert page.get_by_role("heading", level=1).inner_text().endswith("tiny")
    headings = ["Bytes per rank and layer", "Tensors", "Supported sizes", "Memory over tp"]
    assert page.get_by_role("heading", level=2).all_inner_texts() == headings
    assert page.get_by_role("navigation", name="Sections").get_by_role("link").all_inner_texts() == headings
    in_layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
                *(f"self_attn.{name}_proj" for name in "qkvo")]  # fmt: skip
    kinds = ["lm_head", "model.embed_tokens", "model.norm", *(f"model.layers.*.{name}" for name in in_layer)]
    assert names(page) == sorted(f"{name}.weight" for name in kinds)


def test_row_opens_to_show_which_rank_holds_what(show):
    """2 KV heads of 8 elements on 4 ranks: each is on two."""
    page = show("plan")
    opener = page.get_by_role("button", name="model.layers.*.self_attn.k_proj.weight")
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    table = page.get_by_role("table", name="Which rank holds which elements of dim 0")
    rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert rows == [["ranks 0, 1", "", "[0, 8)", "1.02\u00a0kB"], ["ranks 2, 3", "", "[8, 16)", "1.02\u00a0kB"]]
    assert "kv_head" in page.locator(".details .terms").inner_text()
    opener.click()
    assert table.count() == 0


def test_summary_has_quantization_adapters_and_engine(show):
    figures = show("held").locator(".figures div").all_inner_texts()
    found = dict(text.split("\n", 1) for text in figures)
    assert {name: found[name] for name in ("Boundaries", "Quantized weights", "Quantization", "Adapters")} == {
        "Boundaries": "vllm", "Quantized weights": "5", "Quantization": "gptq, 4 bits", "Adapters": "de, fr",
    }  # fmt: skip
    assert not {"Boundaries", "Quantization", "Adapters"} & {
        text.split("\n", 1)[0] for text in show("plan").locator(".figures div").all_inner_texts()
    }


def test_placement_of_an_expert_has_its_rank(show):
    page = show("held")
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#tensors tbody tr").all()]
    found = {row[0]: next(text for text in row[1:] if "expert" in text) for row in rows if "experts" in row[0]}
    assert found == {f"layers.{{0\u20132}}.experts.{{{rank}}}.up": f"expert on rank {rank}" for rank in range(4)}


def test_page_without_tp_shows_sizes_and_how_to_get_the_rest(show):
    page = show("sizes")
    assert page.locator("#tensors").count() == 0
    assert "--tp N" in page.locator("#notes").inner_text()
    rows = page.locator("#sizes tbody tr").all_inner_texts()
    assert rows[0].split("\t")[:2] == ["Supported", "1, 2, 4, 8"]
    assert "is not a multiple of" in rows[-1]
    assert "--cost" in page.locator("#curves").inner_text()


def test_cost_is_shown_as_curves_and_figures(show):
    page = show("cost")
    charts = page.locator("#curves").get_by_role("img")
    assert [chart.get_attribute("aria-label").partition(".")[0] for chart in charts.all()] == [
        "Memory per rank", "Time of communication",
    ]  # fmt: skip
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#curves tbody tr").all()]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert [text.replace("\u00a0", " ") for text in rows[1]] == [
        "2", "1 kB", "500 B", "250 B", "1.75 kB", "100 B", "10 µs", "3 kB", "2 ms",
    ]  # fmt: skip
    assert rows[2][2] == "not counted"
    assert "Only weights are counted for tp 4: no model" in page.locator("#curves").inner_text()


def test_numbers_are_those_of_the_command_line(browser):
    script = (files_of("shardconv.html") / "assets" / "base.js").read_text("utf-8")
    numbers = [0, 999, 999.6, 1125, 12_250, 99_950, 999_499, 999_999, 999_700_000, 10**12, 12_345 * 10**12]
    times = [0, 1.25e-4, 9.994e-4, 9.999e-4, 0.002125, 0.25, 0.9994, 0.9999, 1.125, 12_345]
    page = browser.new_page()
    call_both = "([numbers, times]) => {" + script + "\nreturn [...numbers.map(size), ...times.map(duration)]; }"
    found = page.evaluate(call_both, [numbers, times])
    page.close()
    assert [text.replace("\u00a0", " ") for text in found] == [*map(size, numbers), *map(duration, times)]


def test_checkpoint_without_bytes_has_no_chart(show):
    page = show("nothing")
    assert (page.locator("#curves").count(), page.locator(".chart").count()) == (1, 0)
    assert not re.search("NaN|Infinity", page.locator("body").inner_text())


def test_verification_shows_checks_and_differences(show):
    page = show("verify")
    assert "differences: pass the source that was split" in page.locator(".verdict").inner_text()
    assert "checksums" in page.get_by_role("table", name="Checks").inner_text()
    search = page.get_by_label("Search differences")
    search.fill("layers.2 k_proj")
    rows = page.locator("#verification tbody").last.locator("tr").all_inner_texts()
    assert len(rows) == 1
    assert rows[0].startswith("model.layers.2.self_attn.k_proj.weight")


def results(page):
    """Check to the result that the page shows."""
    rows = page.get_by_role("table", name="Checks").locator("tbody tr").all()
    return dict(row.locator("th, td").all_inner_texts() for row in rows)


def test_failed_checks_are_shown_as_failed(show):
    """Differences that no check is named for, as of a source with fewer layers, are a failed check of their own."""
    page = show("damaged")
    found = results(page)
    assert found["auxiliary files"] == found["checksums"] == "failed: 1 difference"
    assert found["padding"] == "no difference found"
    assert page.locator("#verification .passed").count() == 0
    found = results(show("verify"))
    assert found["other comparisons"].startswith("failed: ")
    assert [result for result in found.values() if result == "passed"] == []


def test_damage_of_an_adapter_is_a_failure_of_its_check_alone(show):
    found = results(show("adapted"))
    assert found.pop("adapter ad") == "failed: 1 difference"
    assert {"adapter ad2", "checksums", "auxiliary files"} <= found.keys()
    assert [check for check, result in found.items() if result.startswith("failed")] == []


def test_verification_of_some_ranks_names_them(show):
    page = show("rank1")
    assert results(page)["checksums"] == "passed"
    assert page.locator(".verdict").inner_text() == "Correct, rank 1 of 2"
    assert "rank 1 of 2" in page.locator(".figures").inner_text()


# --- safety ---------------------------------------------------------------------------------------------------------


def test_text_of_a_checkpoint_is_shown_as_text(show):
    page = show("hostile")
    escaped = {"\u202e": "\\u{202e}", "\x07": "\\u{7}", "\ud800": "\\u{d800}"}
    expected = list(HOSTILE)
    assert show("bidi").title() == "a\\u{202e}b\\u{dcff}: plan for tp 2"
    for character, escape in escaped.items():
        expected = [name.replace(character, escape) for name in expected]
    assert sorted(names(page)) == sorted(expected)
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE[0]
    assert page.title() == f"{HOSTILE[0]}: plan for tp 2"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_browser_refuses_further_scripts_and_requests(browser, files):
    """The page refuses this even if a script of it made markup of a name."""
    page = browser.new_page()
    page.goto((files / "plan.html").as_uri())
    refused = """async () => {
        const found = [];
        const attempt = (what, run) => { try { run(); } catch (error) { found.push(`${what}: ${error.name}`); } };
        attempt('innerHTML', () => { document.body.innerHTML = '<b>x</b>'; });
        attempt('script', () => {
            const script = document.createElement('script');
            script.text = 'window.ran = true';
            document.body.append(script);
        });
        await fetch('http://127.0.0.1:9/').catch((error) => found.push(`fetch: ${error.name}`));
        const image = new Image();
        image.src = 'data:image/gif;base64,R0lGODlhAQABAAAAACw=';
        await new Promise((resolve) => { image.onload = image.onerror = resolve; })
            .then((event) => found.push(`image: ${event.type}`));
        return [...found, 'ran' in window];
    }"""
    found = page.evaluate(refused)
    page.close()
    assert found == ["innerHTML: TypeError", "script: TypeError", "fetch: TypeError", "image: error", False]


# --- keyboard, screen readers, colors -------------------------------------------------------------------------------


def test_keyboard_reaches_everything(show):
    page = show("plan")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the report"
    page.keyboard.press("Enter")
    heading = page.get_by_role("table", name="Kinds of tensors").get_by_role("columnheader", name="Per rank")
    heading.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Space")
    assert heading.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(show, scheme):
    """Rules of axe-core: roles, names, landmarks, contrast, tables. The page of a verification has all sections."""
    page = show("verify", color_scheme=scheme)
    for opener in page.locator(".opener").all()[:2]:
        opener.click()
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    results = axe.Axe().run(page).response
    assert [f"{one['id']}: {one['nodes'][0]['html']}" for one in results["violations"]] == []
    assert "color-contrast" in {one["id"] for one in results["passes"]}


@pytest.mark.parametrize("width", [1280, 400])
def test_page_does_not_scroll_sideways(show, width):
    """Nor do its tables in a wide window."""
    page = show("plan")
    widths = "[...document.querySelectorAll('.frame')].map((frame) => frame.scrollWidth - frame.clientWidth)"
    assert width < 1280 or set(page.evaluate(widths)) == {0}
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width

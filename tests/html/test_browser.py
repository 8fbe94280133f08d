"""The page in a headless browser: it renders, its controls work, and it makes no request. Skipped without chromium."""

import re
import shutil
from dataclasses import replace
from importlib.resources import files as files_of

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

import shardconv
from shardconv.formatting import duration, size
from shardconv.html.page import write_page
from shardconv.runtime.cost_report import CostReport, TpCost, Traffic
from shardconv.tensor.cost import Link
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import call
from tests.support.pages import HOSTILE, many_tensors, plan_report, tensor_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages: of a plan, a verification with differences, 100,000 tensors, and names that are markup."""
    folder = tmp_path_factory.mktemp("pages")
    source = write_checkpoint(folder / "tiny", config=llama_config(layers=3))
    other = write_checkpoint(folder / "other", config=llama_config(layers=2))
    shardconv.split(source, folder / "tiny-tp4", tp=4)
    assert call("plan", source, "--tp", 4, "--html", folder / "plan.html", "-q").code == 0
    assert call("plan", source, "--html", folder / "sizes.html", "-q").code == 0
    verified = call("verify", folder / "tiny-tp4", "--against", other, "--html", folder / "verify.html", "-q")
    assert verified.code == 3
    shardconv.split(source, folder / "tiny-rank1", tp=2, ranks=1)
    assert call("verify", folder / "tiny-rank1", "--html", folder / "rank1.html", "-q").code == 0
    (folder / "cost.html").write_bytes(write_page(plan_report([tensor_report("a")]), cost=cost_report()))
    experts = [tensor_report(f"layers.{layer}.experts.{expert}.up", rows=8 if expert < 2 else 16)
               for layer in range(3) for expert in range(4)]  # fmt: skip
    (folder / "experts.html").write_bytes(write_page(plan_report([*experts, tensor_report("norm")])))
    (folder / "many.html").write_bytes(write_page(plan_report(many_tensors())))
    (folder / "hostile.html").write_bytes(write_page(plan_report(map(tensor_report, HOSTILE), source=HOSTILE[0])))
    rows = [16 if layer == 3 else 8 for layer in range(12)]
    layers = [tensor_report(f"layers.{layer}.up", rows=each) for layer, each in enumerate(rows)]
    (folder / "layers.html").write_bytes(write_page(plan_report(layers)))
    shapes = [tensor_report("square", rows=16), replace(tensor_report("long"), shape=(1, 56))]
    (folder / "shapes.html").write_bytes(write_page(plan_report(shapes)))
    nothing = replace(plan_report([tensor_report("a", rows=0)]), supported_bytes=(0, 0))
    (folder / "nothing.html").write_bytes(write_page(nothing))
    (folder / "bidi.html").write_bytes(write_page(plan_report([tensor_report("a")], source="a\u202eb\udcff")))
    return folder


def cost_report() -> CostReport:
    """Costs of 1, 2 and 4 ranks, the last without a dry run."""
    prefill, decode = (Traffic((), sent, None, seconds) for sent, seconds in ((3000.0, 2e-3), (100.0, 1e-5)))
    nothing = Traffic((), 0.0, None, 0.0)
    costs = (
        TpCost(1, 2000, 1000, 250, 3250, nothing, nothing, None),
        TpCost(2, 1000, 500, 250, 1750, prefill, decode, None),
        TpCost(4, 500, None, None, None, None, None, "no model"),
    )
    return CostReport("made-up", "test", "Model", "bfloat16", 2, 1, 8, Link(), costs, ())


@pytest.fixture
def show(browser, files):
    """Open a page; no page logs an error, opens a dialog, or makes a request."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened, problems = [], []

    def open_page(name, **options):
        page = context.new_page()
        page.emulate_media(**options)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: opened.append(request.url))
        page.goto((files / f"{name}.html").as_uri())
        return page

    yield open_page
    context.close()
    assert problems == []
    assert {url.rpartition("/")[2] for url in opened} <= {f"{path.stem}.html" for path in files.glob("*.html")}


def names(page):
    """The names in the rows of the table of tensors."""
    return page.locator("#tensors tbody tr:not(.details) th").all_inner_texts()


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


def test_checkpoint_without_bytes_has_no_chart(show):
    page = show("nothing")
    assert page.locator("#curves").count() == 1
    assert page.locator(".chart").count() == 0
    text = page.locator("body").inner_text()
    assert "NaN" not in text
    assert "Infinity" not in text


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


def test_screen_readers_hear_the_page_that_is_turned_to(show):
    """They announce changes of an element that stays, not a new one."""
    page = show("many")
    page.get_by_label("Every tensor").check()
    position = page.locator("#tensors [aria-live]").element_handle()
    page.get_by_role("button", name="Next").click()
    assert position.inner_text() == "Page 2 of 1,000"
    assert position.evaluate("node => node.isConnected")


def test_verification_shows_checks_and_differences(show):
    page = show("verify")
    assert "differences: split the source again" in page.locator(".verdict").inner_text()
    assert "checksums" in page.get_by_role("table", name="Checks").inner_text()
    search = page.get_by_label("Search differences")
    search.fill("layers.2 k_proj")
    rows = page.locator("#verification tbody").last.locator("tr").all_inner_texts()
    assert len(rows) == 1
    assert rows[0].startswith("model.layers.2.self_attn.k_proj.weight")


def test_verification_of_some_ranks_names_them(show):
    page = show("rank1")
    assert page.locator(".verdict").inner_text() == "Correct, rank 1 of 2"
    assert "rank 1 of 2" in page.locator(".figures").inner_text()


# --- 100,000 tensors ------------------------------------------------------------------------------------------------


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
    """What the page would refuse even if a script of it made markup of a name."""
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


def focused(page):
    return page.evaluate("document.activeElement.textContent")


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


def test_focus_stays_in_the_pager(show):
    page = show("many")
    page.get_by_label("Every tensor").check()
    page.get_by_role("navigation", name="Pages of tensors").get_by_role("button", name="Last").focus()
    page.keyboard.press("Enter")
    assert focused(page) == "First"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(show, scheme):
    """Rules of axe-core: roles, names, landmarks, contrast, tables. The page of a verification has all sections."""
    page = show("verify", color_scheme=scheme)
    for opener in page.locator(".opener").all()[:2]:
        opener.click()
    results = Axe().run(page).response
    assert [f"{one['id']}: {one['nodes'][0]['html']}" for one in results["violations"]] == []
    assert "color-contrast" in {one["id"] for one in results["passes"]}


@pytest.mark.parametrize("width", [1280, 400])
def test_page_does_not_scroll_sideways(show, width):
    page = show("plan")
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width

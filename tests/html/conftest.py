"""A headless browser, and the pages that its tests open. They are skipped without playwright and chromium."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace
from safetensors.numpy import save_file

import shardconv
from shardconv.html import write_page
from shardconv.plan.placement import Interval
from shardconv.runtime.estimate import CostReport, TpCost, Traffic
from shardconv.tensor.cost import Link
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import call
from tests.support.damage import flip
from tests.support.pages import HOSTILE, many_tensors, plan_report, tensor_report


@pytest.fixture(scope="package")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
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
    damaged = folder / "damaged"
    shutil.copytree(folder / "tiny-tp4", damaged)
    (damaged / "config.json").write_text("{}")
    flip(damaged / "rank-1-of-4.safetensors")
    assert call("verify", damaged, "--html", folder / "damaged.html", "-q").code == 3
    adapters = [write_adapter(folder / name) for name in ("ad", "ad2")]
    shardconv.split(source, folder / "adapted", tp=4, adapters=adapters)
    flip(folder / "adapted" / "adapters" / "ad" / "rank-1-of-4.safetensors")
    assert call("verify", folder / "adapted", "--html", folder / "adapted.html", "-q").code == 3
    shardconv.split(source, folder / "tiny-rank1", tp=2, ranks=1)
    assert call("verify", folder / "tiny-rank1", "--html", folder / "rank1.html", "-q").code == 0
    (folder / "cost.html").write_bytes(write_page(plan_report([tensor_report("a")]), cost=cost_report()))
    experts = [tensor_report(f"layers.{layer}.experts.{expert}.up", rows=8 if expert < 2 else 16)
               for layer in range(3) for expert in range(4)]  # fmt: skip
    (folder / "experts.html").write_bytes(write_page(plan_report([*experts, tensor_report("norm")])))
    held = [structs.replace(tensor_report(f"layers.{layer}.experts.{expert}.up", tp=4), style="expert", dim=0,
                    shard_bytes=tuple(64 * (rank == expert) for rank in range(4)),
                    intervals=tuple((Interval(0, 8),) * (rank == expert) for rank in range(4)))
            for layer in range(3) for expert in range(4)]  # fmt: skip
    with_extras = replace(
        plan_report([*held, tensor_report("norm", tp=4, is_sharded=False)], tp=4),
        num_quantized=5, quantization="gptq, 4 bits", adapters=("de", "fr"), engine="vllm",
    )  # fmt: skip
    (folder / "held.html").write_bytes(write_page(with_extras))
    (folder / "many.html").write_bytes(write_page(plan_report(many_tensors())))
    (folder / "hostile.html").write_bytes(write_page(plan_report(map(tensor_report, HOSTILE), source=HOSTILE[0])))
    rows = [16 if layer == 3 else 8 for layer in range(12)]
    layers = [tensor_report(f"layers.{layer}.up", rows=each) for layer, each in enumerate(rows)]
    (folder / "layers.html").write_bytes(write_page(plan_report(layers)))
    shapes = [tensor_report("square", rows=16), structs.replace(tensor_report("long"), shape=(1, 56))]
    (folder / "shapes.html").write_bytes(write_page(plan_report(shapes)))
    nothing = replace(plan_report([tensor_report("a", rows=0)]), supported_bytes=(0, 0))
    (folder / "nothing.html").write_bytes(write_page(nothing))
    (folder / "bidi.html").write_bytes(write_page(plan_report([tensor_report("a")], source="a\u202eb\udcff")))
    return folder


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter of one layer of the model, with random values."""
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    values = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    tensors = {f"{module}.lora_A.weight": values, f"{module}.lora_B.weight": values.T.copy()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
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


def focused(page):
    """The text of the element that has the focus."""
    return page.evaluate("document.activeElement.textContent")

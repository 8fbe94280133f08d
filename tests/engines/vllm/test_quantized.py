"""Parameters of quantized models of vLLM, loaded by the plugin and by vLLM's default loader.

Bytes are compared before ``process_weights_after_loading``, which includes formats whose kernels
the CPU build does not have.
"""

from pathlib import Path

import pytest

import shardconv
from shardconv.engines.check import check_engine
from shardconv.engines.vllm_plugin import LOAD_FORMAT
from shardconv.support.errors import PlanError
from tests.engines.vllm.parameters import assert_same, parameters
from tests.engines.vllm.quantized import CASES, CHECKPOINTS, NOT_LOADED, write
from tests.engines.vllm.test_engine import QUANTIZED
from tests.formats.test_gptq import DATA
from tests.support.checkpoints import contents
from tools.vllm_kernels import without_kernels

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture(autouse=True)
def missing_kernels():
    with without_kernels() as missing:
        yield missing


@pytest.mark.parametrize(("form", "model", "tp"), CASES)
def test_parameters(form, model, tp, sources, tmp_path):
    """From a split for vLLM, and from the source; the loaders fill every parameter."""
    source, split = write((form, model), sources), tmp_path / "split"
    shardconv.split(source, split, tp=tp, engine="vllm")
    assert check_engine(split).differences == ()
    for rank in range(tp):
        expected = parameters(source, tp, rank, "auto")
        assert_same(parameters(split, tp, rank, LOAD_FORMAT), expected)
        assert_same(parameters(source, tp, rank, LOAD_FORMAT), expected)


@pytest.mark.parametrize("name", NOT_LOADED)
def test_checkpoints_that_vllm_does_not_load(name, sources, tmp_path):
    """vLLM's error is raised for a source, and for a split."""
    checkpoint, message = NOT_LOADED[name]
    source, split = tmp_path / "source", tmp_path / "split"
    checkpoint.write(sources, source)
    shardconv.split(source, split, tp=2, engine="vllm")
    for folder, load_format in ((source, "auto"), (source, LOAD_FORMAT), (split, LOAD_FORMAT)):
        with pytest.raises(ValueError, match=message):
            parameters(folder, 2, 0, load_format)


def test_errors_of_vllm_are_reported(tmp_path):
    split = tmp_path / "split"
    shardconv.split(DATA / "gptq-4-act-order", split, tp=2, engine="vllm")
    differences = check_engine(split).differences
    assert len(differences) == 2
    assert all("vLLM raises" in difference and "desc_act" in difference for difference in differences)


#: Format and model to a part of the error of vLLM's layout, for those that it does not support.
REFUSED = {
    ("compressed-tensors FP8", "phi3"): "gate_up_proj.input_scale: is one number",
    ("ModelOpt FP8", "qwen3_moe"): "experts.0.down_proj.input_scale: layout vllm does not support",
    ("GPTQ 4 bits", "qwen3_moe"): "vLLM has biases of the experts",
    ("GPTQ 4 bits, without `modules_in_block_to_quantize`", "llama"): "needs modules_in_block",
    ("MXFP4", "gpt_oss"): "layout vllm does not support model type 'gpt_oss'",
}


@pytest.mark.parametrize(("form", "model", "tp"), CASES)
def test_layout(form, model, tp, sources, tmp_path):
    """From rank files in vLLM's layout, loaded by vLLM's loader and by the plugin; or an error with the reason."""
    source, split = write((form, model), sources), tmp_path / "split"
    if (form, model) in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[form, model]) as error:
            shardconv.split(source, split, tp=tp, layout="vllm")
        assert 'engine="vllm"' in str(error.value)
        assert not split.exists()
        return
    shardconv.split(source, split, tp=tp, layout="vllm")
    assert check_engine(split).differences == ()
    shardconv.merge(split, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    for rank in range(tp):
        expected = parameters(source, tp, rank, "auto")
        assert_same(parameters(split, tp, rank, "sharded_state"), expected)
        assert_same(parameters(split, tp, rank, LOAD_FORMAT), expected)


def table() -> str:
    """The table of docs/vllm.md: what was compared, by format and way of loading."""
    rows = [
        "| format | models and tensor parallel sizes | `--load-format shardconv` | `split --layout vllm` |",
        "|---|---|---|---|",
    ]
    for form in dict.fromkeys(form for form, _ in CHECKPOINTS):
        models = {model: checkpoint.tps for (each, model), checkpoint in CHECKPOINTS.items() if each == form}
        sizes = "; ".join(f"{model}: {', '.join(map(str, tps))}" for model, tps in models.items())
        compared = "parameters, tokens" if form.endswith(tuple(f" {scheme}" for scheme in QUANTIZED)) else "parameters"
        refused = [model for model in models if (form, model) in REFUSED]
        but = f"; {', '.join(refused)} refused" if refused else ""
        rows.append(
            f"| {form} | {sizes} | {compared} | {'refused' if len(refused) == len(models) else compared + but} |"
        )
    return "\n".join(rows)


def test_the_page_has_the_table():
    assert table() in (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()

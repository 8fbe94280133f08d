"""Parameters of quantized models of vLLM, loaded by the plugin and by vLLM's default loader.

Bytes are compared before ``process_weights_after_loading``, which includes formats whose kernels
the CPU build does not have.
"""

import shutil

import pytest

import shardconv
from shardconv.engines.check import check_engine
from shardconv.engines.vllm_plugin import LOAD_FORMAT
from shardconv.errors import PlanError
from tests.engines.vllm.parameters import assert_same, parameters
from tests.engines.vllm.quantized import CASES, CHECKPOINTS, write
from tests.formats.test_gptq import DATA
from tests.support.checkpoints import contents
from tools.vllm_kernels import without_kernels

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(autouse=True)
def missing_kernels():
    with without_kernels() as missing:
        yield missing


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_parameters(name, tp, sources, tmp_path):
    """From a split for vLLM, and from the source; the loaders fill every parameter."""
    source, split = write(name, sources), tmp_path / "split"
    shardconv.split(source, split, tp=tp, engine="vllm")
    assert check_engine(split).differences == ()
    for rank in range(tp):
        expected = parameters(source, tp, rank, "auto")
        assert_same(parameters(split, tp, rank, LOAD_FORMAT), expected)
        assert_same(parameters(source, tp, rank, LOAD_FORMAT), expected)


def test_act_order_that_vllm_does_not_load(tmp_path):
    """vLLM's error is in the report."""
    source = shutil.copytree(DATA / "gptq-4-act-order", tmp_path / "source")
    shardconv.split(source, tmp_path / "split", tp=2, engine="vllm")
    differences = check_engine(tmp_path / "split").differences
    assert len(differences) == 2
    assert all("vLLM raises" in difference and "desc_act" in difference for difference in differences)


#: Parts of the errors for checkpoints that vLLM's layout does not support.
REFUSED = {
    "FP8 phi3": "gate_up_proj.input_scale: is one number",
    "ModelOpt FP8 qwen3_moe": "experts.0.down_proj.input_scale: layout vllm does not support",
    "ModelOpt NVFP4 qwen3_moe": "experts.0.down_proj.input_scale: layout vllm does not support",
    "MXFP4 gpt_oss": "layout vllm does not support model type 'gpt_oss'",
    **dict.fromkeys(
        [name for name in CHECKPOINTS if name.startswith(("GPTQ", "AWQ"))], "along which vLLM concatenates"
    ),
}


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_layout(name, tp, sources, tmp_path):
    """From rank files in vLLM's layout, loaded by vLLM's loader and by the plugin; or an error with the reason."""
    source, split = write(name, sources), tmp_path / "split"
    if name in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[name]) as error:
            shardconv.split(source, split, tp=tp, layout="vllm")
        assert "--for vllm" in str(error.value)
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

"""Parameters of quantized models of vLLM, loaded by the plugin and by vLLM's default loader.

Bytes are compared before ``process_weights_after_loading``, which includes formats whose kernels
the CPU build does not have.
"""

import shutil

import pytest

import shardconv
from shardconv.engines.check import check_engine
from shardconv.engines.vllm_plugin import LOAD_FORMAT
from tests.engines.vllm.parameters import assert_same, parameters
from tests.engines.vllm.quantized import CASES, write
from tests.formats.test_gptq import DATA
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

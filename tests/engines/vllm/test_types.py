"""Every checkpoint of tests/data/vllm, split for vLLM and loaded by the plugin.

Each value is the number of its element; digests were recorded with vLLM's default loader.
"""

from unittest import mock

import pytest

import shardconv
from shardconv.engines.check import check_engine
from shardconv.engines.vllm_plugin import LOAD_FORMAT, register
from shardconv.support.errors import PlanError
from tests.support.vllm_fixture import LOADED, expected, supported_tp, write
from tools.vllm_kernels import without_kernels
from tools.vllm_record import digest, values_of


@pytest.fixture(scope="session", autouse=True)
def plugin():
    from vllm.model_executor.models import registry  # noqa: PLC0415 - after the environment is set

    register()
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):  # 10 s less for each class
        yield


@pytest.mark.parametrize("name", LOADED)
def test_type(name, tmp_path):
    line = LOADED[name]
    source = write(tmp_path / "source", line)
    for tp in supported_tp(line):
        split = tmp_path / f"tp{tp}"
        shardconv.split(source, split, tp=tp, engine="vllm")
        for rank in range(tp):
            with without_kernels():
                values = values_of(split, tp, rank, LOAD_FORMAT)
            found = {tensor: (tuple(value.shape), digest(value)) for tensor, value in values.items()}
            assert found == expected(line, tp, rank), (tp, rank)


#: Checkpoints of families that do not have stages.
WITHOUT_STAGES = {
    "bloom", "falcon", "falcon-40b", "falcon-rw", "falcon_mamba", "gemma3n_text", "gemma4_text", "gpt-sw3", "gpt2",
    "gpt2-untied", "gptj", "hrm_text", "longcat_flash", "mamba", "mamba2", "mamba2-groups", "nemotron_h", "opt",
    "opt-untied",
}  # fmt: skip
#: Differences that the stages of a checkpoint may have: vLLM does not construct stages of dense layers of some models,
#: and others on CPUs.
_NO_EXPERTS, _SPARSE = " layer found in ", "Sparse Attention is not supported on CPU"
ALLOWED = {
    **dict.fromkeys(("afmoe", "glm4_moe", "glm4_moe-norms", "glm4_moe_lite", "hy_v3", "lfm2_moe"), _NO_EXPERTS),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    "ernie4_5_moe": "AttributeError: 'PPMissingLayer'",
    "laguna": "no tensor for model.layers.1.mlp.experts.routed_experts.e_score_correction_bias",  # also in one stage
}
#: Checkpoints that vLLM does not construct on the meta device.
_NOT_CHECKED = {"apertus"}


@pytest.mark.parametrize("name", sorted(LOADED.keys() - _NOT_CHECKED))
def test_stages_of_type(name, tmp_path):
    """Each stage has the tensors that vLLM constructs; its models differ in what is on all stages."""
    source, split = write(tmp_path / "source", LOADED[name]), tmp_path / "split"
    if name in WITHOUT_STAGES:
        with pytest.raises(PlanError, match=r"pp is not supported for family|the number of layers is unknown"):
            shardconv.split(source, split, tp=1, pp=2, engine="vllm")
        return
    shardconv.split(source, split, tp=1, pp=2, engine="vllm")
    differences = check_engine(split).differences
    assert [one for one in differences if ALLOWED.get(name, "without") not in one] == []

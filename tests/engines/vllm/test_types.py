"""Every checkpoint of tests/data/vllm, split for vLLM and loaded by the plugin.

Each value is the number of its element; digests were recorded with vLLM's default loader.
"""

from unittest import mock

import pytest

import shardconv
from shardconv.engines.vllm_plugin import LOAD_FORMAT, register
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

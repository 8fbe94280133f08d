"""Checks against an engine, where none is installed; those with one are in vllm/."""

from pathlib import Path

import shardconv
from tests.engines.vllm.generate import SETTINGS
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import call
from tests.support.matrix import needs_torch

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_page_has_the_environment_with_which_the_tests_run_vllm_on_a_cpu():
    text = PAGE.read_text("utf-8")
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        assert f"`{name}={SETTINGS[name]}`" in text


@needs_torch
def test_an_engine_that_is_not_installed_is_no_wrong_usage(tmp_path, monkeypatch):
    monkeypatch.setattr("shardconv.engines.check.find_spec", lambda _: None)
    write_checkpoint(tmp_path / "tiny", config=llama_config(layers=1))
    shardconv.split(tmp_path / "tiny", tmp_path / "out", tp=2)
    result = call("verify", tmp_path / "out", "--engine", "vllm")
    assert (result.code, "--engine vllm: vLLM is not installed" in result.err) == (1, True)

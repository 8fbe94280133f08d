"""Imports that models of vLLM require before transformers is imported."""

import sys
from pathlib import Path

import pytest

from shardconv.engines.vllm_plugin import register
from tools.torchvision import declare_operators

sys.path.append(str(Path(__file__).parents[3] / ".venv" / "vision"))
declare_operators()


@pytest.fixture(scope="session")
def plugin() -> None:
    """Register the load format, as vLLM does in its own processes."""
    register()


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints, each of which is written once."""
    return tmp_path_factory.mktemp("sources")

"""torchvision, where it is in the path: composite models need it in vLLM to be constructed, text or not."""

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def declare_torchvision() -> None:
    """Make torchvision importable with a torch without CUDA; tests/vision.py says why it is not."""
    sys.path.append(str(TESTS))
    importlib.import_module("vision").declare_operators()

"""Imports that models of vLLM require before transformers is imported."""

import sys
from pathlib import Path

from tools.torchvision import declare_operators

sys.path.append(str(Path(__file__).parents[3] / ".venv" / "vision"))
declare_operators()

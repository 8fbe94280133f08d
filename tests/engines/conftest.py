"""What models of vLLM need to be imported, before anything imports transformers."""

import sys
from pathlib import Path

from tools.optional import declare_torchvision

sys.path.append(str(Path(__file__).parents[2] / ".venv" / "vision"))
declare_torchvision()

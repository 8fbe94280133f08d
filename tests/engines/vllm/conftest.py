"""What models of vLLM need to be imported, before anything imports transformers."""

import sys
from pathlib import Path

from tools.torchvision import declare_operators

sys.path.append(str(Path(__file__).parents[3] / ".venv" / "vision"))
declare_operators()

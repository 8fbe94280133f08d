"""Draw docs/assets/demo.svg: the commands of examples/demo.sh and their output, exported by rich.

    python -m tools.picture

Commands run in a temporary folder with the demo model. ``plan`` is left out, because its table is too wide.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "demo.svg"
_WIDTH = 116


def commands() -> list[str]:
    """The commands of the demo that are in the picture."""
    script = (ROOT / "examples" / "demo.sh").read_text("utf-8")
    found = re.findall(r"^show (.+)$", script, re.MULTILINE)
    return [command for command in found if not command.startswith(("shardconv plan", "diff", "ls"))]


def run(command: str, folder: Path) -> str:
    """The output of a command on stdout and stderr.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(command), cwd=folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    return result.stdout.strip("\n")


def draw(outputs: dict[str, str]) -> str:
    """The picture of commands and their outputs."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=_WIDTH, file=nowhere, force_terminal=True)
        for command, output in outputs.items():
            console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            if output:
                console.print(Text(output))
    return console.export_svg(title="shardconv", unique_id="demo")


def main() -> None:
    """Run the commands and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "demo-model").symlink_to(ROOT / "examples" / "demo-model")
        outputs = {command: run(command, Path(folder)) for command in commands()}
    PICTURE.write_text(draw(outputs), "utf-8")


if __name__ == "__main__":
    main()

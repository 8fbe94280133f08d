"""Scripts that unpickle files, run by a child process: the calling process is not affected by what files contain."""

import json
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, request: object) -> subprocess.CompletedProcess[str]:
    """Run a script, with a value as JSON on its standard input."""
    command = [sys.executable, "-P", str(script)]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)  # noqa: S603


def failure_reason(child: subprocess.CompletedProcess[str]) -> str:
    """Why a script failed: its last message, or its exit code."""
    return (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]

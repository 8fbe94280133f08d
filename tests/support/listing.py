"""Lists PyTorch files in the process of a test: a process for each listing imports torch, which takes seconds."""

import json
import warnings
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from shardconv.files import torch_files
from shardconv.files.child_script import run_script


def list_here() -> None:
    """Run the script that lists tensors in this process from now on; other scripts in processes of their own."""
    pytest.MonkeyPatch().setattr(torch_files, "run_script", _run_here)


def _run_here(script: Path, request: object) -> CompletedProcess[str]:
    if script.name != "torch_listing.py":
        return run_script(script, request)
    from shardconv.files import torch_listing  # noqa: PLC0415 - imports torch

    with warnings.catch_warnings(action="ignore"):  # as in the script's process, where no caller reads them
        listed = list(torch_listing.list_files(json.loads(json.dumps(request))))
    return CompletedProcess([], 0, "\n".join(map(json.dumps, listed)), "")

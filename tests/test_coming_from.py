"""docs/coming-from.md: the code in each row runs, and the commands exist."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import shardconv
from shardconv import distributed, layers, tensor
from tests.support.command import call
from tests.support.models import MODELS

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text("utf-8")
#: Section to rows of the reference's name and shardconv's.
SECTIONS = {
    section.split("\n", 1)[0]: [line.split(" | ")[:2] for line in section.split("\n") if line.startswith("| ")][1:]
    for section in PAGE.split("\n## ")[1:]
}
ROWS = [
    (f"{title}: {theirs.removeprefix('| ')}", code)
    for title, rows in SECTIONS.items()
    if title != "Names above"
    for theirs, here in rows
    for code in re.findall(r"`([^`]+)`", here)
    if not code.startswith("shardconv ") and re.search("[a-z_]{3}", code) and "/" not in code
]

COMMANDS = sorted(set(re.findall(r"`shardconv ([^`]+)`", PAGE)))


@pytest.fixture
def names(tmp_path):
    """The names that the page's code uses, in one process with torch's groups."""
    transformers.logging.set_verbosity_error()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    shardconv.init_parallel()
    found = {name: getattr(shardconv, name) for name in shardconv.__all__}
    found |= {"copy": copy, "torch": torch, "nn": nn, "shardconv": shardconv}
    found |= {"distributed": distributed, "layers": layers, "tensor": tensor, "model": MODELS["llama"].build()}
    for given, value in SECTIONS["Names above"]:
        if value.strip("| ").startswith("`"):
            found |= {name: eval(value.strip("`| "), dict(found)) for name in re.findall(r"`(\w+)`", given)}
    yield found
    shardconv.destroy_parallel()


@pytest.mark.parametrize(("row", "code"), ROWS, ids=[row for row, _ in ROWS])
def test_code_of_the_page_runs(names, row, code):
    eval(code, names)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_exist(command):
    """``--help`` runs nothing, but unknown options are still refused."""
    result = call(*command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert call(*command.split(), "--no-such-option", "--help").code == 2


def test_rows_are_found():
    assert len(ROWS) > 15
    assert {title: len(rows) for title, rows in SECTIONS.items() if len(rows) < 3} == {}

"""docs/faq.md: each quoted error is what a command prints in the situation that the page describes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import shardconv
from tests.support.checkpoints import DEMO
from tests.support.command import call, run
from tests.support.damage import flip
from tests.support.matrix import needs_torch

QUANTIZED = Path(__file__).parent / "data" / "quantized" / "gptq-3"
PAGE = Path(__file__).parents[1] / "docs" / "faq.md"
ERRORS = PAGE.read_text("utf-8").partition("## Questions")[0]
QUOTED = [text for line in re.findall(r"^\*\*(`[^*]+`)\*\*", ERRORS, re.MULTILINE) for text in line.split("`")[1::2]]


class Case(NamedTuple):
    """A command that prints an error, in a folder with the demo model as ``model``."""

    command: str
    prepare: Callable[[Path], object] = lambda folder: None
    code: int = 1


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({field: value for field, value in config.items() if value is not None}))


def rename_tensor(folder: Path, old: bytes, new: bytes) -> None:
    """Replace a part of tensor names by one of the same length."""
    assert len(old) == len(new)
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(old, new))


def add_weights(folder: Path) -> None:
    shutil.copy(DEMO / "model.safetensors", folder / "model" / "extra.safetensors")


def damage(folder: Path) -> None:
    shardconv.split(folder / "model", folder / "split", tp=2)
    flip(folder / "split" / "rank-1-of-2.safetensors")


def remove_manifest(folder: Path) -> None:
    shardconv.split(folder / "model", folder / "split", tp=2)
    (folder / "split" / "shardconv.json").unlink()


def move_weights(folder: Path) -> None:
    """Leave a link to weights in another folder."""
    weights = folder / "model" / "model.safetensors"
    weights.rename(folder / "elsewhere.safetensors")
    weights.symlink_to(folder / "elsewhere.safetensors")


CASES = {
    "... is not a multiple of ...": Case("split model --tp 3"),
    "no family is known for this model": Case(
        "split model --tp 2 --rules by_name", lambda folder: rename_tensor(folder, b"mlp.up_proj", b"mlp.other_p")
    ),
    "by its name it is a fused tensor": Case(
        "split model --tp 2 --rules by_name", lambda folder: rename_tensor(folder, b"mlp.gate_proj", b"mlp.gate_up_x")
    ),
    "no rule of family ... matches it": Case(
        "split model --tp 2", lambda folder: rename_tensor(folder, b"mlp.up_proj", b"mlp.other_p")
    ),
    "head_dim is unknown": Case("split model --tp 16", lambda folder: (folder / "model" / "config.json").unlink()),
    "holds weights that are not in ...": Case("split model --tp 2", add_weights),
    "quantization ... is not supported": Case(
        "split model --tp 2", lambda folder: change_config(folder, quantization_config={"quant_method": "hqq"})
    ),
    "is a link out of its folder": Case("split model --tp 2", move_weights),
    "exists: choose another path with -o, or pass --overwrite": Case(
        "split model --tp 2 -o split", lambda folder: shardconv.split(folder / "model", folder / "split", tp=2)
    ),
    "is not a split checkpoint": Case("merge model"),
    "a rank file of shardconv, without its manifest": Case("merge split", remove_manifest),
    "the bytes of ... differ from their checksum": Case("merge split", damage),
    "is split for ...": Case("run split --tp 4 --prompt x", damage, code=2),
}  # fmt: skip


def pattern(quoted: str) -> str:
    return re.escape(quoted).replace(r"\.\.\.", ".+")


@pytest.mark.parametrize("quoted", CASES)
def test_errors_of_the_page_are_printed(quoted, tmp_path, monkeypatch):
    case = CASES[quoted]
    shutil.copytree(DEMO, tmp_path / "model")
    case.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = call(*case.command.split())
    assert result.code == case.code
    assert re.search(pattern(quoted), result.err), result.err


def test_a_missing_package_is_named():
    quoted = "this command needs ..., which is not installed"
    result = run("plan", DEMO, "--prove", patch="import sys; sys.modules['torch'] = None")
    assert result.code == 1
    assert re.search(pattern(quoted), result.err), result.err


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    result = call("split", DEMO, "--tp", 2, "-o", tmp_path / "split")
    assert result.code == 1
    assert "the disk has too little free space" in result.err


@needs_torch
def test_quantized_layers_are_not_dequantized_silently(tmp_path):
    shardconv.split(QUANTIZED, tmp_path / "split", tp=2)
    result = call("run", tmp_path / "split", "--token-ids", "1", "--device", "cpu", "-q")
    assert result.code == 1
    assert "is quantized: pass --dequantize" in result.err


def test_a_wrong_number_of_processes_is_named(tmp_path):
    shardconv.split(DEMO, tmp_path / "split", tp=2)
    with pytest.raises(shardconv.ShardconvError, match=pattern("is for ... ranks, and there")):
        shardconv.load(tmp_path / "split", device="cpu")


def test_every_error_of_the_page_has_a_case():
    others = {
        "this command needs ..., which is not installed", "the disk has too little free space",
        "is quantized: pass --dequantize", "is for ... ranks, and there",
    }  # fmt: skip
    assert sorted(QUOTED) == sorted([*CASES, *others])

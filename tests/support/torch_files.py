"""PyTorch files, written as libraries write them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardconv.files.containers import torch_files
from shardconv.files.input_files import InputFiles
from tests.support.checkpoints import deal, part_names, write_index

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def replace_after_listing(monkeypatch: pytest.MonkeyPatch, path: Path, other: bytes) -> None:
    """Replace a file, after its tensors are listed, by one of the same size and time of modification."""
    assert len(other) == path.stat().st_size
    list_tensors = torch_files.UnpicklerProcess.run

    def run(
        child: torch_files.UnpicklerProcess, requests: Sequence[tuple[str, int, int, int]], files: InputFiles
    ) -> Iterator[dict[str, Any]]:
        yield from list_tensors(child, requests, files)
        if requests[0][0] == "file":
            status = path.stat()
            replacement = path.with_name("replacement")
            replacement.write_bytes(other)
            os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
            replacement.rename(path)

    monkeypatch.setattr(torch_files.UnpicklerProcess, "run", run)


def write_pytorch(folder: Path, tensors: Mapping[str, torch.Tensor], *, parts: int = 1, **options: Any) -> Path:
    """Write tensors to one file, or to several with an index; ``options`` are those of ``torch.save``."""
    folder.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        torch.save(dict(tensors), folder / SINGLE, **options)
        return folder
    names = [name.replace(".safetensors", ".bin") for name in part_names(parts, "pytorch_model")]
    weight_map: dict[str, str] = {}
    for name, chosen in zip(names, deal(list(tensors), parts), strict=True):
        torch.save({tensor: tensors[tensor] for tensor in chosen}, folder / name, **options)
        weight_map |= dict.fromkeys(chosen, name)
    write_index(folder, weight_map, INDEX)
    return folder


def read_pytorch(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of files, by torch."""
    return {name: tensor for path in paths for name, tensor in torch.load(path, weights_only=True).items()}

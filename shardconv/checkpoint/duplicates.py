"""Proof that files in PyTorch's format next to a checkpoint hold only tensors of the checkpoint.

Names and shapes are compared, not values: transformers loads safetensors if a folder has both formats. A subprocess
lists the tensors with torch, so that this process does not import it; it executes no code in the files and reads no
values.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from zipfile import is_zipfile

from shardconv.checkpoint.formats import PICKLE_SUFFIXES
from shardconv.checkpoint.json_files import read_json
from shardconv.errors import SourceError

_INDEX_SUFFIX = ".bin.index.json"
#: Prints for each file a list of name, shape and storage of every tensor, or a description of the error.
LISTING = """
import json, sys, torch
found = []
for path in sys.argv[1:]:
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        found.append([
            (name, list(tensor.shape), [
                tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride(), str(tensor.dtype)
            ])
            for name, tensor in tensors.items()
        ])
    except Exception as error:
        found.append(f"torch cannot list it ({type(error).__name__})")
json.dump(found, sys.stdout)
"""


#: For each tensor of a file its name, its shape, and its storage: address, offset, strides and dtype.
Listing = list[tuple[str, list[int], list[object]]]


def unproven(files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The files that are not proven to be duplicates of a checkpoint.

    Args:
        files: name in the folder to path, of regular weight files that are not part of the checkpoint.
        shapes: of the checkpoint's tensors.

    Returns:
        Name to reason; the reason is empty for formats that cannot be listed.
    """
    reasons = dict.fromkeys(files, "")
    indexes = {name: _index(name, path) for name, path in files.items() if name.endswith(_INDEX_SUFFIX)}
    for name, index in indexes.items():
        if not isinstance(index, str) and index.tensors == shapes.keys():
            listed_files = {file for file in index.files & files.keys() if file.endswith(PICKLE_SUFFIXES)}
            reasons |= dict.fromkeys([name, *listed_files], _PROVEN)
    pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES) and reasons[name] != _PROVEN]
    listed = [name for name in pickles if is_zipfile(files[name])]
    reasons |= dict.fromkeys(set(pickles) - set(listed), "not in the zip format of torch.save")
    for name, listing in zip(listed, list_tensors([files[name] for name in listed]), strict=True):
        reasons[name] = listing if isinstance(listing, str) else _first_mismatch(listing, shapes)
    for name, index in indexes.items():
        if isinstance(index, str):
            reasons[name] = index
        elif all(reasons.get(file) == _PROVEN for file in index.files):
            reasons[name] = _PROVEN
        else:
            reasons[name] = "lists tensors that the checkpoint does not have"
    return {name: why for name, why in reasons.items() if why != _PROVEN}


#: Marks a file that is proven to be a duplicate.
_PROVEN = "proven"


class _Index(NamedTuple):
    """The tensors that an index lists, and their files, by their names in the folder."""

    tensors: set[str]
    files: set[str]


def _index(name: str, path: Path) -> _Index | str:
    """Read an index; returns a description of the error if it cannot be used."""
    try:
        weight_map = read_json(path).get("weight_map")
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return "does not have a weight_map"
    return _Index(set(weight_map), {str(PurePosixPath(name).parent / file) for file in weight_map.values()})


def list_tensors(paths: list[Path]) -> list[Listing | str]:
    """List the tensors of files with torch, in a subprocess."""
    if not paths:
        return []
    command = [sys.executable, "-P", "-c", LISTING, *map(str, paths)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode:
        return [f"torch cannot list it ({(result.stderr.strip() or 'no message').splitlines()[-1]})"] * len(paths)
    listings: list[Listing | str] = json.loads(result.stdout)
    return listings


def _first_mismatch(listing: Listing, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first tensor that is not in the checkpoint, or return ``_PROVEN``.

    A tensor that shares storage with one of the checkpoint is in it, too: safetensors stores only one of them.
    """
    known = [(shape, storage) for name, shape, storage in listing if tuple(shape) == shapes.get(name)]
    for name, shape, storage in listing:
        if name in shapes and tuple(shape) != shapes[name]:
            return f"has {name} of shape {shape}, expected {list(shapes[name])} as in the checkpoint"
        if name not in shapes and (shape, storage) not in known:
            return f"has {name}, which the checkpoint does not have"
    return _PROVEN

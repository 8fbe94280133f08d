"""Proof that files of PyTorch's format beside a checkpoint hold nothing that the checkpoint does not have.

By names and shapes, not by values: of two formats in one folder, transformers loads safetensors. torch lists the files
in a process of its own, so that nothing here imports it; it runs no code that is in them, and reads no values.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zipfile import is_zipfile

from shardconv.checkpoint.formats import PICKLE_SUFFIXES
from shardconv.checkpoint.json_files import read_json
from shardconv.errors import SourceError

_INDEX_SUFFIX = ".bin.index.json"
#: Writes for each file a list of name, shape and place in memory of every tensor, or in what way it failed.
_LISTING = """
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


def unproven(files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Which files are not proven to be duplicates of a checkpoint, and why.

    Args:
        files: names in the folder to paths, of regular files with weights that are not part of the checkpoint.
        shapes: of the checkpoint's tensors.

    Returns:
        Name to reason, which is empty for formats that are not tried.
    """
    reasons = dict.fromkeys(files, "")
    indexes = {name: _index(name, path) for name, path in files.items() if name.endswith(_INDEX_SUFFIX)}
    for name, index in indexes.items():
        if not isinstance(index, str) and index.tensors == shapes.keys():
            listed_files = {file for file in index.files & files.keys() if file.endswith(PICKLE_SUFFIXES)}
            reasons |= dict.fromkeys([name, *listed_files], _PROVEN)
    pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES) and reasons[name] != _PROVEN]
    listed = [name for name in pickles if is_zipfile(files[name])]
    reasons |= dict.fromkeys(set(pickles) - set(listed), "not a file that torch.save writes today")
    for name, found in zip(listed, _list([files[name] for name in listed]), strict=True):
        reasons[name] = found if isinstance(found, str) else _first_other(found, shapes)
    for name, index in indexes.items():
        if isinstance(index, str):
            reasons[name] = index
        elif all(reasons.get(file) == _PROVEN for file in index.files):
            reasons[name] = _PROVEN
        else:
            reasons[name] = "lists other tensors than the checkpoint has"
    return {name: why for name, why in reasons.items() if why != _PROVEN}


#: The reason of a file that holds nothing else.
_PROVEN = "proven"


class _Index(NamedTuple):
    """The tensors that an index lists, and the files that it maps them to, by their names in the folder."""

    tensors: set[str]
    files: set[str]


def _index(name: str, path: Path) -> _Index | str:
    """What an index lists, or why it cannot be used."""
    try:
        weight_map = read_json(path).get("weight_map")
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return "has no weight_map"
    return _Index(set(weight_map), {str(PurePosixPath(name).parent / file) for file in weight_map.values()})


def _list(paths: list[Path]) -> list[Any]:
    """What torch finds in files."""
    if not paths:
        return []
    command = [sys.executable, "-P", "-c", _LISTING, *map(str, paths)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        return [f"torch cannot list it ({(done.stderr.strip() or 'no message').splitlines()[-1]})"] * len(paths)
    found: list[Any] = json.loads(done.stdout)
    return found


def _first_other(found: list[Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why a file holds something else; a tensor tied to one of the checkpoint's, as safetensors drops, is that one."""
    known = [(shape, place) for name, shape, place in found if tuple(shape) == shapes.get(name)]
    for name, shape, place in found:
        if name in shapes and tuple(shape) != shapes[name]:
            return f"has {name} of shape {shape}, the checkpoint {list(shapes[name])}"
        if name not in shapes and (shape, place) not in known:
            return f"has {name}, which the checkpoint does not have"
    return _PROVEN

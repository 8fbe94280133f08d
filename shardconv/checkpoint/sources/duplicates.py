"""Proof that files next to a checkpoint, in PyTorch's format or Meta's layout, hold only tensors of the checkpoint.

Names and shapes are compared, not values: transformers loads safetensors if a folder has both formats.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from shardconv.files.containers.safetensors import TensorFile, TensorInfo, read_header
from shardconv.files.containers.torch_files import TorchProblem, list_torch_files
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import PYTORCH, SAFETENSORS
from shardconv.layouts import META
from shardconv.layouts.layout_file import layout_file
from shardconv.layouts.relation import find_target
from shardconv.support.errors import SourceError


def unproven(files: Mapping[str, AnyPath], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The files that are not proven to be duplicates of a checkpoint.

    Args:
        files: name in the folder to path, of regular weight files that are not part of the checkpoint.
        shapes: of the checkpoint's tensors.

    Returns:
        Name to reason; the reason is empty for formats that cannot be listed.
    """
    reasons = dict.fromkeys(files, "")
    indexes = {name: _index(name, path) for name, path in files.items() if PYTORCH.lists(name)}
    for name, index in indexes.items():
        if not isinstance(index, str) and index.tensors == shapes.keys():
            listed_files = {file for file in index.files & files.keys() if file.endswith(PYTORCH.suffixes)}
            reasons |= dict.fromkeys([name, *listed_files], _PROVEN)
    pickles = [name for name in files if name.endswith(PYTORCH.suffixes) and reasons[name] != _PROVEN]
    for name, listed in zip(pickles, list_torch_files([files[name] for name in pickles]), strict=True):
        reasons[name] = _first_mismatch(listed, shapes)
    for name in [name for name in files if SAFETENSORS.has(name) and layout_file(META).names.fullmatch(name)]:
        reasons[name] = _first_mismatch(_read_tensors(files[name]), shapes)
    indexes |= {name: _index(name, path) for name, path in files.items() if name == _META_INDEX}
    for name, index in indexes.items():
        if isinstance(index, str):
            reasons[name] = index
        elif all(reasons.get(file) == _PROVEN for file in index.files):
            reasons[name] = _PROVEN
        else:
            reasons[name] = "lists tensors that the checkpoint does not have"
    return {name: why for name, why in reasons.items() if why != _PROVEN}


_META_INDEX = f"consolidated{SAFETENSORS.index_suffix}"
#: Marks a file that is proven to be a duplicate.
_PROVEN = "proven"


class _Index(NamedTuple):
    """The tensors that an index lists, and their files, by their names in the folder."""

    tensors: set[str]
    files: set[str]


def _index(name: str, path: AnyPath) -> _Index | str:
    """Read an index; returns a description of the error if it cannot be used."""
    try:
        weight_map = read_json(path).get("weight_map")
    except SourceError as error:
        return error.with_options().removeprefix(f"{path}: ")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return "does not have a weight_map"
    return _Index(set(weight_map), {str(PurePosixPath(name).parent / file) for file in weight_map.values()})


def _read_tensors(path: AnyPath) -> TensorFile | TorchProblem:
    """The tensors of a safetensors file."""
    try:
        return read_header(path).file(path)
    except SourceError as error:
        return TorchProblem(error.with_options().removeprefix(f"{path}: "), "download it again")


def _with_model_names(
    tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors, those of Meta's layout with their names in the checkpoint, and without those that follow from it."""
    layout = layout_file(META).all_rules
    for name, info in tensors.items():
        known = find_target(layout.rules, name)
        if known is not None and name not in shapes:
            yield known.sources[0], info
        elif name in shapes or not layout.is_without_source(name):
            yield name, info


def _first_mismatch(listed: TensorFile | TorchProblem, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first tensor that is not in the checkpoint, or return ``_PROVEN``.

    A tensor that shares storage with one of the checkpoint is in it, too: safetensors stores only one of them.
    """
    if isinstance(listed, TorchProblem):
        return listed.problem
    tensors = list(_with_model_names(listed.tensors, shapes))
    known = {info for name, info in tensors if info.shape == shapes.get(name)}
    for name, info in tensors:
        if name in shapes and info.shape != shapes[name]:
            return f"has {name} of shape {list(info.shape)}, expected {list(shapes[name])} as in the checkpoint"
        if name not in shapes and info not in known:
            return f"has {name}, which the checkpoint does not have"
    return _PROVEN

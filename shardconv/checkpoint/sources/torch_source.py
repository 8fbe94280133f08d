"""PyTorch files as a source: the safetensors files that a merge writes for them, and where they store each tensor.

A contiguous tensor is a byte range of its file, whether or not others share it. All others are read with their strides.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.engine.layout import in_file_order
from shardconv.checkpoint.sources.source_files import SourceFile, WeightFiles, Weights, check_files, weight_paths
from shardconv.checkpoint.sources.source_reader import StoredFiles, Transform
from shardconv.files.containers.safetensors import Header, build_header
from shardconv.files.containers.torch_files import TorchFile, TorchTensor, read_training_files
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import FileState, file_states
from shardconv.files.text_files import parse_object
from shardconv.files.weight_formats import index_parts
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError

#: Why a merge does not give the bytes of the files.
DERIVED = "converted from PyTorch files"
#: Why an entry of a training checkpoint is left out.
NOT_WEIGHTS = "entry without weights"
#: Metadata of files of tensors of torch, which transformers requires.
_METADATA = {"format": "pt"}


def read_pytorch(folder: AnyPath, found: WeightFiles, *, follow_links: bool) -> Weights:
    """Read which tensors PyTorch files have, and where.

    Raises:
        SourceError: if a file is missing, damaged or outside of the folder, its pickle asks for anything but tensors,
            or the index does not fit.
    """
    paths = weight_paths(folder, found, follow_links=follow_links)
    states = file_states(paths)  # before the listing: a file may be replaced while the child process runs
    contents = read_training_files(paths)
    listed = list(zip(found.names, paths, contents, strict=True))
    files = [SourceFile(name, path, _header(path, content.tensors)) for name, path, content in listed]
    check_files(folder, found, files)
    names = _new_names(folder, found.names)
    return Weights(
        files=tuple(SourceFile(names[file.name], file.path, file.header) for file in files),
        index=_index(folder, found, names, files),
        index_path=found.index_path(folder),
        left_out={f"{name}[{entry}]": NOT_WEIGHTS for name, _, content in listed for entry in content.left_out},
        stored=_stored(paths, states, contents),
        transforms=_transforms(contents),
        derived=(DERIVED,),
    )


def _header(path: AnyPath, tensors: Sequence[TorchTensor]) -> Header:
    """The header of the safetensors file with these tensors, in an order in which the file is read sequentially."""
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    specs = in_file_order({tensor.name: TensorSpec(tensor.dtype, tensor.shape) for tensor in by_offset})
    try:
        return build_header(((name, spec.dtype, spec.shape) for name, spec in specs.items()), _METADATA)
    except ValueError as error:
        raise SourceError(f"{path}: its tensors cannot be stored in safetensors: {error}: save them again") from error


def _new_names(folder: AnyPath, names: Sequence[str]) -> dict[str, str]:
    """File to the safetensors file that a merge writes for it, with the names that transformers and diffusers use."""
    new = {name: f"{Path(name).stem.removeprefix('pytorch_')}.safetensors" for name in names}
    first = {other: name for name, other in reversed(new.items())}
    if same := next((name for name, other in new.items() if first[other] != name), None):
        raise SourceError(f"{folder}: {first[new[same]]} and {same} would both become {new[same]}: rename one of them")
    return new


def _index(
    folder: AnyPath, found: WeightFiles, names: Mapping[str, str], files: Sequence[SourceFile]
) -> tuple[str, str] | None:
    """Name and text of the index of the files that a merge writes."""
    if found.index is None:
        return None
    name, text = found.index
    index = parse_object(folder / name, text)
    metadata = index.get("metadata")
    total = {"total_size": sum(file.header.data_bytes for file in files)}
    weight_map = {tensor: names[file] for tensor, file in found.weight_map.items()}
    index |= {"metadata": {**(metadata if isinstance(metadata, dict) else {}), **total}, "weight_map": weight_map}
    single, rest = index_parts(name)
    return f"{_new_names(folder, [single])[single]}{rest}", json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _stored(paths: Sequence[AnyPath], states: tuple[FileState, ...], contents: Sequence[TorchFile]) -> StoredFiles:
    """The byte ranges of the tensors."""
    tensors, shards = {}, {}
    for number, content in enumerate(contents):
        for tensor in content.tensors:
            spec = TensorSpec(tensor.dtype, tensor.shape)
            tensors[tensor.name] = spec if tensor.is_contiguous else TensorSpec("U8", (tensor.extent,))
            shards[tensor.name] = Shards(unsharded(tensor.extent), (number,), (tensor.offset,))
    return StoredFiles.listed(paths, states, tensors, shards)


def _transforms(contents: Sequence[TorchFile]) -> dict[str, Transform]:
    """Name to transform of each tensor that is not contiguous."""
    strided = [tensor for content in contents for tensor in content.tensors if not tensor.is_contiguous]
    if not strided:
        return {}
    return {one.name: arrays.strided.StridedTensor(one.name, one.item_bytes, one.shape, one.strides) for one in strided}

"""PyTorch files as a source: the safetensors files that a merge writes for them, and where they store each tensor.

A contiguous tensor is a byte range of its file, whether or not others share it. All others are read with their strides.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.engine.layout import in_file_order
from shardconv.checkpoint.sources.source import Source, SourceFile
from shardconv.checkpoint.sources.stored_tensors import StoredTensors, Transform
from shardconv.files.containers.safetensors import DTYPE_BITS, Header, TensorFile, build_header
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import parse_object
from shardconv.support.errors import SourceError

#: The reason why a merge does not restore the bytes of the files.
DERIVED = "converted from PyTorch files"
#: The reason why an entry of a training checkpoint is left out.
NOT_WEIGHTS = "entry without weights"
#: Metadata of files of tensors of torch, which transformers requires.
_METADATA = {"format": "pt"}


def header_of(file: TensorFile) -> Header:
    """The header of a safetensors file with the tensors of a file, in an order in which that is read sequentially.

    Raises:
        SourceError: if safetensors cannot store them.
    """
    by_offset = sorted(file.tensors.items(), key=lambda item: item[1].start)
    specs = in_file_order({name: info.spec for name, info in by_offset})
    try:
        return build_header(((name, spec.dtype, spec.shape) for name, spec in specs.items()), _METADATA)
    except ValueError as error:
        raise SourceError(
            f"{file.path}: its tensors cannot be stored in safetensors: {error}: save them again"
        ) from error


def as_safetensors(source: Source, listed: Sequence[TensorFile]) -> Source:
    """The source whose files have the names and the index that a merge writes.

    Args:
        source: has the PyTorch files and their index.
        listed: the tensors of the files.

    Raises:
        SourceError: if two files would get the same name.
    """
    names = _new_names(source.folder, [file.name for file in source.files])
    left_out = {
        f"{file.name}[{entry}]": NOT_WEIGHTS
        for file, content in zip(source.files, listed, strict=True)
        for entry in content.left_out
    }
    return replace(
        source,
        files=tuple(SourceFile(names[file.name], file.path, file.header) for file in source.files),
        index=None if source.index is None else _index(source.folder, *source.index, names, source.num_bytes),
        left_out=left_out,
        converted_from=_stored(listed),
        derived=(DERIVED,),
    )


def _new_names(folder: AnyPath, names: Sequence[str]) -> dict[str, str]:
    """File to the safetensors file that a merge writes for it, with the names that transformers and diffusers use."""
    new = {name: f"{Path(name).stem.removeprefix('pytorch_')}.safetensors" for name in names}
    first = {other: name for name, other in reversed(new.items())}
    if same := next((name for name, other in new.items() if first[other] != name), None):
        raise SourceError(f"{folder}: {first[new[same]]} and {same} would both become {new[same]}: rename one of them")
    return new


def _index(folder: AnyPath, name: str, text: str, names: Mapping[str, str], total: int) -> tuple[str, str]:
    """Name and text of the index of the files that a merge writes, with ``total`` bytes."""
    index = parse_object(folder / name, text)
    metadata, weight_map = index.get("metadata"), index["weight_map"]
    assert isinstance(weight_map, dict)
    index |= {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": {tensor: names[file] for tensor, file in weight_map.items()},
    }
    single, _, rest = name.rpartition(".index")
    return f"{_new_names(folder, [single])[single]}.index{rest}", json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _stored(files: Sequence[TensorFile]) -> StoredTensors:
    """The byte ranges of the tensors, and transforms of tensors that are not contiguous."""
    shards: dict[str, Shards] = {}
    transforms: dict[str, Transform] = {}
    for number, file in enumerate(files):
        for name, info in file.tensors.items():
            shards[name] = Shards(unsharded(info.num_bytes), (number,), (info.start,))
            if info.strides is not None:
                item_bytes = DTYPE_BITS[info.dtype] // 8
                transforms[name] = arrays.strided.StridedTensor(name, item_bytes, info.shape, info.strides)
    return StoredTensors(tuple(files), shards).with_layer(transforms)

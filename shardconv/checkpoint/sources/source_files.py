"""Weight files of a source: find them in a folder, with or without an index, and read which tensors they have.

File names in an index are untrusted input, and no link is followed out of the folder. PyTorch files appear as the
safetensors files that a merge writes for them: a contiguous tensor is a byte range of its file, whether or not others
share it, and all others are read with their strides.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.engine.layout import IDENTITY_KEY, MANIFEST_NAME, in_file_order
from shardconv.checkpoint.sources.folder_files import SourceFolder, refuse_adapter
from shardconv.checkpoint.sources.source import Source, SourceFile, StoredTensors
from shardconv.checkpoint.sources.transforms import Transform
from shardconv.files import containers
from shardconv.files.containers.safetensors import DTYPE_BITS, Header, TensorFile, build_header, read_header
from shardconv.files.folder import AnyPath, Compressed, is_portable_name, parse_object, read_text
from shardconv.files.paths import check_link
from shardconv.files.weight_formats import (
    CONFIG_NAME,
    INDEX_NAME,
    NUMBERED_NAME,
    PYTORCH,
    SAFETENSORS,
    SOURCE_FORMATS,
    WeightFormat,
    conversion_instructions,
    is_trainer_state,
    is_weights,
    refuse_rank_files,
    refuse_sharded_state,
    single_name,
    variants,
    without_manifest,
    without_weights,
)
from shardconv.support.errors import SourceError, UsageError, option
from shardconv.support.formatting import counted

#: Maximum number of subfolders in a message.
_MAX_SUBFOLDERS = 5


class WeightFiles(Struct, frozen=True):
    """The weight files of a checkpoint.

    Attributes:
        names: of the source files, sorted; all in one format.
        index: name and compressed text of their index, or None.
        listed: the hash of the files of the tensors, by the index.
    """

    names: list[str]
    index: tuple[str, Compressed] | None = None
    listed: int = 0


def find_weight_files(folder: SourceFolder, given_index: str | None) -> WeightFiles:
    """Find the weight files of the checkpoint in a folder.

    Args:
        folder: the folder.
        given_index: the name of the index that the user passed; None for a folder.

    Raises:
        SourceError: if the files are not exactly one checkpoint, or its index is not valid.
        UsageError: if the user left out a file of the checkpoint.
    """
    path, names = folder.path, folder.names
    if MANIFEST_NAME in names:
        raise SourceError(
            f"{path}: is a split checkpoint: pass the source that was split, merge it (shardconv merge {path}), or "
            f"change its size or layout (shardconv reshard {path} --tp N)"
        )
    refuse_rank_files(path, [given_index] if given_index else names)
    refuse_adapter(path, names)
    refuse_sharded_state(path, names)
    candidates = [given_index] if given_index else names
    weight_format = _find_format(candidates)
    indexes = {name: _read_index(folder, name, weight_format) for name in filter(weight_format.lists, candidates)}
    if given_index is None:
        files = chain.from_iterable(listed for _, listed, _ in indexes.values())
        _refuse_variants(path, set(names).difference(files), weight_format)
    index_name = given_index or _find_index(path, indexes)
    if index_name is None:
        return WeightFiles([_find_single(path, folder.kept, weight_format)])
    text, sources, listed = indexes[index_name]
    _check_not_ignored(folder, sources)
    if given_index is None:
        _check_no_single(path, index_name, sources, names)
    return WeightFiles(sources, (index_name, text), listed)


def _check_not_ignored(folder: SourceFolder, names: Collection[str]) -> None:
    if name := next((name for name in names if name in folder.left_out), None):
        raise UsageError(
            f"{folder.path / name}: is {folder.left_out[name]}, but is a file of the checkpoint: change the pattern"
        )


def _find_format(files: Collection[str]) -> WeightFormat:
    return next((one for one in SOURCE_FORMATS if any(map(one.has_or_lists, files))), SAFETENSORS)


def _read_index(folder: SourceFolder, name: str, weight_format: WeightFormat) -> tuple[Compressed, list[str], int]:
    """The text of an index, the names of the files, sorted, and the hash of the files of the tensors."""
    _check_not_ignored(folder, [name])
    folder.check_link(name)
    text = read_text(folder.path / name)
    files, listed = _listing(_weight_map(folder.path / name, text, weight_format))
    return Compressed(text.encode()), files, listed


def _listing(file_of: Mapping[str, str]) -> tuple[list[str], int]:
    """The names of the files of tensors, sorted, and the hash of both."""
    # copies of the names: strings that were parsed lie among those of tensors, whose memory would stay in use
    return sorted(file.encode().decode() for file in {*file_of.values()}), _hash(file_of)


def _hash(file_of: Mapping[str, str]) -> int:
    """The hash of the files of tensors, to compare in this process. The names of all tensors would take much memory."""
    return sum(map(hash, file_of.items()))  # in any order


def _refuse_variants(folder: AnyPath, names: Collection[str], weight_format: WeightFormat) -> None:
    """Refuse several variants of a checkpoint: the user may not want the default one."""
    found = [name for name in sorted(names) if weight_format.has_or_lists(name) and not NUMBERED_NAME.fullmatch(name)]
    if held := next(variants(found), None):
        raise SourceError(
            f"{folder}: holds {counted(len(held), 'variant')} of a checkpoint ({', '.join(held)}): pass one of these "
            f"files instead of the folder, or leave out all files of the others with {option('ignore')}"
        )


def _find_index(folder: AnyPath, names: Iterable[str]) -> str | None:
    indexes = [name for name in names if not name.startswith("consolidated.")] or [*names]  # Mistral's other files
    if len(indexes) > 1:
        raise SourceError(
            f"{folder}: has several indexes (got {', '.join(indexes)}, expected one): pass one instead of the folder"
        )
    return indexes[0] if indexes else None


def _check_no_single(folder: AnyPath, index: str, names: list[str], files: Collection[str]) -> None:
    """Refuse a file next to an index of the same name: libraries differ in which of the two they load."""
    single = single_name(index)
    if single in files and single not in names:
        raise SourceError(f"{folder}: has both {single} and {index}: pass one of them instead of the folder")


def _find_single(folder: AnyPath, files: Collection[str], weight_format: WeightFormat) -> str:
    weights = [name for name in files if weight_format.has(name) and "/" not in name]
    if weight_format.single in weights:
        return weight_format.single
    if any(NUMBERED_NAME.fullmatch(name) for name in weights):
        raise SourceError(
            f"{folder}: holds files of a checkpoint ({weights[0]}, ...) without their index "
            f"(*{weight_format.suffixes[0]}.index*.json): download the folder again"
        )
    if len(weights) > 1:
        raise SourceError(
            f"{folder}: holds several checkpoints ({', '.join(weights)}): pass one of the files instead of the folder"
        )
    if not weights:
        raise SourceError(f"{folder}: {_no_weights(folder, files)}")
    return weights[0]


def _no_weights(folder: AnyPath, files: Collection[str]) -> str:
    """The problem and the remedy for a folder without a safetensors file."""
    if (folder / "snapshots").is_dir():
        return "is a model in a Hugging Face cache: pass a folder in its snapshots/"
    held = {name.rpartition("/")[0] for name in files for one in SOURCE_FORMATS if one.has(name)}
    if INDEX_NAME in files:
        return f"is a pipeline (expected one model): pass the folder of a component ({', '.join(sorted(held))})"
    if held:
        sources_first = sorted(held, key=lambda name: (f"{name}/{MANIFEST_NAME}" in files, name))
        more = f" and {len(held) - _MAX_SUBFOLDERS} more" if len(held) > _MAX_SUBFOLDERS else ""
        subfolders = f"{', '.join(sources_first[:_MAX_SUBFOLDERS])}{more}"
        return f"holds no weights that can be split, but its subfolders do ({subfolders}): pass one of them"
    others = [name for name in files if is_weights(name) and "/" not in name and not is_trainer_state(name)]
    if others:
        return f"holds {others[0]}, but no .safetensors or PyTorch file. {conversion_instructions(folder, others)}"
    if CONFIG_NAME in files:
        return f"holds a config without weights: {without_weights(folder)}"
    return (
        "holds no .safetensors or PyTorch file and no weights in another known format: pass the folder of a model, or "
        "one of its weight files"
    )


def read_weights(path: AnyPath, found: WeightFiles, *, follow_links: bool) -> Source:
    """Read the headers of weight files: a source without its other files.

    Args:
        path: the folder of the files, or the only one.
        found: the files.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if a file is missing, damaged or outside of the folder, is a rank file, or asks for anything but
            tensors, or the index does not fit.
    """
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    paths = [_path(folder, name, found, follow_links=follow_links) for name in found.names]
    listed = containers.torch_files.read_torch_files(paths) if found.names[0].endswith(PYTORCH.suffixes) else None
    headers = map(read_header, paths) if listed is None else map(header_of, listed)
    files = tuple(map(SourceFile, found.names, paths, headers))
    if shard := next((file for file in files if IDENTITY_KEY in (file.header.metadata or {})), None):
        raise SourceError(without_manifest(folder, shard.name))
    file_of, index_path = _file_of(folder, files), None
    if found.index is not None:
        index_path = folder / found.index[0]
        if found.listed != _hash(file_of):
            raise _index_error(index_path, found.index[1], file_of, files)
    source = Source(path, is_folder=is_folder, files=files, index=found.index, index_path=index_path)
    return source if listed is None else as_safetensors(source, listed)


def _path(folder: AnyPath, name: str, found: WeightFiles, *, follow_links: bool) -> AnyPath:
    path = folder / name
    if not path.exists():
        remedy = f", but {found.index[0]} lists it: download the folder again" if found.index else ""
        raise SourceError(f"{folder}: {name} is missing{remedy}")
    check_link(path, folder, follow_links=follow_links)
    return path


def _weight_map(path: AnyPath, text: str, weight_format: WeightFormat) -> dict[str, str]:
    data = parse_object(path, text)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: does not have a weight_map")
    tensor_in = {name if isinstance(name, str) else "": tensor for tensor, name in weight_map.items()}
    for name, tensor in tensor_in.items():
        if not is_portable_name(name) or not name.endswith(weight_format.suffixes):
            raise SourceError(
                f"{path}: tensor {tensor!r} has an invalid file name (got {weight_map[tensor]!r:.100}, expected "
                f"a file in the same folder that ends with {' or '.join(weight_format.suffixes)})"
            )
    return weight_map


def with_total_size(text: str | bytes, total: int) -> str:
    """The text of an index with another total size in bytes."""
    index = json.loads(text)
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = total
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _file_of(folder: AnyPath, files: Sequence[SourceFile]) -> dict[str, str]:
    """The file of each tensor, which is in no other."""
    found: dict[str, str] = {}
    for file in files:
        specs = file.header.specs
        if name := next((name for name in specs if name in found), None):
            raise SourceError(f"{folder}: tensor {name} is in both {found[name]} and {file.name}")
        found |= dict.fromkeys(specs, file.name)
    return found


def _index_error(
    path: AnyPath, text: Compressed, file_of: Mapping[str, str], files: Sequence[SourceFile]
) -> SourceError:
    """The error for files with other tensors than their index lists."""
    weight_map = parse_object(path, text.raw().decode())["weight_map"]
    assert isinstance(weight_map, dict)
    for name, expected in weight_map.items():
        if (got := file_of.get(name)) != expected:
            return SourceError(
                f"{path}: tensor {name} is in {got or 'no file of the index'} (expected {expected}): {_remedy(files)}"
            )
    missing = [name for name in file_of if name not in weight_map]
    others = f", nor are {len(missing) - 1} more tensors" if len(missing) > 1 else ""
    return SourceError(
        f"{path}: tensor {missing[0]} of {file_of[missing[0]]} is not in the index{others}: {_remedy(files)}"
    )


def _remedy(files: Sequence[SourceFile]) -> str:
    """The remedy for an index and files that do not belong to the same checkpoint."""
    again = "the index was not written with these files, so download both again"
    return f"{again}, or pass {files[0].path} instead" if len(files) == 1 else again


# --- PyTorch files ----------------------------------------------------------------------------------------------------

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
        return build_header(specs.items(), _METADATA)
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


def _index(
    folder: AnyPath, name: str, text: Compressed, names: Mapping[str, str], total: int
) -> tuple[str, Compressed]:
    """Name and text of the index of the files that a merge writes, with ``total`` bytes."""
    index = parse_object(folder / name, text.raw().decode())
    metadata, weight_map = index.get("metadata"), index["weight_map"]
    assert isinstance(weight_map, dict)
    index |= {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": {tensor: names[file] for tensor, file in weight_map.items()},
    }
    single, _, rest = name.rpartition(".index")
    new_text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    return f"{_new_names(folder, [single])[single]}.index{rest}", Compressed(new_text.encode())


def _stored(files: Sequence[TensorFile]) -> StoredTensors:
    """The byte ranges of the tensors, and transforms of tensors that are not contiguous."""
    shards: dict[str, Shards] = {}
    transforms: dict[str, Transform] = {}
    for number, file in enumerate(files):
        for name, info in file.tensors.items():
            shards[name] = Shards(unsharded(info.num_bytes), (number,), (info.start,))
            if info.strides is not None:
                item_bytes = DTYPE_BITS[info.dtype] // 8
                transforms[name] = engine.arrays.StridedTensor(name, item_bytes, info.shape, info.strides)
    return StoredTensors(tuple(files), shards).with_layer(transforms)

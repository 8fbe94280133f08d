"""Rank files of other tools in a folder: their names, and the positions of each rank's tensors.

Names and contents are untrusted input.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint.auxiliary import check_link
from shardconv.checkpoint.copy import Shards
from shardconv.checkpoint.formats import NUMBERED_NAME, SOURCE_FORMATS
from shardconv.checkpoint.header import read_header
from shardconv.checkpoint.source_reader import Transform
from shardconv.checkpoint.torch_files import TorchTensor, read_torch_files
from shardconv.checkpoint.vllm_files import StoredTensor
from shardconv.errors import SourceError
from shardconv.layouts.external import EXTERNAL, ExternalLayout, external_layout
from shardconv.plan.plan import TensorSpec

_AGAIN = "copy the folder again"
#: The most tensors in a message.
_MAX_NAMES = 3


class RankFiles(NamedTuple):
    """Rank files of another tool.

    Attributes:
        paths: of the files.
        prefixes: for each file its expected first bytes.
        sizes: for each file its size in bytes.
        ranks: for each rank the tensors of its files.
    """

    paths: tuple[Path, ...]
    prefixes: tuple[bytes, ...]
    sizes: tuple[int, ...]
    ranks: tuple[dict[str, StoredTensor], ...]


class FullTensors(NamedTuple):
    """Full tensors that are made of stored tensors.

    Attributes:
        specs: name to dtype and shape of each full tensor.
        stored: name to dtype and shape of each stored tensor.
        shards: name to positions of each stored tensor.
        transforms: name to transform of each full tensor that is not stored under its name.
    """

    specs: dict[str, TensorSpec]
    stored: dict[str, TensorSpec]
    shards: dict[str, Shards]
    transforms: dict[str, Transform]


def detect_layout(names: Collection[str]) -> ExternalLayout | None:
    """The layout of other tools' rank files among the files of a folder; None if there is none.

    Args:
        names: of the files directly in the folder.
    """
    if any(one.single in names for one in SOURCE_FORMATS) or any(map(is_index, names)):
        return None
    for layout in map(external_layout, EXTERNAL):
        if rank_files(layout, names) and (layout.beside is None or layout.beside in names):
            return layout
    return None


def is_index(name: str) -> bool:
    """Whether a file is the index of a Hugging Face checkpoint, by its name."""
    return name.endswith(tuple(one.index_suffix for one in SOURCE_FORMATS)) and not name.startswith("consolidated")


def rank_files(layout: ExternalLayout, names: Collection[str]) -> list[str]:
    """The names of rank files, sorted."""
    return sorted(name for name in names if layout.files.fullmatch(name))


def read_rank_files(folder: Path, layout: ExternalLayout, names: Collection[str], *, follow_links: bool) -> RankFiles:
    """Read the positions of all tensors.

    Args:
        folder: the folder.
        layout: of its rank files.
        names: of the files directly in the folder.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or ranks have different tensors.
    """
    grouped = _by_rank(folder, layout, rank_files(layout, names))
    paths = tuple(folder / name for files in grouped for name in files)
    for path in paths:
        check_link(path, folder, follow_links=follow_links)
    found = _read_torch(paths) if paths[0].suffix == ".pth" else _read_safetensors(paths)
    number_of = {path.name: number for number, path in enumerate(paths)}
    ranks = tuple(_joined(folder, [found.ranks[number_of[name]] for name in files]) for files in grouped)
    return found._replace(ranks=ranks)


def _by_rank(folder: Path, layout: ExternalLayout, names: Sequence[str]) -> list[list[str]]:
    """For each rank the names of its files."""
    suffixes = {Path(name).suffix for name in names}
    found = {name: match.groupdict() for name in names if (match := layout.files.fullmatch(name))}
    counts = {group["tp"] for group in found.values() if group.get("tp")}
    counts |= {group["parts"] for group in found.values() if group.get("parts")}
    if len(suffixes) > 1 or len(counts) > 1 or ((NUMBERED_NAME.fullmatch(names[0]) is None) and _is_mixed(found)):
        raise SourceError(
            f"{folder}: holds rank files of several checkpoints ({', '.join(names[:_MAX_NAMES])}, ...): leave those of "
            f"all but one out with --ignore"
        )
    if not any(group.get("rank") for group in found.values()):
        _check_count(folder, names, int(next(iter(counts), 1)))
        return [list(names)]
    by_rank = {int(group["rank"] or 0): name for name, group in found.items()}
    tp = int(next(iter(counts), 1 + max(by_rank)))
    if missing := sorted(set(range(tp)) - by_rank.keys()):
        raise SourceError(
            f"{folder}: the file of rank {missing[0]} is missing (got {', '.join(names[:_MAX_NAMES])}, expected {tp} "
            f"ranks): {_AGAIN}"
        )
    _check_count(folder, names, tp)
    return [[by_rank[rank]] for rank in range(tp)]


def _is_mixed(found: Mapping[str, Mapping[str, str | None]]) -> bool:
    """Whether some files are named by parts and others are not."""
    return len({group.get("parts") is None for group in found.values()}) > 1


def _check_count(folder: Path, names: Sequence[str], expected: int) -> None:
    if len(names) != expected:
        raise SourceError(f"{folder}: has {len(names)} rank files (got {names[-1]}, expected {expected}): {_AGAIN}")


def _joined(folder: Path, files: Sequence[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    joined: dict[str, StoredTensor] = {}
    for tensors in files:
        if both := sorted(joined.keys() & tensors.keys()):
            raise SourceError(f"{folder}: tensor {both[0]} is in two files of a rank: {_AGAIN}")
        joined |= tensors
    return joined


def _read_safetensors(paths: tuple[Path, ...]) -> RankFiles:
    headers = [read_header(path) for path in paths]
    ranks = tuple(
        {
            name: StoredTensor(TensorSpec(info.dtype, info.shape), number, header.data_offset + info.start)
            for name, info in header.tensors.items()
        }
        for number, header in enumerate(headers)
    )
    return RankFiles(paths, tuple(header.prefix for header in headers), tuple(h.file_bytes for h in headers), ranks)


def _read_torch(paths: tuple[Path, ...]) -> RankFiles:
    sizes = tuple(path.stat().st_size for path in paths)
    ranks = []
    for number, (path, tensors) in enumerate(zip(paths, read_torch_files(paths), strict=True)):
        for tensor in tensors:
            if not is_contiguous(tensor):
                raise SourceError(
                    f"{path}: {tensor.name} is a view that is not contiguous (got strides {list(tensor.strides)} of "
                    f"shape {list(tensor.shape)}): save it again after .contiguous()"
                )
        specs = {one.name: TensorSpec(one.dtype, one.shape) for one in tensors}
        ranks.append({one.name: StoredTensor(specs[one.name], number, one.offset) for one in tensors})
    return RankFiles(paths, (b"",) * len(paths), sizes, tuple(ranks))


def is_contiguous(tensor: TorchTensor) -> bool:
    """Whether the elements of a tensor are one range of its file, in order."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != step:
            return 0 in tensor.shape
        step *= size
    return True

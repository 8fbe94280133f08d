"""The files of a folder that vLLM wrote with save_sharded_state.

Owns their names and where each rank's tensors are in them. Knows nothing of plans or layouts.
"""

import re
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.checkpoint.auxiliary import check_link, list_files, take_auxiliary
from shardconv.checkpoint.formats import CONFIG_NAME, is_sharded_state, is_weights
from shardconv.checkpoint.header import Header, read_header
from shardconv.checkpoint.json_files import read_json
from shardconv.errors import SourceError
from shardconv.plan.plan import TensorSpec

_RANK_FILE = re.compile(r"model-rank-(?P<rank>0|[1-9]\d{0,5})-part-(?P<part>0|[1-9]\d{0,5})\.safetensors")
_AGAIN = "copy the folder again, or save it again with vLLM"


class Stored(NamedTuple):
    """A tensor of a rank: its dtype and shape, the number of its file, and its first byte there."""

    spec: TensorSpec
    file: int
    offset: int


class SavedFiles(NamedTuple):
    """What a folder holds.

    Attributes:
        names: of the rank files, by rank and part.
        headers: of each.
        ranks: for each rank the tensors of all its files.
        config: what config.json holds.
        side_files: name to path of each auxiliary file.
        left_out: name of each other file to why it is left out.
    """

    names: tuple[str, ...]
    headers: tuple[Header, ...]
    ranks: tuple[dict[str, Stored], ...]
    config: dict[str, Any]
    side_files: dict[str, Path]
    left_out: dict[str, str]


def is_saved_by_vllm(folder: Path) -> bool:
    """Whether a folder has a file that is named as vLLM names those of ranks."""
    return folder.is_dir() and any(is_sharded_state(path.name) for path in folder.glob("*.safetensors"))


def read_saved_files(folder: Path) -> SavedFiles:
    """Read the headers of a folder that vLLM saved.

    Raises:
        SourceError: if a file is missing, damaged, not a rank file, or a link out of the folder.
    """
    files = list_files(folder)
    ranks = _rank_files(folder, files.kept)
    names = tuple(chain.from_iterable(ranks))
    weights = [name for name in files.kept if is_weights(name) and name not in names]
    lists = {name: "lists the files of another checkpoint" for name in weights if name.endswith(".index.json")}
    if others := [name for name in weights if name not in lists]:
        raise SourceError(
            f"{folder}: holds weights beside the rank files of vLLM ({', '.join(others[:5])}): move them elsewhere"
        )
    side_files = take_auxiliary(folder, files, [*names, *lists], follow_links=False)
    if CONFIG_NAME not in side_files:
        raise SourceError(f"{folder}: holds no {CONFIG_NAME}: copy it from the checkpoint that vLLM was started with")
    for name in names:
        check_link(folder / name, folder, follow_links=False)
    headers = tuple(read_header(folder / name) for name in names)
    return SavedFiles(
        names, headers, _stored(folder, ranks, headers), read_json(side_files[CONFIG_NAME]), side_files,
        files.left_out | lists,
    )  # fmt: skip


def _rank_files(folder: Path, names: Collection[str]) -> list[list[str]]:
    """For each rank the names of its files."""
    found: dict[int, dict[int, str]] = {}
    for name in filter(is_sharded_state, names):
        if (match := _RANK_FILE.fullmatch(name)) is None:
            raise SourceError(
                f"{folder / name}: is not named model-rank-RANK-part-PART.safetensors (pipeline parallelism is not "
                f"supported): use the checkpoint that vLLM was started with"
            )
        found.setdefault(int(match["rank"]), {})[int(match["part"])] = name
    missing = [f"model-rank-{rank}-part-0.safetensors" for rank in range(max(found)) if rank not in found]
    missing += [
        f"model-rank-{rank}-part-{part}.safetensors"
        for rank, parts in sorted(found.items())
        for part in range(max(parts))
        if part not in parts
    ]
    if missing:
        raise SourceError(f"{folder / missing[0]}: is missing, and files of later ranks or parts are there: {_AGAIN}")
    return [[parts[part] for part in sorted(parts)] for _, parts in sorted(found.items())]


def _stored(folder: Path, ranks: list[list[str]], headers: tuple[Header, ...]) -> tuple[dict[str, Stored], ...]:
    """The tensors of each rank; all ranks have to have the same."""
    numbered = iter(enumerate(headers))
    found: list[dict[str, Stored]] = []
    for names in ranks:
        found.append({})
        for path in (folder / name for name in names):
            number, header = next(numbered)
            for name, info in header.tensors.items():
                if name in found[-1]:
                    raise SourceError(f"{path}: holds {name}, as another file of the rank does: {_AGAIN}")
                spec = TensorSpec(info.dtype, info.shape)
                found[-1][name] = Stored(spec, number, header.data_offset + info.start)
    for rank, tensors in enumerate(found):
        _check_alike(folder, rank, tensors, found[0])
    return tuple(found)


def _check_alike(folder: Path, rank: int, tensors: Mapping[str, Stored], first: Mapping[str, Stored]) -> None:
    for name in [*first, *tensors]:
        got, expected = (_described(each.get(name)) for each in (tensors, first))
        if got != expected:
            raise SourceError(
                f"{folder}: rank {rank} has {got} as {name} (expected {expected} as rank 0 has): files are missing, or "
                f"were saved for several tensor parallel sizes: {_AGAIN}"
            )


def _described(stored: Stored | None) -> str:
    return "nothing" if stored is None else f"{stored.spec.dtype} {list(stored.spec.shape)}"

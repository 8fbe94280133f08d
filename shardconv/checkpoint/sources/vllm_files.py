"""Rank files that vLLM wrote with save_sharded_state: their names, and the positions of each rank's tensors."""

import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import NamedTuple

from shardconv.checkpoint.sources.folder_files import find_auxiliary, list_files
from shardconv.files.containers.safetensors import Header, read_header
from shardconv.files.folder import AnyPath
from shardconv.files.paths import check_link
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import CONFIG_NAME, is_sharded_state, is_weights
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError

_RANK_FILE = re.compile(r"model-rank-(?P<rank>0|[1-9]\d{0,5})-part-(?P<part>0|[1-9]\d{0,5})\.safetensors")
_AGAIN = "copy the folder again, or save it again with vLLM"


class StoredTensor(NamedTuple):
    """A tensor of a rank: its dtype and shape, the index of its file, and its offset in the file."""

    spec: TensorSpec
    file: int
    offset: int


class SavedFiles(NamedTuple):
    """Contents of a folder that vLLM saved.

    Attributes:
        names: of the rank files, by rank and part.
        headers: of the rank files.
        ranks: for each rank the tensors of all its files.
        config: contents of config.json.
        auxiliary_files: name to path of each auxiliary file.
        left_out: name to reason of all other files.
    """

    names: tuple[str, ...]
    headers: tuple[Header, ...]
    ranks: tuple[dict[str, StoredTensor], ...]
    config: dict[str, object]
    auxiliary_files: dict[str, AnyPath]
    left_out: dict[str, str]


def is_saved_by_vllm(folder: AnyPath) -> bool:
    """Whether a folder has a file with a name of vLLM's rank files."""
    return folder.is_dir() and any(is_sharded_state(path.name) for path in folder.glob("*.safetensors"))


def read_saved_files(folder: AnyPath) -> SavedFiles:
    """Read the headers of a folder that vLLM saved.

    Raises:
        SourceError: if a file is missing, damaged, not a rank file, or a link out of the folder.
    """
    files = list_files(folder)
    ranks = _rank_files(folder, files.kept)
    names = tuple(chain.from_iterable(ranks))
    weights = [name for name in files.kept if is_weights(name) and name not in names]
    indexes = {name: "index of another checkpoint" for name in weights if name.endswith(".index.json")}
    if others := [name for name in weights if name not in indexes]:
        raise SourceError(
            f"{folder}: holds weights next to the rank files of vLLM ({', '.join(others[:5])}): move them elsewhere"
        )
    auxiliary_files = find_auxiliary(folder, files, [*names, *indexes], follow_links=False)
    if CONFIG_NAME not in auxiliary_files:
        raise SourceError(
            f"{folder}: does not have a {CONFIG_NAME}: copy it from the checkpoint that vLLM was started with"
        )
    for name in names:
        check_link(folder / name, folder, follow_links=False)
    headers = tuple(read_header(folder / name) for name in names)
    return SavedFiles(
        names, headers, _read_tensors(folder, ranks, headers), read_json(auxiliary_files[CONFIG_NAME]), auxiliary_files,
        files.left_out | indexes,
    )  # fmt: skip


def _rank_files(folder: AnyPath, names: Collection[str]) -> list[list[str]]:
    """For each rank the names of its files."""
    ranks: dict[int, dict[int, str]] = {}
    for name in filter(is_sharded_state, names):
        if (match := _RANK_FILE.fullmatch(name)) is None:
            raise SourceError(
                f"{folder / name}: is not named model-rank-RANK-part-PART.safetensors (pipeline parallelism is not "
                f"supported): use the checkpoint that vLLM was started with"
            )
        ranks.setdefault(int(match["rank"]), {})[int(match["part"])] = name
    missing = [f"model-rank-{rank}-part-0.safetensors" for rank in range(max(ranks)) if rank not in ranks]
    missing += [
        f"model-rank-{rank}-part-{part}.safetensors"
        for rank, parts in sorted(ranks.items())
        for part in range(max(parts))
        if part not in parts
    ]
    if missing:
        raise SourceError(f"{folder / missing[0]}: is missing, but files of later ranks or parts exist: {_AGAIN}")
    return [[parts[part] for part in sorted(parts)] for _, parts in sorted(ranks.items())]


def _read_tensors(
    folder: AnyPath, ranks: list[list[str]], headers: tuple[Header, ...]
) -> tuple[dict[str, StoredTensor], ...]:
    """Read the tensors of each rank, and check that all ranks have the same names, dtypes and shapes."""
    numbered = iter(enumerate(headers))
    result: list[dict[str, StoredTensor]] = []
    for names in ranks:
        result.append({})
        for path in (folder / name for name in names):
            number, header = next(numbered)
            for name, info in header.tensors.items():
                if name in result[-1]:
                    raise SourceError(f"{path}: tensor {name} is also in another file of the rank: {_AGAIN}")
                spec = TensorSpec(info.dtype, info.shape)
                result[-1][name] = StoredTensor(spec, number, header.data_offset + info.start)
    for rank, tensors in enumerate(result):
        _check_equal(folder, rank, tensors, result[0])
    return tuple(result)


def _check_equal(
    folder: AnyPath, rank: int, tensors: Mapping[str, StoredTensor], first: Mapping[str, StoredTensor]
) -> None:
    for name in [*first, *tensors]:
        got, expected = (_describe(rank_tensors.get(name)) for rank_tensors in (tensors, first))
        if got != expected:
            raise SourceError(
                f"{folder}: rank {rank} has {got} as {name} (expected {expected} as on rank 0): files are missing, or "
                f"were saved for several tensor parallel sizes: {_AGAIN}"
            )


def _describe(stored: StoredTensor | None) -> str:
    return "nothing" if stored is None else f"{stored.spec.dtype} {list(stored.spec.shape)}"

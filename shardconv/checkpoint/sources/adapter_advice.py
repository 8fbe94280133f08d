"""Advice for adapters where a model is expected, or that a model has and a command does not use."""

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from shardconv.checkpoint.sources.auxiliary import holds_base
from shardconv.files.folder import AnyPath
from shardconv.files.paths import folder_name
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_FILES
from shardconv.support.errors import RunError, SourceError


def refuse_adapter_alone(folder: AnyPath, tp: int | None) -> None:
    """Refuse to load an adapter that is not split, without its base model.

    Args:
        folder: what is loaded.
        tp: tensor parallel size; None if it is not given.

    Raises:
        RunError: if the folder has an adapter and no model.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or holds_base([child.name for child in folder.iterdir()]):
        return
    size, name = tp or "N", folder_name(folder)
    raise RunError(
        f"{_described(folder)}: split it with its base model (shardconv split BASE --adapter {folder} --tp {size}), "
        f"then run both (shardconv run BASE-tp{size} --adapter {name})"
    )


def refuse_split_adapter(folder: AnyPath, auxiliary_files: Collection[str]) -> None:
    """Refuse to load a split adapter without its base model.

    Args:
        folder: the split checkpoint.
        auxiliary_files: its auxiliary files.

    Raises:
        RunError: if it is an adapter.
    """
    if ADAPTER_CONFIG in auxiliary_files:
        raise RunError(f"{_described(folder)}: run its base model with it (shardconv run BASE --adapter {folder})")


def _described(folder: AnyPath) -> str:
    try:
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    except SourceError:
        base = None
    of_base = f" of {base:.200}" if base and isinstance(base, str) else ""
    return f"{folder}: is a PEFT adapter{of_base}, not a model"


def adapter_folders(folder: AnyPath, names: Collection[str]) -> Iterator[AnyPath]:
    """Yield the folders of the adapters among files.

    Args:
        folder: the folder of the files.
        names: their names relative to it, with / as separator.
    """
    yield from dict.fromkeys(
        folder / path.parent for path in map(PurePosixPath, sorted(names)) if path.name in ADAPTER_FILES
    )

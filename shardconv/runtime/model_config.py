"""The config of a split checkpoint, and the model class that it names."""

import json
from collections.abc import Mapping
from pathlib import Path

from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.json_files import read_json
from shardconv.errors import RunError, SplitCheckpointError
from shardconv.hf.classes import ModelClass, model_class


def check_config(folder: Path, expected: Mapping[str, object] | None) -> None:
    """Check that a split checkpoint has the config.json that it was split with.

    Args:
        folder: the split checkpoint.
        expected: the config in its manifest.

    Raises:
        RunError: if it does not have a config.json.
        SplitCheckpointError: if its config differs: shards may not fit, and no later check would detect that.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise RunError(
            f"{folder}: does not have a config.json, which names the model's class: split the source again with "
            f"shardconv split SRC --config FILE, or load it into your own module with shardconv.load(DIR, model=...)"
        )
    found, known = read_json(path), expected or {}
    if different := [name for name in sorted({*found, *known}) if _text(found.get(name)) != _text(known.get(name))]:
        raise SplitCheckpointError(
            f"{path}: differs from the config that was split, in {', '.join(different[:5])}: restore it, or split the "
            f"source again"
        )


def _text(value: object) -> str:
    """Format a config field as JSON, in which NaN equals NaN."""
    return json.dumps(value, sort_keys=True)


def find_model_class(folder: Path, config: Mapping[str, object] | None, *, is_trusted: bool) -> ModelClass:
    """Look up the model class of a split checkpoint.

    Args:
        folder: the split checkpoint.
        config: the config in its manifest.
        is_trusted: whether code in the folder may be run.

    Raises:
        RunError: as :func:`~shardconv.hf.classes.model_class`.
        SplitCheckpointError: if config.json differs from the config that was split.
    """
    check_config(folder, config)
    return model_class(config or {}, folder, is_trusted=is_trusted)

"""The config of a checkpoint, and the model class that it names."""

import json
from collections.abc import Mapping

from shardconv.checkpoint.split.loadable import Loadable, refuse_split_adapter
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.hf.classes import ModelClass, model_class
from shardconv.support.errors import RunError, SplitCheckpointError, option


def check_config(folder: AnyPath, expected: Mapping[str, object] | None) -> None:
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


def check_own_config(checkpoint: Loadable) -> None:
    """Check that a checkpoint has a config, and a split checkpoint that of its source.

    Raises:
        RunError: if it does not have a config, or is an adapter.
        SplitCheckpointError: if config.json differs from the config that was split.
    """
    if checkpoint.source is None:
        refuse_split_adapter(checkpoint.path, checkpoint.manifest.auxiliary_files)
        check_config(checkpoint.path, checkpoint.manifest.config)
    elif checkpoint.source.config is None:
        raise RunError(
            f"{checkpoint.path}: does not have a config.json, which names the model's class: pass one with "
            f"{option(config='FILE')}, or load it into your own module with shardconv.load(SRC, tp=N, model=...)"
        )


def find_model_class(checkpoint: Loadable, *, is_trusted: bool) -> ModelClass:
    """Look up the model class of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        is_trusted: whether code in its folder may be run; with another config than that of the folder, it is not.

    Raises:
        RunError: as :func:`~shardconv.hf.classes.model_class`.
        SplitCheckpointError: if config.json differs from the config that was split.
    """
    check_own_config(checkpoint)
    path = checkpoint.folder / CONFIG_NAME
    is_own = checkpoint.source is None or checkpoint.source.auxiliary_files.get(CONFIG_NAME, path) == path
    return model_class(checkpoint.manifest.config or {}, checkpoint.folder if is_own else None, is_trusted=is_trusted)

"""Fields of configs, sizes of inputs, and the table of model types (``types.toml``)."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardconv.convert.protocols import ModelConfig

#: Sequences per batch, and tokens of text per sequence.
BATCH, LENGTH = 2, 7

#: Patches along each side of an image, for models that take patches.
GRID = 4


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("types.toml").read_text("utf-8"))


def is_type(entry: str, *model_types: str) -> bool:
    """Whether an entry of ``types.toml`` has one of some model types."""
    return any(model_type in _table()[entry] for model_type in model_types)


def type_number(entry: str, model_type: str, default: int) -> int:
    """The number of a model type in an entry of ``types.toml``."""
    return int(_table()[entry].get(model_type, default))


def submodel_config(config: ModelConfig, *names: str) -> ModelConfig:
    """The first submodel's config that exists among some names; the config itself if there is none."""
    thinker = getattr(config, "thinker_config", config)
    found = (getattr(thinker, name, None) for name in names)
    return next((one for one in found if one is not None and hasattr(one, "to_dict")), config)


def first_field(config: ModelConfig, names: Iterable[str], default: Any) -> Any:
    """The value of the first field among some names that is set, else the default."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def deep_field(config: ModelConfig, names: Iterable[str], default: Any) -> Any:
    """As :func:`first_field`, nested configs included."""
    if (found := first_field(config, names, None)) is not None:
        return found
    nested = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((found for one in nested if (found := deep_field(one, names, None)) is not None), default)


def pair_of(size: Any) -> tuple[int, int]:
    """Height and width, from a number, a pair or a mapping."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

"""What is looked up in configs, and how large inputs are."""

from collections.abc import Iterable, Mapping
from typing import Any

#: Examples in a batch, and tokens of text in each.
BATCH, LENGTH = 2, 7

#: Patches of an image along each side, where a model takes patches instead of images.
GRID = 4


def part_of(config: Any, *names: str) -> Any:
    """A nested config, or the config itself."""
    thinker = getattr(config, "thinker_config", config)
    found = (getattr(thinker, name, None) for name in names)
    return next((one for one in found if hasattr(one, "to_dict")), config)


def first_field(config: Any, names: Iterable[str], default: Any) -> Any:
    """The first of some fields that there is."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def deep_field(config: Any, names: Iterable[str], default: Any) -> Any:
    """Like ``first_field``, in nested configs, too."""
    if (found := first_field(config, names, None)) is not None:
        return found
    nested = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((found for one in nested if (found := deep_field(one, names, None)) is not None), default)


def pair_of(size: Any) -> tuple[int, int]:
    """Height and width, in whatever form a config has them."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

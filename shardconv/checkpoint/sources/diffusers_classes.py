"""Classes of diffusers: those that are sharded, and the original names of files that they convert."""

import tomllib
from functools import cache
from pathlib import Path

from shardconv.support.structs import Data, convert


class DiffusersClasses(Data, frozen=True):
    """The content of ``diffusers.toml``."""

    without_weights: tuple[str, ...]
    unsharded: tuple[str, ...]
    prefixes: tuple[str, ...]
    original: dict[str, str]


@cache
def diffusers_classes() -> DiffusersClasses:
    """Read the file."""
    return convert(tomllib.loads(Path(__file__).with_name("diffusers.toml").read_text("utf-8")), DiffusersClasses)

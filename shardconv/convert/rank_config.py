"""The config of a module on one rank."""

from collections.abc import Mapping
from typing import Any


class RankConfig:
    """Local values of some fields of a config, in front of the model's config.

    Args:
        shared: the model's config.
        fields: the local values.
    """

    def __init__(self, shared: object, fields: Mapping[str, object]) -> None:
        self.__dict__.update(fields, _shared=shared)

    def __getattr__(self, name: str) -> Any:  # a field of any type
        """Read a field without a local value from the model's config."""
        if name.startswith("__") or "_shared" not in self.__dict__:  # a copy is empty at first
            raise AttributeError(name)
        return getattr(self._shared, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field of the model's config; a local value of it stays."""
        setattr(self._shared, name, value)

"""Random inputs of small models of diffusers, which ``diffusion.toml`` describes."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardconv.convert.model import config_fields
from shardconv.convert.protocols import PretrainedModel
from shardconv.hf.diffusion import of_class, table
from shardconv.hf.inputs.special import Values
from shardconv.plan.families.config_fields import Fields


def diffusion_inputs(model: PretrainedModel, generator: torch.Generator) -> dict[str, Any]:
    """Random inputs of a small model of diffusers.

    Args:
        model: the model.
        generator: of the random values.
    """
    entry, config = of_class(type(model).__name__), config_fields(model)
    given = {**table()["inputs"], **table()["latents"].get(entry.get("latents"), {}), **entry.get("inputs", {})}
    names = [name for name in inspect.signature(model.forward).parameters if _has(config, given.get(name, {}))]
    values = _DiffusionValues(generator, Fields(config, table()["sizes"]))
    return {name: values.draw(given[name]) for name in names}


def _has(config: Mapping[str, object], entry: Any) -> bool:
    """Whether a model gets an input: its entry is not empty, and the config has all fields in ``if``."""
    return isinstance(entry, list) or (bool(entry) and all(map(config.get, entry.get("if", ()))))


class _DiffusionValues(Values):
    """:class:`~shardconv.hf.inputs.special.Values` of a model of diffusers."""

    def draw(self, table: Any) -> Any:
        """The values that a table describes; for a list, the values of each item."""
        return [self.draw(one) for one in table] if isinstance(table, list) else super().draw(table)

    def _full(self, table: Mapping[str, Any]) -> Tensor:
        return torch.full(self._shape(table["full"]), table["fill"])

    def _complex(self, table: Mapping[str, Any]) -> Tensor:
        shape = self._shape(table["complex"])
        return torch.polar(torch.ones(shape), torch.randn(shape, generator=self._generator))

    def _grid(self, table: Mapping[str, Any]) -> Tensor:
        return torch.cartesian_prod(*map(torch.arange, table["grid"])).float()

    def _tensor(self, table: Mapping[str, Any]) -> Tensor:
        return torch.tensor(table["tensor"])

    def _value(self, table: Mapping[str, Any]) -> object:
        return table["value"]

    def _tuple(self, table: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self.draw(table["tuple"]))

    def _dict(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.draw(one) for name, one in table["dict"].items()}

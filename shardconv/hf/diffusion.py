"""Small models of diffusers: their configs and random inputs, which ``diffusion.toml`` describes."""

import inspect
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardconv.convert.model import config_fields
from shardconv.convert.protocols import ModelConfig
from shardconv.hf.small import HEADS
from shardconv.plan.families.config_fields import Fields, fields_in

#: Features per head of most small models.
_HEAD_DIM = 16

#: Names in the expressions of ``diffusion.toml`` that are not fields of a config.
_SIZES: dict[str, str | int] = {"heads": HEADS, "head_dim": _HEAD_DIM, "width": "heads * head_dim"}


class DiffusersConfig(dict[str, Any]):
    """The content of a ``config.json`` of diffusers, as the config of a model."""

    is_decoder = is_encoder_decoder = output_attentions = False

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.model_type = str(fields.get("_class_name"))

    def to_dict(self) -> dict[str, Any]:
        """The fields, as in ``config.json``."""
        return dict(self)

    def get_text_config(self, *, decoder: bool = False) -> ModelConfig:  # noqa: ARG002 - as in transformers
        """The config itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """A field."""
        if name in self:
            return self[name]
        raise AttributeError(name)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config with these fields."""
        return cls(fields)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("diffusion.toml").read_text("utf-8"))


def _of_class(name: object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _table()["classes"].get(name, {})
    return {**_of_class(found["like"]), **found} if "like" in found else found


def default_fields(kind: type[nn.Module]) -> dict[str, Any]:
    """The config of a class of diffusers by default."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    fields = {one.name: one.default for one in parameters if one.default is not one.empty}
    return {"_class_name": kind.__name__, **fields}


def small_config(config: Mapping[str, Any], *, heads: int = HEADS, head_dim: int = 0) -> DiffusersConfig:
    """The config of a small model: the structure of another one, with the sizes of ``diffusion.toml``.

    Args:
        config: the content of ``config.json``.
        heads: the number of heads.
        head_dim: features per head; 0 for few.
    """
    of_class = _of_class(config.get("_class_name"))
    fields = Fields({"heads": heads, "head_dim": head_dim or of_class.get("head_dim", _HEAD_DIM)}, _SIZES)
    lines, own = _table()["fields"], of_class.get("config", {})
    small = {name: lines[name] for name, value in config.items() if name in lines and not isinstance(value, bool | str)}
    small = {name: value for name, value in small.items() if config[name] is not None}
    return DiffusersConfig({**config, **{name: _evaluated(value, fields) for name, value in {**small, **own}.items()}})


def _evaluated(value: object, fields: Fields) -> Any:
    if isinstance(value, list):
        return [_evaluated(item, fields) for item in value]
    return fields.evaluate(value) if isinstance(value, str) and fields_in(value) <= _SIZES.keys() else value


def diffusion_inputs(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """Random inputs of a small model of diffusers.

    Args:
        model: the model.
        generator: of the random values.
    """
    names = inspect.signature(model.forward).parameters
    found = _of_class(type(model).__name__)
    given = {**_table()["inputs"], **_table()["latents"].get(found.get("latents", ""), {}), **found.get("inputs", {})}
    values = _Values(config_fields(model), generator)
    return {name: values.draw(given[name]) for name in names if name in given and values.has(given[name])}


class _Values:
    """Draws the values of the inputs of one model.

    Args:
        config: of the model.
        generator: of the random values.
    """

    def __init__(self, config: Mapping[str, Any], generator: torch.Generator) -> None:
        self._config, self._generator, self._fields = config, generator, Fields(config, _table()["sizes"])

    def has(self, table: Any) -> bool:
        """Whether a model gets an input: its table is not empty, and the fields in ``if`` are set."""
        return table != {} and (isinstance(table, list) or all(map(self._config.get, table.get("if", ()))))

    def draw(self, table: Any) -> Any:
        """The values that a table describes; of a list, those of each item."""
        if isinstance(table, list):
            return [self.draw(one) for one in table]
        if "value" in table:
            return table["value"]
        if "tuple" in table:
            return tuple(self.draw(one) for one in table["tuple"])
        return self._tensor(table)

    def _tensor(self, table: Mapping[str, Any]) -> Tensor:
        if "tensor" in table:
            return torch.tensor(table["tensor"])
        if "numbers" in table:
            return torch.arange(self._fields.evaluate(table["numbers"]))
        shape = [self._fields.evaluate(size) for size in table["shape"]]
        if "below" in table:
            return torch.randint(0, self._fields.evaluate(table["below"]), shape, generator=self._generator)
        if "fill" in table:
            return torch.full(shape, table["fill"])
        if "grid" in table:
            sides = [torch.arange(self._fields.evaluate(side)) for side in table["grid"]]
            return torch.cartesian_prod(*sides).view(shape).float()
        return torch.randn(shape, generator=self._generator)

"""Formats: the tables of ``formats.toml`` as data."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from shardconv.plan.grid import GROUP_INDEX, PLAIN, SHAPE

#: Strategies of scales, as compressed-tensors names them, to the dims of a scale.
SCALE_DIMS = {
    "tensor": ("-",),
    "channel": ("out", "1"),
    "group": ("out", "in / group"),
    "block": ("out / rows", "in / columns"),
}
#: The same for zero points that are packed into words.
PACKED_SCALE_DIMS = {"channel": ("out / word", "1"), "group": ("out / word", "in / group")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor of a quantized layer.

    Attributes:
        dims: see ``formats.toml``; ``scale``, ``packed_scale`` or ``number`` instead of a list depend on the settings.
        dtypes: the supported dtypes; empty for any.
        optional: whether it may be missing.
        asymmetric: whether it exists in asymmetric quantization only.
        holds: what its values are, as :attr:`~shardconv.plan.grid.Grid.values`.
    """

    dims: tuple[str, ...] | str
    dtypes: tuple[str, ...] = ()
    optional: bool = False
    asymmetric: bool = False
    holds: str = PLAIN


@dataclass(frozen=True, slots=True)
class Format:
    """How a quantization format stores a weight.

    Attributes:
        name: its key in ``formats.toml``.
        axes: what the last dims of the logical matrix are.
        suffix: end of the name of the tensor with the values.
        weight: what the name of the logical matrix has in its place.
        values: the tensor with the values.
        companions: end of the name to the other tensors, which begin with the name of the layer.
        is_zero_code: whether the code 0 is the value 0 for any scale, if there are no zero points.
        scale: end of the name of the scale, whose value 0 makes the value of any code 0; "" if there is none.
    """

    name: str
    axes: tuple[str, ...]
    suffix: str
    weight: str
    values: StoredTensor
    companions: Mapping[str, StoredTensor] = field(default_factory=dict)
    is_zero_code: bool = False
    scale: str = ""


@cache
def formats() -> Mapping[str, Format]:
    """All formats, by name."""
    tables = tomllib.loads(files(__package__).joinpath("formats.toml").read_text("utf-8"))
    return {name: _format(name, table) for name, table in tables.items()}


def _format(name: str, table: Mapping[str, object]) -> Format:
    axes, values, tensors = table["axes"], table["values"], table["tensors"]
    assert isinstance(axes, list)
    assert isinstance(values, dict)
    assert isinstance(tensors, dict)
    ends = {"suffix": values.pop("suffix"), "weight": values.pop("weight")}
    companions = {suffix: _stored(tensor) for suffix, tensor in tensors.items()}
    is_zero_code, scale = table.get("zero_code") is True, str(table.get("scale", ""))
    return Format(
        name, tuple(axes), values=_stored(values), companions=companions, is_zero_code=is_zero_code, scale=scale, **ends
    )


def _stored(table: dict[str, object]) -> StoredTensor:
    dims, dtypes, holds = table["dims"], table.get("dtypes", []), table.get("holds", PLAIN)
    assert isinstance(dtypes, list)
    assert holds in (PLAIN, GROUP_INDEX, SHAPE)
    return StoredTensor(
        tuple(dims) if isinstance(dims, list) else str(dims),
        tuple(dtypes),
        optional=table.get("optional") is True,
        asymmetric=table.get("asymmetric") is True,
        holds=str(holds),
    )

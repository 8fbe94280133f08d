"""Formats: the tables of ``formats.toml`` as data."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from shardconv.plan.grid import CONTENTS, NUMBERS, PLAIN, ROLES, VALUES

#: Strategies of scales, as compressed-tensors names them, to the dims of a scale.
SCALE_DIMS = {
    "tensor": ("1", "1"),
    "channel": ("out", "1"),
    "group": ("out", "in / group"),
    "block": ("out / rows", "in / columns"),
}
#: The same for zero points that are packed into words.
PACKED_SCALE_DIMS = {"channel": ("out / word", "1"), "group": ("out / word", "in / group")}
#: Bits of a word that holds packed values.
WORD_BITS = 32


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stored tensor of a quantized layer.

    Attributes:
        dims: see ``formats.toml``; ``scale``, ``packed_scale`` or ``number`` instead of a list depend on the settings.
        dtypes: the supported dtypes, the usual one first, perhaps with the ``numbers`` of each; empty for any dtype, if
            the weight does not depend on the tensor.
        numbers: how its entries are read, see ``formats.toml``.
        optional: whether it may be missing.
        usual: whether libraries write it although it is optional.
        asymmetric: whether it exists in asymmetric quantization only.
        content: as :attr:`~shardconv.plan.grid.Grid.content`.
        role: what it is in the formula of ``formats.toml``; "" if it does not change the weight.
    """

    dims: tuple[str, ...] | str
    dtypes: dict[str, str] | tuple[str, ...] = ()
    numbers: str = PLAIN
    optional: bool = False
    usual: bool = False
    asymmetric: bool = False
    content: str = PLAIN
    role: str = ""

    def __post_init__(self) -> None:
        """Check the words, which the types do not."""
        numbers = self.dtypes.values() if isinstance(self.dtypes, dict) else [self.numbers]
        if self.role not in ("", *ROLES) or self.content not in (PLAIN, *CONTENTS) or not {*numbers} <= NUMBERS:
            raise ValueError("role, content or numbers is unknown")
        if self.role and not self.dtypes:
            raise ValueError(f"a tensor of role {self.role} needs dtypes")

    def numbers_of(self, dtype: str) -> str:
        """How the entries of a tensor of this dtype are read."""
        return self.dtypes.get(dtype, PLAIN) if isinstance(self.dtypes, dict) else self.numbers


class StoredValues(StoredTensor, frozen=True, kw_only=True):
    """The stored tensor with the values.

    Attributes:
        suffix: end of its name.
        weight: what the name of the logical matrix has in its place.
    """

    suffix: str
    weight: str


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a quantization format stores a weight.

    Attributes:
        name: its key in ``formats.toml``.
        axes: what the last dims of the logical matrix are.
        values: the tensor with the values.
        companions: end of the name to the other tensors, which begin with the name of the layer.
        settings: name of a block to that of the setting with its size, for messages.
    """

    name: str
    axes: tuple[str, ...]
    values: StoredValues
    companions: dict[str, StoredTensor] = msgspec.field(name="tensors", default_factory=dict)
    settings: dict[str, str] = {}

    def is_for(self, shape: Sequence[int]) -> bool:
        """Whether libraries store matrices of this shape so: one matrix [out, in], or experts [experts, in, out]."""
        return len(shape) == len(self.axes) + (self.axes[0] == "in")


@cache
def formats() -> Mapping[str, Format]:
    """All formats, by name."""
    tables = tomllib.loads(files(__package__).joinpath("formats.toml").read_text("utf-8"))
    return {
        name: msgspec.convert({"name": name, **_with_base(table, tables)}, Format) for name, table in tables.items()
    }


def _with_base(table: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table with the keys of its base that it does not have, and the role of its values."""
    table = dict(table)
    base = _with_base(tables[table.pop("base")], tables) if "base" in table else {}
    tensors = base.get("tensors", {}) | table.get("tensors", {})
    merged = {**base, **table, "tensors": tensors}
    return merged | {"values": {**merged["values"], "role": VALUES}}

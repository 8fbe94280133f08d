"""Formats: the tables of ``formats.toml`` as data."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor of a quantized layer.

    Attributes:
        dims: see ``formats.toml``; ``scale``, ``packed_scale`` or ``number`` instead of a list depend on the settings.
        dtypes: the supported dtypes, the usual one first, each with how its entries are read, see ``formats.toml``;
            empty for any dtype, if the weight does not depend on the tensor.
        optional: whether it may be missing.
        usual: whether libraries write it although it is optional.
        asymmetric: whether it exists in asymmetric quantization only.
        content: as :attr:`~shardconv.plan.grid.Grid.content`.
        role: what it is in the formula of ``formats.toml``; "" if it does not change the weight.
    """

    dims: tuple[str, ...] | str
    dtypes: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    usual: bool = False
    asymmetric: bool = False
    content: str = PLAIN
    role: str = ""


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
        settings: name of a block to that of the setting with its size, for messages.
    """

    name: str
    axes: tuple[str, ...]
    suffix: str
    weight: str
    values: StoredTensor
    companions: Mapping[str, StoredTensor] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def is_for(self, shape: Sequence[int]) -> bool:
        """Whether libraries store matrices of this shape so: one matrix [out, in], or experts [experts, in, out]."""
        return len(shape) == len(self.axes) + (self.axes[0] == "in")


@cache
def formats() -> Mapping[str, Format]:
    """All formats, by name."""
    tables = tomllib.loads(files(__package__).joinpath("formats.toml").read_text("utf-8"))
    return {name: _format(name, _with_base(table, tables)) for name, table in tables.items()}


def _with_base(table: Mapping[str, object], tables: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return a table with the keys of its base that it does not have."""
    if "base" not in table:
        return dict(table)
    base = _with_base(tables[str(table["base"])], tables)
    own, inherited = table.get("tensors", {}), base["tensors"]
    assert isinstance(own, dict)
    assert isinstance(inherited, dict)
    return {**base, **table, "tensors": inherited | own}


def _format(name: str, table: Mapping[str, object]) -> Format:
    axes, values, tensors, settings = (table.get(key, {}) for key in ("axes", "values", "tensors", "settings"))
    assert isinstance(axes, list)
    assert isinstance(values, dict)
    assert isinstance(tensors, dict)
    assert isinstance(settings, dict)
    companions = {suffix: _stored(tensor) for suffix, tensor in tensors.items()}
    stored = _stored({**values, "role": VALUES})
    return Format(name, tuple(axes), values["suffix"], values["weight"], stored, companions, settings)


def _stored(table: Mapping[str, object]) -> StoredTensor:
    dims, content, role = (table.get(key, "") for key in ("dims", "content", "role"))
    dtypes = table.get("dtypes", ())
    assert isinstance(dtypes, dict | list | tuple)
    numbers = dtypes if isinstance(dtypes, dict) else dict.fromkeys(dtypes, str(table.get("numbers", PLAIN)))
    assert role in ("", *ROLES)
    assert numbers or not role, f"a tensor of role {role} needs dtypes: {table}"
    assert content in ("", *CONTENTS)
    assert set(numbers.values()) <= NUMBERS
    return StoredTensor(
        tuple(dims) if isinstance(dims, list) else str(dims),
        numbers,
        optional=table.get("optional") is True,
        usual=table.get("usual") is True,
        asymmetric=table.get("asymmetric") is True,
        content=str(content) or PLAIN,
        role=str(role),
    )

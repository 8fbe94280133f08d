"""Formats: the tables of ``formats.toml`` as data; and the formats of the layers of a checkpoint.

A scheme has the layers that a format is for, by names and patterns. Patterns come with a checkpoint, so they match
names in bounded time.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from shardconv.plan.grid import CONTENTS, NUMBERS, PLAIN, ROLES, VALUES
from shardconv.support.errors import PlanError, option

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
        role: its role in the formula of ``formats.toml``; "" if it does not change the weight.
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
        """The encoding of the entries of a tensor of this dtype."""
        return self.dtypes.get(dtype, PLAIN) if isinstance(self.dtypes, dict) else self.numbers


class StoredValues(StoredTensor, frozen=True, kw_only=True):
    """The stored tensor with the values.

    Attributes:
        suffix: end of its name.
        weight: the end of the logical matrix's name that this suffix replaces.
    """

    suffix: str
    weight: str


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantization format: the tensors that store a weight.

    Attributes:
        name: its key in ``formats.toml``.
        axes: names of the last dims of the logical matrix.
        values: the tensor with the values.
        companions: end of the name to the other tensors, which begin with the name of the layer.
        settings: name of a block to the name of the setting with its size, for messages.
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
    tables = tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))
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


# --- schemes ---------------------------------------------------------------------------------------------------------

#: Elements and entries of a block.
Block = tuple[int, int]
#: The most repetitions in a pattern, and characters in a name that it is compared with. Each repetition may match at
#: every character, so a match takes time that grows with their power: about 3 seconds at most.
_MAX_REPETITIONS, _MAX_NAME = 5, 128
#: Seconds for all matches of a checkpoint.
MAX_SECONDS = 60
_SIMPLER = f"write the names of the layers, or pass {option(config='FILE')} with simpler patterns"
#: A name or pattern with one of these may match a layer, and not match a layer whose name has another number.
_NUMBER = re.compile(r"[\d?\[]")
#: A repetition of an element of a pattern, with the parenthesis that may be before it.
_REPETITION = re.compile(r"(\)?)(?:[*+?]|\{\d*,?\d*\})[?+]?")


class Scheme(msgspec.Struct, frozen=True):
    """The format of some layers, with its sizes.

    Attributes:
        format: the format.
        blocks: name of a block in ``formats.toml`` to its elements and entries; a group of 0 elements is a whole row.
        strategy: of the scales, a key of :data:`~shardconv.formats.format.SCALE_DIMS`; "" if shapes show it.
        is_symmetric: whether the quantization is symmetric, without zero points.
        has_act_order: whether groups are in the order of activations, so that their input features are not consecutive.
        targets: names or patterns (``re:``) of layers, or ``Linear`` for all.
        block_sizes: name of a logical matrix to the elements of a block with one scale, for each dim; None if all
            matrices have the blocks of ``blocks``. A block as large as a dim stays one block in a shard.
    """

    format: Format
    blocks: Mapping[str, Block] = {}
    strategy: str = ""
    is_symmetric: bool = True
    has_act_order: bool = False
    targets: tuple[str, ...] = ("Linear",)
    block_sizes: Mapping[str, tuple[int, ...]] | None = None

    def layer(self, name: str) -> str:
        """The name of the layer whose values a tensor of this name holds."""
        return name.removesuffix(self.format.values.suffix).removesuffix(".weight").rstrip("._")

    def rank(self, layer: str, deadline: float) -> tuple[int, str] | None:
        """The closest target of a layer, in the order of ``match_targets`` of compressed-tensors.

        Args:
            layer: name of the layer.
            deadline: deadline of the settings.

        Returns:
            The kind of the closest target, 0 for a name, 1 for a pattern and 2 for a class, and the target; None if no
            target names the layer.
        """
        found = [target for target in self.targets if target == "Linear" or matches(target, layer, deadline)]
        kinds = [2 if target == "Linear" else int(target.startswith("re:")) for target in found]
        return min(zip(kinds, found, strict=True), default=None)


class Settings(msgspec.Struct, frozen=True):
    """The quantization settings of a checkpoint.

    Attributes:
        method: ``quant_method``.
        schemes: the formats of its layers. The scheme whose targets name a layer most closely applies; among equals,
            the one with the fewest missing tensors, and then the first.
        ignored: names of layers that are not quantized, or parts of names between dots.
        ignored_patterns: patterns of such layers.
        deadline: when the patterns must have been matched, on the clock of :func:`time.monotonic`.
    """

    method: str
    schemes: tuple[Scheme, ...]
    ignored: frozenset[str] = frozenset()
    ignored_patterns: tuple[str, ...] = ()
    deadline: float = msgspec.field(default_factory=lambda: monotonic() + MAX_SECONDS)

    @property
    def names_numbers(self) -> bool:
        """Whether the settings may differ between layers whose names differ in numbers only."""
        names = [*self.ignored, *self.ignored_patterns, *(target for one in self.schemes for target in one.targets)]
        has_own_sizes = any(scheme.block_sizes for scheme in self.schemes)
        return has_own_sizes or any(name.startswith("re:") or _NUMBER.search(name) for name in names)

    def closest(self, layer: str, schemes: Iterable[Scheme]) -> list[Scheme]:
        """The schemes whose targets name a layer most closely; empty if none names it."""
        ranked = [(rank, scheme) for scheme in schemes if (rank := scheme.rank(layer, self.deadline))]
        best = min((rank for rank, _ in ranked), default=None)
        return [scheme for rank, scheme in ranked if rank == best]

    def ignoring(self, layer: str) -> str | None:
        """The name or pattern that leaves a layer unquantized; None if there is none."""
        parts = layer.split(".")
        ends = range(1, len(parts) + 1) if self.ignored else ()
        paths = (".".join(parts[first:last]) for last in ends for first in range(last))
        found = next((path for path in paths if path in self.ignored), None)  # lists can have hundreds of names
        return found or next(
            (pattern for pattern in self.ignored_patterns if matches(pattern, layer, self.deadline)), None
        )


def matches(target: str, layer: str, deadline: float) -> bool:
    """Whether a name or pattern of settings matches a layer; ``re:`` begins a regular expression.

    Other names match the layer itself, modules in it, and the end of its name, as the libraries compare them.

    Raises:
        PlanError: if patterns take too long to match.
    """
    if target.startswith("re:"):
        if len(layer) > _MAX_NAME:
            raise PlanError(f"{layer:.60}...: has {len(layer)} characters (expected at most {_MAX_NAME} for patterns)")
        found = re.match(target.removeprefix("re:"), layer) is not None
        if monotonic() > deadline:
            raise PlanError(
                f"quantization_config: its patterns take more than {MAX_SECONDS} seconds to match ({target!r:.60}): "
                f"pass {option(config='FILE')} with simpler patterns"
            )
        return found
    if "*" in target:  # ModelOpt's patterns
        return fnmatchcase(layer, target)
    return target == layer or layer.endswith(f".{target}") or f".{target}." in f".{layer}."


def check_pattern(pattern: str, key: str, where: str = "quantization_config", remedy: str = _SIMPLER) -> None:
    """Refuse a pattern that is not valid, or that takes too long to match: settings are not trusted.

    A repeated group with a repetition or an alternative in it matches in exponentially many ways.

    Args:
        pattern: the pattern.
        key: the setting that has it.
        where: the place of the setting, for the message.
        remedy: the remedy, for the message.

    Raises:
        PlanError: if the pattern is refused.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"{where}: {key}: {pattern!r:.60} is not a regular expression: {error}") from error
    simple = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))  # a class or an escape is one character
    groups, repetitions, at = [False], 0, 0  # whether each open group has a repetition or an alternative
    while at < len(simple):
        found = _REPETITION.match(simple, at)
        if simple[at] == "(":
            groups.append(False)
            at += 2 if simple[at + 1 : at + 2] == "?" else 1
            continue
        is_group = simple[at] == ")"
        is_choice = groups.pop() if is_group and len(groups) > 1 else False
        if found:
            repetitions += 1
            if is_choice or repetitions > _MAX_REPETITIONS:
                raise PlanError(
                    f"{where}: {key}: the pattern {pattern!r:.60} may take too long to match (expected at most "
                    f"{_MAX_REPETITIONS} repetitions, and none of a group with repetitions or alternatives): {remedy}"
                )
        groups[-1] = groups[-1] or is_choice or found is not None or simple[at] == "|"
        at = found.end() if found else at + 1

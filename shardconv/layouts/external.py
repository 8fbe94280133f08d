"""Layouts of other tools' rank files, as data: names, placements and row orders of their tensors.

A layout is a TOML file of this package:

    title      what the files are, for messages.
    files      regular expression of the file names; its groups have the rank and tp, or the part and their number.
    files_per_rank  the number of files of each rank, if it is not 1; a file without a rank in its name is of rank 0.
    beside     a file beside them, without which the names are not enough to detect the layout.
    missing    what the files do not have.
    model_types  the models that can be written in this layout; none if it is only read.
    tensors    name in the files = the tensor of a Hugging Face checkpoint. In names, ``*`` is the same text on both
               sides, and ``{a,b}`` expands to two entries. Keys of an entry:
                 name         in a Hugging Face checkpoint
                 dims         the sharded dim, or several of which one gives the expected shape; none if replicated
                 shape        dim to the config field with its expected full size
                 heads        the config field with the number of heads in dim 0; ranks may hold the same head
                 rotary       whether neighboring rows of a head form the pairs that rotary embeddings rotate
                 gives_tp     whether heads of a shard give the number of ranks, which file names do not
                 on_one_rank  whether each tensor is on one rank only
    left_out   names that a Hugging Face checkpoint does not have.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from shardconv.layouts.rules import Pattern, patterns, without_choices
from shardconv.plan.placement import Interval, Placement
from shardconv.support.errors import PlanError, UsageError
from shardconv.support.formatting import counted

_FOLDER = Path(__file__).parent


class TensorTable(TypedDict, total=False):
    """An entry of ``tensors``."""

    name: str
    dims: list[int]
    shape: dict[str, str]
    heads: str
    rotary: bool
    gives_tp: bool
    on_one_rank: bool


class _LayoutTable(TypedDict, total=False):
    title: str
    files: str
    files_per_rank: int
    beside: str
    missing: list[str]
    model_types: list[str]
    tensors: dict[str, TensorTable]
    left_out: dict[str, list[str]]


class FullTensor(NamedTuple):
    """A full tensor: its shape, how ranks hold it, and the number of heads whose rows are in another order, or 0."""

    shape: tuple[int, ...]
    placement: Placement
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class ExternalRule:
    """The tensors of one name pattern: see the module."""

    pattern: Pattern
    name: Pattern
    dims: tuple[int, ...]
    shape: Mapping[int, str]
    heads: str | None
    is_rotary: bool
    gives_tp: bool
    is_on_one_rank: bool

    def num_ranks(self, shard: tuple[int, ...], config: Mapping[str, object]) -> int | None:
        """The number of ranks by the heads of a shard; None if they do not give it."""
        if not self.gives_tp or self.heads is None:
            return None
        rows = _positive(config, self.heads) * _positive(config, "head_dim")
        return None if not shard or not shard[0] or rows % shard[0] else rows // shard[0]

    def full(self, shards: Sequence[tuple[int, ...]], config: Mapping[str, object]) -> FullTensor:
        """The full tensor of the shards of all ranks, which must have equal shapes.

        Raises:
            PlanError: if the shards do not form a tensor that fits the config.
        """
        tp, shard = len(shards), shards[0]
        if len(set(shards)) > 1:
            got = " and ".join(str(list(shape)) for shape in dict.fromkeys(shards))
            raise PlanError(f"ranks have different shapes (got {got})")
        if not self.dims:
            return self._checked(FullTensor(shard, Placement.replicated(tp)), config)
        if max(self.dims) >= len(shard):
            raise PlanError(f"it has shape {list(shard)} on each rank (expected {max(self.dims) + 1} dims)")
        candidates = [self._sharded(shard, dim, tp, config) for dim in self.dims]
        fitting = [one for one in candidates if self._fits(one.shape, config)] or candidates
        return self._checked(fitting[0], config)

    def _sharded(self, shard: tuple[int, ...], dim: int, tp: int, config: Mapping[str, object]) -> FullTensor:
        heads = None if self.heads is None else _positive(config, self.heads)
        replicas = 1 if heads is None or heads >= tp else tp // heads
        if heads is not None and (tp % heads if heads < tp else heads % tp):
            raise PlanError(f"{self.heads} is {heads}, which cannot be divided over {tp} ranks")
        size = shard[dim]
        ranks = tuple((Interval(at * size, (at + 1) * size),) for at in (rank // replicas for rank in range(tp)))
        full = size * tp // replicas
        placement = Placement(dim, full, ranks if size else ((),) * tp) if tp > 1 else Placement.replicated(1)
        shape = (*shard[:dim], full, *shard[dim + 1 :])
        return FullTensor(shape, placement, heads if self.is_rotary and heads is not None else 0)

    def _fits(self, shape: tuple[int, ...], config: Mapping[str, object]) -> bool:
        return all(shape[dim] == config.get(field) for dim, field in self.shape.items() if dim < len(shape))

    def _checked(self, full: FullTensor, config: Mapping[str, object]) -> FullTensor:
        expected = {dim: (_positive(config, field), field) for dim, field in self.shape.items()}
        if self.heads is not None:
            heads, head_dim = _positive(config, self.heads), _positive(config, "head_dim")
            expected[0] = (heads * head_dim, f"{self.heads} * head_dim")
            if self.is_rotary and head_dim % 2:
                raise PlanError(f"head_dim is {head_dim} (expected an even number)")
        for dim, (size, field) in expected.items():
            if len(full.shape) <= dim or full.shape[dim] != size:
                raise PlanError(
                    f"the shards of {counted(full.placement.tp, 'rank')} form a tensor of shape {list(full.shape)} "
                    f"(expected {size} in dim {dim}, which is {field})"
                )
        return full


class Known(NamedTuple):
    """The name of a tensor in the other form, and the rule that gives it."""

    name: str
    rule: ExternalRule


@dataclass(frozen=True, slots=True)
class ExternalLayout:
    """The layout of rank files of another tool: see the module."""

    key: str
    title: str
    files: re.Pattern[str]
    files_per_rank: int
    beside: str | None
    missing: tuple[str, ...]
    model_types: tuple[str, ...]
    rules: tuple[ExternalRule, ...]
    left_out: tuple[Pattern, ...]

    def known(self, name: str) -> Known | None:
        """The tensor of a Hugging Face checkpoint for a name in the files; None if it is unknown."""
        for rule in self.rules:
            if (match := rule.pattern.match(name)) is not None:
                return Known(rule.name.name(match), rule)
        return None

    def external(self, name: str) -> Known | None:
        """The name in the files for a tensor of a Hugging Face checkpoint; None if they cannot have it."""
        for rule in self.rules:
            if (match := rule.name.match(name)) is not None:
                return Known(rule.pattern.name(match), rule)
        return None

    def is_left_out(self, name: str) -> bool:
        """Whether a Hugging Face checkpoint does not have this tensor."""
        return any(pattern.match(name) is not None for pattern in self.left_out)


@cache
def external_layout(key: str) -> ExternalLayout:
    """Read a layout.

    Raises:
        UsageError: if it is unknown.
    """
    if key not in EXTERNAL:
        raise UsageError(f"layout {key!r} of rank files is unknown (expected one of {', '.join(EXTERNAL)})")
    table = cast("_LayoutTable", tomllib.loads((_FOLDER / f"{key}.toml").read_text("utf-8")))
    rules = tuple(rule for target, entry in table["tensors"].items() for rule in _rules(target, entry))
    left_out = tuple(one for text in table.get("left_out", {}).get("names", ()) for one in patterns(text))
    return ExternalLayout(
        key, table["title"], re.compile(table["files"]), table.get("files_per_rank", 1), table.get("beside"),
        tuple(table["missing"]), tuple(table.get("model_types", ())), rules, left_out,
    )  # fmt: skip


def _rules(target: str, entry: TensorTable) -> Iterator[ExternalRule]:
    shape = {int(dim): field for dim, field in entry.get("shape", {}).items()}
    for pattern, name in without_choices([target, entry["name"]]):
        yield ExternalRule(
            Pattern(pattern), Pattern(name), tuple(entry.get("dims", ())), shape, entry.get("heads"),
            entry.get("rotary", False), entry.get("gives_tp", False), entry.get("on_one_rank", False),
        )  # fmt: skip


def _positive(config: Mapping[str, object], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise PlanError(f"{field} in the config is {value!r:.40} (expected a positive integer)")
    return value


#: The layouts of other tools that have a TOML file.
EXTERNAL = ("deepseek", "deepspeed", "meta")
#: The layout that can be written.
META = "meta"
#: The layout of torch.distributed.checkpoint, whose files describe themselves.
DCP_NAME, DCP_TITLE = "dcp", "torch.distributed.checkpoint"
#: All layouts of other tools that can be read.
SOURCE_LAYOUTS = (*EXTERNAL, DCP_NAME)

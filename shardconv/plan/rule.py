"""A rule: how the tensors whose names match a pattern are sharded, between which units."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardconv.plan.config_fields import check_expression
from shardconv.support.structs import Data


@dataclass(frozen=True, slots=True)
class Style:
    """Which dim of a weight and of its bias a style shards: negative dims count from the end, None is replicated."""

    weight: int | None
    bias: int | None
    packed: bool = False


#: The origin of the rules of this option.
REPLICATE_OPTION = "--replicate"

#: The styles of a rule, under the names that transformers gives them where it has them.
STYLES = {
    "colwise": Style(weight=-2, bias=-1),
    "rowwise": Style(weight=-1, bias=None),
    "colwise_gather_output": Style(weight=-2, bias=-1),
    "packed_colwise": Style(weight=-2, bias=-1, packed=True),
    "packed_rowwise": Style(weight=-1, bias=None, packed=True),
    "embedding_rowwise": Style(weight=-2, bias=-1),
    "embedding_colwise": Style(weight=-1, bias=None),
    "embedding_colwise_gather_output": Style(weight=-1, bias=None),
    "gathered": Style(weight=0, bias=0),
    "by_rows": Style(weight=0, bias=0),
    "replicate": Style(weight=None, bias=None),
    "replicated_with_grad_allreduce": Style(weight=None, bias=None),
}

#: Styles without ``packed`` whose rules may have segments.
_MAY_HAVE_SEGMENTS = ("colwise_gather_output", "by_rows")

#: Names in expressions that are not config fields: sizes of the tensor or of the layer beside it.
SIZE_NAMES = frozenset({"rows", "features"})

#: A choice between several texts in a pattern.
CHOICE = re.compile(r"\{[^{}]*\}")


def check_pattern(pattern: str) -> None:
    """Check that braces in a pattern are balanced and not nested.

    Raises:
        ValueError: if they are not.
    """
    if set("{}") & set(CHOICE.sub("", pattern)):
        raise ValueError("braces are unbalanced or nested")


class UnitRule(Data, frozen=True):
    """A unit: elements that are never divided between ranks, such as a head. Sizes are expressions of config fields.

    Attributes:
        count: the number of units; None if it follows from the size of the tensor.
        size: elements per unit.
        replicate: replicate units where there are fewer of them than ranks.
        shard_if_divisible: shard units only where tp divides their count; otherwise every rank computes with all of
            them, and rules use their style ``otherwise``.
        override: replace the unit of this name in the inherited family, also for the rules of that family. False once
            the families are joined.
    """

    count: str | int | None = None
    size: str | int = 1
    replicate: bool = False
    shard_if_divisible: bool = False
    override: bool = False

    def __post_init__(self) -> None:
        if self.shard_if_divisible and self.count is None:
            raise ValueError("shard_if_divisible = true needs a count")
        for expression in (1 if self.count is None else self.count, self.size):
            check_expression(expression)

    def describe(self) -> str:
        """The unit as a plan file has it."""
        shown = {name: getattr(self, name) for name in ("count", "size", "replicate", "shard_if_divisible")}
        kept = {name: value for name, value in shown.items() if value not in (None, False)}
        return f"{{ {', '.join(f'{name} = {value!r}' for name, value in kept.items())} }}".replace("True", "true")


class Rule(Data, frozen=True, eq=False):
    """How tensors are sharded whose names match a pattern. Compared by identity, as it is a key of large dicts.

    Attributes:
        pattern: module or tensor names; ``*`` is any text without a dot, ``{a,b}`` is a or b, a leading ``**.`` is any
            number of modules.
        style: a key of :data:`STYLES`.
        unit: the unit that boundaries respect; None for single elements.
        segments: for packed styles, the unit of each segment.
        segment: index of the only segment in the tensor, from 0; if its size differs, of an even chunk of all segments.
        groups: number of groups of segments; with at least as many as ranks, each is on one rank.
        repeats: number of repetitions of the segments, each of which is sharded.
        pad: pad a size that tp does not divide with zeros.
        transposed: the weight is stored (in, out), as Conv1D stores it.
        beside: a layer of the same module whose number of ``rows`` the expressions of units may read.
        size: the required size of the last dim, where only the size distinguishes tensors of the same name.
        rows: the required size of the sharded dim, where the rule has neither unit nor segments; not checked if the
            config does not have its fields.
        dims: replicate tensors with fewer dims than this, or with one element along the sharded dim: norms beside
            kernels whose names are not known.
        when: config fields that must have these values for the rule to apply.
        otherwise: the style where ``shard_if_divisible`` units are not sharded, because tp does not divide their count.
        optional: whether a user's rule may match nothing, as where names on disk and in memory differ.
        origin: where the rule comes from, for the report.
        by_user: whether it is from a plan file; then it has to match a tensor, unless it is optional.
        mount: the entry of ``[blocks]`` of a plan file that it is from, of which one rule has to match a tensor; ""
            for none, and for optional entries.
        block: the block, at its module, that it is from; "" for none.
    """

    pattern: str
    style: str
    unit: str | None = None
    segments: tuple[str, ...] = ()
    segment: int | None = None
    groups: str | int = 1
    repeats: str | int = 1
    pad: bool = False
    transposed: bool = False
    beside: str = ""
    size: str | int | None = None
    rows: str | int | None = None
    dims: int = 0
    when: Mapping[str, str | int | float | bool] = {}
    otherwise: str = ""
    optional: bool = False
    origin: str = ""
    by_user: bool = False
    mount: str = ""
    block: str = ""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if self.style not in STYLES:
            raise ValueError(f"style {self.style!r} is unknown (expected {', '.join(STYLES)})")
        if bool(self.segments) != STYLES[self.style].packed and self.style not in _MAY_HAVE_SEGMENTS:
            raise ValueError(
                f"segments are required for packed styles, and allowed for {' and '.join(_MAY_HAVE_SEGMENTS)}"
            )
        if self.otherwise and (self.otherwise not in STYLES or STYLES[self.otherwise].packed):
            raise ValueError(f"otherwise = {self.otherwise!r} is not a style without segments")
        if self.unit and self.segments:
            raise ValueError("rule has both unit and segments: remove one of them")
        if self.rows is not None and self.units:
            raise ValueError("rule has rows, and units, whose counts give them: remove rows")
        if self.segment is not None and not 0 <= self.segment < len(self.segments):
            raise ValueError(f"segment = {self.segment} is out of range (got {len(self.segments)} segments)")
        for expression in self.expressions():
            check_expression(expression)

    @property
    def units(self) -> tuple[str, ...]:
        """The names of its units."""
        return self.segments or ((self.unit,) if self.unit is not None else ())

    def expressions(self) -> Iterator[str | int]:
        """Its expressions, without those of its units."""
        yield from (one for one in (self.groups, self.repeats, self.size, self.rows) if one is not None)

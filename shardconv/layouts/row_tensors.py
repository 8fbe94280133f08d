"""Tensors that consist of rows of others: which rows of source tensors a file tensor has, in order.

The same :class:`RowTensor` is made from the source tensors of a checkpoint that is written, and from the file tensors
of one that is read. Elements of source tensors with all experts may be in another order in files: transposed, or not
interleaved.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple

from shardconv.layouts.full_shapes import positive
from shardconv.layouts.layout_file import ChosenRules
from shardconv.layouts.relation import (
    LayoutRule,
    Match,
    Pattern,
    PermutedTable,
    find_source,
    find_target,
    members_of,
    parse_patterns,
)
from shardconv.plan.plan import TensorSpec, plain_spec
from shardconv.support.errors import PlanError

#: Remedy for a missing tensor.
_ADD = "add the tensor, or correct the config"


class Strided(NamedTuple):
    """A strided view: the sizes of its dims, and their strides in the elements that are viewed."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Permutation(NamedTuple):
    """The order of the elements of a source tensor in a file.

    Attributes:
        source_shape: its shape in the source.
        shape: in the file: experts, rows, and the shape of a row.
        segments: number of segments of the rows.
        to_file: strided view of the source, in the order of the file.
        to_source: strided view of the file, in the order of the source.
    """

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    segments: int
    to_file: Strided
    to_source: Strided

    def rows(self, dtype: str) -> TensorSpec:
        """The rows of all experts, one expert after the other."""
        return TensorSpec(dtype, (self.shape[0] * self.shape[1], *self.shape[2:]))


def permutation(table: PermutedTable, config: Mapping[str, object]) -> Permutation:
    """The order by a config.

    Raises:
        PlanError: if a size in the config is not a positive integer.
    """
    sizes = [one if isinstance(one, int) else positive(config, one) for one in table.shape]
    is_factor = [isinstance(one, int) for one in table.shape]
    order = table.order
    ordered, inverse = [sizes[dim] for dim in order], [order.index(dim) for dim in range(len(order))]
    in_source, in_file = _strides(sizes), _strides(ordered)
    return Permutation(
        source_shape=_merged(zip(sizes, is_factor, strict=True)),
        shape=_merged((sizes[dim], is_factor[dim]) for dim in reversed(order))[::-1],
        segments=ordered[1] if is_factor[order[1]] else 1,
        to_file=Strided(tuple(ordered), tuple(in_source[dim] for dim in order)),
        to_source=Strided(tuple(sizes), tuple(in_file[at] for at in inverse)),
    )


def _merged(dims: Iterable[tuple[int, bool]]) -> tuple[int, ...]:
    """The sizes of dims, and factors of the dim before them."""
    sizes: list[int] = []
    for size, is_factor in dims:
        if is_factor:
            sizes[-1] *= size
        else:
            sizes.append(size)
    return tuple(sizes)


def _strides(shape: Sequence[int]) -> list[int]:
    """The distance of the indices of each dim in the elements of a contiguous tensor."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def permutations(
    rules: Sequence[LayoutRule], names: Iterable[str], config: Mapping[str, object]
) -> dict[str, Permutation]:
    """Name to order of the source tensors whose elements files have in another order.

    Raises:
        PlanError: if a size in the config is not a positive integer.
    """
    permuted = [rule for rule in rules if rule.options.permuted is not None]
    related = ((name, find_source(permuted, name)) for name in names if permuted)
    tables = ((name, found.rule.options.permuted) for name, found in related if found is not None)
    return {name: permutation(table, config) for name, table in tables if table is not None}


class SourceRows(NamedTuple):
    """Rows of a source tensor that follow each other in a file tensor."""

    source: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start


class _Segment(NamedTuple):
    """Rows of a source tensor, by its position in the rule, without those of other experts."""

    source: int
    start: int
    stop: int


class RowTensor(NamedTuple):
    """A file tensor, and the rows of source tensors that it consists of.

    Attributes:
        rule: its rule.
        match: of its name.
        spec: dtype and shape, without padding.
        names: of the source tensors, in order: of each expert, or of a tensor without experts.
        segments: the rows of one expert, or of a tensor without experts, in order.
        is_interleaved: whether a segment of the rule is not contiguous in the rows.
    """

    rule: LayoutRule
    match: Match
    spec: TensorSpec
    names: Sequence[str]
    segments: tuple[_Segment, ...]
    is_interleaved: bool

    @property
    def name(self) -> str:
        """The name in the file."""
        return self.rule.target.name(self.match)

    @property
    def also(self) -> tuple[str, ...]:
        """Further names in the file."""
        return tuple(pattern.name(self.match) for pattern in self.rule.also)

    @property
    def has_experts(self) -> bool:
        """Whether dim 0 is the expert dim."""
        return self.rule.has_experts

    @property
    def is_padded(self) -> bool:
        """Whether there may be rows behind these in a file."""
        return self.rule.options.rows is not None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.spec.shape[self.has_experts + 1 :]

    def source_rows(self) -> Iterator[list[SourceRows]]:
        """Yield the rows, in order; for each index of dim 0, if it is the expert dim, and else once."""
        is_permuted = self.rule.options.permuted is not None  # one source tensor has all experts
        names_step, rows_step = (0, self.spec.shape[1]) if is_permuted else (len(self.rule.sources), 0)
        for expert in range(self.spec.shape[0] if self.has_experts else 1):
            at, first = expert * names_step, expert * rows_step
            yield [
                SourceRows(self.names[at + source], first + start, first + stop)
                for source, start, stop in self.segments
            ]

    def sources(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of the source tensors."""
        counts: dict[str, int] = {}
        for rows in chain.from_iterable(self.source_rows()):
            counts[rows.source] = max(counts.get(rows.source, 0), rows.stop)
        return {name: plain_spec(self.spec.dtype, (count, *self.row_shape)) for name, count in counts.items()}


def row_tensors_of_sources(
    rules: Sequence[LayoutRule], tensors: Mapping[str, TensorSpec], config: Mapping[str, object]
) -> list[RowTensor]:
    """The file tensors of source tensors; a source tensor without a rule is in none.

    Raises:
        PlanError: if a source tensor is missing, or its shape contradicts the config.
    """
    found = []
    for (rule, texts), experts in members_of(rules, tensors).items():
        if not _is_of_layer(texts):
            continue
        names, count = rule.members(texts, experts, config, "correct the source")
        specs = [tensors[name] for name in names]
        shape: tuple[int, ...] = (count, sum(spec.shape[0] for spec in specs[: len(rule.sources)]), *specs[0].shape[1:])
        if rule.options.permuted is not None:
            shape = permutation(rule.options.permuted, config).shape
        try:
            tensor = row_tensor(rule, Match(texts), names, specs[0].dtype, shape, config)
            _check_sizes(tensor.name, rule, tensor.spec.shape, config)
        except PlanError as error:
            raise PlanError(f"{error.message}: correct the config, or {names[0]}") from error
        found.append(tensor)
        for name, spec in tensor.sources().items():
            if spec != tensors[name]:
                raise PlanError(
                    f"{name}: is {tensors[name].dtype} {list(tensors[name].shape)} (expected {spec.dtype} "
                    f"{list(spec.shape)} as a part of {tensor.name} by config.json): correct the config, or the "
                    f"tensor"
                )
    return found


def _is_of_layer(texts: Iterable[str]) -> bool:
    """Whether the text of each ``*`` is the number of a layer."""
    return all(map(str.isdecimal, texts))


def row_tensor(
    rule: LayoutRule,
    match: Match,
    names: Sequence[str],
    dtype: str,
    shape: tuple[int, ...],
    config: Mapping[str, object],
) -> RowTensor:
    """A file tensor by its rule.

    Args:
        rule: its rule.
        match: of its name.
        names: of the source tensors.
        dtype: its dtype.
        shape: number of experts, or 1 without a dim of experts; rows; and the shape of a row.
        config: contents of config.json.

    Raises:
        PlanError: if the config contradicts the shape.
    """
    count, rows, *rest = shape
    full = (*([count] if rule.has_experts else []), rows, *rest)
    try:
        segments = tuple(_segments(rule, rows, config))
        is_interleaved = len(segments) > len(shares_of(rule, config))
    except PlanError as error:
        raise PlanError(f"{rule.target.name(match)}: {error.message}") from error
    return RowTensor(rule, match, TensorSpec(dtype, full), names, segments, is_interleaved)


def _segments(rule: LayoutRule, rows: int, config: Mapping[str, object]) -> Iterator[_Segment]:
    """Yield the segments of the rows of one expert, or of a tensor without experts."""
    options, count, shares = rule.options, len(rule.sources), shares_of(rule, config)
    unit, rest = divmod(rows, sum(shares))
    if rest:
        fields = " + ".join(options.shares) or "its members"
        raise PlanError(f"has {rows} rows (expected a multiple of {sum(shares)}, which is {fields})")
    if options.unit is not None and unit != positive(config, options.unit):
        raise PlanError(f"has {unit} rows per head (expected {config[options.unit]}, which is {options.unit})")
    sizes = [unit * share for share in shares]
    starts = [0] * count if count > 1 else [*accumulate(sizes, initial=0)]
    groups = 1 if options.groups is None else positive(config, options.groups)
    if wrong := next((size for size in sizes if size % groups), None):
        raise PlanError(f"has {wrong} rows in a segment (expected a multiple of {groups}, which is {options.groups})")
    for group in range(groups):
        for at, (start, size) in enumerate(zip(starts, sizes, strict=False)):
            step = size // groups
            yield _Segment(at % count, start + group * step, start + (group + 1) * step)


def shares_of(rule: LayoutRule, config: Mapping[str, object]) -> list[int]:
    """The shares of the segments of a file tensor in its rows.

    Raises:
        PlanError: if the config does not have them.
    """
    if rule.options.permuted is not None:
        return [1] * permutation(rule.options.permuted, config).segments
    return [positive(config, field) for field in rule.options.shares] or [1] * len(rule.sources)


class FoundTensors(NamedTuple):
    """The file tensors of a checkpoint that is read.

    Attributes:
        tensors: name in the file to the file tensor.
        others: name in the file to the first name of the same file tensor, of further names.
        unknown: the names that no rule has.
    """

    tensors: dict[str, RowTensor]
    others: dict[str, str]
    unknown: list[str]


def row_tensors_of_files(
    rules: Sequence[LayoutRule], tensors: Mapping[str, TensorSpec], config: Mapping[str, object]
) -> FoundTensors:
    """The file tensors of a checkpoint that is read.

    Raises:
        PlanError: if the shape of a tensor contradicts the config.
    """
    found, name_of = FoundTensors({}, {}, []), dict[str, str]()
    for name, spec in tensors.items():
        if (related := find_target(rules, name)) is None or not _is_of_layer(related.match.texts):
            found.unknown.append(name)
        elif (first := name_of.setdefault(related.target, name)) != name:
            found.others[name] = first
        else:
            shape = _checked_shape(name, related.rule, spec, config)
            names = related.rule.source_names(related.match.texts, shape[0] if related.rule.is_stacked else 1)
            found.tensors[name] = row_tensor(*related, names, spec.dtype, shape, config)
    return found


def _checked_shape(name: str, rule: LayoutRule, spec: TensorSpec, config: Mapping[str, object]) -> tuple[int, ...]:
    """The number of experts or 1, the rows without padding, and the shape of a row of a file tensor."""
    if len(spec.shape) <= rule.has_experts:
        raise PlanError(f"{name}: has shape {list(spec.shape)} (expected at least {1 + rule.has_experts} dims)")
    if rule.options.permuted is not None:
        shape = permutation(rule.options.permuted, config).shape
        if spec.shape != shape:
            raise PlanError(f"{name}: has shape {list(spec.shape)} (expected {list(shape)} by the config)")
        return shape
    _check_sizes(name, rule, spec.shape, config)
    count, rows, *rest = spec.shape if rule.has_experts else (1, *spec.shape)
    if rule.options.rows is not None:
        held, rows = rows, positive(config, rule.options.rows)
        if held < rows:
            raise PlanError(f"{name}: has {held} rows (expected at least {rows}, which is {rule.options.rows})")
    return (count, rows, *rest)


def _check_sizes(name: str, rule: LayoutRule, shape: Sequence[int], config: Mapping[str, object]) -> None:
    """Check the sizes of a file tensor that a config has."""
    expected = {dim: field for dim, field in rule.options.shape.items() if config.get(field) is not None}
    if count_field := next((field for field in rule.options.count if config.get(field) is not None), None):
        expected[0] = count_field
    for dim, field in expected.items():
        if len(shape) <= dim or shape[dim] != positive(config, field):
            raise PlanError(
                f"{name}: has shape {list(shape)} (expected {config[field]} in dim {dim}, which is {field})"
            )


def check_needed(chosen: ChosenRules, names: Collection[str], layers: Sequence[int]) -> None:
    """Check that each layer has the file tensors that it needs.

    Args:
        chosen: the rules.
        names: of the file tensors, as the rules have them.
        layers: the numbers of the layers.

    Raises:
        PlanError: if one is missing.
    """
    targets = {rule.target for rule in chosen.rules}
    stated = (rule.target.text for rule in chosen.rules if rule.options.when)
    for text in chain((text for group in chosen.groups for text in group.needs), stated):
        patterns = [pattern for pattern in parse_patterns([text]) if pattern in targets]
        for layer in layers if "*" in text and patterns else layers[: min(len(patterns), 1)]:
            expected = [pattern.name(Match((str(layer),))) for pattern in patterns]
            if not any(name in names for name in expected):
                made_of = " or ".join(chosen.sources_of(pattern, str(layer)) for pattern in patterns)
                problem = f"{' or '.join(expected)} is missing (expected by the config, made of {made_of})"
                raise PlanError(problem, _ADD)
    for text, others in (item for group in chosen.groups for item in group.beside.items()):
        matches = [match for name in names if (match := Pattern(text).match(name)) is not None]
        for match, pattern in product(matches, map(Pattern, others)):
            if pattern in targets and pattern.name(match) not in names:
                made_of, other = chosen.sources_of(pattern, *match.texts), Pattern(text).name(match)
                raise PlanError(f"{pattern.name(match)} is missing (expected beside {other}, made of {made_of})", _ADD)


def implied_tensors(chosen: ChosenRules, config: Mapping[str, object]) -> dict[str, float]:
    """The source tensors of ``hidden_size`` elements that no checkpoint has, to the value of all elements."""
    layers = range(positive(config, "num_hidden_layers"))
    texts = ((text, value) for group in chosen.groups for text, value in group.implied.items())
    values = {pattern: value for text, value in texts for pattern in parse_patterns([text])}
    return {
        pattern.name(Match((str(layer),))): value
        for pattern, value in values.items()
        for layer in (layers if "*" in pattern.text else layers[:1])
    }


def find_copies(chosen: ChosenRules, names: Collection[str]) -> dict[str, str]:
    """Source tensors that are copies, to the names of their originals."""
    copies = [(Pattern(text), original) for group in chosen.groups for text, original in group.copies.items()]
    return {name: original for name in names for pattern, original in copies if pattern.match(name)}


def copies_of_layers(chosen: ChosenRules, layers: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Yield the copies that these layers have, with the names of their originals."""
    for text, original in (item for group in chosen.groups for item in group.copies.items()):
        yield from ((Pattern(text).name(Match((str(layer),))), original) for layer in layers)

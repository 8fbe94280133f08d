"""Names and shapes of a checkpoint, and its config, become a plan.

Owns the meeting of rules and tensors: which rule covers a name, which dim it cuts, between which units. What no rule
covers is refused with the way out; nothing is guessed. Knows nothing of files.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from shardconv.errors import PlanError
from shardconv.plan.experts import Expert, find_experts, place_expert
from shardconv.plan.family import NAMES_FAMILY, STYLES, Rule
from shardconv.plan.fields import Fields
from shardconv.plan.matcher import Match, Matcher, pattern_for
from shardconv.plan.padding import Padding
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, cut
from shardconv.plan.plan import Plan, Reason, TensorPlan, TensorSpec
from shardconv.plan.quantization import SCALE
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.scope import Scope
from shardconv.plan.sizes import CANDIDATE_TPS, NO_PADDING, BlockedTp, LegalSizes, PaddedTp, PaddedUnit, PaddingReport

#: Names that hold several projections in one tensor: never planned without a rule that says how they lie in it.
FUSED = re.compile(r"(qkv|query_key_value|c_attn|W_?pack|gate_up|in_proj|fused|packed)", re.IGNORECASE)

#: The most ranks that a plan may have.
MAX_TP = 4096


class _Question(NamedTuple):
    """All that a placement depends on; tensors with the same question have the same answer."""

    rule: Rule
    scope: Scope
    leaf: str
    spec: TensorSpec
    weight: TensorSpec | None
    expert: Expert | None = None
    rows: int | None = None
    stage: int | None = None


class PaddedRule(NamedTuple):
    """A rule that pads.

    Attributes:
        scope: of the rule.
        rule: the rule.
        unit: the unit; None where elements are padded.
        size: how many there are.
        padded: how many there are with padding.
        tensor: the first tensor of which that is true.
        spec: of the tensor.
    """

    scope: Scope
    rule: Rule
    unit: str | None
    size: int
    padded: int
    tensor: str
    spec: TensorSpec


class ShardedDim(NamedTuple):
    """The dim that a rule shards, from 0, and its full size; None where it is replicated, or only the tensor has it."""

    dim: int | None
    size: int | None


#: What a config says of the heads.
HEAD_FIELDS = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})


class Resolver:
    """A rule set over the tensors of one checkpoint, or of a model in memory.

    Args:
        tensors: name to dtype and shape, as the headers have them.
        rules: the rules.
        where: what has the tensors, for messages.

    Raises:
        PlanError: if no rule matches a tensor, or a rule of the user's matches none.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], rules: RuleSet, *, where: str = "this checkpoint") -> None:
        self.rules = rules
        self._questions = _ask(tensors, rules)
        if rules.experts == "expert":
            experts = find_experts({name: spec.shape for name, spec in tensors.items()})
            for name, one in experts.items():
                if (rule := self._questions[name].rule).by_user:
                    raise PlanError(
                        f"{name}: rule {rule.pattern!r} says how it is cut, and experts are to be dealt out"
                    )
                self._questions[name] = self._questions[name]._replace(expert=one)
        self._with_padding: dict[int, Resolver] = {}
        self._first: dict[_Question, str] = {}
        for name, question in self._questions.items():
            self._first.setdefault(question, name)
        used = {question.rule for question in self._first}
        for rule in (rule for scope in rules.scopes for rule in scope.family.rules):
            if rule.by_user and not rule.optional and rule not in used:
                raise PlanError(f"rule {rule.pattern!r} matches no tensor of {where}: correct or remove it")
        if rules.pad:
            self._set_padding(rules.pad)

    def padded(self, pad: int = 1) -> "Resolver":
        """The same with padding to a multiple of ``pad`` and of the tensor parallel size, or with 0 without.

        Raises:
            PlanError: if nothing of such a model is padded.
        """
        if pad == self.rules.pad:
            return self
        if pad and (refusal := self.rules.padding_refusal):
            raise PlanError(f"--pad: nothing of this model is padded: {refusal}")
        if pad not in self._with_padding:
            self._with_padding[pad] = copy(self)
            self._with_padding[pad]._set_padding(pad)  # noqa: SLF001 - one of these
        return self._with_padding[pad]

    def _set_padding(self, pad: int) -> None:
        self.__dict__.pop("_counts", None)
        rules = self.rules.with_padding(pad, frozenset(question.rule for question in self._first))
        scopes = dict(zip(self.rules.scopes, rules.scopes, strict=True))
        changed = {question: question._replace(scope=scopes[question.scope]) for question in self._first}
        self._questions = {name: changed[question] for name, question in self._questions.items()}
        self._first = {changed[question]: name for question, name in self._first.items()}
        self.rules = rules

    @cached_property
    def _counts(self) -> Counter[_Question]:
        """For each question how many tensors it is of."""
        return Counter(self._questions.values())

    def replaced(self, family: RuleSet) -> dict[str, tuple[str, str]]:
        """Tensors that a user's rule gives another style than the family: name to the family's style and the user's."""
        ruled, matcher = _matcher(family)
        found = {}
        for name, question in self._questions.items():
            match = matcher.match(name) if question.rule.by_user else None
            if match is not None and (style := ruled[match.place][0].style) != question.rule.style:
                found[name] = (style, question.rule.style)
        return found

    def sharded_dim(self, name: str) -> ShardedDim:
        """The dim that is sharded of a tensor, and its full size by rule and config.

        The size of that dim is not read from the tensor, which may therefore be a rank's shard.

        Raises:
            PlanError: if the config lacks a field that gives the size.
        """
        question = self._questions[name]
        rule, scope, leaf, spec, *_ = question
        if (dim := _dim(rule, leaf, spec, name)) is None or rule.otherwise:
            return ShardedDim(dim, None)
        fields = _fields(question, spec, name)
        names = rule.parts or (rule.unit,)
        units = [(scope.family.units or {})[unit] for unit in names if unit is not None]
        if not units and rule.style == "embedding_rowwise":
            return ShardedDim(dim, fields.evaluate("vocab_size"))
        counted = [fields.evaluate(unit.count) * fields.evaluate(unit.size) for unit in units if unit.count is not None]
        is_known = len(counted) == len(names)
        times = fields.evaluate(rule.groups) * fields.evaluate(rule.repeats)
        return ShardedDim(dim, times * sum(counted) if is_known else None)

    def plan(self, tp: int, *, assumed: tuple[str, ...] = ()) -> Plan:
        """The plan for ``tp`` ranks.

        Raises:
            PlanError: if a tensor cannot be cut into that many; the message names the sizes that are legal.
        """
        if type(tp) is not int or not 1 <= tp <= MAX_TP:
            raise PlanError(f"tp = {tp!r}: it has to be a whole number from 1 to {MAX_TP}")
        try:
            answers = {question: self._answer(question, tp) for question in self._first}
        except _BlockedError as error:
            is_unsure = bool(self.rules.uncertain) and self.rules.uncertain in error.reason
            raise PlanError(f"{error}. {self._way_out(tp, is_unsure=is_unsure)}") from error
        tensors = {name: answers[question] for name, question in self._questions.items()}
        return Plan(tp, self.rules.family, tensors, self.rules, assumed)

    def legal_sizes(self) -> LegalSizes:
        """Which of :data:`CANDIDATE_TPS` are legal, and what blocks the others."""
        plain = self.padded(0)
        blocked = [found for tp in CANDIDATE_TPS if (found := plain.blocked(tp)) is not None]
        others = [found.tp for found in blocked]
        padded = [one for tp in others if (one := self.padded_size(tp)) is not None]
        return LegalSizes(tuple(tp for tp in CANDIDATE_TPS if tp not in others), tuple(blocked), tuple(padded))

    def padded_size(self, tp: int) -> PaddedTp | None:
        """What a tensor parallel size costs with padding; None if it is not supported with padding either."""
        if self.rules.padding_refusal or (padded := self.padded()).blocked(tp) is not None:
            return None
        return PaddedTp(tp, padded.padding_share(tp))

    def padding_share(self, tp: int) -> float:
        """The bytes of padding on all ranks, as a share of all other bytes."""
        padding = others = 0
        for question, count in self._counts.items():
            placement, spec = self._answer(question, tp).placement, question.spec
            bits = _bits(spec.dtype) * count
            held = bits * sum(placement.shard_numel(spec.shape, rank) for rank in range(tp))
            zeros = placement.num_padding * (prod(spec.shape) // max(placement.size, 1)) * bits
            padding, others = padding + zeros, others + held - zeros
        return padding / max(others, 1)

    def padding(self, tp: int) -> PaddingReport:
        """What the plan for ``tp`` ranks pads as asked."""
        units = [PaddedUnit(one.unit or one.rule.pattern, one.size, one.padded) for one in self.padded_rules(tp)]
        return PaddingReport(tuple(dict.fromkeys(units)), self.padding_share(tp)) if units else NO_PADDING

    def padded_rules(self, tp: int) -> Iterator[PaddedRule]:
        """The units that the plan for ``tp`` ranks pads as asked, by the rule that says so."""
        for question in self._first if self.rules.pad else ():
            if self._answer(question, tp).placement.is_padded:
                yield from self._padded_units(question, tp)

    def blocked(self, tp: int) -> BlockedTp | None:
        """What blocks a tensor parallel size; None where it is supported."""
        try:
            for question in self._first:
                self._answer(question, tp)
        except _BlockedError as error:
            return BlockedTp(tp, error.tensor, error.reason)
        return None

    def _way_out(self, tp: int, *, is_unsure: bool) -> str:
        plain = self.padded(0)
        legal = [str(size) for size in CANDIDATE_TPS if plain.blocked(size) is None]
        way_out = (
            f"{'Otherwise use' if is_unsure else 'Use'} --tp {', '.join(legal)}."
            if legal
            else f"No size up to {max(tp, CANDIDATE_TPS[-1])} is legal."
        )
        padded = None if self.rules.pad else self.padded_size(tp)
        return way_out if padded is None else f"{way_out} tp {tp}: supported with --pad, {padded.describe()}."

    def _answer(self, question: _Question, tp: int) -> TensorPlan:
        """The placement for one question.

        Raises:
            _BlockedError: if the units cannot be shared among ``tp`` ranks.
            PlanError: if rule, config and shape do not fit together.
        """
        name = self._first[question]
        if self.rules.uncertain and tp & (tp - 1):
            raise _BlockedError(name, f"{self.rules.uncertain} Until then only powers of two are supported")
        question = _question_at(question, tp)
        rule, _, leaf, spec, weight, expert, *_ = question
        reference = weight if leaf == "weight_scale_inv" and weight else spec
        fields = _fields(question, reference, name)
        try:
            if expert is not None:
                return TensorPlan(place_expert(expert, spec.shape, tp), "expert", (), Reason(rule.origin, rule.pattern))
            placement = self._place(question, reference, tp, fields, name)
            if reference is not spec:
                placement = _on_blocks(placement, spec, reference, self._block(spec, reference, name))
            _check_bytes(placement, spec)
        except IndivisibleError as error:
            is_unsure = self.rules.uncertain and not HEAD_FIELDS.isdisjoint(fields.read)
            unsure = f"{self.rules.uncertain} Under this assumption " if is_unsure else ""
            reason = ", ".join(self._facts(fields)) or f"shape {list(spec.shape)}"
            raise _BlockedError(name, f"{unsure}{error} ({reason})") from error
        except PlanError as error:
            if self.rules.family != NAMES_FAMILY:
                raise
            raise PlanError(f"{error}. No family is known for this model: --family or --plan may settle it") from error
        return TensorPlan(placement, rule.style, rule.units, Reason(rule.origin, rule.pattern, self._facts(fields)))

    def _facts(self, fields: Fields) -> tuple[str, ...]:
        """The config fields that were read, with a mark on those that were assumed."""
        assumed = HEAD_FIELDS if self.rules.uncertain else frozenset()
        return tuple(f"{key}={value}{' assumed' * (key in assumed)}" for key, value in fields.read.items())

    def _place(self, question: _Question, spec: TensorSpec, tp: int, fields: Fields, name: str) -> Placement:
        rule, scope, leaf, *_ = question
        if rule.size is not None and spec.shape[-1:] != (expected := fields.evaluate(rule.size),):
            raise PlanError(
                f"{name}: shape {list(spec.shape)} does not end in {rule.size} = {expected}, so rule {rule.pattern!r} "
                f"is not meant for it; name the --family, or a --plan FILE with a rule for it"
            )
        dim = _dim(rule, leaf, spec, name)
        if dim is None:
            return Placement.replicated(tp)
        if len(spec.shape) > 2 and rule.origin == f"family {NAMES_FAMILY}":
            raise PlanError(
                f"{name} of shape {list(spec.shape)}: its name does not tell which of its dims is which; name the "
                f"--family, or a --plan FILE with a rule for it"
            )
        size = spec.shape[dim]
        groups = fields.evaluate(rule.groups)
        names, units, shares = self._units(question, size, fields, name)
        expected = groups * sum(unit.width for unit in units)
        if expected != size * shares:
            read = ", ".join(f"{key}={value}" for key, value in fields.read.items())
            parts = " and ".join(dict.fromkeys(map(str, names)))
            raise PlanError(
                f"{name}: dim {dim} has {size} elements; rule {rule.pattern!r} of {rule.origin}, with units {parts}, "
                f"and the config ({read}) expect {expected // shares}: the config is not this checkpoint's, or the "
                f"family, or a plan file, does not fit it; give --config, --family or another --plan"
            )
        if shares > 1:
            return cut(dim, units, tp, groups=groups).share(rule.part or 0, shares)
        return _cut(dim, units, tp, groups, [scope.padding(rule, unit) for unit in names], scope.multiple(tp))

    def _units(
        self, question: _Question, size: int, fields: Fields, name: str
    ) -> tuple[tuple[str | None, ...], list[Unit], int]:
        """The units of a dim of ``size`` elements, or of each of the groups in it, with their names.

        And how many tensors share the dim: 1, or as many as parts where each holds an even share of all of them.
        """
        rule, scope, *_ = question
        names = _unit_names(rule, fields)
        part = size // max(fields.evaluate(rule.groups) * len(names), 1)  # of those that say no count of their own
        units = [self._unit(unit, rule, part, scope, fields, name) for unit in names]
        if rule.part is None:
            return names, units, 1
        if units[rule.part].width == size:
            return (names[rule.part],), [units[rule.part]], 1
        return names, units, len(units)

    def _padded_units(self, question: _Question, tp: int) -> Iterator[PaddedRule]:
        name = self._first[question]
        question = _question_at(question, tp)
        rule, scope, leaf, spec, *_ = question
        dim = _dim(rule, leaf, spec, name)
        names, units, _ = self._units(question, spec.shape[dim or 0], _fields(question, spec, name), name)
        for unit_name, unit in zip(names, units, strict=True):
            padding = scope.padding(rule, unit_name)
            padded = (padding.apply(unit, scope.multiple(tp)) if padding else unit).padded_count(tp)
            if padded != unit.count:
                yield PaddedRule(scope, rule, unit_name, unit.count, padded, name, spec)

    def _unit(self, unit_name: str | None, rule: Rule, size: int, scope: Scope, fields: Fields, name: str) -> Unit:
        if unit_name is None:
            is_vocabulary = rule.pad and rule.style == "embedding_rowwise"
            return Unit(size, pad=rule.pad, multiple=self.rules.vocab_multiple if is_vocabulary else 1)
        unit = (scope.family.units or {})[unit_name]
        copies = unit.copies and not self.rules.uncertain
        unit_size = fields.evaluate(unit.size)
        if unit.count is not None:
            return Unit(fields.evaluate(unit.count), unit_size, copies, rule.pad)
        if not unit_size or size % unit_size:
            raise PlanError(f"{name}: {size} elements are no multiple of the {unit_size} of one {unit_name}")
        return Unit(size // unit_size, unit_size, copies, rule.pad)

    def _block(self, scale: TensorSpec, weight: TensorSpec, name: str) -> tuple[int, ...]:
        block = self.rules.scale_block
        if isinstance(block, list) and [type(size) for size in block] == [int, int] and min(block) > 0:
            blocks = tuple(-(-size // unit) for size, unit in zip(weight.shape[-2:], block, strict=False))
            if scale.shape == (*weight.shape[:-2], *blocks) and len(blocks) == 2:
                return tuple(block)
        raise PlanError(
            f"{name}: shape {list(scale.shape)} does not fit blocks of {block!r:.60} over a weight of "
            f"{list(weight.shape)}: quantization_config.weight_block_size is needed, pass --config FILE with it"
        )


def _unit_names(rule: Rule, fields: Fields) -> tuple[str | None, ...]:
    """The units that a dim consists of, or each of the groups in it, in their order."""
    return (rule.parts or (rule.unit,)) * fields.evaluate(rule.repeats)


def _cut(
    dim: int, units: Sequence[Unit], tp: int, groups: int, paddings: Sequence[Padding | None], multiple: int
) -> Placement:
    """The placement of units, padded as ``paddings`` say it.

    Raises:
        IndivisibleError: if the units cannot be shared among ``tp`` ranks.
    """
    padded = [padding.apply(unit, multiple) if padding else unit for unit, padding in zip(units, paddings, strict=True)]
    try:
        if paddings[0] is None or paddings[0].heads is None or groups == 1:
            return cut(dim, padded, tp, groups=groups)
        return cut(dim, padded, tp, groups=groups, padded_groups=paddings[0].heads.padded(multiple).kv_heads)
    except IndivisibleError as error:
        refusal = next((padding.refusal for padding in paddings if padding and padding.refusal), "")
        raise IndivisibleError(f"{error}, and is not padded: {refusal}" if refusal else str(error)) from error


class _BlockedError(Exception):
    """A tensor cannot be cut for this tp."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"{tensor}: {reason}")
        self.tensor = tensor
        self.reason = reason


def _fields(question: _Question, spec: TensorSpec, name: str) -> Fields:
    """What the units of a rule read: the config, the size of the sharded dim, and the rows of a layer beside."""
    dim = _dim(question.rule, question.leaf, spec, name)
    sizes = {"features": None if dim is None else spec.shape[dim], "rows": question.rows}
    return question.scope.fields(question.stage, **{field: size for field, size in sizes.items() if size is not None})


def _question_at(question: _Question, tp: int) -> _Question:
    """The question with the rule that counts at a tensor parallel size: another where its units are not sharded."""
    rule, scope = question.rule, question.scope
    if not rule.otherwise or all(replace(scope, stage=question.stage).is_sharded(unit, tp) for unit in rule.units):
        return question
    return question._replace(rule=_without_units(rule))


@lru_cache(maxsize=1024)
def _without_units(rule: Rule) -> Rule:
    """The rule that counts where units are not sharded."""
    return Rule(rule.pattern, rule.otherwise, pad=True, transposed=rule.transposed, origin=rule.origin)


def _dim(rule: Rule, leaf: str, spec: TensorSpec, name: str) -> int | None:
    """The dim that a rule cuts of a tensor, from 0; None where it is replicated."""
    style = STYLES[rule.style]
    dim = style.bias if leaf == "bias" else style.weight
    if dim is None or prod(spec.shape) <= 1 or len(spec.shape) < max(rule.dims, 1):
        return None
    if rule.dims and spec.shape[dim] == 1:
        return None
    if dim >= 0 or len(spec.shape) == 1:
        if dim == -1 and leaf != "bias":
            raise PlanError(f"{name}: style {rule.style} needs a matrix, the tensor has one dim")
        return 0
    if rule.transposed and leaf != "bias":
        dim = {-1: -2, -2: -1}[dim]
    return len(spec.shape) + dim


def _on_blocks(placement: Placement, scale: TensorSpec, weight: TensorSpec, block: tuple[int, ...]) -> Placement:
    """The placement of a block scale, from that of its weight: cuts must fall on the edges of blocks."""
    if placement.dim is None:
        return placement
    width = block[placement.dim - len(weight.shape)]
    kind = "input" if placement.dim == len(weight.shape) - 1 else "output"
    if placement.is_padded:
        raise IndivisibleError(
            f"{placement.size} {kind} features would be padded, and with them blocks that have a scale"
        )
    ranks = []
    for pieces in placement.ranks:
        for piece in pieces:
            ends_inside = isinstance(piece, Interval) and piece.stop % width and piece.stop != placement.size
            if not isinstance(piece, Interval) or piece.start % width or ends_inside:
                raise IndivisibleError(
                    f"{placement.size} / {placement.tp} = {piece.size} {kind} features a rank is not a multiple of the "
                    f"{width}-wide scale block"
                )
        ranks.append(tuple(Interval(p.start // width, -(-p.stop // width)) for p in pieces if isinstance(p, Interval)))
    return Placement(placement.dim, scale.shape[placement.dim], tuple(ranks))


def _check_bytes(placement: Placement, spec: TensorSpec) -> None:
    """Cuts of sub-byte dtypes must fall on whole bytes."""
    if placement.dim is None or spec.dtype not in _ELEMENTS_PER_GROUP:
        return
    group = _ELEMENTS_PER_GROUP[spec.dtype]
    inner = prod(spec.shape[placement.dim + 1 :])
    edges = {edge for pieces in placement.ranks for piece in pieces for edge in piece}  # of zeros, their size
    if any(edge * inner % group for edge in edges) or prod(spec.shape[placement.dim :]) % group:
        raise IndivisibleError(f"a cut of {spec.dtype} would fall inside a byte")


#: What no rule covers and cannot be cut is whole on every rank.
SCALAR = Rule("(one element or none)", "replicate", origin="any model")

#: The number of bits in the name of a dtype; BOOL has none, and takes a byte.
_BITS = re.compile(r"\d+")


def _bits(dtype: str) -> int:
    found = _BITS.search(dtype)
    return int(found[0]) if found else 8


#: Elements that together fill whole bytes, for the dtypes of which one does not.
_ELEMENTS_PER_GROUP = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}


def _matcher(rules: RuleSet) -> tuple[list[tuple[Rule, Scope]], Matcher]:
    """The rules that apply, each with its scope, and what finds the place of a tensor's rule among them."""
    ruled = [(rule, scope) for scope in rules.scopes for rule in scope.rules()]
    patterns = [(f"{scope.at}.{rule.pattern}", scope.regex(rule.pattern)) for rule, scope in ruled]
    return ruled, Matcher(patterns)


def _ask(tensors: Mapping[str, TensorSpec], rules: RuleSet) -> dict[str, _Question]:
    ruled, matcher = _matcher(rules)
    alone = (SCALAR, rules.scopes[0])
    staged = {id(rule) for rule, scope in ruled if scope.reads_stage(rule)}
    questions: dict[str, _Question] = {}
    uncovered: list[str] = []
    for name, spec in tensors.items():
        match, weight = matcher.match(name), None
        if name.endswith(SCALE):
            match, weight = _scale_match(name, match, matcher, tensors, ruled)
        if prod(spec.shape) <= 1 and (match is None or weight is not None):
            questions[name] = _Question(*alone, "weight", spec, None)
        elif match is None:
            uncovered.append(name)
        else:
            rule, scope = ruled[match.place]
            rows = _rows_beside(name, rule.beside, tensors) if rule.beside else None
            stage = scope.stage_of(name) if id(rule) in staged else None
            questions[name] = _Question(rule, scope, match.leaf, spec, weight, rows=rows, stage=stage)
    if uncovered:
        raise PlanError(_uncovered(uncovered, tensors, rules.family))
    return questions


def _rows_beside(name: str, layer: str, tensors: Mapping[str, TensorSpec]) -> int:
    """How many rows a layer has that is in the same module as the layer of a tensor."""
    module = name.rpartition(".")[0].rpartition(".")[0]
    weight = tensors.get(f"{module}.{layer}.weight")
    if weight is None or len(weight.shape) < 2:
        raise PlanError(f"{name}: its rule goes by the rows of {module}.{layer}, which has no weight of rows")
    return weight.shape[0]


def _scale_match(
    name: str,
    own: Match | None,
    matcher: Matcher,
    tensors: Mapping[str, TensorSpec],
    ruled: Sequence[tuple[Rule, Scope]],
) -> tuple[Match | None, TensorSpec]:
    """The rule of a block scale, which is that of its weight; and its weight."""
    weight_name = name.removesuffix("_scale_inv")
    if weight_name not in tensors:
        raise PlanError(f"{name}: there is no weight beside this scale")
    match = matcher.match(weight_name)
    if own is not None and match is not None and own.place != match.place:
        rule, weights_rule = (ruled[one.place][0].pattern for one in (own, match))
        raise PlanError(
            f"{name}: rule {rule!r} is not that of its weight, {weights_rule!r}, and a scale is sharded as its weight "
            f"is: name their module, {weight_name.removesuffix('.weight')!r}"
        )
    return (None if match is None else Match(match.place, "weight_scale_inv")), tensors[weight_name]


def _uncovered(names: Sequence[str], tensors: Mapping[str, TensorSpec], family: str) -> str:
    """Why some tensors have no plan, said of the most telling: a fused one, if there is one."""
    name = next(filter(FUSED.search, names), names[0])
    spec = tensors[name]
    fused = ""
    if FUSED.search(name):
        fused = "; by its name it holds several projections in one, and how they lie in it is not known"
    others = f" (nor {len(names) - 1} more)" if len(names) > 1 else ""
    no_rule = f"no rule of family {family} covers it"
    if family == NAMES_FAMILY:
        no_rule = "no family is known for this model, and its name alone does not tell how to cut it"
    return (
        f"{name} ({spec.dtype} {list(spec.shape)}): {no_rule}{others}{fused}. A guess could be silent garbage: name "
        f"the --family, or a --plan FILE with a rule for it, or --replicate {pattern_for(name)!r} to put it "
        f"whole on every rank"
    )

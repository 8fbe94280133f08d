"""Layout files: one TOML file of this package for each system whose rank files are read or written.

A file has the names of the system's rank files, and groups of rules that relate their tensors to a Hugging Face
checkpoint's. ``[types]`` has the groups that apply to each model type; without it, all do. A group has rules in
``tensors``, name in the files = names of the source tensors (see :class:`~shardconv.layouts.relation.RuleTable`).
"""

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from shardconv.layouts.layout import REMEDY
from shardconv.layouts.relation import (
    ConstantRule,
    ConstantTable,
    LayoutRule,
    Pattern,
    RuleTable,
    parse_constants,
    parse_patterns,
    parse_rules,
)
from shardconv.support.errors import PlanError, option

_Layout = TypeVar("_Layout", bound="LayoutHead")

FOLDER = Path(__file__).parent


class GroupTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A group of rules, shared by model types.

    Attributes:
        tensors: file tensors that differ from a source tensor in name or contents. A source tensor that no rule names
            keeps its name; of several rules for one, the first applies.
        constants: file tensors without a source tensor.
        left_out: names of further file tensors without a source tensor, which are not written.
        refuse: source tensors that the engine does not support.
        needs: names of file tensors that the engine requires. ``*`` is each layer, and of names with ``{a,b}``, one is
            required; names whose rule does not apply are not.
        beside: name of a file tensor to further tensors that a layer with it needs.
        requires: config fields and the values that they have to have if a config states them.
        copies: name of a source tensor to the name of the tensor with the same values.
        padded_to: name of a file tensor to the multiple that its rows are padded to with zeros before they are sharded.
        defaults: values of config fields that a config may omit.
        args: arguments of the system's programs for models with the group.
        settings: further arguments, to the config fields that have their values.
        absent: config fields that must not be set.
        implied: source tensors of ``hidden_size`` elements that no checkpoint has, to the value of all elements.
        dense: config fields that say which layers do not have experts.
    """

    tensors: dict[str, RuleTable | tuple[str, ...]] = {}
    constants: dict[str, ConstantTable] = {}
    left_out: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    beside: dict[str, tuple[str, ...]] = {}
    requires: dict[str, object] = {}
    copies: dict[str, str] = {}
    padded_to: dict[str, int] = {}
    defaults: dict[str, object] = {}
    args: dict[str, object] = {}
    settings: dict[str, str] = {}
    absent: tuple[str, ...] = ()
    implied: dict[str, float] = {}
    dense: tuple[str, ...] = ()

    @cached_property
    def rules(self) -> tuple[LayoutRule, ...]:
        """The rules of ``tensors``, without ``{}``."""
        tables = {name: RuleTable(one) if isinstance(one, tuple) else one for name, one in self.tensors.items()}
        return tuple(rule for target, table in tables.items() for rule in parse_rules(target, table))

    @cached_property
    def constant_rules(self) -> tuple[ConstantRule, ...]:
        """The rules of ``constants``, without ``{}``."""
        return tuple(rule for target, table in self.constants.items() for rule in parse_constants(target, table))

    @cached_property
    def without_source(self) -> tuple[Pattern, ...]:
        """The names of file tensors without a source tensor."""
        return (*(rule.target for rule in self.constant_rules), *parse_patterns(self.left_out))


class RefusedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of quantized layers that a layout does not support.

    Attributes:
        reason: the reason.
        unless: end of the name of another tensor of the layer, with which they are supported.
        methods: the quantization methods for which they are not supported; by default all.
        setting: a quantization setting with which they are supported.
    """

    reason: str
    unless: str | None = None
    methods: tuple[str, ...] | None = None
    setting: str = ""


class QuantizedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The quantized layers of a layout. A rule for ``weight`` also applies to names with one of ``ends`` instead.

    Attributes:
        groups: the groups whose rules hold for quantized layers.
        ends: the ends of names of supported tensors.
        values: the ends among them that a layer has instead of ``weight``.
        last: the ends among them of tensors that the engine keeps for the last of several fused layers only; the values
            of the others follow from grids.
        dropped: further ends, of tensors that the engine does not have; their values follow from grids.
        refuse: pattern to tensors of quantized layers that are not supported.
        methods: supported quantization method to its constants.
    """

    groups: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refuse: dict[str, RefusedTable] = {}
    methods: dict[str, dict[str, ConstantTable]] = {}


class ChosenRules(NamedTuple):
    """The groups of a model type, their rules that apply to its config, all other rules, and the completed config."""

    groups: tuple[GroupTable, ...]
    rules: tuple[LayoutRule, ...]
    others: tuple[LayoutRule, ...]
    config: Mapping[str, object]

    def sources_of(self, target: Pattern, *texts: str) -> str:
        """The names of the source tensors of a file tensor, for a message."""
        rule = next(rule for rule in self.rules if rule.target == target)
        return " and ".join(rule.source_names(texts))

    def fields_of(self, rule: LayoutRule | None) -> str:
        """The config fields that exclude a rule, as the end of a message about a model."""
        fields = () if rule is None else (*rule.options.when, *rule.options.given)
        return "".join(f" with {field} {self.config.get(field)!r:.20}" for field in fields)

    def is_without_source(self, name: str) -> bool:
        """Whether a file tensor is one without a source tensor."""
        return any(pattern.match(name) is not None for group in self.groups for pattern in group.without_source)


class LayoutHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The part of a layout file before its tables, which is enough to detect rank files.

    Attributes:
        title: a description, for messages.
        files: regular expression of the file names. Its groups are the rank, the number of ranks (tp), the part of the
            rank, and, for files without ranks, the number of parts. Other files without a rank are of rank 0.
        files_per_rank: the number of files of each rank, where their names do not have parts.
        beside: a file beside them that is needed to read them. Without it, names are not enough to detect the layout.
        others: regular expression of the names of further files of the system, without weights.
        is_certain: whether the names alone decide, also in the folder of a Hugging Face checkpoint.
        missing: contents of a checkpoint that the files do not have.
        file_name: of a rank file that is written, see :class:`~shardconv.layouts.layout.FileLayout`.
        file_name_in_stage: the same for a rank of one of several pipeline stages.
        engine: the engine that reads the files; its plan has the sharded dims.
        versions: the engine versions that read the files.
        key: the name of the layout.
    """

    title: str
    files: str
    files_per_rank: int = 1
    beside: str | None = None
    others: str = ""
    is_certain: bool = False
    missing: tuple[str, ...] = ()
    file_name: str = ""
    file_name_in_stage: str = ""
    engine: str | None = None
    versions: str | None = None
    key: str = ""

    @cached_property
    def names(self) -> re.Pattern[str]:
        """The pattern of the file names."""
        return re.compile(self.files)


class LayoutFile(LayoutHead, frozen=True):
    """The layout of the rank files of a system.

    Attributes:
        groups: by name.
        types: model type to names of groups; empty if all groups apply to all models.
        quantized: the tensors of quantized layers.
    """

    groups: dict[str, GroupTable] = {}
    types: dict[str, tuple[str, ...]] = {}
    quantized: QuantizedTable = QuantizedTable()

    @cached_property
    def all_rules(self) -> ChosenRules:
        """All groups, and the rules of all of them."""
        groups = tuple(self.groups.values())
        return ChosenRules(groups, tuple(rule for group in groups for rule in group.rules), (), {})

    def rules_for(self, config: Mapping[str, object]) -> ChosenRules:
        """The rules for the model of a config.

        Raises:
            PlanError: if the layout does not support this model.
        """
        groups = self._groups_of(config.get("model_type"))
        for field, value in (item for group in groups for item in group.requires.items()):
            if config.get(field, value) != value:
                raise PlanError(
                    f"layout {self.key} does not support {field} {config[field]!r:.40} of the config (expected "
                    f"{value!r})",
                    self._remedy,
                )
        for field in (field for group in groups for field in group.absent if config.get(field) is not None):
            raise PlanError(
                f"layout {self.key} does not support {field} {config[field]!r:.40} of the config (expected none)",
                self._remedy,
            )
        config = {field: value for group in groups for field, value in group.defaults.items()} | dict(config)
        rules = [rule for group in groups for rule in group.rules]
        applied = tuple(rule for rule in rules if rule.applies(config))
        return ChosenRules(groups, applied, tuple(rule for rule in rules if rule not in applied), config)

    @property
    def _remedy(self) -> str:
        """The remedy for a model that the layout does not support."""
        return REMEDY if self.engine is not None else f"use {option(layout='native')}"

    def _groups_of(self, model_type: object) -> tuple[GroupTable, ...]:
        if not self.types:
            return tuple(self.groups.values())
        if model_type is None:
            raise PlanError(
                f"layout {self.key} needs a config.json with a model_type",
                f"add one ({option('config')}), or {self._remedy}",
            )
        if not isinstance(model_type, str) or model_type not in self.types:
            similar = ", ".join(get_close_matches(str(model_type), self.types, cutoff=0))
            raise PlanError(
                f"layout {self.key} does not support model type {model_type!r:.60} (expected one of {len(self.types)} "
                f"types, such as {similar})",
                self._remedy,
            )
        return tuple(self.groups[group] for group in self.types[model_type])


@cache
def layout_head(key: str) -> LayoutHead:
    """Read the head of the layout file of a system, one of :data:`~shardconv.layouts.SOURCE_LAYOUTS`."""
    return _parse(_text(key).partition("\n[")[0], key, LayoutHead)


@cache
def layout_file(key: str) -> LayoutFile:
    """Read the layout file of a system, one of :data:`~shardconv.layouts.SOURCE_LAYOUTS`."""
    return _parse(_text(key), key, LayoutFile)


def _text(key: str) -> str:
    return (FOLDER / f"{key}.toml").read_text("utf-8")


def _parse(text: str, key: str, kind: type[_Layout]) -> _Layout:
    return msgspec.convert({**tomllib.loads(text), "key": key}, kind, str_keys=True)

"""Load families, blocks and plan files, and find families by name and by model type.

A family file has one or more families, each a table. docs/plan-files.md describes the tables. Unknown keys are errors.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from shardconv.plan.families.family import PLAN_FILE, Family, Mount, Submodel, expand_blocks
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule, check_pattern
from shardconv.support.errors import PlanError, UsageError
from shardconv.support.structs import convert, parse_table

T = TypeVar("T", UnitRule, Rule, ModuleRule)

#: Maximum number of suggestions for an unknown name.
_MAX_SUGGESTIONS = 3
_MIN_STEM = 3
#: The least similarity of a name that does not begin with the same letters.
_CUTOFF = 0.5


class FamilyList(Struct, frozen=True):
    """The families that a search found.

    Attributes:
        families: name of a family to the model types that it serves.
        similar: if there are none, the most similar families and model types.
    """

    families: Mapping[str, tuple[str, ...]]
    similar: tuple[str, ...] = ()


def list_families(word: str = "") -> FamilyList:
    """List the families whose name, or the name of a model type that they serve, contains a word.

    Args:
        word: the word, in any case and with any separators; "" for all families.

    Returns:
        The families; with only the model types that contain the word if the name of the family does not.
    """
    found, letters = dict[str, tuple[str, ...]](), _squeeze(word)
    for name in family_names():
        is_named = letters in _squeeze(name)
        served = (kind for kind, family in _index().of_type.items() if family == name)
        kinds = tuple(kind for kind in served if is_named or letters in _squeeze(kind))
        if kinds or is_named:
            found[name] = kinds
    return FamilyList(found, () if found else _nearest(word))


def _similar(unknown: str) -> str:
    """Families for an unknown name: the family that serves a model type of this name, else the most similar ones."""
    of_type = _index().of_type
    if (family := of_type.get(unknown)) is not None:
        return f"{family}, which serves the model type {unknown}"
    return ", ".join(dict.fromkeys(of_type.get(name, name) for name in _nearest(unknown))) or "none"


def _nearest(unknown: str) -> tuple[str, ...]:
    """The names of families and model types that are most similar to an unknown one.

    Names that begin with the same letters, the name of a series of models, come before all others: ``qwen2`` for
    ``qwen25``, and ``llama`` for ``LlamaForCausalLM``.
    """
    by_letters = {_squeeze(name): name for name in reversed([*family_names(), *_index().of_type])}
    letters = _squeeze(unknown)
    series = [name for name in by_letters if _share_stem(name, letters)]
    nearest = get_close_matches(letters, series or [*by_letters], _MAX_SUGGESTIONS, 0.0 if series else _CUTOFF)
    return tuple(by_letters[name] for name in nearest)


def _squeeze(name: str) -> str:
    """A name in lower case, without separators."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _share_stem(name: str, other: str) -> bool:
    """Whether two names begin with the same letters, or one with all leading letters of the other."""
    short, long = sorted((re.split("[^a-z]", text)[0] for text in (name, other)), key=len)
    return len(short) >= _MIN_STEM and long.startswith(short)


FOLDER = Path(__file__).parent
_BLOCKS = FOLDER / "blocks"


def family_names() -> list[str]:
    """The names of all families, sorted."""
    return sorted(_index().tables)


@cache
def load_family(name: str) -> Family:
    """The family of this name, with expanded blocks and inherited rules.

    Raises:
        UsageError: if the family is unknown.
    """
    table = _index(rf"(?m)^\[{re.escape(name)}\b").tables.get(name)
    if table is None:
        raise UsageError(
            f"family {name!r} is unknown (similar: {_similar(name)}): shardconv plan --list-families [WORD] lists them"
        )
    family = parse_family(name, table, f"family {name}")
    return expand_family(family, load_family(family.inherits) if family.inherits else Family(name))


def expand_family(family: Family, base: Family) -> Family:
    """Expand the blocks of a family, and add the rules of another family after its own.

    Args:
        family: the family, whose rules are tried first.
        base: the other family, such as the inherited one.

    Raises:
        PlanError: if a block does not exist or cannot be mounted, or if a unit would change the rules of ``base``
            without ``override``.
    """
    for name, unit in family.units.items():
        other = base.units.get(name, unit)
        if not unit.override and other != unit:
            raise PlanError(
                f"{family.origin}: unit {name!r} is {unit.describe()}, but {other.describe()} in family {base.name}, "
                f"whose rules also use it: correct or rename it, or replace the unit of the family with override = true"
            )
    expanded = expand_blocks(family, base, load_block)
    named = family.units_named() - family.units.keys()
    if numbered := sorted(named & (expanded.numbered | base.numbered)):
        raise PlanError(
            f"{family.origin}: the number in unit {numbered[0]!r} depends on the order of [blocks], which may change: "
            f"add a unit with another name to [units]"
        )
    return expanded.with_base(base)


def block_names() -> list[str]:
    """The names of all blocks, sorted."""
    return sorted(path.stem for path in _BLOCKS.glob("*.toml"))


@cache
def load_block(name: str) -> Family:
    """The block of this name.

    Raises:
        PlanError: if the block is unknown.
    """
    path = _BLOCKS / f"{name}.toml"
    if not re.fullmatch("[a-z0-9_]+", name) or not path.is_file():
        raise PlanError(f"block {name!r} is unknown (expected {', '.join(block_names())})")
    return parse_block(name, tomllib.loads(path.read_text("utf-8")))


@cache
def family_for(model_type: str) -> Family | None:
    """The family that serves a ``model_type`` of config.json; None if there is none."""
    name = _index(rf'model_types\s*=\s*\[[^]]*"{re.escape(model_type)}"').of_type.get(model_type)
    return None if name is None else load_family(name)


def model_type_of(config: Mapping[str, object]) -> str | None:
    """The type of a model by its config: the ``model_type`` of transformers, or the class name of diffusers."""
    found = config.get("model_type", config.get("_class_name"))
    return found if isinstance(found, str) else None


class _Index(NamedTuple):
    """The families of some files.

    Attributes:
        tables: name of a family to its table.
        of_type: model type to the name of its family.
    """

    tables: dict[str, dict[str, object]]
    of_type: dict[str, str]


@cache
def _index(pattern: str = "") -> _Index:
    """Read the family files in which a pattern is found, such as the beginning of a table; "" for all files.

    Raises:
        PlanError: if two families have the same name or serve the same model type.
    """
    index = _Index({}, {})
    for path in _paths():
        for name, table in _tables(path).items() if re.search(pattern, _text(path)) else ():
            if name in index.tables:
                raise PlanError(f"family {name} is defined twice, also in {path.name}: rename one of them")
            index.tables[name] = table
            for model_type in table.get("model_types", ()):
                if (other := index.of_type.get(model_type)) is not None:
                    raise PlanError(f"model type {model_type!r} is in families {other} and {name}: remove one")
                index.of_type[model_type] = name
    return index


@cache
def _paths() -> list[Path]:
    return sorted(FOLDER.glob("*.toml"))


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def _tables(path: Path) -> dict[str, Any]:
    return tomllib.loads(_text(path))


def clear_cache() -> None:
    """Clear the caches, so that files are read again."""
    for cached in (load_family, load_block, family_for, _index, _paths, _text, _tables):
        cached.cache_clear()


def parse_plan_file(name: str, text: str) -> Family:
    """Parse a plan file, which has the format of a family in TOML, or in JSON if its name ends in ``.json``.

    Blocks are not expanded, and nothing is inherited: see :func:`expand_family`.

    Raises:
        PlanError: if the text does not have the format.
    """
    is_json = name.endswith(".json")
    try:
        data = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name} is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{name} is not a table (expected the keys of a plan file)")
    return parse_family(name, data, f"{PLAN_FILE} {name}", without=_NOT_BY_USER)


#: Fields of a family that are not keys of its table.
_GIVEN = ("name", "origin", "numbered", "empty")
#: Keys that a plan file does not have: it applies to the checkpoint it is passed for, and is not in docs/models.md.
_NOT_BY_USER = ("model_types", "gathered")
#: Keys that a block does not have.
_NOT_IN_BLOCKS = ("model_types", "inherits", "prefix", "submodels", "gathered")
#: Keys whose values a family inherits, unless its file has them empty.
_INHERITED = ("prefix", "submodels", "gathered", "stages")


def parse_block(name: str, data: Mapping[str, object]) -> Family:
    """Parse the table of a block.

    Raises:
        PlanError: if the table does not have the format, or a rule names a unit that does not exist.
    """
    block = parse_family(name, data, f"block {name}", without=_NOT_IN_BLOCKS)
    if overrides := [key for key, unit in block.units.items() if unit.override]:
        raise PlanError(
            f"{block.origin}: unit {overrides[0]}: override = true is not for blocks, as they inherit no units"
        )
    block.check_units()
    return block


def parse_family(name: str, data: Mapping[str, object], origin: str, *, without: tuple[str, ...] = ()) -> Family:
    """Parse the table of a family, without expanding blocks and inherited rules.

    Args:
        name: name of the family.
        data: the table.
        origin: the source of its rules, for reports.
        without: keys that the table may not have.

    Raises:
        PlanError: if the table does not have the format.
    """
    by_user = origin.startswith(PLAN_FILE)

    def rules(key: str, kind: type[T]) -> list[T]:
        return [
            parse_entry(kind, pattern, table, pattern=pattern, origin=origin, by_user=by_user)
            for pattern, table in _alternatives(data, key)
        ]

    try:
        prefix = data.get("prefix", ())
        sections = {
            "prefix": (prefix,) if isinstance(prefix, str) and prefix else prefix or (),
            "units": {unit: parse_entry(UnitRule, unit, table) for unit, table in _section(data, "units").items()},
            "rules": rules("rules", Rule),
            "modules": rules("modules", ModuleRule),
            "submodels": {
                start: _submodel(start, table, by_user=by_user) for start, table in _section(data, "submodels").items()
            },
            "blocks": [_mount(pattern, table) for pattern, table in _alternatives(data, "blocks")],
        }
        empty = [key for key in _INHERITED if key in data and not data[key]]
        table = {**data, **{key: value for key, value in sections.items() if key in data}}
        return parse_table(
            table, Family, without=(*_GIVEN, *without), name=name, origin=origin, numbered=[], empty=empty
        )
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error


def _section(data: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """The names in a section with their entries; none if the file does not have the section."""
    section = data.get(key, {})
    if not isinstance(section, dict):
        raise ValueError(f"{key}: {section!r:.60} is not a table")  # noqa: TRY004 - all of them become one PlanError
    return section


def _alternatives(data: Mapping[str, object], key: str) -> Iterator[tuple[str, Any]]:
    """Each pattern in a section with each of its rules or blocks, in order: a pattern has one or a list of them."""
    for pattern, entries in _section(data, key).items():
        yield from ((pattern, entry) for entry in (entries if isinstance(entries, list) else [entries]))


def parse_entry(kind: type[T], name: str, data: object, **given: object) -> T:
    """Parse the table of a unit, a rule or module overrides.

    Args:
        kind: the class.
        name: name of the unit, or the pattern.
        data: the table.
        given: fields that follow from the file, or from the place of the table in it.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, kind, without=("pattern", "origin", "by_user", "mount", "block"), **given)
    except ValueError as error:
        raise ValueError(f"{kind.LABEL} {name!r}: {error}") from error


def _submodel(start: str, data: object, *, by_user: bool) -> Submodel:
    """Parse an entry of ``[submodels]``: a config field, or a table with it and a family."""
    table = {"config": data, "family": ""} if isinstance(data, str) else data
    try:
        check_pattern(start)
        return parse_table(table, Submodel, without=("by_user",), by_user=by_user)
    except ValueError as error:
        raise ValueError(f"submodel {start!r}: {error}: expected a config field, or config and family") from error


def _mount(pattern: str, data: object) -> Mount:
    """Parse an entry of ``[blocks]``: a block's name, or a table with the name and replaced config fields."""
    fields = dict(data) if isinstance(data, dict) else {"block": data}
    block, optional = fields.pop("block", None), fields.pop("optional", False)
    if not isinstance(block, str) or not isinstance(optional, bool):
        raise ValueError(f"blocks {pattern!r}: {data!r:.60} is not a block's name, or a table with block = NAME")  # noqa: TRY004 - all of them become one PlanError
    for value in fields.values():
        if type(value) not in (str, int):
            raise ValueError(f"blocks {pattern!r}: {value!r:.60} is not an expression of config fields")
    try:
        return convert({"pattern": pattern, "block": block, "fields": fields, "optional": optional}, Mount)
    except ValueError as error:
        raise ValueError(f"blocks {pattern!r}: {error}") from error

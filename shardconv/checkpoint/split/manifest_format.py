"""The JSON form of manifests: its versions, its schema and its checksum.

| version | contents |
|---|---|
| 1 | placements, and the reason of each |
| 2 | the same; with ``dcp`` rank files have the layout of that name |
| 3 | the plan: placements, styles and units, with the rules and module overrides that they follow from; the layout of
rank files, null or missing for native; rank files store the identity of the split checkpoint in their headers |
| 4 | the same; units and rules have other names of keys |
| 5 | the same; a folder may have some of the ranks, with the checksum of a sample of the source's values |

Older versions are upgraded to the latest when they are read; fields that they do not have are empty.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

import xxhash

from shardconv.layouts.layout import DCP
from shardconv.plan.plan import PlanJson
from shardconv.plan.request import PlanRequestJson

#: The version of new manifests, and the latest version that can be read.
FORMAT_VERSION = 5

#: The first version that stores rules, and the first with the present names of their keys.
_WITH_RULES, _WITH_PRESENT_KEYS = 3, 4

#: Key of the checksum of all other keys.
CHECKSUM_KEY = "manifest_checksum"

_MODEL_RULES = {
    "at": str,
    "prefix": [str],
    "config": (dict, None),
    "defaults": {...: (str, int, bool)},
    "units": {...: dict},
    "rules": [{"pattern": str, "style": str}],
    "modules": [{"pattern": str}],
}
_RULES = {
    "family": str,
    "experts": str,
    "uncertain": str,
    "models": [_MODEL_RULES],
}
_PLACED = {
    "placement": {"dim": (int, None), "size": int, "ranks": [[(int, [int])]]},
    "style": str,
    "units": [str],
    "reason": {"origin": str, "rule": str, "fields": [str]},
}
_LAYOUT = {
    "name": str,
    "file_name": str,
    "engine": (str, None),
    "versions": (str, None),
    "has_offsets": bool,
    "tensors": [{"name": str, "members": [int], "stack": int}],
    "constants": [{"dtype": str, "shape": [int], "value": (float, int), "names": [str]}],
    "padded_to": {...: int},
}
#: A list means any number of its element, a mapping from ``...`` any keys, a tuple a choice.
_SCHEMA = {
    "tp": int,
    "ranks": ([int], None),
    "layout": (_LAYOUT, None),
    "plan": {
        "tp": int,
        "family": (str, None),
        "assumed": [str],
        "placements": [_PLACED],
        "tensors": {...: int},
        "rules": (_RULES, None),
    },
    "request": {"family": (str, None), "plan_file": ([str], None), "replicate": [str], "head_dim": (int, None)},
    "source": {
        "name": str,
        "is_folder": bool,
        "files": [{"name": str, "num_bytes": int, "header": str}],
        "index": ([str], None),
        "metadata": {...: str},
        "config": (dict, None),
        "ignore": [str],
        "derived": [str],
        "merged_adapter": (str, None),
        "dtype": (str, None),
        "sample": (str, None),
        "is_config_given": bool,
    },
    "auxiliary_files": {...: str},
    "checksums": {"stripe_bytes": int, "ranks": ([[str]], None), "identity": (str, None)},
}


class SourceFileJson(TypedDict):
    """Name, size and header of a source file."""

    name: str
    num_bytes: int
    header: str


class SourceJson(TypedDict):
    """The source, as a manifest stores it; ``index`` is a pair of name and text."""

    name: str
    is_folder: bool
    files: list[SourceFileJson]
    index: list[str] | None
    metadata: dict[str, str]
    config: dict[str, object] | None
    ignore: list[str]
    derived: list[str]
    merged_adapter: str | None
    dtype: str | None
    sample: str | None
    is_config_given: NotRequired[bool]


class ChecksumsJson(TypedDict):
    """Checksums of each rank and stripe, and the identity that follows from them."""

    algorithm: str
    stripe_bytes: int
    ranks: list[list[str]] | None
    identity: str | None


class ManifestJson(TypedDict):
    """A manifest of the latest version, without its checksum."""

    format_version: int
    created_by: str
    layout: dict[str, Any] | None
    tp: int
    ranks: list[int] | None
    plan: PlanJson
    request: PlanRequestJson
    source: SourceJson
    auxiliary_files: dict[str, str]
    checksums: ChecksumsJson
    adapters: NotRequired[list[str]]


def checked(data: Mapping[str, object]) -> ManifestJson:
    """Check the data of a manifest, and upgrade it to the latest version.

    Args:
        data: the JSON object.

    Raises:
        ValueError: if it is not a manifest of a known version, or was changed after it was written.
    """
    version = data.get("format_version")
    if type(version) is not int or version < 1:
        raise ValueError("it is not a manifest of shardconv")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"its format version is too new (got {version}, expected at most {FORMAT_VERSION}): update shardconv"
        )
    body: dict[str, Any] = {key: value for key, value in data.items() if key != CHECKSUM_KEY}
    if data.get(CHECKSUM_KEY) != checksum(body):
        raise ValueError("it was changed after it was written (its checksum differs)")
    body = {"layout": None, "ranks": None, **body}
    if body.get("dcp") is True and body["layout"] is None:  # before there was a key for layouts
        body["layout"] = DCP.to_json(())
    if version < _WITH_RULES:
        body = _upgraded(body)
    elif version < _WITH_PRESENT_KEYS:
        try:
            body = _with_renamed_keys(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("its rules have a missing key or a wrong type") from error
    if isinstance(source := body.get("source"), dict):
        # before there were sources without safetensors files, conversions, and folders with some of the ranks
        absent: dict[str, object] = {
            "derived": [], "merged_adapter": None, "dtype": None, "sample": None, "is_config_given": False,
        }  # fmt: skip
        body = {**body, "source": {**absent, **source}}
    has_types = _fits(body, _SCHEMA) and _fits(body.get("adapters", []), [str])
    if not has_types or (body["plan"]["rules"] is None) is not (version < _WITH_RULES):
        raise ValueError("one of its fields is missing or has the wrong type")
    return cast("ManifestJson", body)


def checksum(body: Mapping[str, object]) -> str:
    """The checksum of a manifest, computed without its checksum key."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def identity_of(checksums: Sequence[Sequence[str]]) -> str:
    """The checksum of all checksums of a split checkpoint, which its rank files store in their headers."""
    return xxhash.xxh3_128_hexdigest("\n".join(" ".join(rank) for rank in checksums).encode())


#: Placeholder of the identity until the checksums are known.
NO_IDENTITY = "0" * 32


def _upgraded(body: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a manifest of version 1 or 2; missing fields stay missing."""
    plan, source = body["plan"], body["source"]
    placements = [_upgraded_placement(placement) for placement in plan["rules"]]
    renamed = {"files" if key == "parts" else key: value for key, value in source.items()}
    return {
        **body,
        "layout": DCP.to_json(()) if body.get("dcp") is True else None,
        "plan": {**plan, "placements": placements, "rules": None},
        "source": {**renamed, "ignore": []},
        "auxiliary_files": body["side_files"],
        "checksums": {**body["checksums"], "identity": None},
    }


def _upgraded_placement(data: dict[str, Any]) -> dict[str, Any]:
    origin, rule, style, fields = data["reason"]
    reason = {"origin": origin, "rule": rule, "fields": fields}
    return {"placement": data["placement"], "style": style, "units": [], "reason": reason}


#: Keys of units and of rules in version 3 to those since version 4.
_RENAMED_IN_UNITS = {"copies": "replicate", "whole": "shard_if_divisible"}
_RENAMED_IN_RULES = {"parts": "segments", "part": "segment"}
_RENAMED_IN_MODULES = {"copied_input": "allreduce_input_grad", "summed_output": "allreduce_output"}


def _with_renamed_keys(body: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a manifest of version 3 to version 4: rename the keys of its rules."""
    rules = body["plan"]["rules"]
    others = {key: value for key, value in rules.items() if key != "scopes"}
    renamed = {**others, "models": [_upgraded_model(model) for model in rules["scopes"]]}
    return {**body, "plan": {**body["plan"], "rules": renamed}}


def _upgraded_model(model: dict[str, Any]) -> dict[str, Any]:
    return {
        **model,
        "units": {name: _renamed(unit, _RENAMED_IN_UNITS) for name, unit in model["units"].items()},
        "rules": [_renamed(rule, _RENAMED_IN_RULES) for rule in model["rules"]],
        "modules": [_upgraded_module(module) for module in model["modules"]],
    }


def _upgraded_module(module: Mapping[str, Any]) -> dict[str, object]:
    upgraded = _renamed(module, _RENAMED_IN_MODULES)
    if "slices" in module:
        upgraded["slices"] = {name: _renamed(one, _RENAMED_IN_RULES) for name, one in module["slices"].items()}
    return upgraded


def _renamed(table: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {names.get(key, key): value for key, value in table.items()}


def _fits(value: object, schema: object) -> bool:
    match schema:
        case tuple():
            return any(_fits(value, choice) for choice in schema)
        case [inner]:
            return isinstance(value, list) and all(_fits(item, inner) for item in value)
        case dict():
            if not isinstance(value, dict):
                return False
            if ... in schema:
                return all(_fits(item, schema[...]) for item in value.values())
            return schema.keys() <= value.keys() and all(_fits(value[key], inner) for key, inner in schema.items())
    return value is None if schema is None else type(value) is schema

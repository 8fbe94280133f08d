"""Conversion of manifests to JSON data and back; see ``manifest_format`` for the format.

A manifest is untrusted input: its sizes are checked before they are used, and no name in it leads out of its folder.
"""

from pathlib import Path

from shardconv.checkpoint.engine.geometry import geometry
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.sources.source_files import is_portable_name
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_format import (
    CHECKSUM_KEY,
    FORMAT_VERSION,
    ManifestJson,
    SourceFileJson,
    checked,
    checksum,
)
from shardconv.files.header import Header, parse_header
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest
from shardconv.plan.tp_sizes import MAX_TP

_MIN_STRIPE_BYTES = 2**12


def to_json(manifest: Manifest, created_by: str) -> dict[str, object]:
    """Convert a manifest to JSON data with a checksum.

    Args:
        manifest: the manifest.
        created_by: name and version of the program that writes it.
    """
    body: ManifestJson = {
        "format_version": FORMAT_VERSION,
        "created_by": created_by,
        "layout": None if manifest.layout == NATIVE else manifest.layout.to_json(manifest.source_tensors),
        "tp": manifest.tp,
        "ranks": None if manifest.is_complete else list(manifest.ranks),
        "plan": manifest.plan.to_json(),
        "request": manifest.request.to_json(),
        "source": {
            "name": manifest.source_name,
            "is_folder": manifest.is_folder,
            "files": [
                {"name": name, "num_bytes": header.file_bytes, "header": header.raw.decode()}
                for name, header in manifest.source_files
            ],
            "index": list(manifest.index) if manifest.index else None,
            "metadata": manifest.metadata,
            "config": manifest.config,
            "ignore": list(manifest.ignore),
            "derived": list(manifest.derived),
            "merged_adapter": manifest.merged_adapter,
            "dtype": manifest.dtype,
            "sample": manifest.sample,
        },
        "auxiliary_files": dict(manifest.auxiliary_files),
        "checksums": {
            "algorithm": "xxh3_128",
            "stripe_bytes": manifest.stripe_bytes,
            "ranks": None if manifest.checksums is None else [list(rank) for rank in manifest.checksums],
            "identity": manifest.identity,
        },
    }
    if manifest.adapters:
        body["adapters"] = list(manifest.adapters)
    if manifest.is_config_given:
        body["source"]["is_config_given"] = True
    return {**body, CHECKSUM_KEY: checksum(body)}


def from_json(data: dict[str, object]) -> Manifest:
    """Convert JSON data to a manifest: the inverse of :func:`to_json`.

    Raises:
        ValueError: if the data is not a manifest of a known version, or was changed.
    """
    body = checked(data)
    if not body["tp"] == body["plan"]["tp"] <= MAX_TP:
        raise ValueError(
            f"its number of ranks is invalid (got tp {body['tp']} and a plan for tp {body['plan']['tp']}, expected "
            f"equal values of at most {MAX_TP})"
        )
    ranks = body["ranks"]
    if ranks is not None and not (ranks and ranks == sorted({*ranks}) and 0 <= ranks[0] <= ranks[-1] < body["tp"]):
        raise ValueError(f"its ranks are not ascending ranks of {body['tp']}")
    manifest = _parse(body)
    if body["checksums"]["identity"] != manifest.identity:
        raise ValueError("its identity does not match its checksums")
    _check_tensors(manifest)
    _check_checksums(manifest)
    _check_names(manifest)
    return manifest


def _parse(body: ManifestJson) -> Manifest:
    source, checksums, plan = body["source"], body["checksums"], Plan.from_json(body["plan"])
    source_files = tuple(map(_source_file, source["files"]))
    names = dict.fromkeys(name for _, header in source_files for name in header.tensors)
    ranks = checksums["ranks"]
    return Manifest(
        plan=plan,
        request=PlanRequest.from_json(body["request"]),
        config=source["config"],
        source_name=source["name"],
        is_folder=source["is_folder"],
        source_files=source_files,
        index=_pair(source["index"]),
        metadata=source["metadata"],
        auxiliary_files=body["auxiliary_files"],
        stripe_bytes=checksums["stripe_bytes"],
        ranks=tuple(range(plan.tp) if body["ranks"] is None else body["ranks"]),
        checksums=None if ranks is None else tuple(map(tuple, ranks)),
        layout=NATIVE if body["layout"] is None else FileLayout.from_json(body["layout"], names),
        is_identified=checksums["identity"] is not None,
        ignore=tuple(source["ignore"]),
        derived=tuple(source["derived"]),
        merged_adapter=source["merged_adapter"],
        dtype=source["dtype"],
        adapters=tuple(body.get("adapters", ())),
        sample=source["sample"],
        is_config_given=source["is_config_given"],
    )


def _source_file(data: SourceFileJson) -> tuple[str, Header]:
    raw = data["header"].encode()
    data_bytes = data["num_bytes"] - 8 - len(raw)
    return data["name"], parse_header(raw, data_bytes, Path(data["name"]))


def _pair(values: list[str] | None) -> tuple[str, str] | None:
    """Name and text of the index, or None."""
    if not values:
        return None
    if len(values) != 2:
        raise ValueError("its index is not a pair of name and text")
    return values[0], values[1]


def _check_tensors(manifest: Manifest) -> None:
    """Check that plan, source files and layout fit together."""
    if manifest.plan.tensors.keys() != manifest.tensors.keys():
        raise ValueError("its plan and its source files have different tensors")
    for name, spec in manifest.tensors.items():
        geometry(manifest.plan.placement(name), spec.dtype, spec.shape)  # raises ValueError if it does not fit
    manifest.checked_for_layout()
    if manifest.stripe_bytes < _MIN_STRIPE_BYTES or (manifest.request.head_dim or 1) < 1:
        raise ValueError("its stripe_bytes or head_dim is too small")


def _check_checksums(manifest: Manifest) -> None:
    """Check that there is one checksum for each of the folder's ranks and each stripe."""
    if manifest.checksums is None:
        return
    num_bytes = sum(header.data_bytes for _, header in manifest.source_files)
    if any(len(rank) < num_bytes // manifest.stripe_bytes for rank in manifest.checksums):
        raise ValueError("it has too few checksums for its tensors")  # checked before stripes are computed
    counts = {len(manifest.checksums), *(len(rank) - len(manifest.stripes) for rank in manifest.checksums)}
    if counts != {len(manifest.ranks), 0}:
        raise ValueError("the number of its checksums does not match its tensors")


def _check_names(manifest: Manifest) -> None:
    """Check that no name leads out of the folder, and that no two files have the same name."""
    names = [name for name, _ in manifest.source_files] + ([manifest.index[0]] if manifest.index else [])
    rank_files = [*manifest.rank_files, *manifest.rank_indexes]
    for name in [*names, *rank_files, *manifest.adapters]:
        if not is_portable_name(name):
            raise ValueError(f"{name!r:.100} is not a valid file name")
    for name in manifest.auxiliary_files:
        if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
            raise ValueError(f"{name!r:.100} is not a valid file name")
    auxiliary_files = manifest.auxiliary_files
    for files in ([*names, *auxiliary_files], [MANIFEST_NAME, *rank_files, *auxiliary_files]):
        if len({*files}) != len(files):
            raise ValueError("two of its files have the same name")

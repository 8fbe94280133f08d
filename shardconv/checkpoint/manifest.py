"""The manifest, shardconv.json: what a split checkpoint needs to be verified, merged, resharded and run.

Owns what a manifest means; how it is written is manifest_format.py's. Its contents are checked like anything else from
disk: no path in it is followed out of a folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shardconv.checkpoint.copy import Stripe, cut_stripes
from shardconv.checkpoint.fileio import create
from shardconv.checkpoint.formats import refuse_sharded_state
from shardconv.checkpoint.geometry import geometry
from shardconv.checkpoint.header import Header, parse_header
from shardconv.checkpoint.layout import MANIFEST_NAME, FoundFiles, Layout, in_order, lay_out_parts, lay_out_ranks
from shardconv.checkpoint.manifest_format import (
    CHECKSUM_KEY,
    FORMAT_VERSION,
    NO_IDENTITY,
    checked,
    checksum,
    identity_of,
)
from shardconv.checkpoint.paths import hub_hint
from shardconv.checkpoint.source import Source, is_plain_name
from shardconv.errors import PlanError, SourceError, SplitCheckpointError
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest
from shardconv.plan.sizes import MAX_TP

_MIN_STRIPE_BYTES = 2**12
_MAX_MANIFEST_BYTES = 2**30


@dataclass(frozen=True)
class Manifest:
    """What is known of a split checkpoint.

    Attributes:
        plan: the placement of every tensor.
        request: what the user said about the plan.
        config: the source's config, or None.
        source_name: the name of the source's file or folder.
        is_folder: whether the source was a folder.
        parts: name and header of each of the source's files.
        index: name and text of the source's index, or None.
        metadata: what the rank files say of themselves beside the format.
        side_files: name to checksum of each side file.
        stripe_bytes: the grain of the checksums.
        checksums: for each rank the xxh3-128 of its bytes of each stripe; None where none were taken.
        layout: which tensors the rank files hold, and their names.
        is_identified: whether rank files have the identity of the split; see :attr:`identity`.
        ignore: patterns of files of the source that the user left out.
        found: the rank files of an engine that wrote them itself; None where they are as the layout has them.
    """

    plan: Plan
    request: PlanRequest
    config: dict[str, Any] | None
    source_name: str
    is_folder: bool
    parts: tuple[tuple[str, Header], ...]
    index: tuple[str, str] | None
    metadata: dict[str, str]
    side_files: Mapping[str, str]
    stripe_bytes: int
    checksums: tuple[tuple[str, ...], ...] | None = field(default=None, repr=False)
    layout: FileLayout = NATIVE
    is_identified: bool = False
    ignore: tuple[str, ...] = ()
    found: FoundFiles | None = None

    @classmethod
    def of_source(
        cls,
        source: Source,
        plan: Plan,
        request: PlanRequest,
        *,
        stripe_bytes: int,
        layout: FileLayout = NATIVE,
        checksums: bool = True,
    ) -> Self:
        """The manifest for a source that is about to be split, with ``checksums`` or without.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        return cls(
            plan=plan,
            request=request,
            config=source.config,
            source_name=source.name,
            is_folder=source.is_folder,
            parts=tuple((part.name, part.header) for part in source.parts),
            index=source.index,
            metadata=source.metadata,
            side_files=dict.fromkeys(source.side_files, ""),
            stripe_bytes=stripe_bytes,
            layout=layout,
            is_identified=checksums,
            ignore=source.ignore,
        ).checked_for_layout()

    @property
    def saved_by(self) -> str | None:
        """The engine that wrote the rank files itself, without naming their source; None for a split checkpoint."""
        return None if self.found is None else self.layout.engine

    @property
    def notes(self) -> tuple[str, ...]:
        """How such rank files may differ from the checkpoint that the engine loaded."""
        return () if self.found is None else self.found.notes

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return self.plan.tp

    @cached_property
    def source_tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the source's order."""
        headers = (header for _, header in self.parts)
        return {name: TensorSpec(info.dtype, info.shape) for header in headers for name, info in header.tensors.items()}

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the order of the rank files."""
        return in_order(self.source_tensors)

    @cached_property
    def stripes(self) -> list[Stripe]:
        """The stripes of the full tensors."""
        sizes = [shards.geometry.num_bytes for shards in self.part_layout.shards]
        return cut_stripes(sizes, self.stripe_bytes)

    @cached_property
    def identity(self) -> str | None:
        """The digest of all checksums, which each rank file has in its header: a file of another split is found by it.

        Zeros as long as the checksums are not known, and None where none are taken, as in formats 1 and 2.
        """
        if not self.is_identified:
            return None
        return identity_of(self.checksums) if self.checksums is not None else NO_IDENTITY

    @cached_property
    def rank_layout(self) -> Layout:
        """The files of the ranks, as they have to be."""
        if self.found is not None:
            return self.found.layout
        return lay_out_ranks(self.tensors, self.plan, self.metadata, layout=self.layout, identity=self.identity)

    @cached_property
    def part_layout(self) -> Layout:
        """The files of the source, as they were."""
        return lay_out_parts([header for _, header in self.parts], self.tensors)

    @property
    def rank_files(self) -> list[str]:
        """The names of the files of the ranks."""
        if self.found is not None:
            return list(self.found.names)
        return [self.layout.rank_file(rank, self.tp) for rank in range(self.tp)]

    def rank_paths(self, folder: Path) -> list[Path]:
        """The files of the ranks in a folder."""
        return [folder / name for name in self.rank_files]

    def heads_with(self, checksums: tuple[tuple[str, ...], ...]) -> list[bytes]:
        """What the rank files begin with when their checksums are known."""
        return replace(self, checksums=checksums).rank_layout.heads

    def written(self, checksums: tuple[tuple[str, ...], ...] | None, side_files: Mapping[str, str]) -> Self:
        """The manifest with what is known once the files are written."""
        return replace(self, checksums=checksums, side_files=side_files)

    def with_plan(self, plan: Plan, request: PlanRequest, layout: FileLayout, *, checksums: bool) -> Self:
        """The manifest of the same source for another plan and layout, not yet written, with ``checksums`` or without.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        changed = replace(self, plan=plan, request=request, layout=layout, checksums=None, is_identified=checksums)
        changed = replace(changed, found=None)
        return changed.checked_for_layout()

    def checked_for_layout(self) -> Self:
        """The manifest itself.

        Raises:
            PlanError: if the layout does not fit the tensors or the plan.
        """
        self.layout.check(self.tensors, self.plan)
        if self.layout.changed:
            _ = self.rank_layout  # refuses shards that do not form a tensor
        return self

    def to_json(self, created_by: str) -> dict[str, Any]:
        """Plain data, with a checksum of its own."""
        body = {
            "format_version": FORMAT_VERSION,
            "created_by": created_by,
            "layout": None if self.layout == NATIVE else self.layout.to_json(self.source_tensors),
            "tp": self.tp,
            "plan": self.plan.to_json(),
            "request": self.request.to_json(),
            "source": {
                "name": self.source_name,
                "is_folder": self.is_folder,
                "files": [
                    {"name": name, "num_bytes": header.file_bytes, "header": header.raw.decode()}
                    for name, header in self.parts
                ],
                "index": list(self.index) if self.index else None,
                "metadata": self.metadata,
                "config": self.config,
                "ignore": list(self.ignore),
            },
            "auxiliary_files": dict(self.side_files),
            "checksums": {
                "algorithm": "xxh3_128",
                "stripe_bytes": self.stripe_bytes,
                "ranks": self.checksums,
                "identity": self.identity,
            },
        }
        return {**body, CHECKSUM_KEY: checksum(body)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is no manifest of this version, or was changed.
        """
        data = checked(data)
        if not data["tp"] == data["plan"]["tp"] <= MAX_TP:
            raise ValueError(
                f"it is for {data['tp']} ranks, its plan for {data['plan']['tp']}, and there are at most {MAX_TP}"
            )
        source, checksums = data["source"], data["checksums"]
        ranks = checksums["ranks"]
        parts = tuple(_part(part) for part in source["files"])
        names = dict.fromkeys(name for _, header in parts for name in header.tensors)
        manifest = cls(
            plan=Plan.from_json(data["plan"]),
            request=PlanRequest.from_json(data["request"]),
            config=source["config"],
            source_name=source["name"],
            is_folder=source["is_folder"],
            parts=parts,
            index=tuple(source["index"]) if source["index"] else None,
            metadata=source["metadata"],
            side_files=data["auxiliary_files"],
            stripe_bytes=checksums["stripe_bytes"],
            checksums=None if ranks is None else tuple(map(tuple, ranks)),
            layout=NATIVE if data["layout"] is None else FileLayout.from_json(data["layout"], names),
            is_identified=checksums["identity"] is not None,
            ignore=tuple(source["ignore"]),
        )
        if checksums["identity"] != manifest.identity:
            raise ValueError("its identity is not that of its checksums")
        manifest._check()
        return manifest

    def _check(self) -> None:
        if self.plan.tensors.keys() != self.tensors.keys():
            raise ValueError("its plan is not for its tensors")
        for name, spec in self.tensors.items():
            geometry(self.plan.placement(name), spec.dtype, spec.shape)  # refuses what does not fit
        self.checked_for_layout()
        if self.stripe_bytes < _MIN_STRIPE_BYTES or (self.request.head_dim or 1) < 1:
            raise ValueError("its stripes or heads are empty")
        if any(pair is not None and len(pair) != 2 for pair in (self.index, self.request.plan_file)):
            raise ValueError("its index and its plan file are not a name and a text each")
        if self.checksums is not None:
            num_bytes = sum(header.data_bytes for _, header in self.parts)
            if any(len(rank) < num_bytes // self.stripe_bytes for rank in self.checksums):
                raise ValueError("it has fewer checksums than its tensors need")  # before anything is as many
            counts = {len(self.checksums), *(len(rank) - len(self.stripes) for rank in self.checksums)}
            if counts != {self.tp, 0}:
                raise ValueError("its checksums are not for its tensors")
        self._check_names()

    def _check_names(self) -> None:
        """Check that no name leads out of a folder, and that no two files would overwrite each other."""
        names = [name for name, _ in self.parts] + ([self.index[0]] if self.index else [])
        for name in [*names, *self.rank_files]:
            if not is_plain_name(name):
                raise ValueError(f"{name!r:.100} is no name of a file in its folder")
        for name in self.side_files:
            if not all(is_plain_name(part) for part in name.split("/")):
                raise ValueError(f"{name!r:.100} is no name of a file in its folder")
        ours = [MANIFEST_NAME, *self.rank_files, *self.side_files]
        if len({*names, *self.side_files}) != len(names) + len(self.side_files) or len({*ours}) != len(ours):
            raise ValueError("two of its files have one name")


def _part(data: dict[str, Any]) -> tuple[str, Header]:
    raw = data["header"].encode()
    data_bytes = data["num_bytes"] - 8 - len(raw)
    return data["name"], parse_header(raw, data_bytes, Path(data["name"]))


def is_split(path: Path) -> bool:
    """Whether a path is the folder of a split checkpoint."""
    return (path / MANIFEST_NAME).exists()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a split checkpoint.

    Raises:
        SplitCheckpointError: if the folder is no split checkpoint, or its manifest is not valid.
    """
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise SplitCheckpointError(f"{folder}: there is no such folder{hub_hint(folder)}")
    try:
        if not path.is_file() and path.exists():
            raise ValueError("it is not a regular file")  # to read it could wait for ever
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        data = _parsed(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")  # noqa: TRY004 - all become one error
        return Manifest.from_json(data)
    except FileNotFoundError as error:
        _refuse_sharded_state(folder)
        raise SplitCheckpointError(
            f"{folder}: is not a split checkpoint (no {MANIFEST_NAME}): make one with shardconv split {folder} --tp N"
        ) from error
    except OSError as error:
        raise SplitCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SourceError, PlanError) as error:
        raise SplitCheckpointError(f"{path}: cannot be used: {error}") from error


def _refuse_sharded_state(folder: Path) -> None:
    try:
        refuse_sharded_state(folder, [path.name for path in folder.glob("*.safetensors")])
    except SourceError as error:
        raise SplitCheckpointError(str(error)) from error


def _parsed(text: bytes) -> Any:  # noqa: ANN401 - anything JSON holds
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is truncated or damaged: copy it again, or split the source again ({error})") from error


def write_manifest(manifest: Manifest, folder: Path, created_by: str, *, mode: int) -> None:
    """Write a manifest into a folder, with the permissions ``mode`` before the umask."""
    text = json.dumps(manifest.to_json(created_by), separators=(",", ":"))
    with create(folder / MANIFEST_NAME, mode) as file:
        file.write(text.encode())

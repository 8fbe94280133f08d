"""The manifest, shardconv.json: the plan, source headers and checksums that verify, merge, reshard and run need.

``manifest_format`` defines its JSON form. A manifest is untrusted input: no path in it is followed out of its folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shardconv.checkpoint.copy import Stripe, split_into_stripes
from shardconv.checkpoint.fileio import create
from shardconv.checkpoint.formats import refuse_sharded_state
from shardconv.checkpoint.geometry import geometry
from shardconv.checkpoint.header import Header, parse_header
from shardconv.checkpoint.layout import (
    MANIFEST_NAME,
    ExplicitFiles,
    Layout,
    in_file_order,
    lay_out_ranks,
    lay_out_source,
)
from shardconv.checkpoint.manifest_format import (
    CHECKSUM_KEY,
    FORMAT_VERSION,
    NO_IDENTITY,
    checked,
    checksum,
    identity_of,
)
from shardconv.checkpoint.paths import hub_hint
from shardconv.checkpoint.source import Source, is_portable_name
from shardconv.errors import PlanError, SourceError, SplitCheckpointError
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest
from shardconv.plan.tp_sizes import MAX_TP

_MIN_STRIPE_BYTES = 2**12
_MAX_MANIFEST_BYTES = 2**30


@dataclass(frozen=True)
class Manifest:
    """Description of a split checkpoint.

    Attributes:
        plan: the placement of every tensor.
        request: the user's options for the plan.
        config: the source's config, or None.
        source_name: the name of the source's file or folder.
        is_folder: whether the source was a folder.
        source_files: name and header of each source file.
        index: name and text of the source's index, or None.
        metadata: metadata of the rank files, except the format.
        auxiliary_files: name to checksum of each auxiliary file.
        stripe_bytes: bytes of the full tensors per checksum.
        checksums: for each rank the xxh3-128 of its bytes of each stripe, or None.
        layout: the tensors of the rank files, and the names of the files.
        is_identified: whether rank files store the identity of the split checkpoint; see :attr:`identity`.
        ignore: patterns of files of the source that the user left out.
        explicit_files: rank files that do not follow from ``layout``, or None.
    """

    plan: Plan
    request: PlanRequest
    config: dict[str, Any] | None
    source_name: str
    is_folder: bool
    source_files: tuple[tuple[str, Header], ...]
    index: tuple[str, str] | None
    metadata: dict[str, str]
    auxiliary_files: Mapping[str, str]
    stripe_bytes: int
    checksums: tuple[tuple[str, ...], ...] | None = field(default=None, repr=False)
    layout: FileLayout = NATIVE
    is_identified: bool = False
    ignore: tuple[str, ...] = ()
    explicit_files: ExplicitFiles | None = None

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
        """The manifest of a split that is not yet written, with or without ``checksums``.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        return cls(
            plan=plan,
            request=request,
            config=source.config,
            source_name=source.name,
            is_folder=source.is_folder,
            source_files=tuple((file.name, file.header) for file in source.files),
            index=source.index,
            metadata=source.metadata,
            auxiliary_files=dict.fromkeys(source.auxiliary_files, ""),
            stripe_bytes=stripe_bytes,
            layout=layout,
            is_identified=checksums,
            ignore=source.ignore,
        ).checked_for_layout()

    @property
    def saved_by(self) -> str | None:
        """The engine that wrote the rank files; None if shardconv did."""
        return None if self.explicit_files is None else self.layout.engine

    @property
    def notes(self) -> tuple[str, ...]:
        """Possible differences between rank files of an engine and the checkpoint that it loaded."""
        return () if self.explicit_files is None else self.explicit_files.notes

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return self.plan.tp

    @cached_property
    def source_tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the source's order."""
        headers = (header for _, header in self.source_files)
        return {name: TensorSpec(info.dtype, info.shape) for header in headers for name, info in header.tensors.items()}

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the order of the rank files."""
        return in_file_order(self.source_tensors)

    @cached_property
    def stripes(self) -> list[Stripe]:
        """The stripes of the full tensors."""
        sizes = [shards.geometry.num_bytes for shards in self.source_layout.shards]
        return split_into_stripes(sizes, self.stripe_bytes)

    @cached_property
    def identity(self) -> str | None:
        """The digest of all checksums. Each rank file stores it in its header, so files of another split are detected.

        Zeros while the checksums are unknown; None without checksums, and in formats 1 and 2.
        """
        if not self.is_identified:
            return None
        return identity_of(self.checksums) if self.checksums is not None else NO_IDENTITY

    @cached_property
    def rank_layout(self) -> Layout:
        """The expected rank files."""
        if self.explicit_files is not None:
            return self.explicit_files.layout
        return lay_out_ranks(self.tensors, self.plan, self.metadata, layout=self.layout, identity=self.identity)

    @cached_property
    def source_layout(self) -> Layout:
        """The source files."""
        return lay_out_source([header for _, header in self.source_files], self.tensors)

    @property
    def rank_files(self) -> list[str]:
        """The names of the rank files."""
        if self.explicit_files is not None:
            return list(self.explicit_files.names)
        return [self.layout.rank_file(rank, self.tp) for rank in range(self.tp)]

    def rank_paths(self, folder: Path) -> list[Path]:
        """The paths of the rank files in a folder."""
        return [folder / name for name in self.rank_files]

    def prefixes_with(self, checksums: tuple[tuple[str, ...], ...]) -> list[bytes]:
        """The bytes of each rank file before its shards, with the identity of these checksums."""
        return replace(self, checksums=checksums).rank_layout.prefixes

    def written(self, checksums: tuple[tuple[str, ...], ...] | None, auxiliary_files: Mapping[str, str]) -> Self:
        """The manifest after its files are written, with their checksums."""
        return replace(self, checksums=checksums, auxiliary_files=auxiliary_files)

    def with_plan(self, plan: Plan, request: PlanRequest, layout: FileLayout, *, checksums: bool) -> Self:
        """The manifest of the same source for another plan and layout, not yet written, with or without ``checksums``.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        changed = replace(self, plan=plan, request=request, layout=layout, checksums=None, is_identified=checksums)
        changed = replace(changed, explicit_files=None)
        return changed.checked_for_layout()

    def checked_for_layout(self) -> Self:
        """Check the layout, and return the manifest itself.

        Raises:
            PlanError: if the layout does not fit the tensors or the plan.
        """
        self.layout.check(self.tensors, self.plan)
        if self.layout.changed:
            _ = self.rank_layout  # raises PlanError if shards do not form a tensor
        return self

    def to_json(self, created_by: str) -> dict[str, Any]:
        """Convert to JSON data with a checksum."""
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
                    for name, header in self.source_files
                ],
                "index": list(self.index) if self.index else None,
                "metadata": self.metadata,
                "config": self.config,
                "ignore": list(self.ignore),
            },
            "auxiliary_files": dict(self.auxiliary_files),
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
            ValueError: if the data is not a manifest of a known version, or was changed.
        """
        data = checked(data)
        if not data["tp"] == data["plan"]["tp"] <= MAX_TP:
            raise ValueError(
                f"its number of ranks is invalid (got tp {data['tp']} and a plan for tp {data['plan']['tp']}, expected "
                f"equal values of at most {MAX_TP})"
            )
        source, checksums = data["source"], data["checksums"]
        ranks = checksums["ranks"]
        source_files = tuple(map(_source_file, source["files"]))
        names = dict.fromkeys(name for _, header in source_files for name in header.tensors)
        manifest = cls(
            plan=Plan.from_json(data["plan"]),
            request=PlanRequest.from_json(data["request"]),
            config=source["config"],
            source_name=source["name"],
            is_folder=source["is_folder"],
            source_files=source_files,
            index=tuple(source["index"]) if source["index"] else None,
            metadata=source["metadata"],
            auxiliary_files=data["auxiliary_files"],
            stripe_bytes=checksums["stripe_bytes"],
            checksums=None if ranks is None else tuple(map(tuple, ranks)),
            layout=NATIVE if data["layout"] is None else FileLayout.from_json(data["layout"], names),
            is_identified=checksums["identity"] is not None,
            ignore=tuple(source["ignore"]),
        )
        if checksums["identity"] != manifest.identity:
            raise ValueError("its identity does not match its checksums")
        manifest._check()
        return manifest

    def _check(self) -> None:
        if self.plan.tensors.keys() != self.tensors.keys():
            raise ValueError("its plan and its source files have different tensors")
        for name, spec in self.tensors.items():
            geometry(self.plan.placement(name), spec.dtype, spec.shape)  # raises ValueError if it does not fit
        self.checked_for_layout()
        if self.stripe_bytes < _MIN_STRIPE_BYTES or (self.request.head_dim or 1) < 1:
            raise ValueError("its stripe_bytes or head_dim is too small")
        if any(pair is not None and len(pair) != 2 for pair in (self.index, self.request.plan_file)):
            raise ValueError("its index or plan file is not a pair of name and text")
        if self.checksums is not None:
            num_bytes = sum(header.data_bytes for _, header in self.source_files)
            if any(len(rank) < num_bytes // self.stripe_bytes for rank in self.checksums):
                raise ValueError("it has too few checksums for its tensors")  # checked before stripes are computed
            counts = {len(self.checksums), *(len(rank) - len(self.stripes) for rank in self.checksums)}
            if counts != {self.tp, 0}:
                raise ValueError("the number of its checksums does not match its tensors")
        self._check_names()

    def _check_names(self) -> None:
        """Check that no name leads out of the folder, and that no two files have the same name."""
        names = [name for name, _ in self.source_files] + ([self.index[0]] if self.index else [])
        for name in [*names, *self.rank_files]:
            if not is_portable_name(name):
                raise ValueError(f"{name!r:.100} is not a valid file name")
        for name in self.auxiliary_files:
            if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
                raise ValueError(f"{name!r:.100} is not a valid file name")
        for files in ([*names, *self.auxiliary_files], [MANIFEST_NAME, *self.rank_files, *self.auxiliary_files]):
            if len({*files}) != len(files):
                raise ValueError("two of its files have the same name")


def _source_file(data: dict[str, Any]) -> tuple[str, Header]:
    raw = data["header"].encode()
    data_bytes = data["num_bytes"] - 8 - len(raw)
    return data["name"], parse_header(raw, data_bytes, Path(data["name"]))


def is_split(path: Path) -> bool:
    """Whether a path is the folder of a split checkpoint."""
    return (path / MANIFEST_NAME).exists()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a split checkpoint.

    Raises:
        SplitCheckpointError: if the folder is not a split checkpoint, or its manifest is not valid.
    """
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise SplitCheckpointError(f"{folder}: does not exist{hub_hint(folder)}")
    try:
        if not path.is_file() and path.exists():
            raise ValueError("it is not a regular file")  # reading a pipe could block forever
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        data = _parsed(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004 - all become one error
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

"""The manifest of a split checkpoint: the plan, source headers and checksums that verify, merge, reshard and run need.

``manifest_file`` reads, checks and writes it. A padded checkpoint also has a manifest, in a file of another name. Its
only rank has the padded tensors, in files with the names of the source files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

import xxhash
from msgspec import field
from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Stripes, split_into_stripes
from shardconv.checkpoint.engine.layout import (
    ADAPTERS,
    IDENTITY_KEY,
    MANIFEST_NAME,
    PADDING_NAME,
    Layout,
    in_file_order,
    lay_out_padded,
    lay_out_ranks,
)
from shardconv.checkpoint.sources.source import Source
from shardconv.files.containers.safetensors import Header, build_index, num_bytes
from shardconv.files.folder import AnyPath, Compressed
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest
from shardconv.plan.stages import as_option as stages_option
from shardconv.support.errors import option
from shardconv.support.structs import Data

#: Placeholder of the identity until the checksums are known.
NO_IDENTITY = "0" * 32


class Manifest(Data, frozen=True, kw_only=True, dict=True, tag_field="format_version", tag=1):
    """Description of a split checkpoint, in a folder with all ranks, or with some of them.

    Its fields are the keys of shardconv.json. A change of them, or of the meaning of an existing style, unit or
    override, needs a new version of the format, its tag.

    Attributes:
        plan: the placement of every tensor.
        request: the user's options for the plan.
        config_text: the source's config as JSON, or None; as text, because configs may have values like Infinity.
        source_name: the name of the source's file or folder.
        is_folder: whether the source was a folder.
        source_files: name and header of each source file.
        index: name and compressed text of the source's index, or None.
        metadata: metadata of the rank files, except the format.
        auxiliary_files: name to checksum of each auxiliary file.
        stripe_bytes: bytes of the full tensors per checksum.
        ranks: the ranks whose files the folder has, in order. ``checksums``, and shards in ``rank_layout``, are in this
            order.
        checksums: for each of ``ranks`` the xxh3-128 of its bytes of each stripe, or None.
        layout: the tensors of the rank files, and the names of the files.
        is_identified: whether rank files store the identity of the split checkpoint; see :attr:`identity`.
        ignore: patterns of files of the source that the user left out.
        derived: the reasons why a merge does not restore the files that were split, one phrase each.
        merged_adapter: name of the adapter that was merged into the weights; None without one.
        dtype: the dtype that floating-point tensors were converted to, such as "bf16"; None if they were not.
        adapters: names of the adapters that were split with it, each a split checkpoint in a folder of its own.
        original_config: text of the source's config.json in the manifest of a padded checkpoint; None for a split
            checkpoint.
        sample: in a folder with some ranks, the checksum of a sample of the source's values, see
            :func:`~shardconv.checkpoint.sources.stored_tensors.sample_checksum`.
        is_config_given: whether the user passed the config, which replaces the source's.
        created_by: name and version of the program that wrote it.
    """

    created_by: str = ""
    plan: Plan
    request: PlanRequest
    config_text: str | None = field(name="config")
    source_name: str
    is_folder: bool
    source_files: tuple[tuple[str, Header], ...]
    index: tuple[str, Compressed] | None
    metadata: dict[str, str]
    auxiliary_files: Mapping[str, str]
    stripe_bytes: int
    ranks: tuple[int, ...]
    checksums: tuple[tuple[str, ...], ...] | None = None
    layout: FileLayout = NATIVE
    is_identified: bool = False
    ignore: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    merged_adapter: str | None = None
    dtype: str | None = None
    adapters: tuple[str, ...] = ()
    original_config: str | None = None
    sample: str | None = None
    is_config_given: bool = False

    @classmethod
    def of_source(
        cls,
        source: Source,
        plan: Plan,
        request: PlanRequest,
        *,
        layout: FileLayout = NATIVE,
        checksums: bool = True,
        adapters: tuple[str, ...] = (),
        ranks: tuple[int, ...] | None = None,
    ) -> Self:
        """The manifest of a split that is not yet written, with or without ``checksums``; None for all ``ranks``.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        return cls(
            plan=plan.stored(),
            request=request,
            config_text=config_text(source.config),
            source_name=source.name.encode(errors="replace").decode(),
            is_folder=source.is_folder,
            source_files=tuple((file.name, file.header) for file in source.files),
            index=source.index,
            metadata=source.metadata,
            auxiliary_files=dict.fromkeys(source.auxiliary_names, ""),
            stripe_bytes=STRIPE_BYTES,
            ranks=tuple(range(plan.num_ranks)) if ranks is None else ranks,
            layout=layout,
            is_identified=checksums,
            ignore=source.ignore,
            derived=source.derived,
            merged_adapter=source.merged_adapter,
            dtype=source.dtype,
            adapters=adapters,
            is_config_given=source.is_config_given,
        ).checked_for_layout()

    @cached_property
    def config(self) -> dict[str, object] | None:
        """The source's config, or None."""
        config: dict[str, object] | None = None if self.config_text is None else json.loads(self.config_text)
        return config

    @property
    def file_name(self) -> str:
        """The name of the file that stores it."""
        return PADDING_NAME if self.is_padded else MANIFEST_NAME

    @property
    def is_padded(self) -> bool:
        """Whether it describes a padded checkpoint, which stores the config of its source."""
        return self.original_config is not None

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.plan.tp

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all pipeline stages."""
        return self.plan.num_ranks

    @property
    def size_options(self) -> str:
        """The options of ``split`` for as many ranks, for messages."""
        stages = self.plan.stages
        stages_text = "" if stages is None else f" {stages_option(stages.num_layers)}"
        ep = f" {option(ep=self.plan.ep)}" if self.plan.ep > 1 else ""
        return f"{option(tp=self.tp)}{ep}{stages_text}"

    @property
    def is_complete(self) -> bool:
        """Whether the folder has all ranks."""
        return self.ranks == tuple(range(self.num_ranks))

    @property
    def shared(self) -> "Manifest":
        """The fields that all folders of a split share."""
        return self if self.is_complete else replace(self, ranks=(), checksums=None, source_name="")

    @cached_property
    def source_tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the source's order."""
        return {name: spec for _, header in self.source_files for name, spec in header.specs.items()}

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Name to dtype and full shape of every tensor, in the order of the rank files."""
        return in_file_order(self.source_tensors)

    @cached_property
    def stripes(self) -> Stripes:
        """The stripes of the full tensors."""
        return split_into_stripes([num_bytes(*spec[:2]) for spec in self.tensors.values()], self.stripe_bytes)

    @cached_property
    def identity(self) -> str | None:
        """The checksum of all checksums, which rank files store in their headers, so that files of others are detected.

        Folders with some of the ranks have one each, as no host has the checksums of all ranks. Zeros while the
        checksums are unknown; None without checksums, and for rank files that were written to a URL.
        """
        if not self.is_identified:
            return None
        return NO_IDENTITY if self.checksums is None else identity_of(self.checksums)

    @cached_property
    def rank_layout(self) -> Layout:
        """The expected rank files."""
        if self.is_padded:
            return lay_out_padded([header for _, header in self.source_files], self.tensors, self.plan)
        ranks = None if self.is_complete else self.ranks
        return lay_out_ranks(
            self.tensors, self.plan, self.metadata, layout=self.layout, identity=self.identity, ranks=ranks
        )

    @property
    def files_per_rank(self) -> tuple[int, ...]:
        """For each rank of the folder the number of its files."""
        is_one = self.layout.max_file_bytes is None and not self.is_padded
        return (1,) * len(self.ranks) if is_one else self.rank_layout.files_per_rank

    @property
    def rank_files(self) -> list[str]:
        """The names of the rank files."""
        if self.is_padded:
            return [name for name, _ in self.source_files]
        counts = zip(self.ranks, self.files_per_rank, strict=True)
        return [self._rank_file(rank, file, count) for rank, count in counts for file in range(count)]

    def _rank_file(self, rank: int, file: int = 0, count: int = 1) -> str:
        """The name of one of the ``count`` files of a rank."""
        return self.layout.rank_file(rank, self.plan.ranks_per_stage, file, count, self.plan.pp)

    @property
    def rank_indexes(self) -> dict[str, str]:
        """Name to text of the index of the files of each rank with several; none for engines."""
        if max(self.files_per_rank) == 1 or self.layout.engine is not None or self.is_padded:
            return {}
        layout, names, indexes = self.rank_layout, self.rank_files, {}
        several = [(at, rank) for at, rank in enumerate(self.ranks) if layout.files_per_rank[at] > 1]
        for at, rank in several:
            files = zip(names[layout.file_range(at)], layout.headers[layout.file_range(at)], strict=True)
            indexes[f"{self._rank_file(rank)}.index.json"] = build_index(files)
        return indexes

    def adapter_folders(self, folder: AnyPath) -> dict[str, AnyPath]:
        """Name to folder of each adapter of the split checkpoint in a folder."""
        return {name: folder / ADAPTERS / name for name in self.adapters}

    def rank_paths(self, folder: AnyPath) -> list[AnyPath]:
        """The paths of the rank files in a folder."""
        return [folder / name for name in self.rank_files]

    def with_ranks(self, ranks: tuple[int, ...]) -> "Manifest":
        """The manifest of a folder with these ranks, not yet written."""
        return self if ranks == self.ranks else replace(self, ranks=ranks)

    def prefixes_with(self, checksums: tuple[tuple[str, ...], ...]) -> Iterator[bytes]:
        """Yield the bytes of each rank file before its shards, with the identity of all checksums of the folder."""
        pairs = (f'"{IDENTITY_KEY}":"{one.identity}"' for one in (self, replace(self, checksums=checksums)))
        unknown, known = (pair.encode() for pair in pairs)
        yield from (prefix.replace(unknown, known, 1) for prefix in self.rank_layout.prefixes)

    def written(self, checksums: tuple[tuple[str, ...], ...] | None, auxiliary_files: Mapping[str, str]) -> Self:
        """The manifest after its files are written, with their checksums."""
        return replace(self, checksums=checksums, auxiliary_files=auxiliary_files)

    def with_plan(self, plan: Plan, request: PlanRequest, layout: FileLayout, *, checksums: bool) -> Self:
        """The manifest of the same source for another plan and layout, not yet written, with or without ``checksums``.

        Raises:
            PlanError: as :meth:`checked_for_layout`.
        """
        changed = replace(
            self,
            plan=plan.stored(),
            request=request,
            layout=layout,
            is_identified=checksums,
            ranks=tuple(range(plan.num_ranks)),
            checksums=None,
            sample=None,
        )
        return changed.checked_for_layout()

    def checked_for_layout(self) -> Self:
        """Check the layout, and return the manifest itself.

        Raises:
            PlanError: if the layout does not fit the tensors or the plan.
        """
        if self.layout != NATIVE:
            self.layout.check(self.tensors, self.plan)
        if self.layout.changed:
            _ = self.rank_layout  # raises PlanError if shards do not form a tensor
        return self


def config_text(config: Mapping[str, object] | None) -> str | None:
    """A config as a manifest stores it."""
    return None if config is None else json.dumps(config)


def identity_of(checksums: Sequence[Sequence[str]]) -> str:
    """The checksum of all checksums of a split checkpoint, which its rank files store in their headers."""
    return xxhash.xxh3_128_hexdigest("\n".join(" ".join(rank) for rank in checksums).encode())

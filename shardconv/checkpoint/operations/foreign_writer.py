"""Write a source as files of another tool, without a manifest.

Everything in the files is copied as a tensor: tensors of the other tool, stored in the source or computed from it, and
the literal bytes between them, such as headers; or each file is one tensor, a ``Concatenation`` of ranges of others. So
journal, resume and uploads work as for rank files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Shards, split_into_stripes
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.output.job import Job
from shardconv.checkpoint.output.writer import CheckpointWriter, Weights
from shardconv.checkpoint.sources.planning import PlannedSource
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import open_tensors
from shardconv.checkpoint.sources.transforms import Concatenation, Transforms
from shardconv.files.folder import AnyPath, permissions
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.plan.plan import Plan, TensorSpec


class NewFile(NamedTuple):
    """A file that is written: its name, its bytes, and offset to literal bytes of everything but tensors."""

    name: str
    size: int
    literals: Mapping[int, bytes]


class ForeignFiles(Struct, frozen=True):
    """Files of another tool that are written from a source.

    Attributes:
        files: the files with tensors, one per rank.
        shards: name to the positions of the shards of each tensor in the files.
        tensors: name to dtype and full shape.
        layers: layers of transforms to tensors that are not stored in the source in this form.
        texts: name to contents of further files.
        others: further files that are not texts.
    """

    files: Sequence[NewFile]
    shards: Mapping[str, Shards]
    tensors: Mapping[str, TensorSpec]
    layers: Sequence[Transforms]
    texts: Mapping[str, str]
    others: Sequence[NewFile] = ()

    @classmethod
    def of_contents(
        cls,
        files: Mapping[str, Concatenation],
        others: Mapping[str, Concatenation],
        layers: Sequence[Transforms],
        texts: Mapping[str, str],
    ) -> Self:
        """Files that are one tensor of bytes each.

        Args:
            files: name to contents of the files with tensors, one per rank.
            others: name to contents of further files that are not texts.
            layers: layers of transforms to the tensors of which ``files`` have ranges.
            texts: name to contents of further files.
        """
        contents = {**files, **others}
        sizes = {name: one.size for name, one in contents.items()}
        new = [NewFile(name, size, {}) for name, size in sizes.items()]
        return cls(
            files=new[: len(files)],
            shards={name: Shards(unsharded(size), (at,), (0,)) for at, (name, size) in enumerate(sizes.items())},
            tensors={name: TensorSpec("U8", (size,)) for name, size in sizes.items()},
            layers=[*layers, contents],
            texts=texts,
            others=new[len(files) :],
        )

    @property
    def all_files(self) -> list[NewFile]:
        """All files that are not texts."""
        return [*self.files, *self.others]

    @property
    def rank_bytes(self) -> list[int]:
        """For each rank the bytes of its file."""
        return [file.size for file in self.files]


class ForeignLayout(Protocol):
    """A layout of another tool, with the options of a split for it."""

    @property
    def name(self) -> str:
        """The name of the layout."""

    @property
    def settings(self) -> Job:
        """The options, by their names in a job."""

    def plan_tp(self, tp: int) -> int:
        """The number of ranks of the plan, for ``tp`` files."""

    def check(self, planned: PlannedSource, tp: int) -> None:
        """Check the options that do not need a plan.

        Raises:
            PlanError: if the layout does not support the model.
            UsageError: if an option does not apply to it.
        """

    def lay_out(self, planned: PlannedSource, plan: Plan) -> ForeignFiles:
        """Lay out the files of a source that :meth:`check` accepts.

        Raises:
            PlanError: if the layout cannot express a tensor, its placement, or the config.
        """


class _Copied(NamedTuple):
    """A tensor that is copied, and its positions in the files."""

    name: str
    spec: TensorSpec
    shards: Shards


def write_foreign(
    writer: CheckpointWriter, *, source: Source, files: ForeignFiles, settings: Job, read: Iterable[AnyPath]
) -> int:
    """Write the files, and the auxiliary files of the source.

    Args:
        writer: the writer of the checkpoint.
        source: the source.
        files: the files.
        settings: the command and its options.
        read: all files that the result follows from.

    Returns:
        Bytes of full tensors that an interrupted run had written.

    Raises:
        SourceError: if the source changes.
        OutputError: if the destination exists, is in use, or has too little free space.
    """
    literals = dict(_literals(files))
    copied = sorted(_copied(files, literals), key=lambda one: (one.shards.offsets[0], one.shards.files[0]))
    stored = source.stored_as_ranges
    for layer in (*files.layers, literals):
        stored = stored.with_layer(layer)
    source = replace(source, converted_from=stored)
    reader, inputs = open_tensors(source, {name: spec for name, spec, _ in copied}, None)
    shards = [one.shards for one in copied]
    stripes = split_into_stripes([one.geometry.num_bytes for one in shards], STRIPE_BYTES)
    auxiliary = writer.auxiliary
    kept = {name: path for name, path in auxiliary.copied.items() if name not in files.texts}
    writer = replace(writer, auxiliary=replace(auxiliary, copied=kept))
    names = [file.name for file in files.all_files]
    sizes = [file.size for file in files.all_files]
    weights = Weights(names, [b""] * len(names), sizes, shards, stripes)
    config = source.auxiliary_files.get(CONFIG_NAME)
    mode = 0o666 if config is None else permissions([config])
    with writer.writing(reader, inputs, weights, settings, read) as staged:
        for name, text in files.texts.items():
            staged.write(name, text, mode)
    return staged.resumed_bytes


def _literals(files: ForeignFiles) -> Iterator[tuple[str, Concatenation]]:
    for file in files.all_files:
        yield from ((_name(file, at), Concatenation.of_parts([data])) for at, data in file.literals.items())


def _name(file: NewFile, offset: int) -> str:
    """A name that no tensor has."""
    return f"{file.name}@{offset}"


def _copied(files: ForeignFiles, literals: Mapping[str, Concatenation]) -> Iterator[_Copied]:
    """Yield all tensors, and the literal bytes as tensors."""
    for name, shards in files.shards.items():
        yield _Copied(name, files.tensors[name], shards)
    for number, file in enumerate(files.all_files):
        for at in file.literals:
            size = literals[_name(file, at)].size
            yield _Copied(_name(file, at), TensorSpec("U8", (size,)), Shards(unsharded(size), (number,), (at,)))

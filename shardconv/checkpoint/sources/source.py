"""A source: a checkpoint that can be split, and where its files store its tensors."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import unsharded
from shardconv.checkpoint.engine.layout import lay_out_source
from shardconv.checkpoint.sources.transforms import Concatenation, Transform, Transforms, TransformsOnUse
from shardconv.files.containers.safetensors import Header, TensorFile, num_bytes
from shardconv.files.folder import AnyPath, Compressed
from shardconv.files.input_files import InputFiles
from shardconv.files.paths import absolute_path, folder_name
from shardconv.files.weight_formats import PYTORCH, SAFETENSORS
from shardconv.formats.settings import with_quantization
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import SourceError


def is_snapshot(folder: AnyPath) -> bool:
    """Whether a folder is a model in a Hugging Face cache."""
    return folder.parent.name == "snapshots"


def model_name(folder: AnyPath) -> str:
    """The name of the folder of a model, or of the model in a Hugging Face cache."""
    return folder.parent.parent.name.rpartition("--")[2] if is_snapshot(folder) else folder_name(folder)


@cache
def file_tensor_name(number: int) -> str:
    """The name by which the bytes of a file are read as a tensor. No tensor has it."""
    return f"\0{number}"


class StoredTensors(Struct, frozen=True):
    """The positions of the stored tensors of a source, and the transforms to its other tensors.

    Attributes:
        files: the files.
        shards: name to the positions of the shards of each stored tensor in the files.
        layers: layers of transforms. The first layer reads the stored tensors, each other one the tensors of the layer
            before it. A tensor that a layer does not compute is taken from the layer before it.
    """

    files: tuple[TensorFile, ...]
    shards: Mapping[str, Shards]
    layers: tuple[Transforms, ...] = ()

    @classmethod
    def of_files(cls, files: Sequence[TensorFile]) -> Self:
        """The files themselves, each as a tensor of bytes by its :func:`file_tensor_name`."""
        sizes = enumerate(file.size for file in files)
        shards = {file_tensor_name(number): Shards(unsharded(size), (number,), (0,)) for number, size in sizes}
        return cls(tuple(files), shards)

    def transform_of(self, name: str) -> Transform | None:
        """The last transform of a tensor; None if it is stored under its name."""
        return next((layer[name] for layer in reversed(self.layers) if name in layer), None)

    @property
    def names(self) -> set[str]:
        """The names of all tensors that are stored or computed."""
        return {*self.shards, *(name for layer in self.layers for name in layer)}

    def with_layer(self, transforms: Transforms) -> Self:
        """The tensors with another layer of transforms."""
        return replace(self, layers=(*self.layers, transforms)) if transforms else self

    def joined(self, other: "StoredTensors") -> Self:
        """The tensors of both.

        Raises:
            SourceError: if they have a tensor of the same name, which would be read through the transforms of both.
        """
        if both := self.names & other.names:
            raise SourceError(
                f"{self.files[0].path} and {other.files[0].path} both have a tensor {min(both)}: rename it in one"
            )
        moved = {
            name: shards._replace(files=tuple(file + len(self.files) for file in shards.files))
            for name, shards in other.shards.items()
        }
        return replace(
            self,
            files=(*self.files, *other.files),
            shards={**self.shards, **moved},
            layers=(*self.layers, *other.layers),
        )

    def open(self) -> InputFiles:
        """Open the files.

        Raises:
            SourceError: if one was changed since its tensors were listed.
        """
        files = self.files
        return InputFiles(
            [file.path for file in files],
            (b"" if file.prefix is None else file.prefix.raw() for file in files),
            [file.size for file in files],
            [file.state for file in files],
        )  # fmt: skip


def _ranges(headers: Sequence[Header]) -> TransformsOnUse[int]:
    """Each tensor of files with these headers as a range of its file."""
    firsts = [0, *accumulate(header.file_bytes for header in headers)]  # of each file, one behind the other
    starts = {
        name: first + start
        for first, header in zip(firsts, headers, strict=False)
        for name, start in header.starts().items()
    }

    def make(name: str, start: int) -> Concatenation:
        file, found = bisect_right(firsts, start) - 1, Concatenation()
        if file < len(headers):  # the last tensor may be empty
            found.add(file_tensor_name(file), num_bytes(*headers[file].specs[name][:2]), start - firsts[file])
        return found

    return TransformsOnUse(starts, make)


class SourceFile(Struct, frozen=True):
    """One file of a source that a merge writes: its name in the folder, its path, and its header."""

    name: str
    path: AnyPath
    header: Header


class Source(Struct, frozen=True, dict=True):
    """A checkpoint that can be split.

    Attributes:
        path: the path that the user passed.
        is_folder: whether ``path`` is a folder.
        files: the safetensors files that a merge writes, sorted by name.
        converted_from: the stored tensors from which the tensors of ``files`` are made; None if ``files`` store them.
        index: name and compressed text of the index of the files, or None.
        index_path: the index of the files that store the tensors, or None.
        config: contents of config.json, or None.
        auxiliary_files: name relative to the folder, with / as separator, to path.
        left_out: name to reason of all other files; names of hidden folders end with /.
        ignore: patterns of files that the user left out.
        layout: of rank files of another tool; None for all other sources.
        num_ranks: number of ranks whose files store the tensors.
        made_files: name to text of auxiliary files that the folder does not have, or that get another text, such as a
            config with another dtype.
        assumed: assumptions about the source, as sentences.
        derived: the reasons why a merge does not restore the bytes of the source's files, one phrase each; empty if it
            does.
        merged_adapter: name of the adapter that is merged into the weights; None without one.
        dtype: the dtype that floating-point tensors are converted to, by its name as an option; None if they are not.
        is_config_given: whether the user passed the config, which replaces the folder's.
    """

    path: AnyPath
    is_folder: bool
    files: tuple[SourceFile, ...]
    converted_from: StoredTensors | None = None
    index: tuple[str, Compressed] | None = None
    index_path: AnyPath | None = None
    config: dict[str, object] | None = None
    auxiliary_files: Mapping[str, AnyPath] = {}
    left_out: Mapping[str, str] = {}
    ignore: tuple[str, ...] = ()
    layout: str | None = None
    num_ranks: int = 1
    made_files: Mapping[str, str] = {}
    assumed: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    merged_adapter: str | None = None
    dtype: str | None = None
    is_config_given: bool = False

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """The names of all auxiliary files that are written beside the weights."""
        return tuple(dict.fromkeys([*self.auxiliary_files, *self.made_files]))

    @property
    def paths(self) -> tuple[AnyPath, ...]:
        """The files that store the tensors."""
        return tuple(file.path for file in (self.converted_from or self).files)

    @cached_property
    def stored(self) -> StoredTensors:
        """The positions of the stored tensors."""
        if self.converted_from is not None:
            return self.converted_from
        shards = lay_out_source([file.header for file in self.files], self.specs).shards
        return StoredTensors(self._tensor_files, dict(zip(self.specs, shards, strict=True)))

    @property
    def stored_as_ranges(self) -> StoredTensors:
        """Positions of the tensors as ranges of their files, made on use: need less memory than :attr:`stored`."""
        if self.converted_from is not None:
            return self.converted_from
        return StoredTensors.of_files(self._tensor_files).with_layer(_ranges([file.header for file in self.files]))

    @property
    def _tensor_files(self) -> tuple[TensorFile, ...]:
        headers = ((file.path, file.header) for file in self.files)
        return tuple(TensorFile(path, header.file_bytes, {}, prefix=header.prefix) for path, header in headers)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of every tensor, in the order of the files and of their data."""
        return {name: spec for file in self.files for name, spec in file.header.specs.items()}

    @property
    def name(self) -> str:
        """The name of the file without its suffix, or of the folder, or of the model in a Hugging Face cache."""
        path = absolute_path(self.path) if isinstance(self.path, Path) else self.path  # resolve() would leave a cache
        folder = path if path.is_dir() else path.parent
        is_weights = path != folder and path.name.endswith((*SAFETENSORS.suffixes, *PYTORCH.suffixes))
        return path.stem if is_weights and not is_snapshot(folder) else model_name(folder)

    @property
    def folder(self) -> AnyPath:
        """The folder of config.json and the other auxiliary files."""
        return self.path if self.is_folder else self.path.parent

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.header.data_bytes for file in self.files)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files; where values differ, the first file takes precedence."""
        tables = (file.header.metadata or {} for file in reversed(self.files))
        return {key: value for table in tables for key, value in table.items()}

    def config_with_quantization(self) -> Mapping[str, object] | None:
        """The config, with quantization settings of the files: see :func:`with_quantization`."""
        return with_quantization(self.config, self.auxiliary_files, self.metadata)

    @property
    def has_quantization(self) -> bool:
        """Whether there are quantization settings."""
        return (self.config_with_quantization() or {}).get(SETTINGS_KEY) is not None

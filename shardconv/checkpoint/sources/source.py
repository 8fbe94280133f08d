"""A source: a checkpoint that can be split, whatever its files are."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from shardconv.checkpoint.engine.layout import lay_out_source
from shardconv.checkpoint.sources.stored_tensors import StoredTensors
from shardconv.files.containers.safetensors import Header, TensorFile
from shardconv.files.folder import AnyPath, Compressed, read_json
from shardconv.files.paths import absolute_path, folder_name
from shardconv.files.weight_formats import PYTORCH, SAFETENSORS
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import METADATA_KEY, SETTINGS_FILES, SETTINGS_KEY


def is_snapshot(folder: AnyPath) -> bool:
    """Whether a folder is a model in a Hugging Face cache."""
    return folder.parent.name == "snapshots"


def model_name(folder: AnyPath) -> str:
    """The name of the folder of a model, or of the model in a Hugging Face cache."""
    return folder.parent.parent.name.rpartition("--")[2] if is_snapshot(folder) else folder_name(folder)


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
        files = tuple(
            TensorFile(file.path, file.header.file_bytes, {}, prefix=file.header.prefix()) for file in self.files
        )
        return StoredTensors(files, dict(zip(self.specs, shards, strict=True)))

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


# --- quantization settings ------------------------------------------------------------------------------------------
#
# They may be outside of the main section of config.json: in the config of a submodel, in other files, in metadata.
# ``formats/settings.py`` decides which methods are supported.

#: The keys of the text model in the config of a composite model, where transformers looks for settings, too.
_TEXT_MODELS = ("text_config", "decoder", "generator")


def config_with_quantization(source: Source) -> Mapping[str, object] | None:
    """The config of a source, as :func:`with_quantization`."""
    return with_quantization(source.config, source.auxiliary_files, source.metadata)


def with_quantization(
    given: Mapping[str, object] | None, auxiliary_files: Mapping[str, AnyPath], metadata: Mapping[str, str]
) -> Mapping[str, object] | None:
    """Add quantization settings of its text model or of another file to a config without any.

    Args:
        given: the config.
        auxiliary_files: name to path of the files beside it.
        metadata: of the files with tensors.

    Raises:
        SourceError: if the file cannot be read.
    """
    config = given or {}
    sections = [config, *(config.get(key) for key in _TEXT_MODELS)]
    tables = (section.get(SETTINGS_KEY) for section in sections if isinstance(section, Mapping))
    if (table := next((table for table in tables if table is not None), None)) is not None:
        if isinstance(table, Mapping) and table.get("quant_method") == "torchao":
            table = {**table, METADATA_KEY: metadata}
        return {**config, SETTINGS_KEY: table}
    for name in SETTINGS_FILES:
        path = auxiliary_files.get(name)
        if path is not None and (settings := _settings(name, read_json(path))) is not None:
            return {**config, SETTINGS_KEY: settings}
    return given


def _settings(name: str, table: Mapping[str, object]) -> Mapping[str, object] | None:
    """The quantization settings in a file; None if there are none."""
    if name == "hf_quant_config.json":
        section = table.get("quantization")
        has_algorithm = isinstance(section, Mapping) and (
            section.get("quant_algo") or section.get("kv_cache_quant_algo")
        )
        return {**section, "quant_method": "modelopt"} if isinstance(section, Mapping) and has_algorithm else None
    if name == "quanto_qmap.json":
        return {**table, "quant_method": "quanto"}
    known = {"w_bit": "awq", "bits": "gptq"}
    method = table.get("quant_method") or next((known[key] for key in known if key in table), None)
    return None if method is None else {**table, "quant_method": method}

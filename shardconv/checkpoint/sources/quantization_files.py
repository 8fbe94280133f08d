"""Quantization settings outside of the main section of config.json: of a submodel, in files next to it, in metadata.

``formats/settings.py`` decides which methods are supported.
"""

from collections.abc import Mapping

from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import read_json
from shardconv.plan.quantization import METADATA_KEY, SETTINGS_FILES, SETTINGS_KEY

#: The keys of the text model in the config of a composite model, where transformers looks for settings, too.
_TEXT_MODELS = ("text_config", "decoder", "generator")


def config_with_quantization(source: Source) -> Mapping[str, object] | None:
    """The config of a source, as :func:`with_quantization`."""
    return with_quantization(source.config, source.auxiliary_files, source.metadata)


def with_quantization(
    given: Mapping[str, object] | None, auxiliary_files: Mapping[str, AnyPath], metadata: Mapping[str, str]
) -> Mapping[str, object] | None:
    """A config; quantization settings of its text model or of another file are added if it has none.

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

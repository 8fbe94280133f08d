"""Quantization settings in files next to config.json, such as those of ModelOpt, and in metadata of source files.

``formats/settings.py`` decides which methods are supported.
"""

from collections.abc import Mapping

from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.source import Source
from shardconv.plan.quantization import METADATA_KEY, SETTINGS_FILES, SETTINGS_KEY


def with_settings(source: Source) -> Mapping[str, object] | None:
    """The config of a source, with the quantization settings of another file if config.json has none.

    Raises:
        SourceError: if the file cannot be read.
    """
    if (table := (source.config or {}).get(SETTINGS_KEY)) is not None:
        if isinstance(table, Mapping) and table.get("quant_method") == "torchao":
            return {**(source.config or {}), SETTINGS_KEY: {**table, METADATA_KEY: source.metadata}}
        return source.config
    for name in SETTINGS_FILES:
        path = source.auxiliary_files.get(name)
        if path is not None and (settings := _settings(name, read_json(path))) is not None:
            return {**(source.config or {}), SETTINGS_KEY: settings}
    return source.config


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

"""Quantization settings in files next to config.json: those of ModelOpt, AutoGPTQ and AutoAWQ.

``plan/quantization.py`` decides which methods are supported.
"""

from collections.abc import Mapping

from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.source import Source
from shardconv.plan.quantization import SETTINGS_FILES, SETTINGS_KEY


def with_settings(source: Source) -> Mapping[str, object] | None:
    """The config of a source, with the quantization settings of another file if config.json has none.

    Raises:
        SourceError: if the file cannot be read.
    """
    if (source.config or {}).get(SETTINGS_KEY) is not None:
        return source.config
    for name in SETTINGS_FILES:
        path = source.auxiliary_files.get(name)
        if path is not None and (method := _method(name, read_json(path))):
            return {**(source.config or {}), SETTINGS_KEY: {"quant_method": f"{method} ({name})"}}
    return source.config


def _method(name: str, settings: Mapping[str, object]) -> str:
    """The quantization method in a settings file; "" if there is none."""
    if name == "hf_quant_config.json":
        section = settings.get("quantization")
        algorithms = section if isinstance(section, Mapping) else {}
        used = [str(algorithms[key]) for key in ("quant_algo", "kv_cache_quant_algo") if algorithms.get(key)]
        return f"modelopt {' and '.join(used)}" if used else ""
    known = {"w_bit": "awq", "bits": "gptq"}
    return str(settings.get("quant_method") or next((known[key] for key in known if key in settings), ""))

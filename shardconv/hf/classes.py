"""Look up the model class and the config of a checkpoint.

Owns the one way from the content of ``config.json`` to a class. A class comes from transformers or, if the caller
trusts it, from code in the checkpoint's folder.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from shardconv.files.folder import AnyPath, local_copy, temporary_folder
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.hf.diffusion import DiffusersConfig
from shardconv.hf.package import diffusers_name, import_diffusers, import_transformers, quiet
from shardconv.support.errors import RunError, one_line, option

if TYPE_CHECKING:
    from shardconv.convert.protocols import ModelConfig, PretrainedModel


class ModelClass(NamedTuple):
    """A model class and the config to build it with.

    Attributes:
        kind: the class.
        config: a ``PreTrainedConfig`` without the settings of quantization, or a ``DiffusersConfig``.
    """

    kind: "type[PretrainedModel]"
    config: "ModelConfig"


def model_class(config: Mapping[str, object], folder: AnyPath | None = None, *, is_trusted: bool = False) -> ModelClass:
    """Look up the class that a config names, and read the config as transformers does.

    Args:
        config: the content of ``config.json``.
        folder: a folder whose ``config.json`` has this content. Without it, code of the checkpoint is not found.
        is_trusted: whether code in the folder may be run.

    Raises:
        RunError: if transformers is not installed, does not have the class or refuses the config, or if the class is
            code in the folder and not trusted.
    """
    if (class_name := diffusers_name(config)) is not None:
        return ModelClass(diffusers_class(class_name), DiffusersConfig(config))
    transformers, name = import_transformers(), _architecture(config)
    code = [] if folder is None else _code(config)
    trusts, is_known = bool(code) and is_trusted, config.get("model_type") in transformers.CONFIG_MAPPING
    if code and not trusts and not is_known:
        raise RunError(
            f"{folder}: its model is code in the checkpoint ({', '.join(code)}): read the code, and if you trust it, "
            f"use {option(trust_remote_code=True)}"
        )
    own = next((ref for ref in code if trusts and ref.rpartition(".")[2] == name), None)
    kind: Any = getattr(transformers, name or "", None)
    if own is None and not (hasattr(kind, "config_class") and (trusts or is_known)):
        raise _unknown(config, folder)
    made = _read_config(config, folder, is_trusted=trusts)
    return ModelClass(kind if own is None or folder is None else _class_in_folder(own, folder), made)


def diffusers_class(name: str) -> "type[PretrainedModel]":
    """The model class of diffusers with this name.

    Raises:
        RunError: if diffusers is not installed, or does not have it.
    """
    diffusers = import_diffusers()
    with quiet():
        kind, base = getattr(diffusers, name, None), diffusers.ModelMixin
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise RunError(
            f"config.json does not name a model class of diffusers {diffusers.__version__} (got _class_name {name!r}, "
            f'expected for example "FluxTransformer2DModel"): correct it, or install the version that has the class'
        )
    found: type[PretrainedModel] = kind
    return found


def _unknown(config: Mapping[str, object], folder: AnyPath | None) -> RunError:
    """The error if transformers does not have the class or the model type."""
    remedy = "correct it; for a split checkpoint, correct the source's, and split it again"
    if folder is None:
        remedy = f"pass one that does with {option(config='FILE')}"
    return RunError(
        f"{_prefix(folder)}config.json does not name a model class of transformers {import_transformers().__version__} "
        f"(got model_type {config.get('model_type')!r} and architectures {config.get('architectures')!r}, expected for "
        f'example "llama" and ["LlamaForCausalLM"]): {remedy}'
    )


def _prefix(folder: AnyPath | None) -> str:
    return "" if folder is None else f"{folder}: "


def _code(config: Mapping[str, object]) -> list[str]:
    """References to classes in code of the checkpoint."""
    refs = config.get("auto_map")
    return [str(ref) for ref in refs.values()] if isinstance(refs, Mapping) else []


def _architecture(config: Mapping[str, object]) -> str | None:
    """The name of the class, which is the first of ``architectures``."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _read_config(config: Mapping[str, object], folder: AnyPath | None, *, is_trusted: bool) -> "ModelConfig":
    """The config as an object of its class."""
    transformers = import_transformers()
    try:
        with _written(config, folder) as path:
            made: ModelConfig = transformers.AutoConfig.from_pretrained(path, trust_remote_code=is_trusted)
            return made
    except Exception as error:
        model_type, known = config.get("model_type"), transformers.CONFIG_MAPPING
        name = f"{known[model_type].__name__} of transformers" if model_type in known else "transformers"
        raise RunError(
            f"{_prefix(folder)}{name} {transformers.__version__} refuses config.json: {one_line(error)}"
        ) from error


@contextmanager
def _written(config: Mapping[str, object], folder: AnyPath | None) -> Iterator[AnyPath]:
    """A folder with the config: transformers decodes infinite numbers only when it reads a file."""
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    if folder is not None and given == config:
        with local_copy(folder, _is_code_or_config) as local:
            yield local
        return
    with temporary_folder() as made:
        (made / CONFIG_NAME).write_text(json.dumps(given), "utf-8")
        yield made


def _class_in_folder(reference: str, folder: AnyPath) -> "type[PretrainedModel]":
    """A class in code of a checkpoint, as ``auto_map`` refers to it."""
    dynamic_modules = import_transformers("dynamic_module_utils")
    with local_copy(folder, _is_code_or_config) as local:
        kind: type[PretrainedModel] = dynamic_modules.get_class_from_dynamic_module(reference, local)
    return kind


def _is_code_or_config(name: str) -> bool:
    return name == CONFIG_NAME or name.endswith(".py")

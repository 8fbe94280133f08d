"""Models of diffusers: configs, configs of small models by ``diffusion.toml``, and pipelines."""

import inspect
import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from shardconv.convert.protocols import ModelConfig
from shardconv.files.folder import AnyPath, read_json
from shardconv.files.weight_formats import is_index, is_weights
from shardconv.hf.package import import_diffusers, quiet
from shardconv.hf.small import HEADS
from shardconv.plan.families.config_fields import Fields, fields_in
from shardconv.support.errors import RunError, one_line

#: Features per head of most small models.
_HEAD_DIM = 16

#: Names in the expressions of ``diffusion.toml`` that are not fields of a config.
_SIZES: dict[str, str | int] = {"heads": HEADS, "head_dim": _HEAD_DIM, "width": "heads * head_dim"}

#: The name of a file of weights with a variant, such as ``diffusion_pytorch_model.fp16-00001-of-00002.safetensors``.
_VARIANT = re.compile(r"[^.]+\.(?P<variant>[^.-]+)(-\d+-of-\d+)?\.(safetensors|bin)")


class DiffusersConfig(dict[str, Any]):
    """The content of a ``config.json`` of diffusers, as the config of a model."""

    is_decoder = is_encoder_decoder = output_attentions = False

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.model_type = str(fields.get("_class_name"))

    def to_dict(self) -> dict[str, Any]:
        """The fields, as in ``config.json``."""
        return dict(self)

    def get_text_config(self, *, decoder: bool = False) -> ModelConfig:  # noqa: ARG002 - as in transformers
        """The config itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """A field."""
        if name in self:
            return self[name]
        raise AttributeError(name)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config with these fields."""
        return cls(fields)


@cache
def table() -> dict[str, Any]:
    """The content of ``diffusion.toml``."""
    return tomllib.loads(Path(__file__).with_name("diffusion.toml").read_text("utf-8"))


def of_class(name: object) -> Mapping[str, Any]:
    """The entry of a class in ``diffusion.toml``, or of a similar one."""
    found: Mapping[str, Any] = table()["classes"].get(name, {})
    return {**of_class(found["like"]), **found} if "like" in found else found


def default_fields(kind: type[nn.Module]) -> dict[str, Any]:
    """The default config of a class of diffusers."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    fields = {one.name: one.default for one in parameters if one.default is not one.empty}
    return {"_class_name": kind.__name__, **fields}


def small_config(config: Mapping[str, Any], *, heads: int = HEADS, head_dim: int = 0) -> DiffusersConfig:
    """The config of a small model: the structure of another one, with the sizes of ``diffusion.toml``.

    Args:
        config: the content of ``config.json``.
        heads: the number of heads.
        head_dim: features per head, unless the class has a number of its own; 0 for few.
    """
    entry = of_class(config.get("_class_name"))
    fields = Fields({"heads": heads, "head_dim": entry.get("head_dim") or head_dim or _HEAD_DIM}, _SIZES)
    lines, own = table()["fields"], entry.get("config", {})
    small = {name: lines[name] for name, value in config.items() if name in lines and not isinstance(value, bool | str)}
    small = {name: value for name, value in small.items() if config[name] is not None}
    return DiffusersConfig({**config, **{name: _evaluated(value, fields) for name, value in {**small, **own}.items()}})


def _evaluated(value: object, fields: Fields) -> Any:
    if isinstance(value, list):
        return [_evaluated(item, fields) for item in value]
    return fields.evaluate(value) if isinstance(value, str) and fields_in(value) <= _SIZES.keys() else value


# --- pipelines --------------------------------------------------------------------------------------------------------


def build_pipeline(
    index: Path, components: Mapping[str, Any], dtype: torch.dtype, *, shown: AnyPath | None = None
) -> Any:
    """A pipeline of diffusers, which loads all other components from a folder.

    Args:
        index: the ``model_index.json`` in the folder.
        components: name to each component that is not loaded from the folder.
        dtype: of the floating-point parameters of the others.
        shown: the folder in messages; None if it is the folder of the index, which is a temporary copy otherwise.

    Raises:
        RunError: if diffusers is not installed, or cannot load the others.
    """
    diffusers = import_diffusers()
    try:
        with quiet():
            # DiffusionPipeline does not know the optional components of its subclasses, and would load these again
            kind = getattr(diffusers, str(read_json(index).get("_class_name")), diffusers.DiffusionPipeline)
            variant = variant_of(index.parent, components)
            options = {"dtype": dtype, "variant": variant, "disable_mmap": shown not in {None, index.parent}}
            return kind.from_pretrained(index.parent, **options, **components)
    except Exception as error:
        folder = index.parent if shown is None else shown
        problem = one_line(error).replace(str(index.parent), str(folder))
        raise RunError(f"{folder}: diffusers {diffusers.__version__} cannot load the pipeline: {problem}") from error


def variant_of(folder: Path, loaded: Collection[str]) -> str | None:
    """The ``variant`` with which diffusers finds the weights of all components in the folder.

    Args:
        folder: of the pipeline.
        loaded: names of the components that are not loaded from the folder.

    Returns:
        None if each other component has weights without a variant, or does not have weights.
    """
    for component in sorted(folder.iterdir()):
        names = [path.name for path in component.iterdir()] if component.is_dir() else []
        weights = [name for name in names if is_weights(name) and not is_index(name)]
        found = [_VARIANT.fullmatch(name) for name in weights if component.name not in loaded]
        if found and all(found):
            return next(match["variant"] for match in found if match)
    return None

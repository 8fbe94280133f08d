"""Build pipelines by diffusers, with components that are loaded already."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import is_index, is_weights
from shardconv.hf.package import import_diffusers, quiet
from shardconv.support.errors import RunError, one_line

#: The name of a file of weights with a variant, such as ``diffusion_pytorch_model.fp16-00001-of-00002.safetensors``.
_VARIANT = re.compile(r"[^.]+\.(?P<variant>[^.-]+)(-\d+-of-\d+)?\.(safetensors|bin)")


def build_pipeline(index: Path, components: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A pipeline of diffusers, which loads all other components from a folder.

    Args:
        index: the ``model_index.json`` in the folder.
        components: name to each component that is not loaded from the folder.
        dtype: of the floating-point parameters of the others.

    Raises:
        RunError: if diffusers is not installed, or cannot load the others.
    """
    diffusers = import_diffusers()
    try:
        with quiet():
            # DiffusionPipeline does not know the optional components of its subclasses, and would load these again
            kind = getattr(diffusers, str(read_json(index).get("_class_name")), diffusers.DiffusionPipeline)
            variant = variant_of(index.parent, components)
            return kind.from_pretrained(index.parent, dtype=dtype, variant=variant, **components)
    except Exception as error:
        raise RunError(
            f"{index.parent}: diffusers {diffusers.__version__} cannot load the pipeline: {one_line(error)}"
        ) from error


def variant_of(folder: Path, loaded: Collection[str]) -> str | None:
    """The variant of weights without which diffusers finds none in the folder of a component.

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

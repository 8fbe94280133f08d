"""Build pipelines by diffusers, with components that are loaded already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardconv.files.text_files import read_json
from shardconv.hf.package import import_diffusers, quiet
from shardconv.support.errors import RunError, one_line


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
    # DiffusionPipeline does not know which components of its subclasses are optional, and would load these again
    kind = getattr(diffusers, str(read_json(index).get("_class_name")), diffusers.DiffusionPipeline)
    try:
        with quiet():
            return kind.from_pretrained(index.parent, dtype=dtype, **components)
    except Exception as error:
        raise RunError(
            f"{index.parent}: diffusers {diffusers.__version__} cannot load the pipeline: {one_line(error)}"
        ) from error

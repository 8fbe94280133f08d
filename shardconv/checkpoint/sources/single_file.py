"""Single-file checkpoints of diffusion models, whose tensors have other names than those that diffusers gives them."""

from itertools import product

from shardconv.checkpoint.sources.diffusers_classes import diffusers_classes
from shardconv.checkpoint.sources.source import Source
from shardconv.support.errors import SourceError


def refuse_original_names(source: Source) -> None:
    """Refuse a diffusion model with its original names, which cannot be planned.

    Raises:
        SourceError: if it is one, with the lines that convert it.
    """
    known = diffusers_classes()
    for (names, class_name), prefix in product(known.original.items(), known.prefixes):
        found = [f"{prefix}{name}" for name in names.split()]
        if all(name in source.specs for name in found):
            raise SourceError(
                f"{source.path}: holds a diffusion model with its original names (such as {found[0]}): convert it to "
                f"the names of diffusers in Python, and pass the new folder:\nfrom diffusers import {class_name}\n"
                f"{class_name}.from_single_file({str(source.paths[0])!r}).save_pretrained('{source.name}-diffusers')"
            )

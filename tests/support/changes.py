"""Changes of a checkpoint in one safetensors file, for tables of unusual ones; each is a function of its folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.models import Tensors, change_config, change_tensors

Change = Callable[[Path], object]


def tensors(change: Callable[[Tensors], object]) -> Change:
    return lambda folder: change_tensors(folder, change)


def put(name: str, value: torch.Tensor | Callable[[Tensors], torch.Tensor]) -> Change:
    """Add or replace a tensor, by one or by a function of all tensors."""
    return tensors(lambda found: found.update({name: value(found) if callable(value) else value}))


def drop(*texts: str) -> Change:
    """Remove the tensors with one of these texts in their names, of which there is at least one."""

    def change(found: Tensors) -> None:
        names = [name for name in found if any(text in name for text in texts)]
        assert names, texts
        for name in names:
            del found[name]

    return tensors(change)


def rename(old: str, new: str) -> Change:
    return tensors(lambda found: found.update({new: found.pop(old)}))


def config(**fields: Any) -> Change:
    """Set fields of config.json; None removes one."""
    return lambda folder: change_config(folder, fields)


def remove(pattern: str) -> Change:
    """Remove the files of a pattern, of which there is at least one."""
    return lambda folder: [path.unlink() for path in [*folder.glob(pattern)] or [folder / pattern]]


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def block_scales(size: int, **settings: Any) -> Change:
    """Quantize to FP8 with a scale for each block of ``size`` by ``size`` elements, and change the settings."""

    def change(found: Tensors) -> None:
        for name in [name for name in found if name.endswith("_proj.weight")]:
            found[f"{name}_scale_inv"] = found[name][::size, ::size].abs() + 1
            found[name] = found[name].to(torch.float8_e4m3fn)

    table = {"quant_method": "fp8", "weight_block_size": [size, size], **settings}
    return both(tensors(change), config(quantization_config=table))

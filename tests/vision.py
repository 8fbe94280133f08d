"""torchvision beside a torch without CUDA.

The torchvision of the package index is built for CUDA, and where torch has none it stops on import: it describes two
operators that its library, which cannot be loaded, would have defined. With these declared the rest of it works, and
so does timm, which needs nothing of that library.
"""

import importlib.util

import torch

_MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_operators() -> None:
    """Make ``import torchvision`` work, if it is installed and does not."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name, signature in _MISSING.items():
            torch.library.define(f"torchvision::{name}", signature)
        importlib.import_module("torchvision")

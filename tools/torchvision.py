"""timm and torchvision, for the few types that need them, beside an environment whose torch has no CUDA.

The torchvision of the package index is built for CUDA, and where torch has none it stops on import: it describes two
operators that its library, which cannot be loaded, would have defined. All of transformers would stop with it, so it is
not installed where other tests see it, but in a folder of its own, which ``make test-models`` has in its path. With
the two operators declared the rest of it works, and so does timm, which needs nothing of that library.
"""

import importlib
import importlib.util

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

#: Types that timm builds, or a part of them.
TYPES = ("fast_vlm", "gemma3n", "perception_lm", "timm_wrapper")


def declare_operators() -> None:
    """Make ``import torchvision`` work, if it is there and does not."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _BOXES)
        importlib.import_module("torchvision")

"""timm and torchvision for the types that require them, in an environment with torch for CPU.

torchvision from the package index is built for CUDA, and its import fails with torch for CPU: it registers fake kernels
of two operators of a library that cannot be loaded. transformers would then fail, too, so torchvision is installed in a
separate folder, which only ``make test-models`` has in its path. With the two operators declared, torchvision and timm
work.
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

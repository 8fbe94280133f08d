"""A note on a tensor that says along which dim it is split.

A convenience for those who build models: nothing in this library reads it, and operations do not keep it.
"""

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn

Tensors = TypeVar("Tensors", Tensor, list[Tensor], tuple[Tensor, ...])


def get_parallel_dim(tensor: Tensor) -> int | None:
    """The dim that was noted on a tensor, or None."""
    return getattr(tensor, "parallel_dim", None)


class RegisterParallelDim(nn.Module):
    """Notes on each tensor that passes along which dim it is split.

    Args:
        dim: 0, 1, -1 or None.

    Raises:
        ValueError: if ``dim`` is none of these, or if what passes is no tensor, list or tuple of tensors.

    Example:
        >>> get_parallel_dim(RegisterParallelDim(dim=0)(torch.zeros(3)))
        0
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        if dim not in (None, 0, 1, -1):
            raise ValueError(f"dim = {dim!r}: it has to be None, 0, 1 or -1")
        self.dim = dim

    def forward(self, tensors: Tensors) -> Tensors:
        """The same object, with the note on it."""
        each: Iterable[object] = (tensors,) if isinstance(tensors, Tensor) else tensors
        each = list(each) if isinstance(each, list | tuple) else [None]
        if not all(isinstance(tensor, Tensor) for tensor in each):
            raise ValueError("a tensor, or a list or tuple of tensors, is needed")
        for tensor in each:
            tensor.parallel_dim = self.dim  # type: ignore[attr-defined] # a note on a tensor
        return tensors

    def extra_repr(self) -> str:
        """The dim."""
        return f"dim={self.dim}"

"""The autograd function of all operations between ranks: the gradient of each is another operation."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

TensorT = TypeVar("TensorT", bound=Tensor)
_Map = Callable[[Tensor], Tensor]


class _Context(FunctionCtx):
    gradient: _Map


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, input: Tensor, run: _Map, gradient: _Map) -> Tensor:
        ctx.gradient = gradient
        return run(input)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


def with_gradient(input: TensorT, run: Callable[[TensorT], TensorT], gradient: Callable[[TensorT], TensorT]) -> TensorT:
    """Apply a function to a tensor, with another function as its gradient.

    Args:
        input: the tensor.
        run: computes the output, which must not be ``input`` itself; autograd does not trace it.
        gradient: computes the gradient of the input from that of the output. For gradients of higher order it must be
            differentiable.
    """
    return _Operation.apply(input, run, gradient)


def identity(input: Tensor) -> Tensor:
    """Return a view of the input."""
    return input.view_as(input)

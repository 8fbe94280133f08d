"""The autograd function of all operations between ranks: the gradient of each is another operation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

#: A function of one tensor; if it is differentiable, so is the gradient that it computes.
Operation = Callable[[Tensor], Tensor]


class _Context(FunctionCtx):
    gradient: Operation


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, input: Tensor, run: Operation, gradient: Operation) -> Tensor:
        ctx.gradient = gradient
        return run(input)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


def with_gradient(input: Tensor, run: Operation, gradient: Operation) -> Tensor:
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

"""Modules that the caller of `load` builds: the argument `model`, and tensors that only their constructor computes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import shardconv
from shardconv.runtime.load import build_by_caller
from shardconv.support.errors import RunError, UsageError
from tests.support.loading import Mlp


class Scaled(nn.Module):
    """A layer with a buffer of two names that is not stored, and tensors that are not buffers."""

    def __init__(self, *, is_random: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        scale = torch.rand(4) if is_random else 10.0 ** -torch.arange(4.0)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("again", scale, persistent=False)
        self.mask = torch.ones(4, 4).tril()
        self.listed = [torch.ones(2), torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale @ self.mask


def unchanged(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Mlp(),
            r"^model is an instance of Mlp \(expected its class, or a function that builds it\): pass model=Mlp, or "
            r"model=lambda: Mlp\(...\) with its arguments$",
        ),
        ("Mlp", r"^model is 'Mlp' \(expected a function or class\): correct it$"),
    ],
    ids=["module", "text"],
)
def test_another_argument_is_refused(model, message):
    with pytest.raises(UsageError, match=message):
        shardconv.load("not read", model=model)


def test_tensors_that_are_not_stored_have_the_values_of_the_constructor():
    unsharded = Scaled()
    built = build_by_caller(Scaled, unchanged, partial(dict, unsharded.state_dict()), None)
    x = torch.randn(3, 4)
    assert torch.equal(built(x), unsharded(x))
    assert torch.equal(built.again, unsharded.again)
    assert [one.tolist() for one in built.listed] == [[1.0, 1.0], [0.0, 0.0, 0.0]]


def test_constructor_does_not_change_the_random_state_and_keeps_no_hook():
    tensors, state = dict(Scaled().state_dict()), torch.get_rng_state()
    build_by_caller(Scaled, unchanged, lambda: tensors, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.Linear(2, 2).weight.is_meta


def test_random_buffer_that_is_not_stored_is_an_error():
    with pytest.raises(RunError, match=r"^scale, again: is not in any file, and __init__ does not compute the"):
        build_by_caller(partial(Scaled, is_random=True), unchanged, partial(dict, Scaled().state_dict()), None)


def test_modules_of_other_threads_keep_their_device():
    """The hook of torch that keeps parameters on the meta device is called for all threads."""
    others = []

    def build() -> nn.Module:
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(nn.Linear, 2, 2).result())
        return Scaled()

    build_by_caller(build, unchanged, partial(dict, Scaled().state_dict()), None)
    assert len(others) == 3
    assert not any(other.weight.is_meta for other in others)

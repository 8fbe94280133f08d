"""Classes created at run time: they are cached, keep the module's name, and are copied and pickled with instances."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardconv.convert.modules import AllReducedOutput
from shardconv.convert.overrides import InputGradientAllReduce, Unfused, extend_class
from shardconv.distributed import Axis
from shardconv.layers import ParallelEmbedding, ParallelLinear, RowParallelLinear
from shardconv.layers.runtime_classes import converted_class

AXIS = Axis("tensor", 0, 1, (0,), None)


class Counted(nn.Module):
    """Multiplies by a number."""

    def forward(self, x):
        return x * 3


class Table(nn.Embedding):
    """Doubles its rows."""

    def forward(self, ids):
        return 2 * super().forward(ids)


class Remade(nn.Module):
    """Has a custom ``__reduce__``."""

    def __reduce__(self):
        return Remade, ()


def test_classes_are_cached():
    kind = converted_class(AllReducedOutput, Counted)
    assert converted_class(AllReducedOutput, Counted) is kind
    assert converted_class(AllReducedOutput, kind) is kind
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Counted", "Counted", __name__)


@pytest.mark.parametrize(
    ("parallel", "original"),
    [
        (ParallelEmbedding, nn.Embedding),
        (ParallelLinear, nn.modules.linear.NonDynamicallyQuantizableLinear),
        (RowParallelLinear, Conv1D),
    ],
)
def test_layer_of_a_library_becomes_the_parallel_class(parallel, original):
    assert converted_class(parallel, original) is parallel


def test_class_of_an_embedding_precedes_the_parallel_class():
    assert converted_class(ParallelEmbedding, Table).__mro__[1:3] == (Table, ParallelEmbedding)


def test_other_classes_follow_the_parallel_class():
    assert converted_class(AllReducedOutput, Counted).__mro__[1] is AllReducedOutput


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_copies(protocol):
    """A module whose class was created in several steps."""
    module = Counted()
    extend_class(module, Unfused, AXIS)
    extend_class(module, InputGradientAllReduce, AXIS)
    for copied in (pickle.loads(pickle.dumps(module, protocol)), copy.deepcopy(module), copy.copy(module)):
        assert type(copied) is type(module)
        assert isinstance(copied, Unfused)
        assert torch.equal(copied(torch.ones(2)), 3 * torch.ones(2))


def test_custom_reduce():
    module = Remade()
    extend_class(module, InputGradientAllReduce, AXIS)
    assert type(pickle.loads(pickle.dumps(module))) is Remade

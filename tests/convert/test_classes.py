"""Classes that are made at run time: made once, named as the module's own, copied and pickled with their instances."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardconv.convert.classes import converted_class
from shardconv.convert.heads import LocalValues, with_local_values
from shardconv.convert.modules import AllReducedOutput, InputGradientAllReduce
from shardconv.convert.overrides import extend_class
from shardconv.distributed import Axis
from shardconv.layers import ParallelEmbedding, ParallelLinear, RowParallelLinear

AXIS = Axis("tensor", 0, 1, (0,), None)


class Counted(nn.Module):
    """Multiplies by a number in a local variable."""

    def forward(self, x):
        count = 4
        return x * count


class Table(nn.Embedding):
    """Doubles its rows."""

    def forward(self, ids):
        return 2 * super().forward(ids)


class Remade(nn.Module):
    """Decides by itself how it is pickled."""

    def __reduce__(self):
        return Remade, ()


def test_each_class_is_made_once():
    kind = converted_class(AllReducedOutput, Counted)
    assert converted_class(AllReducedOutput, Counted) is kind
    assert converted_class(AllReducedOutput, kind) is kind
    assert with_local_values(Counted, ("count",)) is with_local_values(Counted, ("count",))
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Counted", "Counted", __name__)


def test_order_of_bases():
    """Methods of an embedding's own class call those of the parallel class; all others are called by them."""
    assert converted_class(ParallelEmbedding, nn.Embedding) is ParallelEmbedding
    assert converted_class(ParallelEmbedding, Table).__mro__[1:3] == (Table, ParallelEmbedding)
    assert converted_class(AllReducedOutput, Counted).__mro__[1] is AllReducedOutput
    recompiled = with_local_values(Counted, ("count",))
    assert converted_class(recompiled, Counted) is recompiled
    below = converted_class(InputGradientAllReduce, Counted)
    assert converted_class(recompiled, below).__mro__[1] is below
    assert converted_class(ParallelLinear, nn.modules.linear.NonDynamicallyQuantizableLinear) is ParallelLinear
    assert converted_class(RowParallelLinear, Conv1D) is RowParallelLinear


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_copies(protocol):
    """Of a module whose class was made in several steps."""
    module = Counted()
    extend_class(module, with_local_values(Counted, ("count",)), AXIS, local_values={"count": 3})
    extend_class(module, InputGradientAllReduce, AXIS)
    for copied in (pickle.loads(pickle.dumps(module, protocol)), copy.deepcopy(module), copy.copy(module)):
        assert type(copied) is type(module)
        assert isinstance(copied, LocalValues)
        assert torch.equal(copied(torch.ones(2)), 3 * torch.ones(2))


def test_own_way_of_pickling():
    module = Remade()
    extend_class(module, InputGradientAllReduce, AXIS)
    assert type(pickle.loads(pickle.dumps(module))) is Remade

"""The norm of sharded gradients, and the clipped gradients, compared with those of the unsharded model.

In float32, as the grouped products of experts need it: norms to 1e-4, gradients to 1e-5 of the norm or 1e-3.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard

import shardconv
from shardconv.convert.converted_model import gather_state_dict
from shardconv.convert.model import convert_with_request
from shardconv.plan.request import PlanRequest
from shardconv.tensor import shard_parameter
from tests.support.comparison import inputs_of
from tests.support.models import MODELS
from tests.support.ranks import LAYOUTS, on_ranks

#: Models with replicated KV heads on four ranks, a padded vocabulary, padding of heads and widths on three, gathered
#: parameters, and experts that only one rank holds.
NAMES = ("llama", "gpt2", "mixtral", "bert")


def backward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    model.eval()
    output = next(iter(model(**inputs).values()))
    output.square().sum().backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full gradients, by the names of the parameters."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: value for name, value in gather_state_dict(model).items() if value.is_floating_point()}


def check(axis, name, norm_type, factor, options):
    unsharded, inputs = MODELS[name].build(), inputs_of(MODELS[name])
    model = copy.deepcopy(unsharded)
    convert_with_request(model, model.config.to_dict(), PlanRequest(**options), axis)
    backward(unsharded, inputs)
    backward(model, inputs)
    expected = torch.nn.utils.get_total_norm(
        [one.grad for one in unsharded.parameters() if one.grad is not None], norm_type
    )
    limit = factor * expected.item()
    torch.nn.utils.clip_grad_norm_(unsharded.parameters(), limit, norm_type)
    found = shardconv.clip_grad_norm_(model.parameters(), limit, norm_type)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    clipped = gradients(model)
    for key, value in gradients(unsharded).items():
        torch.testing.assert_close(clipped[key], value, rtol=1e-3, atol=1e-5 * limit)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norm_is_that_of_the_unsharded_model(ranks, layout, name, norm_type):
    options = {"ep": len(LAYOUTS[layout][0])} if name == "mixtral" else {}
    ranks(layout, check, name, norm_type, 0.1, options)


def test_norm_of_padded_heads_and_of_gradients_that_are_not_clipped(ranks):
    ranks("three", check, "llama", 2.0, 2.0, {"pad": True})
    ranks("pairs", check, "llama", 3.0, 0.5, {})


@on_ranks("pairs")
def test_low_precision_is_summed_in_float32(axis):
    layer = shardconv.ParallelLinear(64, 2, bias=False, dim=0, dtype=torch.bfloat16, group=axis)
    layer.weight.grad = torch.full_like(layer.weight, 3.0)
    assert shardconv.clip_grad_norm_(layer.weight, 1e9) == (128 * 9) ** 0.5
    assert layer.weight.grad.dtype is torch.bfloat16


@on_ranks("pairs")
def test_a_norm_that_is_not_finite(axis):
    layer = shardconv.ParallelLinear(4, 2, bias=False, dim=-1, group=axis)
    layer.weight.grad = torch.full_like(layer.weight, float("inf") if axis.rank else 0.0)
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is not finite \(got inf\)"):
        shardconv.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
    assert shardconv.clip_grad_norm_(layer.parameters(), 1.0).isinf()


@on_ranks("four")
def test_a_rank_may_have_no_elements_of_its_own(axis):
    """Of weights of two KV heads, which ranks hold twice, every other rank has none."""
    model = MODELS["llama"].build().double()
    full = model.model.layers[0].self_attn.k_proj.weight.numel()
    convert_with_request(model, model.config.to_dict(), PlanRequest(), axis)
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.grad = torch.full_like(weight, 3.0)
    torch.testing.assert_close(shardconv.clip_grad_norm_(weight, 1e9).item(), 3.0 * full**0.5, rtol=1e-12, atol=0)


@on_ranks("four")
def test_dtensors_are_refused(axis):
    layer = nn.Linear(4, 4)
    shard_parameter(layer, "weight", DeviceMesh("cpu", list(axis.ranks)), [Shard(0)])
    with pytest.raises(TypeError, match="a parameter is a DTensor"):
        shardconv.clip_grad_norm_(layer.parameters(), 1.0)


def test_parameters_without_gradients():
    assert shardconv.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0) == 0
    assert shardconv.clip_grad_norm_([], 1.0) == 0

"""Layers, loss, dropout, LoRA, loading and generation on an accelerator, on two ranks with gloo, which may share it.

On a machine without one, the accelerator is a disguised CPU: see support/disguised.py.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import nn

import shardconv
from shardconv.layers import ParallelDropout, ParallelEmbedding
from shardconv.layers.dropout import check_seeds, share_seeds
from shardconv.layers.loss import parallel_cross_entropy
from shardconv.runtime.device import move
from tests.support.adapters import write_adapter
from tests.support.disguised import ACCELERATOR as DEVICE
from tests.support.disguised import NAME, disguised, with_accelerator
from tests.support.models import MODELS
from tests.support.operation_checks import from_all

#: Rounding errors of sums over ranks in float64.
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def check_embedding_and_loss(axis):
    torch.manual_seed(2)
    table = nn.Embedding(21, 8, padding_idx=3, dtype=torch.float64, device=DEVICE)
    torch.manual_seed(2)
    split = ParallelEmbedding(21, 8, 3, dim=0, dtype=torch.float64, device=DEVICE, group=axis)
    assert torch.equal(split.master_weight, table.weight)
    ids = torch.tensor([0, 3, 20, 20], device=DEVICE)
    assert torch.equal(split(ids), table(ids))
    logits = torch.randn(6, 8 * axis.size, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.arange(6, device=DEVICE)
    mine = logits.detach().chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    found = parallel_cross_entropy(mine, target, label_smoothing=0.1, num_classes=8 * axis.size, group=axis)
    torch.testing.assert_close(found, expected, **NEAR)
    expected.backward()
    found.backward()
    torch.testing.assert_close(mine.grad, logits.grad.chunk(axis.size, 1)[axis.rank], **NEAR)


def check_dropout(axis):
    """Masks are the same for replicated tensors and differ for sharded ones, if random states of the device agree."""
    module, place = torch.get_device_module(DEVICE), torch.device(DEVICE)
    torch.manual_seed(3)
    for _ in range(axis.rank + 1):  # the state of a GPU does not depend on how many numbers one call draws
        torch.rand(1, device=place)
    assert len({bytes(state.tolist()) for state in from_all(axis, torch.get_rng_state())}) == 1
    x = torch.ones(64, 64, device=place)
    with pytest.raises(RuntimeError, match="are seeded differently"):
        ParallelDropout(0.5, group=axis)(x)
    share_seeds(axis, place)
    check_seeds(axis, place)
    assert len({bytes(state.tolist()) for state in from_all(axis, module.get_rng_state())}) == 1
    for is_parallel in (False, True):
        mask = ParallelDropout(0.5, input_is_parallel=is_parallel, group=axis)(x)
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        parts = from_all(axis, mask.cpu())
        assert torch.equal(parts[0], parts[1]) != is_parallel


def check_move(_):
    """Also of values that are there already, and where the device is the default one."""
    model = nn.Linear(3, 2)
    model.register_buffer("there", torch.arange(4, device=DEVICE))
    expected = [value.cpu().clone() for value in (*model.parameters(), *model.buffers())]
    with torch.device(DEVICE):
        move(model, torch.device(DEVICE))
    found = [*model.parameters(), *model.buffers()]
    assert {value.device.type for value in found} == {DEVICE}
    assert all(torch.equal(value.cpu(), other) for value, other in zip(found, expected, strict=True))


def on_device(axis, name, *arguments):
    """Run a check of this module on the device; it raises where tensors of devices are mixed."""
    with with_accelerator():
        globals()[name](axis, *arguments)


@pytest.mark.parametrize(
    "check",
    [check_embedding_and_loss, check_dropout, check_move],
    ids=lambda f: f.__name__,
)
def test_layers(ranks, check):
    ranks("pair", on_device, check.__name__)


def check_load(axis, split, adapter):
    """Logits, generated tokens, and gradients of the adapter."""
    on_cpu, model = (
        shardconv.load(split, device=device, dtype=torch.float64, adapter=adapter, group=axis)
        for device in ("cpu", DEVICE)
    )
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {DEVICE}
    ids = torch.arange(12)[None] + 3
    results = []
    for each, given in ((on_cpu, ids), (model, ids.to(DEVICE))):
        logits = each(given).logits
        logits.square().sum().backward()
        tokens = each.generate(given, max_new_tokens=8, do_sample=False)
        gradients = {name: value.grad.cpu() for name, value in each.named_parameters() if value.grad is not None}
        results.append((logits.detach().cpu(), tokens.cpu(), gradients))
    (expected, tokens, gradients), found = results
    assert torch.equal(found[1], tokens)
    assert found[2].keys() == gradients.keys()
    pairs = [(found[0], expected), *((found[2][name], value) for name, value in gradients.items())]
    for mine, other in pairs:  # other kernels, in float64
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("settings", [None, {"target_modules": "all-linear"}], ids=["alone", "with LoRA"])
def test_loaded_model(ranks, tmp_path, settings):
    source, adapter = MODELS["llama"].write(tmp_path / "source"), None
    if settings is not None:
        adapter = write_adapter(tmp_path / "adapter", source, **settings)
    shardconv.split(source, tmp_path / "split", tp=2, adapters=[adapter] if adapter else [])
    ranks("pair", on_device, "check_load", tmp_path / "split", adapter and "adapter")


def check_disguise(axis):
    """The disguised CPU detects these errors, so that the other tests can fail."""
    x, cpu = torch.ones(2, 3, device=NAME, requires_grad=True), torch.ones(3)
    for mix in (lambda: x * cpu, lambda: torch.cat([x[0], cpu]), lambda: nn.functional.linear(x, torch.ones(2, 3))):
        with pytest.raises(RuntimeError, match=f"gets tensors of the CPU and of {NAME}"):
            mix()
    assert (x * cpu.sum()).tolist() == [[3.0] * 3] * 2  # a number, as on other accelerators
    with disguised() as operators:
        x.cpu().to(NAME)
    assert operators.copies == {"aten::_to_copy": 2}
    with pytest.raises(RuntimeError):
        x.detach().numpy()
    assert torch.accelerator.current_accelerator() == torch.device(NAME)


@pytest.mark.skipif(DEVICE != NAME, reason="there is an accelerator")
def test_disguise(ranks):
    ranks("pair", on_device, "check_disguise")

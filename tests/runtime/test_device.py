"""Devices: which exist, which have room for a model, and copies of values to them."""

import pytest
import torch
from torch import nn

from shardconv.checkpoint.header import build_header
from shardconv.errors import RunError
from shardconv.runtime import device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def tied_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    model[3].weight = model[0].weight
    model.register_buffer("empty", torch.zeros(0, 3))
    return model.bfloat16()


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_copied_values_are_equal(monkeypatch, size):
    """With staging buffers of any size, to new memory."""
    monkeypatch.setattr(device, "BUFFER_BYTES", size)
    model, same = tied_model(), tied_model()
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items() if tensor.numel()}
    parameters, seen = list(model.parameters()), []
    device.move(model, CPU, lambda done, total: seen.append((done, total)))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in same.state_dict().items())
    assert all(state[name].data_ptr() != place for name, place in places.items())
    assert all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    assert model[3].weight is model[0].weight
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert seen[-1] == (held, held)
    assert seen == sorted(seen)


def test_missing_devices_are_errors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.rank_device(None) == CPU
    with pytest.raises(RunError, match="no CUDA device found: use --device cpu"):
        device.rank_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.rank_device(None) == torch.device("cuda", 1)
    assert device.rank_device("cuda:0") == CUDA
    with pytest.raises(RunError, match=r"device cuda:2 does not exist \(found 2 CUDA devices\)"):
        device.rank_device("cuda:2")


@pytest.mark.parametrize(
    ("dtype", "ranks", "free", "fits"),
    [
        (None, 1, 236, True),
        (None, 1, 235, False),
        (None, 4, 471, False),
        (None, 4, 472, True),
        (torch.float32, 1, 435, False),
        (torch.float32, 1, 436, True),
    ],
)
def test_room_on_a_device(monkeypatch, dtype, ranks, free, fits):
    """100 values of two bytes and 9 of four, which keep their dtype; ranks that share a device share its room."""
    header = build_header([("a", "BF16", (10, 10)), ("b", "I32", (9,))], None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**9))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if fits:
        device.check_room(CUDA, header.tensors.values(), dtype, 4)
    else:
        with pytest.raises(RunError, match=r"cuda:0 has room for 0.0 GB: use more ranks .* --tp 8"):
            device.check_room(CUDA, header.tensors.values(), dtype, 4)

"""Devices: which exist, which have room for a model, and copies of values to them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardconv.distributed import devices
from shardconv.distributed.devices import backends_for
from shardconv.files.containers.safetensors import build_header
from shardconv.plan.plan import TensorSpec
from shardconv.runtime import device
from shardconv.support.errors import RunError, UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def tied_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    model[3].weight = model[0].weight
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("strided", torch.arange(10.0)[::5][:1])
    return model.bfloat16()


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 1 << 20])
def test_moved_values_are_copies(monkeypatch, num_bytes):
    """In new memory; parameters stay the same objects, and tied ones tied. Progress ends with the model's bytes."""
    monkeypatch.setattr(device, "PIECE_BYTES", num_bytes)
    model, progress = tied_model(), []
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items() if tensor.numel()}
    parameters = list(model.parameters())
    device.move(model, CPU, lambda done, total: progress.append((done, total)))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in tied_model().state_dict().items())
    assert all(state[name].data_ptr() != place for name, place in places.items())
    assert all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    assert model[3].weight is model[0].weight
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert progress[-1] == (held, held)
    assert progress == sorted(progress)


def test_moved_values_are_freed_one_by_one(monkeypatch):
    """A tensor has its new memory after its last piece, so that host memory is not held until the end."""
    monkeypatch.setattr(device, "PIECE_BYTES", 64)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    before, freed = [value.data_ptr() for value in model.parameters()], []
    device.move(
        model,
        CPU,
        lambda *_: freed.append(
            sum(value.data_ptr() != place for value, place in zip(model.parameters(), before, strict=True))
        ),
    )
    assert freed[len(freed) // 2] >= 18
    assert freed[-1] == 40


@pytest.fixture
def found(monkeypatch):
    """Let torch find a number of accelerators of a type."""

    def find(kind, count, free=10**9, current=0):
        module = SimpleNamespace(mem_get_info=lambda _: (free, 10**9))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        devices._module_of.cache_clear()

    yield find
    devices._module_of.cache_clear()


@pytest.mark.parametrize(
    ("kind", "count", "requested", "expected"),
    [
        ("cuda", 0, None, "cpu"),
        ("cuda", 2, None, "cuda:1"),
        ("cuda", 2, "cuda", "cuda:1"),
        ("cuda", 2, "cuda:0", "cuda:0"),
        ("cuda", 2, torch.device("cuda", 0), "cuda:0"),
        ("xpu", 4, None, "xpu:3"),
        ("xpu", 8, torch.device("xpu"), "xpu:3"),
        ("xpu", 8, "cpu", "cpu"),
        ("mps", 1, None, "cpu"),
    ],
)
def test_device_of_local_rank_3(monkeypatch, found, kind, count, requested, expected):
    """The accelerator with the local rank as index, if torch sends its tensors between ranks."""
    found(kind, count)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.rank_device(requested) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "current", "local_rank", "requested"), [("xpu", 5, None, "xpu"), ("cuda", 2, "3", None)]
)
def test_device_that_the_program_has_selected(monkeypatch, found, kind, current, local_rank, requested):
    """As ``torch.cuda.set_device(2)`` does, with and without a launcher, which sets the local rank."""
    found(kind, 8 if kind == "xpu" else 4, current=current)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert device.rank_device(requested) == torch.device(kind, current)


def test_accelerator_is_probed_once(monkeypatch, found):
    found("cuda", 1)
    expected = devices.device_module(CUDA)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", pytest.fail)
    assert devices.device_module(CUDA) is expected is not None
    assert devices.device_module(CPU) is None


@pytest.mark.parametrize(
    ("kind", "count", "requested", "message"),
    [
        ("cuda", 0, "cuda", r'device cuda cannot be used here \(expected cpu\): use device="cpu"'),
        ("cuda", 2, "xpu:1", r'device xpu:1 cannot be used here \(expected cuda or cpu\): use device="cpu"'),
        ("cuda", 2, "meta", r"device meta cannot be used here \(expected cuda or cpu\)"),
        ("cuda", 2, "gpu", r"device 'gpu' is unknown \(expected cpu, cuda or xpu\): use device=\"cpu\""),
        ("cuda", 0, "a gpu:1", r"device 'a gpu:1' is unknown"),
        ("cuda", 0, "", r"device '' is unknown"),
        ("mps", 1, "mps", r"device mps cannot be used here \(expected cpu\)"),
        ("cuda", 2, "cuda:2", r'device cuda:2 does not exist \(found 2 cuda devices\): use device="cuda"'),
        ("xpu", 1, "xpu:-1", r"device xpu:-1 does not exist \(found 1 xpu device\)"),
        ("cuda", 0, "cpu:x", r"device cpu:x does not exist \(found 1 cpu device\)"),
    ],
)
def test_devices_that_cannot_be_used(found, kind, count, requested, message):
    found(kind, count)
    with pytest.raises(UsageError, match=message):
        device.rank_device(requested)


def test_ranks_that_share_devices(monkeypatch, found):
    """Gloo, which does not need a device per rank, supports tensors of CUDA, and not those of XPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    found("cuda", 2)
    assert device.rank_device(None).type == "cuda"
    found("xpu", 2)
    with pytest.raises(UsageError, match=r'4 ranks cannot share 2 xpu devices: use tp=2, or device="cpu"'):
        device.rank_device(None)


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [("cuda", 2, "cpu:gloo,cuda:nccl"), ("xpu", 3, "cpu:gloo,xpu:xccl"), ("cuda", 1, "gloo"), ("mps", 8, "gloo")],
)
def test_backends_of_two_ranks(found, kind, count, expected):
    """Those that torch names, if there is a device for each rank."""
    found(kind, count)
    assert backends_for(2) == expected


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
def test_room_on_a_device(monkeypatch, found, dtype, ranks, free, fits):
    """100 values of two bytes and 9 of four, which keep their dtype; ranks that share a device share its room."""
    header = build_header([("a", TensorSpec("BF16", (10, 10))), ("b", TensorSpec("I32", (9,)))], None)
    found("cuda", 2, free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if fits:
        device.check_room(CUDA, header.specs.values(), dtype, 4)
    else:
        with pytest.raises(RunError, match=r"cuda:0 has room for \d+ B: use more ranks .*tp=8.* --tp 8"):
            device.check_room(CUDA, header.specs.values(), dtype, 4)


ROOM = {
    "views": ("cpu", None, 1, 0, 0, 0),
    "copies": ("cpu", None, 1, 50, 0, 50),
    "copies of 3 ranks": ("cpu", None, 3, 50, 0, 150),
    "fetched": ("cpu", None, 2, 0, 300, 600),
    "converted": ("cpu", torch.float32, 1, 50, 0, 400),
    "fetched and converted": ("cpu", torch.float32, 2, 0, 300, 1400),
    "views that have the dtype": ("cpu", torch.bfloat16, 2, 0, 0, 0),
    "on the way to a GPU": ("cuda", None, 2, 0, 300, 600),
    "converted on the way to a GPU": ("cuda", torch.float32, 1, 0, 0, 400),
}


@pytest.mark.parametrize("what", ROOM)
def test_room_in_memory(monkeypatch, found, what):
    """Of all ranks of the host: files that are fetched, and values that are copied or converted."""
    device_type, dtype, ranks, copied, fetched, needed = ROOM[what]
    header = build_header([("a", TensorSpec("BF16", (10, 10))), ("b", TensorSpec("I32", (9,)))], None)
    found("cuda", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    arguments = (torch.device(device_type, 0), header.specs.values(), dtype, 4)
    monkeypatch.setattr(device.os, "sysconf", lambda name: needed if name == "SC_PAGE_SIZE" else 1)
    device.check_room(*arguments, copied=copied, fetched=fetched)
    if needed:
        monkeypatch.setattr(device.os, "sysconf", lambda name: needed - 1 if name == "SC_PAGE_SIZE" else 1)
        with pytest.raises(RunError, match=r"cpu has room for .*: use more ranks on more hosts .*tp=8"):
            device.check_room(*arguments, copied=copied, fetched=fetched)

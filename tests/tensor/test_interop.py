"""State dicts of converted models as DTensors, in torch's distributed checkpoints at any tp."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from shardconv import ColumnParallelLinear, ParallelEmbedding, convert_model, gather_state_dict, init_parallel
from shardconv.distributed import destroy_parallel, groups
from shardconv.plan.placement import Interval, Padding, Placement, Unit, shard_dim
from shardconv.tensor import as_dtensor
from shardconv.tensor.interop import ChunkedShard, num_chunks
from tests.support.matrix import cases
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # intended

NAMES = ["llama", "tied", "phi3", "gpt2", "gpt_neox", "falcon-7b", "mixtral"]


def unsharded_model(name):
    from tests.support.models import GQA, MODELS, Model  # noqa: PLC0415 - transformers takes seconds to import

    model = Model("llama", {**GQA, "tie_word_embeddings": True}) if name == "tied" else MODELS[name]
    return model.build()


def check_save(axis, name, path):
    unsharded, model = unsharded_model(name), convert_model(unsharded_model(name), group=axis)
    tensors = as_dtensor(model)
    assert list(tensors) == list(unsharded.state_dict())
    for key, expected in unsharded.state_dict().items():
        assert type(tensors[key]) is DTensor
        assert tensors[key].shape == expected.shape
        if isinstance(tensors[key].to_local(), ChunkedShard):
            with pytest.raises(NotImplementedError, match="gather_state_dict"):
                tensors[key].full_tensor()
        else:
            assert torch.equal(tensors[key].full_tensor(), expected)
    dcp.save({"model": tensors}, checkpoint_id=path)
    return {key: tensor.placements for key, tensor in tensors.items()}


def check_load(axis, name, path):
    unsharded, model = unsharded_model(name), convert_model(unsharded_model(name), group=axis)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    parameters = dict(model.named_parameters())
    dcp.load({"model": as_dtensor(model)}, checkpoint_id=path)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert_equal(gather_state_dict(model), unsharded.state_dict())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


#: Tied weights, a fused projection, and experts.
BY_DEFAULT = {"tied", "gpt2", "mixtral"}


@pytest.mark.parametrize("name", cases(NAMES, lambda name: name in BY_DEFAULT))
def test_checkpoint_at_another_tp(ranks, tmp_path, name):
    path = str(tmp_path / "checkpoint")
    ranks("four", check_save, name, path)
    ranks("pairs", check_load, name, path)
    expected = unsharded_model(name).state_dict()
    found = {key: torch.full_like(tensor, 7) for key, tensor in expected.items()}
    dcp.load({"model": found}, checkpoint_id=path, no_dist=True)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_checkpoint_of_the_unsharded_model(ranks, tmp_path, name):
    """Written by torch, and loaded on more ranks."""
    path = str(tmp_path / "checkpoint")
    dcp.save({"model": unsharded_model(name).state_dict()}, checkpoint_id=path, no_dist=True)
    ranks("four", check_load, name, path)
    ranks("strided", check_load, name, path)


def test_placements(ranks, tmp_path):
    (found, *others) = ranks("four", check_save, "llama", str(tmp_path / "checkpoint"))
    assert all(other == found for other in others)
    layer = "model.layers.0."
    assert {key.removeprefix(layer): str(placed) for key, placed in found.items() if key.startswith(layer)} == {
        "self_attn.q_proj.weight": "(Shard(dim=0),)",
        "self_attn.k_proj.weight": "(Shard(dim=0), Replicate())",
        "self_attn.v_proj.weight": "(Shard(dim=0), Replicate())",
        "self_attn.o_proj.weight": "(Shard(dim=1),)",
        "mlp.gate_proj.weight": "(Shard(dim=0),)",
        "mlp.up_proj.weight": "(Shard(dim=0),)",
        "mlp.down_proj.weight": "(Shard(dim=1),)",
        "input_layernorm.weight": "(Replicate(),)",
        "post_attention_layernorm.weight": "(Replicate(),)",
    }


def small_module(axis, *, fill):
    """A vocabulary of five, of which the last of four ranks has nothing, a fused layer, and buffers."""
    table = ParallelEmbedding(5, 4, dim=0, group=axis)
    fused = ColumnParallelLinear(4, 24, split_sizes=(8, 8, 8), group=axis)
    with torch.no_grad():
        for number, shard in enumerate([table.weight, fused.weight, fused.bias]):
            shard.copy_(torch.arange(shard.numel()).view_as(shard) + 1000 * number + 100 * axis.rank if fill else shard)
    return nn.Sequential(table, fused, nn.BatchNorm1d(2))


def check_small(axis, path):
    written, read = small_module(axis, fill=True), small_module(axis, fill=False)
    dcp.save({"model": as_dtensor(written)}, checkpoint_id=path, process_group=axis.group)
    dcp.load({"model": as_dtensor(read)}, checkpoint_id=path, process_group=axis.group)
    assert_equal(gather_state_dict(read), gather_state_dict(written))
    tensors = as_dtensor(written)
    table = tensors["0.weight"]
    held = gather_state_dict(written)["0.weight"].chunk(axis.size)
    assert torch.equal(table.to_local(), held[axis.rank] if axis.rank < len(held) else torch.empty(0, 4))
    assert table.to_local().data_ptr() == written[0].weight.data_ptr() or not table.to_local().numel()
    return gather_state_dict(written)


def test_ranks_without_a_chunk(ranks, tmp_path):
    """Ranks have different values, so a chunk of the wrong rank is detected."""
    path = str(tmp_path / "checkpoint")
    expected, *_ = ranks("four", check_small, path)
    found = {key: torch.full_like(tensor, 7) for key, tensor in expected.items()}
    dcp.load({"model": found}, checkpoint_id=path, no_dist=True)
    assert_equal(found, expected)


@on_ranks("four")
def test_meshes_are_cached(axis):
    """Check that tensors of two calls have equal meshes."""
    module = convert_model(unsharded_model("llama"), group=axis)
    first, second = as_dtensor(module), as_dtensor(module)
    for key, tensor in first.items():
        assert tensor.device_mesh == second[key].device_mesh
        assert torch.equal((tensor + second[key]).full_tensor(), 2 * gather_state_dict(module)[key])


@on_ranks("four")
def test_the_mesh_of_init_parallel(axis):
    """Check that tensors use the mesh of init_parallel, and so combine with the user's DTensors."""
    made = init_parallel(tensor=2, data=2, device_type="cpu")
    try:
        tensors = as_dtensor(small_module(made.tensor, fill=True))
        assert all(tensor.device_mesh == made.mesh["tensor"] for tensor in tensors.values())
        assert as_dtensor(small_module(axis, fill=True))["0.weight"].device_mesh != made.mesh["tensor"]
    finally:
        groups._current.groups = None


class WithState(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def get_extra_state(self):
        return "words"


@on_ranks("pairs")
def test_tensors_that_cannot_be_stored_or_computed_with_are_refused(axis):
    with pytest.raises(ValueError, match=r"^0.weight is on the meta device"):
        as_dtensor(nn.Sequential(ColumnParallelLinear(4, 8, device="meta", group=axis)))
    with pytest.raises(ValueError, match="_extra_state is a str, expected a tensor"):
        as_dtensor(WithState())
    with pytest.raises(NotImplementedError, match=r"Use this DTensor with torch\.distributed\.checkpoint only"):
        as_dtensor(small_module(axis, fill=True))["1.weight"].add(1)


def test_without_processes():
    init_parallel(tensor=1)
    try:
        with pytest.raises(ValueError, match="requires a process group, even for one process"):
            as_dtensor(nn.Linear(2, 2))
    finally:
        destroy_parallel()


@pytest.mark.parametrize(
    ("placement", "chunks"),
    [
        (Placement.replicated(4), 1),
        (shard_dim(0, [Unit(8)], 1), 1),
        (shard_dim(0, [Unit(8)], 4), 4),
        (shard_dim(0, [Unit(1, size=8, replicate=True)], 4), 1),
        (shard_dim(0, [Unit(2, size=8, replicate=True)], 4), 2),
        (shard_dim(0, [Unit(5, pad=True)], 4), 4),
        (shard_dim(0, [Unit(131, pad=True)], 4), 4),
        (shard_dim(0, [Unit(8), Unit(8)], 4), None),
        (shard_dim(0, [Unit(8), Unit(2, size=4, replicate=True)], 4), None),
        (shard_dim(0, [Unit(8), Unit(8)], 4, groups=2), None),
        (Placement(0, 8, ((Interval(0, 2),), (Interval(2, 8),))), None),  # torch.chunk splits it into 4 and 4
        (Placement(0, 8, ((Interval(4, 8),), (Interval(0, 4),))), None),
        (Placement(0, 8, ((Interval(0, 4),), (Interval(4, 8),), (Interval(0, 4),), (Interval(4, 8),))), None),
        (Placement(0, 8, ((), (Interval(0, 8),))), None),
        (Placement(0, 4, ((Interval(0, 2), Padding(2)), (Interval(2, 4), Padding(2)))), 2),
    ],
)
def test_which_placements_are_chunks(placement, chunks):
    assert num_chunks(placement) == chunks

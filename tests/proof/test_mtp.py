"""MTP layers (multi-token prediction) of checkpoints on the Hub, which transformers does not use.

Their names are those that serving frameworks load; their tensors are copies of a layer, or random.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from shardconv.checkpoint.operations.merge import merge
from shardconv.checkpoint.operations.split import split
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import write_reference
from shardconv.proof.ranks import REFERENCE
from tests.support.matrix import MATRIX
from tests.support.models import model_class
from tests.support.mtp import HUB, KIND_OF, with_mtp
from tools.model_matrix.trial import check, small, worst

pytestmark = MATRIX

#: Pattern of added tensors to the dim that is sharded; all others are replicated.
SHARDED_DIMS = {r"embed_tokens|up_proj|shared_head.output": 0, "down_proj": 1}


class Made(NamedTuple):
    """A checkpoint with MTP layers in ``folder / "source"``, split for two ranks in ``folder / "split"``."""

    folder: Path
    kind: str
    of_layer: dict[str, str]
    drawn: dict[str, torch.Tensor]
    shards: list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=HUB)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    model = small(model_class(KIND_OF[request.param], request.param))
    model.save_pretrained(folder / "source")
    write_reference(type(model), folder / "source", folder / REFERENCE)
    of_layer, drawn = with_mtp(folder / "source", request.param)
    assert of_layer
    assert drawn
    split(folder / "source", folder / "split", tp=2)
    shards = [load_file(path) for path in sorted((folder / "split").glob("*-of-*.safetensors"))]
    return Made(folder, type(model).__name__, of_layer, drawn, shards)


def test_mtp_layers_are_sharded_as_other_layers(made):
    for new, name in made.of_layer.items():
        assert all(torch.equal(shard[new], shard[name]) for shard in made.shards), new


def test_other_tensors_of_mtp_layers_are_sharded_along_their_dims(made):
    for name, tensor in made.drawn.items():
        dim = next((dim for pattern, dim in SHARDED_DIMS.items() if re.search(pattern, name)), None)
        first, second = (shard[name] for shard in made.shards)
        if dim is not None:  # an odd vocabulary is padded
            assert first.shape[dim] == second.shape[dim] == -(-tensor.shape[dim] // 2), name
            first = torch.cat([first, second], dim).narrow(dim, 0, tensor.shape[dim])
        assert torch.equal(first, tensor), name


def test_mtp_layers_are_merged_byte_for_byte(made, tmp_path):
    merge(made.folder / "split", tmp_path / "merged")
    source = made.folder / "source/model.safetensors"
    assert (tmp_path / "merged/model.safetensors").read_bytes() == source.read_bytes()


def test_mtp_layers_do_not_change_outputs(ranks, made):
    source, place = made.folder / "source", made.folder / "split"
    found = worst(ranks("pair", check, made.kind, source, place, PlanRequest(), made.folder / REFERENCE))
    assert not isinstance(found, str), found
    assert (found[0] < 1e-4, found[1] is not False) == (True, True)

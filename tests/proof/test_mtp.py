"""MTP layers (multi-token prediction) of checkpoints on the Hub, which transformers does not use.

Their names are those that serving frameworks load; their tensors are copies of a layer, or random.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from shardconv.checkpoint.merge import merge
from shardconv.checkpoint.split import split
from shardconv.errors import PlanError
from shardconv.plan.family_file import parse_plan_file
from shardconv.plan.matcher import name_regex
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import write_reference
from shardconv.proof.small_models import REFERENCE
from tests.support.mtp import HUB, KIND_OF, with_mtp
from tools.model_matrix.trial import check, model_class, small, worst

#: Pattern of added tensors to the dim that is sharded; all others are replicated.
SHARDED_DIMS = {r"embed_tokens|up_proj|shared_head.output": 0, "down_proj": 1}


@pytest.mark.parametrize("model_type", HUB)
def test_mtp_layers_are_split_and_merged(ranks, tmp_path, model_type):
    """They are sharded as other layers, merged byte for byte, and do not change the outputs."""
    made = small(model_class(KIND_OF[model_type], model_type))
    made.save_pretrained(tmp_path / "source")
    write_reference(type(made), tmp_path / "source", tmp_path / REFERENCE)
    of_layer, drawn = with_mtp(tmp_path / "source", model_type)
    assert of_layer
    assert drawn
    split(tmp_path / "source", tmp_path / "split", tp=2)
    shards = [load_file(path) for path in sorted((tmp_path / "split").glob("*-of-*.safetensors"))]
    for new, name in of_layer.items():
        assert all(torch.equal(shard[new], shard[name]) for shard in shards), new
    for name, tensor in drawn.items():
        dim = next((dim for pattern, dim in SHARDED_DIMS.items() if re.search(pattern, name)), None)
        full = shards[0][name] if dim is None else torch.cat([shard[name] for shard in shards], dim)
        assert shards[1][name].numel() == tensor.numel() // (1 if dim is None else 2), name
        assert torch.equal(full, tensor), name
    merge(tmp_path / "split", tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    source, place = tmp_path / "source", tmp_path / "split"
    found = worst(ranks("pair", check, type(made).__name__, source, place, PlanRequest(), tmp_path / REFERENCE))
    assert not isinstance(found, str), found
    assert (found[0] < 1e-4, found[1] is not False) == (True, True)


def test_alternative_prefixes():
    regex = re.compile(name_regex("model.layers.*.norm", ("model.", "mtp.")))
    assert all(regex.fullmatch(f"{start}layers.0.norm") for start in ("model.", "mtp.", ""))
    assert not any(regex.fullmatch(f"{start}layers.0.norm") for start in ("mtp.model.", "model.mtp.", "a.mtp.", "m."))
    prefixes = {'"model."': ("model.",), '["model.", "mtp."]': ("model.", "mtp."), '""': (), "[]": ()}
    for text, prefix in prefixes.items():
        assert parse_plan_file("plan.toml", f"prefix = {text}").prefix == prefix
    for text in ("[1]", '[""]', "1"):
        with pytest.raises(PlanError, match="prefix"):
            parse_plan_file("plan.toml", f"prefix = {text}")

"""Rank files in vLLM's layout, compared with the recorded tensors of vLLM's models (tests/data/vllm), without vLLM."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING

import shardconv
from shardconv.layouts.layout_file import layout_file
from shardconv.support.errors import PlanError
from tests.support.changes import put
from tests.support.checkpoints import contents
from tests.support.matrix import cases
from tests.support.models import change_config
from tests.support.vllm_fixture import LOADED, digest, expected, supported_tp, write

VLLM = layout_file("vllm")
TYPES = set(VLLM.types)
TYPE_OF = {name: line["config"]["model_type"] for name, line in LOADED.items()}
#: Checkpoints of these types with tensors that vLLM drops.
DROPPED = {"cohere-biases": "model.layers.0.self_attn.k_proj.bias"}
MATCHING = [name for name, model_type in TYPE_OF.items() if model_type in TYPES and name not in DROPPED]
OTHERS = [name for name in LOADED if name not in MATCHING]
#: Number of supported model types and checkpoints.
NUM_TYPES, NUM_CHECKPOINTS = 49, 67


def test_page_has_the_supported_types():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    listed = page.partition("<!-- types -->")[2].partition("<!-- end of types -->")[0]
    assert listed.split() == ", ".join(sorted(TYPES)).split()


def test_counts():
    assert (len(TYPES), len(MATCHING)) == (NUM_TYPES, NUM_CHECKPOINTS)
    assert {TYPE_OF[name] for name in MATCHING} == TYPES


@pytest.fixture
def source_of(tmp_path):
    return lambda name: write(tmp_path / "source", LOADED[name])


#: One of each structure: fused and single projections, biases, norms, experts of one tensor and of many, latent
#: attention, convolutions, and linear attention.
BY_DEFAULT = {
    "afmoe", "cohere-norms", "deepseek_v3", "ernie4_5_moe", "exaone4", "gemma2", "glm4", "gptj", "granitemoe",
    "lfm2_moe", "llama-biases", "llama-tied", "mimo_v2_flash", "minicpm3", "minimax_m2", "mixtral", "nemotron",
    "olmoe-packed", "opt", "phi3", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "stablelm",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MATCHING, lambda name: name in BY_DEFAULT))
def test_files_have_the_tensors_of_vllm(source_of, tmp_path, name):
    """Compares names, shapes and values of every rank, and the merged source."""
    source, line = source_of(name), LOADED[name]
    for tp in supported_tp(line):
        split = tmp_path / f"tp{tp}"
        shardconv.split(source, split, tp=tp, layout="vllm")
        for rank in range(tp):
            tensors = load_file(split / f"model-rank-{rank}-part-0.safetensors")
            found = {tensor: (value.shape, digest(value)) for tensor, value in tensors.items()}
            assert found == expected(line, tp, rank), (tp, rank)
        shardconv.merge(split, tmp_path / f"merged{tp}")
        assert contents(tmp_path / f"merged{tp}") == contents(source)


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_checkpoints_are_refused(source_of, tmp_path, name):
    named = DROPPED.get(name) or f"does not support model type '{TYPE_OF[name]}'"
    with pytest.raises(PlanError, match=f"{named}.*use the native layout"):
        shardconv.split(source_of(name), tmp_path / "out", tp=2, layout="vllm")
    assert not (tmp_path / "out").exists()


def test_unused_source_tensors_are_refused():
    """A tensor of which no rank has an element would be lost."""
    assert [name for name in MATCHING if LOADED[name]["unused"]] == []


# --- forms of checkpoints that the fixture does not have ------------------------------------------------------------


#: Checkpoint to a tensor that vLLM does not load, and its shape.
REFUSED = {
    "glm4_moe": ("model.layers.2.eh_proj.weight", (4, 4)),
    "qwen3_next": ("mtp.norm.weight", (4,)),
    "deepseek_v3": ("model.layers.1.mlp.experts.down_proj", (4, 4, 4)),
    "stablelm": ("model.layers.0.self_attn.q_layernorm.norms.0.weight", (16,)),
    "gemma2": ("lm_head.weight", (1000, 128)),
    "gemma4_text": ("model.layers.0.experts.down_proj", (4, 4, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_forms_are_refused(source_of, tmp_path, name):
    """MTP layers after the others or with a prefix, packed experts, norms of heads, and a head of tied embeddings."""
    source, (tensor, shape) = source_of(name), REFUSED[name]
    put(tensor, torch.zeros(shape))(source)
    with pytest.raises(PlanError, match=f"{tensor}: .*support"):
        shardconv.split(source, tmp_path / "out", tp=2, layout="vllm")


def test_low_rank_queries_that_are_missing(source_of, tmp_path):
    source = source_of("deepseek_v2-no-q-lora")
    change_config(source, {"q_lora_rank": 24})
    with pytest.raises(PlanError, match=r"q_a_proj.weight: is missing"):
        shardconv.split(source, tmp_path / "out", tp=2, layout="vllm")


def test_embeddings_are_tied_by_default(source_of, tmp_path):
    """If config.json does not have the field."""
    source = source_of("gemma")
    shardconv.split(source, tmp_path / "with", tp=2, layout="vllm")
    fields = {name: value for name, value in LOADED["gemma"]["config"].items() if name != "tie_word_embeddings"}
    (source / "config.json").write_text(json.dumps(fields))
    shardconv.split(source, tmp_path / "without", tp=2, layout="vllm")
    for name in ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"):
        assert tensors_of(tmp_path / "with" / name) == tensors_of(tmp_path / "without" / name)


def tensors_of(path):
    return {name: digest(value) for name, value in load_file(path).items()}


@pytest.mark.parametrize("model_type", sorted(TYPES.intersection(CONFIG_MAPPING)))
def test_defaults_equal_those_of_transformers(model_type):
    groups = VLLM.rules_for({"model_type": model_type}).groups
    if not any("tie_word_embeddings" in rule.options.when for group in groups for rule in group.rules):
        return
    defaults = {field: value for group in groups for field, value in group.defaults.items()}
    expected_value = CONFIG_MAPPING[model_type]().tie_word_embeddings
    assert defaults.get("tie_word_embeddings", False) == expected_value

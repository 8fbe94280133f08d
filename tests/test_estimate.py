"""What a dry run counts is what processes do that talk to each other: collectives, cache, and bytes that are alive."""

import pytest
import torch
from counting import recording_axis
from models import GQA, LAYERS, MODELS, MOE, VOCAB, Model, plain

import shardconv
from shardconv.plan.request import PlanRequest
from shardconv.runtime.dry_run import MetaModel, Usage, dry_run

BATCH, SEQ = 2, 11

#: One of each kind: plain, transposed, fused, biased, not rotated, experts, latents, encoders, windows, states.
COUNTED = {
    **{
        name: MODELS[name]
        for name in (
            "llama", "gpt2", "phi3", "gpt_bigcode", "falcon-7b", "falcon-40b", "falcon-rw", "bloom", "olmo2", "mixtral",
            "qwen2_moe", "deepseek_v3", "t5", "bert",
        )
    },
    "bart": plain("bart"),
    "opt": plain("opt"),
    "windows": Model("mistral", {**GQA, "sliding_window": 4}),
    "tied": Model("llama", {**GQA, "tie_word_embeddings": True}),
    "states": Model(
        "qwen3_next",
        {
            **GQA, **MOE, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip


def made(name: str, tp: int) -> Usage:
    """What a dry run of a model says, of float32 as tests build it."""
    model = COUNTED[name]
    with torch.device("meta"):
        real = model.build()
    config = {**real.config.to_dict(), "architectures": [type(real).__name__], "dtype": None}
    return dry_run(MetaModel(config, torch.float32), PlanRequest(), tp=tp, batch=BATCH, seq=SEQ)


def counted(calls):
    """Kind and bytes of each collective."""
    return None if calls is None else [(one.collective, one.num_bytes) for one in calls]


def ids_of(batch=BATCH, seq=SEQ):
    return torch.randint(3, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))


def converted(axis, name):
    """The model with values, over processes whose collectives are written down."""
    recording = recording_axis(axis)
    real = shardconv.convert_model(COUNTED[name].build(0.2).eval(), group=recording)
    recording.group.taken()
    return real, recording.group


def check_counted(axis, name, prefill, decode, cache_bytes):
    """Predicted without values, seen by torch in a real generation of one token, and of two."""
    real, group = converted(axis, name)
    if not real.can_generate():
        with torch.no_grad():
            real(input_ids=ids_of())
        assert group.taken() == prefill
        assert (decode, cache_bytes) == (None, None)
        return
    options = {"do_sample": False, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids_of())}
    after = real.generate(ids_of(), max_new_tokens=1, min_new_tokens=1, **options)
    assert group.taken() == prefill
    assert sum(tensor.nbytes for tensor in tensors_of(after.past_key_values)) == cache_bytes
    real.generate(ids_of(), max_new_tokens=2, min_new_tokens=2, **options)
    assert group.taken() == prefill + decode
    assert min(len(prefill), len(decode)) > LAYERS


def tensors_of(cache):
    """What a cache of transformers keeps of each layer, by the names that it has there."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    names = ("keys", "values", "conv_states", "recurrent_states", "_sliding_window_tensor")
    layers = [layer for one in (parts if parts[0] else [cache]) for layer in one.layers]
    found = [getattr(layer, name, None) for layer in layers for name in names]
    found = [one for each in found for one in (each.values() if isinstance(each, dict) else [each])]
    return [one for one in found if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("layout", "tp"), [("pairs", 2), ("four", 4)])
def test_collectives_and_cache(ranks, layout, tp, name):
    usage = made(name, tp)
    ranks(layout, check_counted, name, counted(usage.prefill), counted(usage.decode), usage.cache_bytes)

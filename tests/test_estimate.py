"""What a dry run counts is what processes do that talk to each other: collectives, cache, and bytes that are alive."""

import pytest
import torch
from counting import recording_axis
from models import GQA, LAYERS, MLA, MODELS, MOE, VOCAB, Model, plain

import shardconv
from shardconv.plan.request import PlanRequest
from shardconv.runtime.dry_run import MetaModel, Usage, dry_run
from shardconv.runtime.meter import LiveBytes

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
    "latents": Model("deepseek_v3", {**MLA, **MOE, "v_head_dim": 32}),
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


#: Values have another size than keys there: the kernel for attention on a CPU cannot do that, and all scores are held.
WITHOUT_KERNEL = "deepseek_v3"


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


def check_counted(axis, name, prefill, decode, cache_bytes, activation_bytes):
    """Predicted without values; seen by torch in a generation of one token, and of two, and live in the two passes."""
    real, group = converted(axis, name)
    assert len(prefill) > LAYERS
    if not real.can_generate():
        assert live_bytes(real) == (activation_bytes, None)
        assert group.taken() == prefill
        assert (decode, cache_bytes) == (None, None)
        return
    options = {"do_sample": False, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids_of())}
    after = real.generate(ids_of(), max_new_tokens=1, min_new_tokens=1, **options)
    assert group.taken() == prefill
    assert sum(tensor.nbytes for tensor in tensors_of(after.past_key_values)) == cache_bytes
    real.generate(ids_of(), max_new_tokens=2, min_new_tokens=2, **options)
    assert group.taken() == prefill + decode
    if name != WITHOUT_KERNEL:
        assert live_bytes(real) == (activation_bytes + cache_bytes, cache_bytes)


@torch.no_grad()
def live_bytes(real):
    """What is alive at most in the two passes, by the same meter on tensors with values; and the cache between them."""
    ids = ids_of()
    with LiveBytes([*real.parameters(), *real.buffers(), ids]) as live:
        if not real.can_generate():
            real(input_ids=ids)
            return live.peak, None
        states, first, text, options = {}, ids, "input_ids", {"use_cache": True, "logits_to_keep": 1}
        if real.config.is_encoder_decoder:
            states = {"encoder_outputs": real.get_encoder()(input_ids=ids, return_dict=True)}
            first, text, options = ids[:, :1], "decoder_input_ids", {"use_cache": True}
        cache = real(**states, **{text: first}, **options).past_key_values
        cache_bytes = sum(tensor.nbytes for tensor in tensors_of(cache))
        real(**states, **{text: first[:, :1]}, **options, past_key_values=cache)
    return live.peak, cache_bytes


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
def test_real_runs_are_as_counted(ranks, layout, tp, name):
    usage = made(name, tp)
    counts = counted(usage.prefill), counted(usage.decode), usage.cache_bytes, usage.activation_bytes
    ranks(layout, check_counted, name, *counts)

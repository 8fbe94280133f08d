"""Cost estimates of dry runs, compared with real runs: collectives, bytes of the cache, and live bytes."""

import json
import re
import shutil

import msgspec
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaMLP

import shardconv
from shardconv.plan.request import PlanRequest
from shardconv.runtime.dry_run import LiveBytes, MetaModel, Usage, dry_run
from shardconv.runtime.estimate import Collective, CostReport, TpCost, Traffic, estimate_cost
from shardconv.support.errors import PlanError, RunError, SourceError, UsageError
from shardconv.support.formatting import duration, size
from shardconv.tensor.cost import Link
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import call
from tests.support.matrix import cases
from tests.support.models import GQA, LAYERS, MLA, MODELS, MOE, VOCAB, Model, change_config, default_model, read
from tests.support.recording_group import recording_axis

BATCH, SEQ = 2, 11

#: Models with transposed or fused weights, biases, experts, latents, encoders, sliding windows and states.
COUNTED = {
    **{
        name: MODELS[name]
        for name in (
            "llama", "gpt2", "phi3", "gpt_bigcode", "falcon-7b", "falcon-40b", "falcon-rw", "bloom", "olmo2", "mixtral",
            "qwen2_moe", "deepseek_v3", "t5", "bert",
        )
    },
    "latents": Model("deepseek_v3", {**MLA, **MOE, "v_head_dim": 32}),
    "bart": default_model("bart"),
    "opt": default_model("opt"),
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


#: Values have another size than keys: the CPU kernel of attention does not support it, and all scores are in memory.
WITHOUT_KERNEL = "deepseek_v3"


def made(name: str, tp: int) -> Usage:
    """The estimate of a dry run of a model in float32."""
    model = COUNTED[name]
    with torch.device("meta"):
        real = model.build()
    config = {**real.config.to_dict(), "architectures": [type(real).__name__], "dtype": None}
    return dry_run(MetaModel(config, torch.float32), PlanRequest(), tp, BATCH, SEQ)


def counted(calls):
    """Kind and bytes of each collective."""
    return None if calls is None else [(one.collective, one.num_bytes) for one in calls]


def ids_of(batch=BATCH, seq=SEQ):
    return torch.randint(3, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))


def converted(axis, name):
    """The converted model with values, over a group that records its collectives."""
    recording = recording_axis(axis)
    real = shardconv.convert_model(COUNTED[name].build(0.2).eval(), group=recording)
    recording.group.taken()
    return real, recording.group


def check_counted(axis, name, prefill, decode, cache_bytes, activation_bytes):
    """Check an estimate against a generation of one token and of two tokens, and live bytes of both passes."""
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
    """Peak live bytes of the two passes, by the same meter on tensors with values; and the cache between them."""
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
    """Name to tensor of each layer of a cache of transformers."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    names = ("keys", "values", "conv_states", "recurrent_states", "_sliding_window_tensor")
    layers = [layer for one in (parts if parts[0] else [cache]) for layer in one.layers]
    found = [getattr(layer, name, None) for layer in layers for name in names]
    found = [one for each in found for one in (each.values() if isinstance(each, dict) else [each])]
    return [one for one in found if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize(
    ("layout", "tp", "name"),
    cases(
        [(layout, tp, name) for layout, tp in (("pair", 2), ("four", 4)) for name in COUNTED],
        lambda layout, tp, name: (
            (tp == 4 and name == "llama") or (tp == 2 and name in {"falcon-40b", "mixtral", "latents", "t5"})
        ),
    ),
)
def test_estimates_equal_real_runs(ranks, layout, tp, name):
    usage = made(name, tp)
    counts = counted(usage.prefill), counted(usage.decode), usage.cache_bytes, usage.activation_bytes
    ranks(layout, check_counted, name, *counts)


# --- the report -----------------------------------------------------------------------------------------------------

LINK = Link(alpha=1e-5, beta=1e-9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Llama with 3 layers, in bfloat16: hidden size 64, 8 heads, 2 KV heads of size 8, vocabulary 131."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", config=llama_config(layers=3))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_costs_equal_manual_calculation(tiny, tp):
    """Of 3 prompts of 5 tokens: two all-reduces per layer, one of the embedding, and the all-gather of 132 logits."""
    (cost,) = estimate_cost(tiny, tps=[tp], batch=3, seq=5, link=LINK).costs
    for traffic, tokens in ((cost.prefill, 3 * 5), (cost.decode, 3)):
        words = -(-131 // tp) * tp
        hidden, logits = tokens * 64 * 2, 3 * words * 2
        reduces, gathers = Collective("all_reduce", hidden, 7), Collective("all_gather", logits, 1)
        assert traffic.collectives == ((reduces, gathers) if tp > 1 else ())
        share = (tp - 1) / tp
        assert traffic.sent_bytes == pytest.approx(share * (7 * 2 * hidden + logits))
        assert traffic.layer_bytes == pytest.approx(share * 2 * 2 * hidden)
        messages = (tp - 1) * (7 * 2 + 1)
        assert traffic.seconds == pytest.approx(messages * LINK.alpha + traffic.sent_bytes * LINK.beta)
    assert cost.cache_bytes == 3 * 2 * (3 * 5) * max(2 // tp, 1) * 8 * 2
    assert cost.weight_bytes == max(shardconv.report_plan(tiny, tp=tp).rank_bytes)
    assert cost.memory_bytes == cost.weight_bytes + cost.cache_bytes + cost.activation_bytes
    assert cost.not_counted is None


def test_costs_of_stages(tiny):
    """Two messages of the hidden states between three stages, and two of the logits from the last one.

    The first stage has an all-reduce of the embedding, the last one an all-gather of the logits.
    """
    report = estimate_cost(tiny, tps=[2], stages="1,1,1", batch=3, seq=5, link=LINK)
    (cost,), (whole,) = report.costs, estimate_cost(tiny, tps=[2], batch=3, seq=5, link=LINK).costs
    assert report.stages == (1, 1, 1)
    assert cost.weight_bytes == max(shardconv.report_plan(tiny, tp=2, pp=3).rank_bytes)
    assert cost.cache_bytes == whole.cache_bytes // 3
    for traffic, other, tokens in ((cost.prefill, whole.prefill, 15), (cost.decode, whole.decode, 3)):
        hidden = tokens * 64 * 2
        logits = 3 * 131 * 2
        sent = {Collective("send", hidden, 2), Collective("send", logits, 2)}
        assert {*traffic.collectives} == {*other.collectives} | sent
        assert traffic.seconds == pytest.approx(other.seconds + 4 * LINK.alpha + 2 * (hidden + logits) * LINK.beta)
        first, last = 3 * hidden + hidden, 2 * hidden + 3 * 132 * 2 / 2 + 2 * logits  # all-reduces by two ranks
        assert traffic.sent_bytes == max(first, last)


def test_defaults(tiny):
    done = []
    report = estimate_cost(tiny, progress=lambda *numbers: done.append(numbers))
    supported = shardconv.report_plan(tiny).supported_tp
    assert [cost.tp for cost in report.costs] == [tp for tp in supported if tp <= 64]
    assert (report.batch, report.seq, report.link, report.dtype) == (1, 2048, Link(), "bfloat16")
    assert (report.model, report.family, report.num_layers, report.notes) == ("LlamaForCausalLM", "llama", 3, ())
    assert done == [(number, len(report.costs)) for number in range(len(report.costs) + 1)]


def test_sizes_that_need_padding(tiny):
    """With ``pad``, also the 3 sizes up to 16 with the least padding, with the bytes of their plans and a note."""
    report = estimate_cost(tiny, pad=True, seq=1)
    sizes = shardconv.report_plan(tiny)
    padded = [one.tp for one in sorted(sizes.padded_tp, key=lambda one: one.memory)][:3]
    assert max(one.tp for one in sizes.padded_tp) <= 16
    assert [cost.tp for cost in report.costs] == sorted([*sizes.supported_tp, *padded])
    plans = {cost.tp: shardconv.report_plan(tiny, tp=cost.tp, pad=True) for cost in report.costs}
    assert [cost.weight_bytes for cost in report.costs] == [max(plan.rank_bytes) for plan in plans.values()]
    costs = ", ".join(f"tp {tp} ({plan.padding.memory:.1%})" for tp, plan in plans.items() if tp in padded)
    assert report.notes == (f"padded with zeros (additional memory): {costs}",)
    assert (
        "the 3 up to 16 with the least padding; --tp N counts another"
        in call("plan", tiny, "--cost", "--pad", "--seq", "1").out
    )


def changed(source, folder, *, without_weights=False, **fields):
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors") if without_weights else None)
    change_config(folder, fields)
    return folder


def test_notes_of_a_config_with_another_dtype_and_few_positions(tiny, tmp_path):
    """The default number of tokens is that of the positions."""
    short = changed(tiny, tmp_path / "short", max_position_embeddings=100, dtype="float16")
    report, longer = estimate_cost(short, tps=[2]), estimate_cost(short, tps=[2], seq=200)
    assert (report.seq, longer.seq, report.dtype) == (100, 200, "float16")
    assert "stored as bfloat16, and loaded as float16" in report.notes[0]
    assert longer.notes[1] == "200 tokens are more than the 100 that the model is made for"


@pytest.mark.parametrize(
    ("name", "note"),
    [("t5", "the encoder processes the prompts"), ("deepseek_v3-hub", "the weights are quantized")],
)
def test_notes_of_models(checkpoint, name, note):
    report = estimate_cost(checkpoint(name), tps=[2])
    assert note in report.notes[-1]
    assert report.costs[0].decode.sent_bytes > 0


def test_notes_of_inputs_other_than_text(tmp_path):
    kinds = {"vision_config": {"model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}}
    model = MetaModel(
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], **kinds}, torch.float32
    )
    assert model.other_inputs == ("pixel_values",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"architectures": ["NoSuchModel"]}, "model_type 'llama' and architectures ['NoSuchModel']"),
        ({"hidden_act": "nonsense"}, "nonsense"),
    ],
)
def test_only_weights_are_counted_without_a_model(tiny, tmp_path, fields, why):
    """Other columns are empty."""
    report = estimate_cost(changed(tiny, tmp_path / "changed", **fields), tps=[2, 4])
    for cost in report.costs:
        assert cost.weight_bytes == max(shardconv.report_plan(tiny, tp=cost.tp).rank_bytes)
        assert why in cost.not_counted
        assert not any((cost.cache_bytes, cost.activation_bytes, cost.memory_bytes, cost.prefill, cost.decode))


def test_model_that_reads_values(tiny, monkeypatch):
    def choose(self, hidden_states):
        return hidden_states[(hidden_states > 0).nonzero()[:, 0]]

    monkeypatch.setattr(LlamaMLP, "forward", choose)
    result = call("plan", tiny, "--cost")
    assert (result.code, result.err) == (0, "")
    assert "only weights are counted for tp 1, 2, 4, 8: NotImplementedError: " in result.out
    assert re.search(r"^per rank, in \w+$", result.out, re.MULTILINE)  # without prompts
    assert re.search(r"^2 +\d+ kB( +-){8} *$", result.out, re.MULTILINE)


def test_source_without_a_config(tiny, tmp_path):
    shutil.copy(tiny / "model.safetensors", tmp_path)
    (cost,) = estimate_cost(tmp_path / "model.safetensors", tps=[2], head_dim=8).costs
    assert cost.not_counted == "no config.json names the model: pass --config FILE"


@pytest.mark.parametrize("name", cases(["tiny", "mixtral", "t5"], lambda name: name != "mixtral"))
def test_config_without_weights(tiny, checkpoint, tmp_path, name):
    """The estimate equals the one with weights."""
    with_weights = tiny if name == "tiny" else checkpoint(name)
    shutil.copy(with_weights / "config.json", tmp_path)
    if name == "tiny":  # its config was written without it
        change_config(tmp_path, {"dtype": "bfloat16"})
    expected = estimate_cost(with_weights, batch=BATCH, seq=SEQ)
    for source in (tmp_path, tmp_path / "config.json"):
        report = estimate_cost(source, batch=BATCH, seq=SEQ)
        assert report.costs == expected.costs
        assert report.notes[0].startswith(f"no weights found: the tensors of {report.model} are counted as save_")


def test_assumed_dtype_of_a_config_without_weights(tiny, tmp_path):
    report = estimate_cost(changed(tiny, tmp_path / "config", without_weights=True, dtype=None), tps=[2])
    assert report.notes[0].endswith("in float32 (assumed, as the config does not have a dtype)")
    assert report.costs[0].weight_bytes == 2 * estimate_cost(tiny, tps=[2]).costs[0].weight_bytes


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "torchao"}, "needs a block size"),
        ({"quant_method": "aqlm"}, "'aqlm' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes with 4 bits is not supported"),
        ({"quant_method": "mxfp4"}, "no layer of the model has a weight that mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down": {}}}, "dynamic selects layers"),
    ],
    ids=["metadata", "not supported", "4 bits", "experts", "layers"],
)
def test_quantized_tensors_that_a_config_does_not_determine(tiny, tmp_path, settings, reason):
    """The weights are counted without quantization, and a note says so."""
    folder = changed(tiny, tmp_path / "config", without_weights=True, dtype="bfloat16", quantization_config=settings)
    report = estimate_cost(folder, tps=[2])
    assert re.search(f"asks for quantized weights .* unquantized ones are counted, .*{reason}", report.notes[1])
    assert report.costs[0].weight_bytes == estimate_cost(tiny, tps=[2]).costs[0].weight_bytes
    assert "unquantized ones are counted" in call("plan", folder, "--cost", "--tp", "2", "-q").err


def test_reason_where_only_one_rank_is_supported(tiny, tmp_path):
    """The error of two ranks, whose shards would have parts of blocks of 128."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = changed(tiny, tmp_path / "config", without_weights=True, quantization_config=settings, head_dim=24)
    report = estimate_cost(folder, seq=1)
    assert [cost.tp for cost in report.costs] == [1]
    with pytest.raises(PlanError) as error:
        estimate_cost(folder, tps=[2])
    assert report.notes[-1] == error.value.with_options()
    assert "\n--tp 2 is unsupported" in call("plan", folder, "--cost", "--seq", "1").out


def test_config_alone_of_fp8_has_the_sizes_and_bytes_of_the_checkpoint(checkpoint, tmp_path):
    """With a layer that is not quantized, and without MTP layers, which the model class does not have."""
    source, ignored = checkpoint("deepseek_v3-hub"), "model.layers.0.mlp.down_proj"
    tensors = {name: one for name, one in read(source).items() if f"layers.{LAYERS}." not in name}
    tensors[f"{ignored}.weight"] = tensors[f"{ignored}.weight"].float()
    del tensors[f"{ignored}.weight_scale_inv"]
    shutil.copy(source / "config.json", tmp_path)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8], "modules_to_not_convert": [ignored]}
    change_config(tmp_path, {"quantization_config": settings})
    alone = estimate_cost(tmp_path, seq=1)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = shardconv.report_plan(tmp_path)
    found = {cost.tp: cost.weight_bytes for cost in alone.costs}
    assert found == dict(zip(expected.supported_tp, expected.supported_bytes, strict=True))
    assert "experts as quantized by the config (fp8 e4m3), the others in float32 (" in alone.notes[0]


def test_layers_that_the_model_class_leaves_out_are_noted(tiny, tmp_path):
    folder = changed(tiny, tmp_path / "config", without_weights=True, num_nextn_predict_layers=1)
    note = "MTP layers (num_nextn_predict_layers) are not counted: LlamaForCausalLM does not have them"
    assert note in estimate_cost(folder, tps=[2]).notes


NO_MODEL = {"config.json": '{"model_type": "none", "architectures": ["None"]}'}
#: The files of a folder, the source in it, and the error.
REFUSED = {
    "tokenizer": ({"tokenizer.json": "{}"}, SourceError, "is not a .safetensors or PyTorch file"),
    "safetensors index": ({"model.safetensors.index.json": "{}"}, SourceError, "does not have a weight_map"),
    "config": (NO_MODEL, RunError, "does not name a model class of transformers"),
    "folder": (NO_MODEL, RunError, "does not name a model class of transformers"),
    "folder with weights": ({**NO_MODEL, "pytorch_model.bin": ""}, SourceError, "is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_sources_are_refused(tmp_path, what):
    files, error, message = REFUSED[what]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        estimate_cost(tmp_path if what.startswith("folder") else tmp_path / next(iter(files)))


def test_config_that_is_a_link(tiny, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").symlink_to(tiny / "config.json")
    with pytest.raises(SourceError, match="is a link out of its folder"):
        estimate_cost(tmp_path / "folder")
    assert estimate_cost(tmp_path / "folder", tps=[2], follow_links=True).costs


@pytest.mark.parametrize("options", [{"batch": 0}, {"seq": 0}], ids=str)
def test_wrong_arguments_are_refused(tiny, options):
    with pytest.raises(UsageError, match=r"is (0|-1) \(expected a positive integer\): correct it"):
        estimate_cost(tiny, **options)


# --- the command ----------------------------------------------------------------------------------------------------


def test_row_of_the_table_has_the_costs(tiny):
    """Below the settings; there is a row for each supported size."""
    result = call("plan", tiny, "--cost", "--batch", "3", "--seq", "5", "--alpha", "1e-5", "--beta", "1e-9")
    assert (result.code, result.err) == (0, "")
    for text in (
        "LlamaForCausalLM, family llama, 3 layers", "3 prompts of 5 tokens, and a step for the next token of each, in",
        "link: 10 µs per message, 1 GB/s", "the supported sizes up to 64",
    ):  # fmt: skip
        assert text in result.out
    rows = [re.split(" {2,}", line.rstrip()) for line in result.out.rstrip().splitlines()[-5:]]
    assert [row[0] for row in rows] == ["tp", "1", "2", "4", "8"]
    (cost,) = estimate_cost(tiny, tps=[2], batch=3, seq=5, link=LINK).costs
    sizes = (cost.weight_bytes, cost.cache_bytes, cost.activation_bytes, cost.memory_bytes, cost.decode.sent_bytes)
    assert rows[2][1:] == [
        *map(size, sizes), size(cost.decode.layer_bytes), duration(cost.decode.seconds),
        size(cost.prefill.sent_bytes), duration(cost.prefill.seconds),
    ]  # fmt: skip


def test_json_of_the_command_is_the_report(tiny):
    result = call("plan", tiny, "--cost", "--json", "--tp", "4", "--alpha", "1e-5", "--beta", "1e-9")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    report = json.loads(result.out)
    for kind, found in ((CostReport, report), (TpCost, report["costs"][0]), (Traffic, report["costs"][0]["decode"])):
        assert list(found) == list(kind.__struct_fields__)
    assert report["link"] == structs.asdict(LINK)
    assert report == json.loads(msgspec.json.encode(estimate_cost(str(tiny), tps=[4], link=LINK)))


#: Arguments of the command to its exit code and error.
WRONG_OPTIONS = {
    "SRC --cost --batch 0": (2, "Invalid value for '--batch'"),
    "SRC --cost --beta -1": (2, "Invalid value for '--beta'"),
    "SRC --cost --tp 3": (1, "--tp 3 is unsupported"),
    "SRC --seq 5": (2, "--seq applies to --cost only"),
    "SRC --cost --prove": (2, "--cost does not apply to --prove"),
    "SRC --cost --check-model": (2, "--check-model does not apply to --cost"),
    "SRC --cost --measure-link --alpha 3": (2, "pass one or the other"),
    "SRC --measure-link": (2, "--measure-link takes SRC only together with --cost"),
    "SRC --cost --measure-link": (2, "torchrun --nproc-per-node N -m shardconv plan --measure-link"),
    "--measure-link": (2, "torchrun"),
    "--measure-link --all": (2, "--all does not apply to --measure-link"),
    "--list-families --tp 2": (2, "--tp does not apply to --list-families: remove one of the two"),
    "--list-families llama --pad": (2, "--pad does not apply to --list-families"),
    "SRC --propose --ep 2": (2, "--ep does not apply to --propose"),
    "SRC --propose --prove": (2, "--prove does not apply to --propose"),
    "SRC --prove --all": (2, "--all does not apply to --prove"),
    "SRC --all": (2, "--all lists the tensors of a plan, which is for one tensor parallel size: add --tp N"),
    "SRC/config.json --cost --ignore x": (2, "--ignore: only applies to folders with weights (got the config "),
    "SRC/config.json --cost --from meta": (2, "--from: only applies to folders with weights (got the config "),
    **dict.fromkeys(("", "--cost", "--cost --measure-link", "--prove"), (2, "Missing argument 'SRC'")),
}


@pytest.mark.parametrize("arguments", WRONG_OPTIONS)
def test_wrong_options(tiny, arguments):
    code, message = WRONG_OPTIONS[arguments]
    result = call("plan", *arguments.replace("SRC", str(tiny)).split())
    assert (result.code, result.out, message in result.err) == (code, "", True), result.err
    assert "Traceback" not in result.err

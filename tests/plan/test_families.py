"""Every family, on tiny randomly initialized models: round trips, and shards compared with torch code.

The expected shards follow from the modeling code, not from the family files: which heads, blocks and halves a rank's
tensor has, so that the same modeling code with fewer heads runs on it. Comparisons are exact.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers import DiaConfig, DiaForConditionalGeneration

import shardconv
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.loading import family_names, load_family
from shardconv.support.errors import PlanError, UsageError
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.matrix import cases, each_once
from tests.support.models import HEADS, KV_HEADS, MODELS, VOCAB, Tensors, change_config, default_model, read

TPS = (1, 2, 4, 8)
each_tp = pytest.mark.parametrize("tp", cases(TPS, lambda tp: tp in {2, 8}))

#: Maps a full tensor and tp to the shards of all ranks.
Sharding = Callable[[torch.Tensor, int], list[torch.Tensor]]


def shard_evenly(tensor: torch.Tensor, tp: int, dim: int) -> list[torch.Tensor]:
    """The shards of a number of blocks, the same number on each rank; fewer blocks than ranks are replicated."""
    count = tensor.shape[dim]
    if count < tp:
        tensor, count = tensor.repeat_interleave(tp // count, dim), tp
    assert count % tp == 0
    return list(tensor.split(count // tp, dim))


def by_rank(parts: Iterable[torch.Tensor], tp: int, dim: int = 0) -> Iterable[tuple[torch.Tensor, ...]]:
    """For each rank its shard of each segment."""
    return zip(*(shard_evenly(part, tp, dim) for part in parts), strict=True)


def blocks(*counts: int, dim: int = 0) -> Sharding:
    """Consecutive segments, each of so many heads or rows, and each sharded over all ranks."""

    def shards(tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
        split = tensor.unflatten(dim, (sum(counts), -1)).split(counts, dim)
        return [torch.cat(mine, dim).flatten(dim, dim + 1) for mine in by_rank(split, tp, dim)]

    return shards


def halves(dim: int) -> Sharding:
    """[gate; up], each sharded between rows."""
    return lambda tensor, tp: [torch.cat(mine, dim) for mine in by_rank(tensor.chunk(2, dim), tp, dim)]


def along(dim: int) -> Sharding:
    return lambda tensor, tp: shard_evenly(tensor, tp, dim)


def replicate(tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return [tensor] * tp


def vocab(tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """Rows of the vocabulary, followed by rows of padding."""
    assert len(tensor) == VOCAB
    padding = -VOCAB % tp
    return shard_evenly(pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, padding)), tp, 0)


def neox(tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """``view(heads, 3, head_dim)``: q, k and v of a head are adjacent."""
    q_k_v = tensor.unflatten(0, (HEADS, 3, -1)).unbind(1)
    return [torch.stack(mine, 1).flatten(0, 2) for mine in by_rank(q_k_v, tp)]


def falcon_groups(tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """``view(kv_heads, heads / kv_heads + 2, head_dim)``: the query heads of a group, then its k and v."""
    grouped = tensor.unflatten(0, (KV_HEADS, HEADS // KV_HEADS + 2, -1))
    q_k_v = grouped[:, :-2].flatten(0, 1), grouped[:, -2], grouped[:, -1]
    groups = max(KV_HEADS // tp, 1)
    return [
        torch.cat([part.unflatten(0, (groups, -1)) for part in mine], 1).flatten(0, 2) for mine in by_rank(q_k_v, tp)
    ]


Shardings = dict[str, Sharding]

#: Family to the sharded tensors and how they are sharded; all others are replicated.
LLAMA: Shardings = {
    r"(embed_tokens|lm_head)\.(weight|bias)": vocab,
    r"q_proj\.(weight|bias)": blocks(HEADS),
    r"[kv]_proj\.(weight|bias)": blocks(KV_HEADS),
    r"o_proj\.weight": blocks(HEADS, dim=1),
    r"self_attn\.(sinks|softmax_offset)": blocks(HEADS),
    r"(gate|up)_proj\.(weight|bias)": along(0),
    r"down_proj\.weight": along(1),
}
EXPERTS_SHARDINGS: Shardings = {**LLAMA, r"experts\.gate_up_proj": halves(1), r"experts\.down_proj": along(2)}
NORMS_OF_HEADS: Shardings = {r"q_norm\.weight": blocks(HEADS), r"k_norm\.weight": blocks(KV_HEADS)}
GPT2: Shardings = {
    r"(wte|lm_head)\.weight": vocab,
    r"c_attn\.weight": blocks(HEADS, HEADS, HEADS, dim=1),
    r"c_attn\.bias": blocks(HEADS, HEADS, HEADS),
    r"attn\.c_proj\.weight": blocks(HEADS),
    r"c_fc\.weight": along(1),
    r"c_fc\.bias": along(0),
    r"mlp\.c_proj\.weight": along(0),
}
BIGCODE: Shardings = {
    r"(wte|lm_head)\.weight": vocab,
    r"attn\.c_proj\.weight": blocks(HEADS, dim=1),
    r"c_fc\.(weight|bias)": along(0),
    r"mlp\.c_proj\.weight": along(1),
}
NEOX: Shardings = {
    r"(embed_in|embed_out|word_embeddings|lm_head)\.weight": vocab,
    r"query_key_value\.(weight|bias)": neox,
    r"(attention|self_attention)\.dense\.weight": blocks(HEADS, dim=1),
    r"dense_h_to_4h\.(weight|bias)": along(0),
    r"dense_4h_to_h\.weight": along(1),
}
BERT: Shardings = {
    r"(word_embeddings|lm_head|cls\.predictions|decoder)\.(weight|bias)": vocab,
    r"self\.(query|key|value)\.(weight|bias)": blocks(HEADS),
    r"attention\.output\.dense\.weight": blocks(HEADS, dim=1),
    r"intermediate\.dense\.(weight|bias)": along(0),
    r"layer\.\d+\.output\.dense\.weight": along(1),
    r"(pooler|transform|lm_head|generator_predictions)\.dense\.(weight|bias)": along(0),
    r"embeddings_project\.(weight|bias)": along(0),
}
BART: Shardings = {
    r"(shared|embed_tokens|lm_head|proj_out|output_projection)\.weight": vocab,
    r"[qkv]_proj\.(weight|bias)": blocks(HEADS),
    r"out_proj\.weight": blocks(HEADS, dim=1),
    r"fc1\.(weight|bias)": along(0),
    r"fc2\.weight": along(1),
}
MLA: Shardings = {
    r"(q|q_b|kv_b)_proj\.weight": blocks(HEADS),
    r"(q_b|kv_b)_proj\.weight_scale_inv": blocks(HEADS),
    r"o_proj\.weight_scale_inv": blocks(HEADS, dim=1),
    r"(gate|up)_proj\.weight_scale_inv": along(0),
    r"down_proj\.weight_scale_inv": along(1),
    r"shared_head\.head\.weight": vocab,
    **EXPERTS_SHARDINGS,
}

#: The same for some models of models.py, instead of those of their family.
SHARDINGS: dict[str, Shardings] = {
    "llama": LLAMA,
    "olmo2": LLAMA | NORMS_OF_HEADS,
    "cohere": LLAMA | NORMS_OF_HEADS,
    "starcoder2": LLAMA | {r"c_fc\.(weight|bias)": along(0), r"mlp\.c_proj\.weight": along(1)},
    "phi": LLAMA | {
        r"self_attn\.dense\.weight": blocks(HEADS, dim=1),
        r"fc1\.(weight|bias)": along(0),
        r"fc2\.weight": along(1),
    },
    "phi3": LLAMA | {r"qkv_proj\.weight": blocks(HEADS, KV_HEADS, KV_HEADS), r"gate_up_proj\.weight": halves(0)},
    "qwen2_moe": EXPERTS_SHARDINGS,
    "mixtral": EXPERTS_SHARDINGS | {r"w[13]\.weight": along(0), r"w2\.weight": along(1)},
    "cohere2_moe": EXPERTS_SHARDINGS,
    "minimax_m2": EXPERTS_SHARDINGS | NORMS_OF_HEADS | {r"w[13]\.weight": along(0), r"w2\.weight": along(1)},
    "granitemoe": LLAMA | {
        r"block_sparse_moe\.(input_linear\.weight|experts\.gate_up_proj)": halves(1),
        r"block_sparse_moe\.(output_linear\.weight|experts\.down_proj)": along(2),
        r"shared_mlp\.input_linear\.weight": halves(0),
        r"shared_mlp\.output_linear\.weight": along(1),
    },
    "bart": BART,
    "opt": BART,
    "olmoe": EXPERTS_SHARDINGS | NORMS_OF_HEADS,
    "glm4_moe": EXPERTS_SHARDINGS,
    "deepseek_v3": MLA,
    "gpt2": GPT2,
    "gpt_bigcode": BIGCODE | {r"c_attn\.(weight|bias)": blocks(HEADS, 1, 1)},
    "gpt_bigcode-mha": BIGCODE | {r"c_attn\.(weight|bias)": neox},
    "gpt_neox": NEOX,
    "bloom": NEOX,
    "falcon": NEOX | {r"query_key_value\.(weight|bias)": blocks(HEADS, 1, 1)},
    "falcon-40b": NEOX | {r"query_key_value\.(weight|bias)": falcon_groups},
    "falcon-rw": NEOX,
    "bert": BERT,
    "roberta": BERT,
    "electra": BERT | {r"generator_lm_head\.(weight|bias)": vocab},
    "t5": {
        r"(shared|embed_tokens|lm_head)\.weight": vocab,
        r"\w+Attention\.[qkv]\.weight": blocks(HEADS),
        r"\w+Attention\.o\.weight": blocks(HEADS, dim=1),
        r"relative_attention_bias\.weight": along(1),
        r"DenseReluDense\.wi(_[01])?\.weight": along(0),
        r"DenseReluDense\.wo\.weight": along(1),
    },
}  # fmt: skip

#: Further model types to the entry above with the same shards.
_SAME_SHARDS = {
    "llama": (
        "apertus", "arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite",
        "granite_swa", "helium", "hunyuan_v1_dense", "jais2", "ministral", "ministral3", "mistral", "nemotron", "olmo",
        "seed_oss", "smollm3", "vaultgemma",
    ),
    "olmo2": ("olmo3",),
    "phi3": ("glm",),
    "qwen2_moe": ("kolibri1", "mellum"),
    "mixtral": ("phimoe",),
    "cohere2_moe": ("cohere2_moe",),
    "minimax_m2": ("minimax_m2",),
    "granitemoe": ("granitemoe", "granitemoe_swa", "granitemoeshared"),
    "bart": (
        "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "plbart", "whisper",
    ),
    "opt": ("biogpt", "opt", "xglm"),
    "olmoe": ("flex_olmo",),
    "glm4_moe": ("afmoe", "hy_v3", "solar_open"),
    "deepseek_v3": ("deepseek_v32",),
    "bert": ("ernie", "megatron-bert", "roformer"),
    "roberta": (
        "bert-generation", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
    ),
    "t5": ("mt5", "umt5"),
}  # fmt: skip
#: Models of models.py whose type does not have an entry.
_LIKE = {
    "qwen2": "llama", "qwen3": "llama", "stablelm": "llama", "glm4": "phi3", "qwen3_moe": "qwen2_moe",
    "deepseek_v2": "deepseek_v3",
}  # fmt: skip
OTHER_TYPES = [(model_type, shards) for shards, types in _SAME_SHARDS.items() for model_type in types]


@pytest.fixture(scope="module")
def split(checkpoint, tmp_path_factory) -> Callable[[str, int], Path]:
    """The split checkpoint of a model by its name in models.py and tp, made once."""

    @cache
    def make(name: str, tp: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{name}-tp{tp}") / "split"
        shardconv.split(checkpoint(name), folder, tp=tp)
        return folder

    return make


def rank_files(folder: Path, tp: int) -> list[Tensors]:
    return [load_file(folder / f"rank-{rank}-of-{tp}.safetensors") for rank in range(tp)]


def is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors of any dtype have equal bits, also of NaN."""
    same_kind = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return same_kind and torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)))


def check_shards(source: Path, folder: Path, tp: int, shardings: Shardings) -> None:
    """Compare every shard of every tensor with the expected one."""
    ranks = rank_files(folder, tp)
    for name, tensor in read(source).items():
        sharding = next(
            (sharding for pattern, sharding in shardings.items() if re.search(rf"(^|\.){pattern}$", name)), replicate
        )
        expected = sharding(tensor, tp)
        for rank in range(tp):
            assert is_same(ranks[rank][name], expected[rank]), f"{name} of rank {rank}, {tuple(tensor.shape)}"
    assert all(rank.keys() == read(source).keys() for rank in ranks)


@each_tp
@pytest.mark.parametrize("name", MODELS)
def test_shards_follow_from_the_modeling_code(name, tp, checkpoint, split):
    model_type = name.partition("-")[0]
    check_shards(
        checkpoint(name), split(name, tp), tp, SHARDINGS.get(name) or SHARDINGS[_LIKE.get(model_type, model_type)]
    )


@pytest.mark.parametrize(("model_type", "shards"), OTHER_TYPES)
def test_other_types_with_the_same_shards(model_type, shards, tmp_path):
    source = default_model(model_type).write(tmp_path / "source")
    shardconv.split(source, tmp_path / "split", tp=4)
    check_shards(source, tmp_path / "split", 4, SHARDINGS[shards])


@pytest.mark.parametrize("tp", cases(TPS, lambda tp: tp == 8))
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tp, checkpoint, split, tmp_path):
    shardconv.merge(split(name, tp), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(checkpoint(name))
    assert shardconv.verify(split(name, tp), against=checkpoint(name)).differences == ()


#: One model of each family, and the most different models of one family.
REPRESENTATIVES = [name for name in MODELS if name in SHARDINGS] + ["falcon-7b", "deepseek_v3-hub"]


@pytest.mark.parametrize("name", [name for name in family_names() if name != NAMES_FAMILY])
def test_head_counts_are_checked_against_the_config(name):
    """Without units from the config, boundaries inside of heads or a wrong config would be accepted."""
    for rule in load_family(name).rules:
        if rule.style == "colwise" and re.search(
            r"(attn|attention)\}?\.(\{[^}]*\b)?(q|k|v|query|key|value)\b", rule.pattern
        ):
            assert rule.unit, rule


@pytest.mark.parametrize(("name", "old", "new"), each_once(REPRESENTATIVES, [(2, 4), (4, 2)]))
def test_reshard_equals_a_split_of_the_source(name, old, new, split, tmp_path):
    shardconv.reshard(split(name, old), tmp_path / "resharded", tp=new)
    assert contents(tmp_path / "resharded") == contents(split(name, new))


@pytest.mark.parametrize("name", MODELS)
def test_heads_limit_the_supported_tp_sizes(name, checkpoint):
    """Boundaries between rows would allow more sizes: 16, and with 96 rows also 3 and 6."""
    assert shardconv.report_plan(checkpoint(name)).supported_tp == TPS


def altered(source: Path, folder: Path, fields: dict[str, object]) -> Path:
    """A copy of a checkpoint with other fields in its config."""
    for name, data in contents(source).items():
        (folder / name).write_bytes(data)
    change_config(folder, fields)
    return folder


UNKNOWN = {"model_type": "unheard_of"}
#: A model, fields of its config, options of make_plan, the error, and its message.
REFUSED = [
    (
        "llama",
        {},
        {"tp": 3},
        PlanError,
        r"tp=3 is unsupported \(expected.*3 neither divides 2 nor is a multiple of 2",
    ),
    ("falcon-40b", {}, {"tp": 16}, PlanError, r"8 is not a multiple of 16 \(.*num_attention_heads=8"),
    *(("llama", {}, {"tp": tp}, UsageError, "tp is .* an? (positive )?integer") for tp in (0, -1, 2.0, True, 10**9)),
    # The config of another checkpoint.
    *(
        (name, fields, {}, PlanError, r"pass config( or other rules|=FILE with it)")
        for name, fields in (
            ("llama", {"num_attention_heads": 4, "hidden_size": 128}),
            ("llama", {"num_key_value_heads": 4}),
            ("llama", {"intermediate_size": 48}),
            ("llama", {"num_attention_heads": None}),
            ("llama", {"num_attention_heads": "8"}),
            ("phi3", {"num_key_value_heads": HEADS}),
            ("falcon-40b", {"new_decoder_architecture": False}),
            ("falcon-7b", {"multi_query": False}),
            ("gpt_bigcode", {"multi_query": False}),
            ("deepseek_v3", {"v_head_dim": 8}),
            ("qwen3_moe-packed", {"moe_intermediate_size": 32}),
            ("t5", {"num_heads": 4}),
        )
    ),
    *(
        (name, UNKNOWN, {}, PlanError, r"by its name it is a fused tensor.*rules.*replicate=")
        for name in ("phi3", "gpt2", "gpt_neox", "falcon-7b", "qwen3_moe-packed")
    ),
    ("deepseek_v2", UNKNOWN, {}, PlanError, r"its output features are not|no rule of family by_name"),
    ("llama", {}, {"rules": "gpt2"}, PlanError, "no rule of family gpt2 matches it"),
    *(
        ("llama", {}, {"rules": name}, UsageError, rf"family '{name}' is unknown \(similar: {similar}")
        for name, similar in (
            ("lama", "llama"),
            ("qwen2", "llama, which serves the model type qwen2"),
            ("qwen25", "llama"),
            ("xyzzy", "none"),
        )
    ),
    ("llama", {}, {"replicate": ("lm_haed",)}, UsageError, r'replicate=\["lm_haed"\] matches no tensor'),
    *(
        ("llama", {}, {"replicate": [pattern]}, UsageError, r"replicate=.*braces are unbalanced")
        for pattern in ("{model.normX", "model.norm}", "model.{norm,{a}}")
    ),
]


@pytest.mark.parametrize(("name", "fields", "options", "error", "message"), REFUSED)
def test_plans_that_are_not_possible_are_refused(name, fields, options, error, message, checkpoint, tmp_path):
    with pytest.raises(error, match=message):
        shardconv.make_plan(altered(checkpoint(name), tmp_path, fields), **{"tp": 2, **options})


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_plan_by_tensor_names_equals_the_plan_of_the_family(name, checkpoint, tmp_path):
    unknown = altered(checkpoint(name), tmp_path, {"model_type": "unheard_of"})
    for tp in TPS:
        plan = shardconv.make_plan(unknown, tp=tp)
        known = shardconv.make_plan(checkpoint(name), tp=tp)
        assert plan.assumed == ("model type 'unheard_of' does not have a family: planned by the names of its tensors",)
        assert all(plan.placement(tensor) == known.placement(tensor) for tensor in known.tensors)


def test_hint_to_compare_outputs_of_a_known_model_type(checkpoint, tmp_path):
    """A proof has its class."""
    (tmp_path / "mine.toml").write_text('[rules]\n"lm_head" = { style = "replicate" }\n')
    assumed = shardconv.report_plan(checkpoint("llama"), rules=tmp_path / "mine.toml").assumed
    assert assumed[0] == "rules of mine.toml are tried first; shardconv plan --prove compares outputs"


TOML_PLAN = """
[units]
pair = { size = 2 }

[rules]
"model.layers.*.mlp.down_proj" = { style = "replicate" }
"model.layers.*.mlp.{gate_proj,up_proj}" = { style = "colwise", unit = "pair" }
"model.layers.*.self_attn.q_proj" = { style = "colwise", unit = "query_head" }
"""
JSON_PLAN = json.dumps(tomllib.loads(TOML_PLAN))


@pytest.mark.parametrize(("name", "text"), [("mine.toml", TOML_PLAN), ("mine.json", JSON_PLAN)])
def test_plan_file_takes_precedence_over_the_family(name, text, checkpoint, tmp_path):
    """Its rules may use the units of the family, and are tried first."""
    (tmp_path / name).write_text(text)
    shardconv.split(checkpoint("llama"), tmp_path / "split", tp=2, rules=tmp_path / name)
    check_shards(checkpoint("llama"), tmp_path / "split", 2, LLAMA | {r"down_proj\.weight": replicate})
    plan = shardconv.make_plan(checkpoint("llama"), tp=2, rules=tmp_path / name)
    assert plan.family == "llama"
    assert plan.tensors["model.layers.1.mlp.down_proj.weight"].reason.origin == f"plan file {name}"
    shardconv.reshard(tmp_path / "split", tmp_path / "split4", tp=4)
    check_shards(checkpoint("llama"), tmp_path / "split4", 4, LLAMA | {r"down_proj\.weight": replicate})


def test_plan_file_may_inherit_a_family(checkpoint, tmp_path):
    """Its own rules must match a tensor; inherited rules need not."""
    unknown = altered(checkpoint("phi3"), tmp_path, {"model_type": "unheard_of"})
    (tmp_path / "mine.toml").write_text('inherits = "phi3"\n[rules]\n"lm_head" = { style = "replicate" }\n')
    plan = shardconv.make_plan(unknown, tp=2, rules=tmp_path / "mine.toml")
    known = shardconv.make_plan(unknown, tp=2, rules="phi3", replicate=("lm_head",))
    assert plan.assumed == (
        "rules of mine.toml are tried first; shardconv plan --prove compares outputs if transformers has a class of "
        "'unheard_of'; if not, compare the outputs of shardconv.load(DIR, model=MODULE) with the unsharded module's",
        "mine.toml replaces rules of the family for 1 tensors: lm_head.weight (replicate instead of embedding_rowwise)",
    )
    assert known.assumed[0].startswith(
        "lm_head is replicated as requested, and layers that depend on it may be sharded"
    )
    assert all(plan.placement(name) == known.placement(name) for name in known.tensors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[rules]\n"model.nothing" = { style = "replicate" }', "'model.nothing' matches no tensor"),
        ('[rules]\n"lm_head" = { style = "replicate", columns = 1 }', "key 'columns' is unknown"),
        ('[rules]\n"lm_head" = { style = "sideways" }', "style 'sideways' is unknown"),
        ('[rules]\n"lm_head" = { unit = "query_head" }', "missing required field `style`"),
        (
            'inherits = "by_name"\n[units]\nhidden = { count = 8 }\n'
            '[rules]\n"lm_head" = { style = "colwise", unit = "heads" }',
            r"unit 'heads' is unknown \(expected hidden, kv_head, query_head\): write kv_head or query_head, or add it",
        ),
        (
            '[rules]\n"lm_head" = { style = "colwise", segments = ["query_head"] }',
            "segments are required for packed styles",
        ),
        (
            '[rules]\n"lm_head" = { style = "packed_colwise", segments = [["x"]] }',
            r"segments\[0\]: Expected `str`, got `array`",
        ),
        ('[rules]\n"lm_head" = { style = "colwise", when = { a = [1] } }', r"when\[...\]: Expected `.*`, got `array`"),
        ('[rules]\n"lm_head" = "replicate"', "is not a table"),
        ('[rules]\n"lm_head" = { style = "colwise", beside = "x" }', "its rule reads the rows of"),
        ('[modules]\n"lm_head" = { at_most = { x = ["q_proj"] } }', r"at_most\[...\]: Expected `array` of length 2"),
        ('[modules]\n"x" = { inputs = { y = { dim = 0, segments = ["query_head"] } } }', "key 'segments' is unknown"),
        ('[modules]\n"x" = { inputs = { y = { dim = 0, unit = "query_head", item = 1 } } }', "key 'item' is unknown"),
        ('[modules]\n"x" = { inputs = { y = { dim = -1, unit = "query_head" } } }', "dim is negative without size"),
        (
            '[modules]\n"x" = { inputs = { y = { unit = "query_head" } } }',
            r"inputs.*missing required field `dim`",
        ),
        ('[modules]\n"x" = { output = { dim = 0, segments = ["query_head"] } }', "key 'segments' is unknown"),
        ('[modules]\n"x" = { slices = { y = { dim = 0, unit = "query_head", size = 2 } } }', "key 'size' is unknown"),
        ('[modules]\n"x" = { slices = { y = { dim = 0, unit = "query_head", item = 4 } } }', "key 'item' is unknown"),
        ('[blocks]\n"model.layers.{*.mlp" = "mlp"', r"blocks 'model.layers.\{\*.mlp': braces are unbalanced"),
        ('[modules]\n"{x" = { allreduce_input_grad = true }', r"modules '\{x': braces are unbalanced"),
        ('[modules]\n"x" = { gathers = ["y}"] }', r"modules 'x': braces are unbalanced"),
        ('[submodels]\n"x}" = "text_config"', r"submodel 'x\}': braces are unbalanced"),
        ('model_types = ["llama"]', "key 'model_types' is unknown"),
        ('gathered = "a reason"', "key 'gathered' is unknown"),
        ("[config]\nhead_dims = 8", r"plan file mine\.toml: \[config\] head_dims: no rule reads this field"),
        (
            '[submodels]\n"model.vision" = "vision_config"',
            "submodel 'model.vision': the config does not have a nested config 'vision_config'",
        ),
        ("[ruls]", "key 'ruls' is unknown"),
        ('[config]\nhead_dim = "head_dim"\n[rules]\n', ""),
        ('inherits = "nothing"', r"plan file mine\.toml: inherits: family 'nothing' is unknown"),
        (
            '[submodels]\n"model" = { config = "text_config", family = "nothing" }',
            r"plan file mine\.toml: submodel 'model': family 'nothing' is unknown",
        ),
        ("rules = 1", "rules: 1 is not a table"),
        ("[rules", "is not TOML"),
    ],
)
def test_invalid_plan_files_are_refused(text, message, checkpoint, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    source = altered(checkpoint("llama"), tmp_path, {"head_dim": None} if "head_dim =" in text else {})
    with pytest.raises(PlanError, match=message or "refer to each other in a cycle"):
        shardconv.make_plan(source, tp=2, rules=tmp_path / "mine.toml")


def test_replicate_names_or_patterns(checkpoint):
    plan = shardconv.make_plan(checkpoint("llama"), tp=2, replicate=("model.layers.1.mlp.*", "lm_head"))
    replicated = {name for name, placed in plan.tensors.items() if placed.reason.origin == "--replicate"}
    mlp = {f"model.layers.1.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    assert replicated == {"lm_head.weight", *mlp}
    assert all(plan.placement(name).dim is None for name in replicated)


def listed(word):
    """The families for a word, and the most similar name."""
    found = json.loads(call("plan", "--list-families", word, "--json").out)
    return found["families"], next(iter(found["similar"]), None)


def test_families_are_listed_by_a_model_type():
    found, _ = listed("qwen2_v")
    assert all("qwen2_v" in family or all("qwen2_v" in kind for kind in kinds) for family, kinds in found.items())
    assert "qwen2_vl" in [kind for kinds in found.values() for kind in kinds]


@pytest.mark.parametrize(
    ("word", "similar"),
    [("mistrl", "mistral"), ("LlamaForCausalLM", "llama"), ("gpt-neox2", "gpt_neox"), ("deepseek-v33", "deepseek_v3"),
     ("xyzzy", None)],
)  # fmt: skip
def test_list_of_families_has_similar_names(word, similar):
    """Names of the same series of models first, whose names begin with the same letters."""
    assert listed(word) == ({}, similar)


def test_families_are_found_in_any_spelling():
    assert listed("qwen3_moe") == listed("Qwen3-MoE") == listed("qwen3moe") == ({"llama": ["qwen3_moe"]}, None)


def test_cross_attention_with_other_numbers_of_heads(tmp_path):
    """As in Dia 1.6B: 4 KV heads in the self-attention of the decoder, and 16 in its cross attention."""
    decoder = {
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 1, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 8,
        "cross_hidden_size": 32, "vocab_size": 1028, "max_position_embeddings": 16,
    }  # fmt: skip
    encoder = {name: decoder[name] for name in list(decoder)[:5]}
    made = DiaForConditionalGeneration(DiaConfig(encoder_config=encoder, decoder_config=decoder))
    made.save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=4)
    source, ranks = read(tmp_path / "source"), rank_files(tmp_path / "split", 4)
    layer = "model.decoder.layers.0."
    for rank, tensors in enumerate(ranks):
        heads = slice(rank * 8, (rank + 1) * 8)
        name = f"{layer}cross_attention.k_proj.weight"
        assert torch.equal(tensors[name], source[name][heads])
        name = f"{layer}self_attention.k_proj.weight"
        assert torch.equal(tensors[name], source[name]), "one KV head, on every rank"

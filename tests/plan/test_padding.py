"""Padding of heads, widths and experts: positions and zeros in rank files, and outputs of padded models."""

import copy
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple
from safetensors import safe_open
from torch import nn

import shardconv
from shardconv.plan.families.family import Family
from shardconv.plan.families.rule import ModuleRule, Rule, SliceRule, UnitRule
from shardconv.plan.padded_config import change_config
from shardconv.plan.padding import Heads, UnitPadding, matched_modules, unit_paddings
from shardconv.plan.placement import Interval, Unit, shard_dim
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.rule_set import ModelRules
from shardconv.support.errors import IntegrityError, PlanError, UsageError
from shardconv.tensor import as_dtensor
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.command import call
from tests.support.matrix import cases
from tests.support.models import GQA, MODELS, MOE, T5, Model, model_class
from tests.support.plans import held
from tests.support.ranks import on_ranks, ranks_in
from tests.support.verdicts import verdict
from tools.model_matrix.trial import small

SCALE = 0.3  # so that attention is neither uniform nor on one token
LAYOUTS = {2: "first", 3: "three", 4: "four", 5: "five", 6: "six", 12: "twelve"}

heads = st.tuples(st.integers(1, 9), st.integers(1, 5))
tps = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


# --- placements -----------------------------------------------------------------------------------------------------


def keeps_groups(kv_heads: int, group: int, padded: Heads, tp: int) -> bool:
    """Whether every rank has equally many heads, and each query head is on the rank of its KV head."""
    query = shard_dim(0, [Unit(kv_heads * group, groups=kv_heads, padded=padded[:2])], tp)
    kv = shard_dim(0, [Unit(kv_heads, replicate=True, groups=kv_heads, padded=(padded.kv_heads, 1))], tp)
    seen = []
    for rank in range(tp):
        queries, keys = held(query, rank), held(kv, rank)
        per_key, rest = divmod(len(queries), len(keys))
        if rest or not query.is_even or not kv.is_even:
            return False
        for place, head in enumerate(queries):
            if head is not None and keys[place // per_key] != head // group:
                return False
        seen += [head for head in queries if head is not None]
    return seen == list(range(kv_heads * group))


@given(heads=heads, tp=tps)
def test_query_heads_keep_their_kv_heads(heads, tp):
    kv_heads, group = heads
    assert keeps_groups(kv_heads, group, Heads(kv_heads, group).padded(tp), tp)


@given(heads=heads, tp=tps)
def test_padding_takes_the_least_memory(heads, tp):
    """No other number of heads takes less memory on all ranks together."""
    kv_heads, group = heads
    found = Heads(kv_heads, group).padded(tp)
    costs = []
    for kv in range(kv_heads, kv_heads + tp + 1):
        for each in range(group, group + tp + 1):
            is_shared = kv * each % tp == 0 and (kv % tp == 0 or (tp % kv == 0 and each % (tp // kv) == 0))
            costs += [kv * each + max(kv, tp)] if is_shared else []
    assert found.query_heads + max(found.kv_heads, tp) == min(costs)


@given(heads=heads, tp=tps, block=st.sampled_from([2, 3, 4]))
def test_blocks_hold_query_heads_of_one_rank_or_padding(heads, tp, block):
    """A block of a quantized matrix has all of its heads, in their order, on one rank, and no padding beside them."""
    kv_heads, group = heads
    assume(kv_heads * group % block == 0)
    padded = Heads(kv_heads, group, block).padded(tp)
    assert keeps_groups(kv_heads, group, padded, tp)
    query = shard_dim(0, [Unit(kv_heads * group, groups=kv_heads, padded=padded[:2])], tp)
    shards = [held(query, rank) for rank in range(tp)]
    stored = [tuple(shard[at : at + block]) for shard in shards for at in range(0, len(shard), block)]
    blocks = [tuple(range(at, at + block)) for at in range(0, kv_heads * group, block)]
    assert [one for one in stored if one != (None,) * block] == blocks


@given(heads=heads, tp=tps, block=st.sampled_from([2, 3, 4]))
def test_heads_with_full_blocks_on_each_rank_are_padded_as_without_blocks(heads, tp, block):
    """So that checkpoints that are split already have the same placements."""
    kv_heads, group = heads
    assume(kv_heads * group % block == 0)
    unblocked = Heads(kv_heads, group).padded(tp)
    padding = Unit(kv_heads * group, groups=kv_heads, padded=unblocked[:2])
    entries = [entry for rank in shard_dim(0, [padding], tp).ranks for entry in rank]
    edges = {edge for entry in entries for edge in (entry if isinstance(entry, Interval) else (entry.size,))}
    if all(edge % block == 0 for edge in edges):
        assert Heads(kv_heads, group, block).padded(tp)[:2] == unblocked[:2]


@given(heads=heads, tp=tps)
def test_interleaved_groups_are_padded_as_separate_tensors(heads, tp):
    """Compares [q; k; v] of each KV head in one tensor with separate tensors of queries and keys."""
    kv_heads, group = heads
    padded = Heads(kv_heads, group).padded(tp)
    one = Unit(1, replicate=True, padded=(1, 1))
    segments = [Unit(group, padded=(1, padded.group)), one, one]
    fused = shard_dim(0, segments, tp, groups=kv_heads, padded_groups=padded.kv_heads)
    query = shard_dim(0, [Unit(kv_heads * group, groups=kv_heads, padded=padded[:2])], tp)
    kv = shard_dim(0, [Unit(kv_heads, replicate=True, groups=kv_heads, padded=(padded.kv_heads, 1))], tp)
    rows = np.arange(kv_heads * (group + 2)).reshape(kv_heads, group + 2)
    for rank in range(tp):
        expected_q = [None if head is None else rows[head // group, head % group] for head in held(query, rank)]
        keys = held(kv, rank)
        found = np.array(held(fused, rank), dtype=object).reshape(len(keys), -1)
        assert found[:, :-2].ravel().tolist() == expected_q
        for offset, column in ((-2, found[:, -2]), (-1, found[:, -1])):
            assert column.tolist() == [None if key is None else rows[key, offset] for key in keys]


UNITS_OF = {
    "query": UnitRule("q_heads", "size"),
    "kv": UnitRule("kv_heads", "size", replicate=True),
    "few": UnitRule("kv_heads", "size"),
    "number": UnitRule("q_heads"),
    "width": UnitRule("width"),
    "by_tensor": UnitRule(None, "size"),
}


def model_rules_of(*modules: ModuleRule, config: dict[str, int] | None = None, **rules: str) -> ModelRules:
    """The rules of a model whose module has these layers, each with a unit, and module overrides; with padding."""
    made = tuple(Rule(layer if "." in layer else f"block.{layer}", "colwise", unit) for layer, unit in rules.items())
    family = Family("made up", units=UNITS_OF, rules=made, modules=modules)
    used = {rule: frozenset({rule.pattern}) for rule in made}
    fields = {"q_heads": 6, "kv_heads": 2, "size": 4, "width": 10, **(config or {})}
    return ModelRules(family, fields, pad=1, used=used)


def paddings(**rules: str) -> dict[str, UnitPadding]:
    """The paddings of units by such rules."""
    return dict(unit_paddings(model_rules_of(**rules)))


def test_units_of_one_module_are_padded_together():
    assert paddings(q="query", k="kv", bias="number") == dict.fromkeys(
        ("query", "kv", "number"), UnitPadding(Heads(2, 3))
    )
    assert paddings(q="query", bias="number") == dict.fromkeys(("query", "number"), UnitPadding())
    assert paddings(up="width")["width"].align > 1


#: Each way in which a module override depends on a unit.
OVERRIDES = {
    "attributes": {"attributes": {"num_heads": "2 * number"}},
    "inputs": {"inputs": {"mask": SliceRule(1, "number")}},
    "slices": {"slices": {"slopes": SliceRule(0, "number")}},
    "slices of segments": {"slices": {"slopes": SliceRule(0, segments=("number", "number"))}},
    "output": {"output": SliceRule(-1, "number")},
    "norms": {"norms": "number"},
    "shared output": {"shared_output": "number"},
}


@pytest.mark.parametrize("pattern", ["block", "**.block", "{other,block}", "bl*", "block.q"])
@pytest.mark.parametrize("case", OVERRIDES)
def test_units_of_overrides_are_padded_with_those_of_the_module(case, pattern):
    """Values per head have the order of the heads; the override may have another pattern than the rules."""
    model_rules = model_rules_of(ModuleRule(pattern, **OVERRIDES[case]), q="query", k="kv")
    assert unit_paddings(model_rules)["number"] == UnitPadding(Heads(2, 3))
    assert [held(model_rules.units("number", 4), rank) for rank in range(4)] == [[0, 1], [2, None], [3, 4], [5, None]]
    assert model_rules.units("number", 4) == model_rules.units("query", 4)


def test_values_per_head_in_other_modules_are_padded_like_the_heads():
    """For example a bias with a column per query head, where each group of query heads is padded."""
    number, width = ({"q": "query", "k": "kv", "table.bias": unit} for unit in ("number", "width"))
    model_rules = model_rules_of(**number)
    assert model_rules.units("number", 4) == model_rules.units("query", 4)
    assert model_rules_of(**width).units("width", 4).local_size(0) == 8
    with pytest.raises(PlanError, match="its count equals the number of heads of other modules"):
        model_rules_of(**width, config={"width": 2, "kv_heads": 2}).units("width", 4)


def test_override_applies_to_one_module_of_a_rule():
    """A rule may match layers of several modules, and an override only one of them."""
    regex = re.compile(model_rules_of(q="query").regex("**.block"))
    assert matched_modules(["block.q", "mlp.up", "mlp.down"], regex) == {"block"}


def test_units_of_unknown_order_are_not_padded():
    """With padding at the end, values would belong to other heads."""
    model_rules = model_rules_of(ModuleRule("elsewhere", slices={"slopes": SliceRule(0, "number")}), q="query", k="kv")
    with pytest.raises(PlanError, match=r"unit number: 6 is not a multiple of 4, and is not padded: no rule"):
        model_rules.units("number", 4)
    assert not model_rules.units("number", 3).is_padded


def minimax(query_heads: int, kv_heads: int, pad: int = 1) -> Planner:
    """The rules of the family for attention and linear attention with these numbers of heads, with padding."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    rows = dict(zip(names, (query_heads, kv_heads, kv_heads, query_heads), strict=True))
    shapes = {name: (4 * count, 16) if name != "o_proj" else (16, 4 * count) for name, count in rows.items()}
    specs = {f"model.layers.1.self_attn.{name}.weight": TensorSpec("F32", shape) for name, shape in shapes.items()}
    linear = {"qkv_proj": (12 * query_heads, 16), "out_proj": (16, 4 * query_heads)}
    specs |= {f"model.layers.0.self_attn.{name}.weight": TensorSpec("F32", shape) for name, shape in linear.items()}
    config = {"model_type": "minimax", "num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    return planner_for(specs, {**config, "head_dim": 4, "hidden_size": 16}, PlanRequest(pad=pad))


@pytest.mark.parametrize(("heads", "tp"), [((6, 2), 4), ((64, 8), 24), ((64, 8), 6), ((12, 4), 8)])
def test_slopes_of_minimax_have_the_order_of_its_heads(heads, tp):
    """Each rank has the slopes of its query heads."""
    planner = minimax(*heads)
    placement = planner.plan(tp).placement("model.layers.0.self_attn.out_proj.weight")
    assert placement.is_padded
    slopes = planner.rules.models[0].units("head", tp)
    for rank in range(tp):
        heads_of = [None if column is None else column // 4 for column in held(placement, rank)[::4]]
        assert held(slopes, rank) == heads_of


def test_slopes_that_depend_on_the_number_of_heads_are_not_padded_in_configs():
    """As with ALiBi: more heads in the config would change the slope of every head."""
    names = [f"model.layers.0.self_attn.{name}.weight" for name in ("qkv_proj", "out_proj")]
    with pytest.raises(PlanError, match="self_attn have a value for each head that depends on their number"):
        change_config(minimax(6, 2, pad=4), names, may_add=True)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"q": "query", "k": "few"}, "the correspondence of heads is unknown"),
        ({"q": "query", "k": "few", "v": "kv"}, "the KV head of each query head is unknown"),
        ({"q": "query", "k": "by_tensor"}, "differs between tensors"),
        ({"q": "query", "k": "kv", "up": "width"}, "the KV head of each query head is unknown"),
    ],
)
def test_units_with_unknown_kv_heads_are_not_padded(rules, message):
    """Shapes would be correct, but query heads would use the keys of other heads."""
    assert all(message in padding.refusal for padding in paddings(**rules).values())


# --- files ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    heads=heads, intermediate=st.integers(1, 40), layers=st.integers(1, 2), tp=tps, other=tps, parts=st.integers(1, 2)
)
def test_merge_and_reshard_restore_the_bytes_of_the_source(heads, intermediate, layers, tp, other, parts):
    kv_heads, group = heads
    config = llama_config(
        layers=layers, hidden=16, heads=kv_heads * group, kv_heads=kv_heads, intermediate=intermediate, vocab=7
    )
    config["head_dim"] = 4
    assume(intermediate != kv_heads or group == 1)  # which could be one value per KV head
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = write_checkpoint(folder / "source", config=config, parts=parts)
        shardconv.split(source, folder / "split", tp=tp, pad=True)
        assert shardconv.verify(folder / "split", against=source).differences == ()
        shardconv.reshard(folder / "split", folder / "again", tp=other, pad=True)
        shardconv.split(source, folder / "direct", tp=other, pad=True)
        assert contents(folder / "again") == contents(folder / "direct")
        for split in ("split", "again"):
            shardconv.merge(folder / split, folder / "merged", overwrite=True)
            assert contents(folder / "merged") == contents(source)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file as integers, as random bytes may be NaN, which is not equal to itself."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).view(torch.int16) for name in file.keys()}


def test_rank_files_equal_hand_written_shards(tmp_path):
    """8 query heads with 2 KV heads on 6 ranks: of the 4 heads of a group, padded to 6, 3 ranks have 2, 2 and 0."""
    source = write_checkpoint(tmp_path / "source", config=llama_config(layers=1))
    report = shardconv.split(source, tmp_path / "split", tp=6, pad=True)
    assert [astuple(unit) for unit in report.padding.units if unit.name == "query_head"] == [("query_head", 8, 12)]
    assert not [unit for unit in report.padding.units if unit.name in ("kv_head", "intermediate")]
    full = tensors_of(source / "model.safetensors")
    q, o = (full[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qo")
    size = q.shape[0] // 8
    for rank in range(6):
        local = tensors_of(tmp_path / "split" / f"rank-{rank}-of-6.safetensors")
        mine = ((0, 1), (2, 3), (), (4, 5), (6, 7), ())[rank]
        rows = [q[head * size : (head + 1) * size] for head in mine] or [torch.zeros_like(q[: 2 * size])]
        columns = [o[:, head * size : (head + 1) * size] for head in mine] or [torch.zeros_like(o[:, : 2 * size])]
        assert torch.equal(local["model.layers.0.self_attn.q_proj.weight"], torch.cat(rows))
        assert torch.equal(local["model.layers.0.self_attn.o_proj.weight"], torch.cat(columns, 1))


def test_padding_that_is_not_zero_is_found(tmp_path):
    """Also without checksums: in o_proj of the rank that has only padding, where it would change outputs."""
    source = write_checkpoint(tmp_path / "source", config=llama_config(layers=1))
    shardconv.split(source, tmp_path / "split", tp=6, pad=True, checksums=False)
    name, path = "model.layers.0.self_attn.o_proj.weight", tmp_path / "split" / "rank-2-of-6.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    with path.open("r+b") as file:
        file.seek(8 + length + header[name]["data_offsets"][1] - 1)
        assert file.read(1) == b"\0"
        file.seek(-1, 1)
        file.write(b"\1")
    with pytest.raises(IntegrityError, match=f"rank-2-of-6.safetensors: the padding of {name} is not zero"):
        shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert shardconv.verify(tmp_path / "split").differences


# --- models ---------------------------------------------------------------------------------------------------------

#: Query and KV heads for which 4 ranks pad each group, as full groups would take more memory.
FEW = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
#: Layers of linear attention, whose decay differs between heads, and of attention.
MINIMAX = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
OTHERS = {
    "gpt_oss": Model("gpt_oss", {**GQA, **MOE, "sliding_window": 8}),
    "llama-6-2": Model("llama", FEW),
    "minimax": Model("minimax", {**MINIMAX, **GQA}),
    "deberta-4": Model("deberta", {"num_attention_heads": 4}, "AutoModelForMaskedLM"),
    "mpnet-4": Model("mpnet", {"num_attention_heads": 4}, "AutoModelForMaskedLM"),
    "t5-4": Model("t5", {**T5, "num_heads": 4}, "T5ForConditionalGeneration"),
    "minimax-6-2": Model("minimax", {**MINIMAX, **FEW}),
}

#: Model to the tensor parallel sizes at which it runs with padding.
RUN = {
    **dict.fromkeys(
        (
            "llama-biases", "qwen3", "stablelm", "phi", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_bigcode",
            "gpt_neox", "bloom", "falcon-rw", "bert", "t5", "t5-gated",
        ),
        (3,),
    ),
    **dict.fromkeys(("cohere", "olmo2", "phi3", "falcon-7b", "falcon-40b", "gpt_oss"), (3, 6)),
    **dict.fromkeys(("llama-6-2", "minimax-6-2"), (4,)),
    "minimax": (3, 6),
    **dict.fromkeys(("deberta-4", "mpnet-4", "t5-4"), (12,)),  # each head is padded, next to values per head
    "llama": (3, 5, 6, 12),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs a check on up to six processes."""
    with ranks_in(tmp_path_factory.mktemp("ranks"), 6) as run:
        yield run


@pytest.fixture(scope="module")
def twelve_ranks(tmp_path_factory):
    with ranks_in(tmp_path_factory.mktemp("ranks"), 12) as run:
        yield run


def written(folder: Path, name: str) -> tuple[type, Path]:
    """The class of a model, and its checkpoint."""
    transformers.logging.disable_progress_bar()
    model = (MODELS | OTHERS)[name].build(SCALE)
    model.save_pretrained(folder)
    return type(model), folder


@pytest.fixture(scope="module")
def written_once(tmp_path_factory):
    """The function ``written`` with one folder per model; tests do not change it."""
    return cache(lambda name: written(tmp_path_factory.mktemp("source") / "source", name))


NAMES_AND_TPS = [(name, tp) for name, tps in RUN.items() for tp in tps]
#: Models that run by default: KV heads, a fused projection, experts, and query heads that are padded.
PADDED_BY_DEFAULT = {("llama", 3), ("phi3", 3), ("mixtral", 3), ("llama-6-2", 4)}


@pytest.mark.parametrize(("name", "tp"), cases(NAMES_AND_TPS, lambda *one: one in PADDED_BY_DEFAULT))
def test_padded_models_compute_the_same(written_once, name, tp, tmp_path, request):
    """Compares outputs, cached greedy tokens and gradients, of loaded models and of models converted in memory."""
    run = request.getfixturevalue("twelve_ranks" if tp == 12 else "ranks")
    kind, source = written_once(name)
    shardconv.split(source, tmp_path / "split", tp=tp, pad=True)
    assert verdict(run, LAYOUTS[tp], kind, source, tmp_path / "split", PlanRequest(pad=1)) == "passed"


@pytest.mark.parametrize(("name", "tp"), cases(NAMES_AND_TPS, lambda name, tp: tp == RUN[name][0]))
def test_padding_is_proposed_and_removed_by_a_merge(written_once, name, tp, tmp_path):
    _, source = written_once(name)
    with pytest.raises(PlanError, match=rf"^tp={tp} is unsupported .*, or pad=True to pad .*[0-9.]+% more memory"):
        shardconv.split(source, tmp_path / "split", tp=tp)
    shardconv.split(source, tmp_path / "split", tp=tp, pad=True)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def check_training(axis, name):
    """Train a few steps: parameters equal those of the unsharded model, and padding stays zero. Returns its size."""
    model, expected = MODELS[name].build(SCALE).eval(), MODELS[name].build(SCALE).eval()
    shardconv.convert_model(model, pad=True, group=axis.group)
    ids = torch.arange(24).view(2, 12)
    for one in (model, expected):
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    found = shardconv.gather_state_dict(model)
    for key, full in expected.state_dict().items():
        assert torch.allclose(found[key], full, atol=1e-4), key
    padded = 0
    for module in model.modules():
        for own, placement in getattr(module, "placements", {}).items():
            parameter = getattr(module, own, None)
            if parameter is not None and placement.dim is not None:
                columns = parameter.detach().movedim(placement.dim, 0)
                zeros = [place for place, element in enumerate(held(placement, axis.rank)) if element is None]
                assert not columns[zeros].any(), own
                padded += len(zeros)
    return padded


@pytest.mark.parametrize(
    ("name", "tp"),
    cases(
        [("llama-biases", 6), ("mixtral", 3), ("falcon-40b", 6), ("gpt2", 3)],
        lambda name, _: name in {"mixtral", "falcon-40b"},
    ),
)
def test_padding_stays_zero_in_training(ranks, name, tp):
    assert sum(ranks(LAYOUTS[tp], check_training, name))


@on_ranks("six")
def test_distributed_checkpoints_have_no_padding(axis, tmp_path):
    """Check a padded model that is saved without padding, and the result that is loaded into a padded model."""
    model, expected = MODELS["llama-biases"].build(SCALE), MODELS["llama-biases"].build(SCALE).state_dict()
    shardconv.convert_model(model, pad=True, group=axis.group)
    dcp.save(as_dtensor(model), checkpoint_id=tmp_path / "dcp")
    full = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(full, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(full[name], value) for name, value in expected.items())
    again = MODELS["llama-biases"].build(1.0)
    shardconv.convert_model(again, pad=True, group=axis.group)
    dcp.load(as_dtensor(again), checkpoint_id=tmp_path / "dcp")
    loaded = shardconv.gather_state_dict(again)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@on_ranks("three")
def test_row_parallel_layers_accept_full_inputs(axis):
    """Check a full input, of which each rank uses its features."""
    unsharded = nn.Linear(8, 3)
    layer = copy.deepcopy(unsharded)
    placement = shard_dim(1, [Unit(8, pad=True)], axis.size)
    layer = shardconv.RowParallelLinear(8, 3, placement=placement, group=axis.group)
    shardconv.load_full_state_dict(layer, unsharded.state_dict())
    full = torch.arange(16.0).view(2, 8).requires_grad_()
    again = full.detach().clone().requires_grad_()
    output, expected = layer(full), unsharded(again)
    assert torch.allclose(output, expected, atol=1e-5)
    output.sum().backward()
    expected.sum().backward()
    assert torch.allclose(full.grad, again.grad, atol=1e-5)


# --- what is said, and what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("one-layer") / "source", config=llama_config(layers=1))


def test_reshard_pads_only_on_request_and_where_it_is_needed(one_layer, tmp_path):
    shardconv.split(one_layer, tmp_path / "three", tp=3, pad=True)
    with pytest.raises(PlanError, match=r"or pad=True to pad with zeros \([0-9.]+% more memory\)"):
        shardconv.reshard(tmp_path / "three", tmp_path / "six", tp=6)
    assert shardconv.reshard(tmp_path / "three", tmp_path / "two", tp=2).padding.units == ()
    shardconv.split(one_layer, tmp_path / "direct", tp=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "direct")


def test_reported_cost_is_that_of_the_files(one_layer, tmp_path):
    """Compares the bytes of tensors in rank files with and without padding."""
    source = one_layer
    report = shardconv.split(source, tmp_path / "three", tp=3, pad=True)
    held_bytes = zero_bytes = 0
    for rank in range(3):
        for name, tensor in tensors_of(tmp_path / "three" / f"rank-{rank}-of-3.safetensors").items():
            placement = shardconv.make_plan(source, tp=3, pad=True).placement(name)
            share = held(placement, rank).count(None) / placement.local_size(rank) if placement.dim is not None else 0
            held_bytes += tensor.nbytes
            zero_bytes += tensor.nbytes * share
    assert report.padding.memory == pytest.approx(zero_bytes / (held_bytes - zero_bytes))
    found = shardconv.report_plan(source)
    assert 3 not in found.supported_tp
    assert {one.tp: one.memory for one in found.padded_tp}[3] == pytest.approx(report.padding.memory)
    assert 3 in {one.tp for one in found.blocked_tp}


REFUSED = {
    "engine": (UsageError, {"engine": "vllm"}, None, r"pad=True is not supported with .* of vllm.* pad SRC"),
    "no family": (PlanError, {}, {"model_type": "unheard_of", "head_dim": 16}, "no family is known for this model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_padding_is_refused(case, tmp_path):
    error, options, config, message = REFUSED[case]
    config = {**llama_config(layers=1), **(config or {})}
    source = write_checkpoint(tmp_path / "source", config=config)
    with pytest.raises(error, match=message):
        shardconv.split(source, tmp_path / "split", tp=3, pad=True, **options)


#: Model type to the message at tp 3.
UNITS = {
    "a convolution over the channels": ("mamba2", "computes along the dim that would be padded"),
    "heads that differ from layer to layer": ("gemma4_text", "differs between tensors"),
    "halves of heads": ("diffllama", "the KV head of each query head is unknown"),
}


@pytest.mark.parametrize("case", UNITS)
def test_models_that_are_not_padded(case, tmp_path):
    model_type, message = UNITS[case]
    model = small(model_class("text generation", model_type))
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(PlanError, match=message) as error:
        shardconv.split(tmp_path / "source", tmp_path / "split", tp=3, pad=True)
    assert "pad=True to pad" not in str(error.value)
    assert not (tmp_path / "split").exists()


def padded_units(source: Path, tp: int) -> dict[str, tuple[int, int]]:
    """The units that a plan pads, each with its number without and with padding."""
    return {
        unit.name: (unit.size, unit.padded_size)
        for unit in shardconv.report_plan(source, tp=tp, pad=True).padding.units
    }


def test_one_value_per_head_is_padded_like_the_heads(tmp_path):
    """MPNet's bias has a column per head, in another module than the heads; widths are padded further."""
    small(model_class("fill-mask", "mpnet")).save_pretrained(tmp_path)
    found = padded_units(tmp_path, 3)
    assert (found["query_head"], found["column"]) == ((4, 6), (4, 6))


def test_widths_are_padded_to_a_multiple_of_eight_on_each_rank(tmp_path):
    source = write_checkpoint(tmp_path, config=llama_config(layers=1, intermediate=100))
    assert padded_units(source, 3)["intermediate"] == (100, 120)


def test_whole_experts_are_a_remedy_for_narrow_experts(tmp_path):
    """Sizes that are supported without padding, and their origin: a split checkpoint has its plan."""
    source = Model("mixtral", {**GQA, **MOE, "intermediate_size": 90}).write(tmp_path / "source")
    remedy = "--ep 4 for whole experts on each rank, or --pad to pad with zeros"
    assert f": pass a supported size, or {remedy}" in call("plan", source, "--tp", 4).err
    assert shardconv.make_plan(source, tp=4, ep=4).tp == 4
    shardconv.split(source, tmp_path / "split", tp=2)
    refused = call("reshard", tmp_path / "split", "--tp", 4, "-o", tmp_path / "four")
    assert (refused.code, "--ep" in refused.err, "--pad to pad" in refused.err) == (1, False, True)
    assert "--ep" not in call("plan", source, "--tp", 3).err  # 3 does not divide the heads


def test_commands_report_padded_sizes_and_their_cost(one_layer, tmp_path):
    costs = {one.tp: f"{one.memory:.1%}" for one in shardconv.report_plan(one_layer).padded_tp}
    listed = call("plan", one_layer).out
    assert (
        f"supported with --pad up to tp 16 (additional memory): 3 ({costs[3]}), 5 ({costs[5]}), 6 ({costs[6]})"
        in listed
    )
    refused = call("split", one_layer, "--tp", 3, "-o", tmp_path / "three")
    assert refused.code == 1
    assert "--tp 3 is unsupported (expected one of 1, 2, 4, 8) because of " in refused.err
    assert f": pass a supported size, or --pad to pad with zeros ({costs[3]} more memory)" in refused.err
    done = call("split", one_layer, "--tp", 3, "--pad", "-o", tmp_path / "three").out
    for text in ("query_head from 8 to 12, kv_head from 2 to 3", "lm_head from 131 to 132",
                 "model.embed_tokens from 131 to 132", f"{costs[3]} more memory"):  # fmt: skip
        assert text in done
    report = json.loads(call("reshard", tmp_path / "three", "--tp", 6, "--pad", "-o", tmp_path / "six", "--json").out)
    units = [f"{one['name']} from {one['size']} to {one['padded_size']}" for one in report["padding"]["units"]]
    assert "query_head from 8 to 12" in units
    assert f"padded with zeros: {', '.join(units)}; {costs[6]} more memory" in call("plan", tmp_path / "six").out

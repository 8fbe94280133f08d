"""Rank files in every layout: merging and resharding them, and layouts over any placements.

test_vllm_layout.py compares their tensors with those of vLLM. Comparisons are exact, except of model outputs: sums over
features are computed per rank.
"""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file

import shardconv
from shardconv.checkpoint.operations.split_writing import split_by
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.layouts import SOURCE_LAYOUTS, layout_file
from shardconv.layouts.layout import Constant, FileLayout, FileTensor
from shardconv.plan.placement import Placement, Unit, shard_dim
from shardconv.plan.plan import Plan, Reason, TensorPlan
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import PlanError, SplitCheckpointError, UsageError
from tests.support.changes import config, drop, put, remove
from tests.support.checkpoints import contents, safetensors_bytes
from tests.support.command import call
from tests.support.manifests import change_manifest
from tests.support.matrix import cases, each_once
from tests.support.models import GQA, MOE, Model, pack_experts, read
from tests.support.placements import shard_of

LAYER, VOCAB = "model.layers.0", 256
DENSE = {**GQA, "vocab_size": VOCAB}
SPARSE = {**DENSE, **{name: value for name, value in MOE.items() if "shared" not in name}}
#: One checkpoint per form that vLLM's layout supports; test_vllm_layout.py has one per model type.
KINDS = {
    "llama": Model("llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": Model("llama", {**DENSE, "tie_word_embeddings": True}),
    "mistral": Model("mistral", DENSE),
    "qwen2": Model("qwen2", {"num_key_value_heads": 2, "vocab_size": VOCAB}),
    "qwen3": Model("qwen3", DENSE),
    "mixtral": Model("mixtral", SPARSE),
    "qwen3_moe": Model("qwen3_moe", {**SPARSE, "mlp_only_layers": [1]}),
    "qwen3_moe, packed": Model("qwen3_moe", SPARSE, rewrite=pack_experts),
}


@pytest.fixture(scope="module")
def split_of(source_of, tmp_path_factory):
    """Split a kind of checkpoint in a layout for a tp, once; tests do not change it."""

    @cache
    def split(kind, layout, tp):
        folder = tmp_path_factory.mktemp("splits") / "split"
        shardconv.split(source_of(kind), folder, tp=tp, layout=layout)
        return folder

    return split


# --- merge and reshard ----------------------------------------------------------------------------------------------


#: The native layout keeps the boundaries of an engine unless others are requested.
ENGINE_OF = {"native": "shardconv"}


#: Layout and tp before, and after; torch cannot read tensors of two intervals, as those of packed experts are.
RESHARDS = [
    ("native", 2, "vllm", 4), ("vllm", 4, "native", 2), ("vllm", 2, None, 4), ("vllm", 4, "vllm", 4),
    ("vllm", 4, "dcp", 2), ("dcp", 2, "vllm", 4), ("dcp", 4, "native", 2), ("dcp", 4, None, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "old", "old_tp", "layout", "tp"),
    cases(
        [(kind, *step) for kind in KINDS for step in RESHARDS if not (kind.endswith("packed") and "dcp" in step)],
        lambda kind, *_: kind in {"llama, tied", "qwen2", "mixtral", "qwen3_moe, packed"},
    ),
)
def test_reshard_to_any_layout_equals_a_split_of_the_source(split_of, tmp_path, kind, old, old_tp, layout, tp):
    report = shardconv.reshard(
        split_of(kind, old, old_tp), tmp_path / "new", tp=tp, layout=layout, engine=ENGINE_OF.get(layout)
    )
    assert (report.old_layout, report.layout) == (old, layout or old)
    assert contents(tmp_path / "new") == contents(split_of(kind, layout or old, tp))


@pytest.fixture
def no_layouts(tmp_path, monkeypatch):
    """Installed layouts without rules, which may change: the manifest stores the layout of a split checkpoint."""
    (tmp_path / "none").mkdir()
    for name in SOURCE_LAYOUTS:
        text = "title = ''\nfiles = 'none'\nengine = 'vllm'\n[types]\nnone = []\n"
        (tmp_path / "none" / f"{name}.toml").write_text(text)
    cached = (layout_file.layout_head, layout_file.layout_file)
    with monkeypatch.context() as patch:
        patch.setattr(layout_file, "FOLDER", tmp_path / "none")
        for read in cached:
            read.cache_clear()
        yield
    for read in cached:
        read.cache_clear()


@pytest.fixture
def split(split_of):
    """A split checkpoint that exists before its layout is removed."""
    return split_of("qwen3_moe", "vllm", 4)


def test_split_reads_the_installed_layout(source_of, no_layouts, tmp_path):
    with pytest.raises(PlanError, match="does not support model type 'qwen3_moe'"):
        shardconv.split(source_of("qwen3_moe"), tmp_path / "no", tp=2, layout="vllm")


def test_commands_read_no_installed_layout(source_of, split, no_layouts, tmp_path):
    assert shardconv.verify(split, against=source_of("qwen3_moe")).differences == ()
    assert shardconv.merge(split, tmp_path / "back").is_identical
    assert ", layout vllm" in call("plan", split).out


def test_reshard_reads_no_installed_layout(split, split_of, request, tmp_path):
    expected = contents(split_of("qwen3_moe", "vllm", 2))
    request.getfixturevalue("no_layouts")
    shardconv.reshard(split, tmp_path / "resharded", tp=2)
    assert contents(tmp_path / "resharded") == expected


# --- models of the files --------------------------------------------------------------------------------------------


def check_model(axis, source, split):
    """Outputs equal those of the unsharded model, and parameters are views of the rank file."""
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    model = shardconv.load(split, device="cpu", group=axis)
    ids = torch.arange(10).view(1, -1)
    with torch.no_grad():
        expected, found = unsharded(ids).logits, model(ids).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    own = str(split / f"model-rank-{axis.rank}-part-0.safetensors")
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if line.endswith(own)]
    fused = model.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.v_proj.weight
    assert all(any(low <= weight.data_ptr() < high for low, high in maps) for weight in fused)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="requires /proc")
@pytest.mark.parametrize(
    ("kind", "layout", "tp"), each_once(["llama", "llama, tied", "mixtral", "qwen3_moe"], [("pair", 2), ("four", 4)])
)
def test_load(ranks, source_of, tmp_path, kind, layout, tp):
    shardconv.split(source_of(kind), tmp_path / "out", tp=tp, layout="vllm")
    ranks(layout, check_model, source_of(kind), tmp_path / "out")


# --- errors ---------------------------------------------------------------------------------------------------------


V = f"{LAYER}.self_attn.v_proj.weight"
#: Case to the kind of checkpoint, the change, the options, and the expected message.
REFUSED = {
    "a type without rules": (
        "qwen2", config(model_type="olmo2"), {},
        r"does not support model type 'olmo2' \(expected one of \d+ types, such as olmoe, .*native",
    ),
    "no model type": ("llama", config(model_type=None), {}, "needs a config.json with a model_type"),
    "no config": ("llama", remove("config.json"), {}, "needs a config.json"),
    "a tensor without a target": (
        "llama", put(f"{LAYER}.self_attn.rotary_emb.inv_freq", torch.ones(8)), {},
        rf"{LAYER}.self_attn.rotary_emb.inv_freq: layout vllm does not support this tensor",
    ),
    "a member of another dtype": (
        "llama", put(V, lambda found: found[V].bfloat16()), {},
        rf"{LAYER}.self_attn.qkv_proj.weight: .*several dtypes .*q_proj.weight of F32, .*v_proj.weight of BF16",
    ),
    "a member that is missing": (
        "qwen2", drop(f"{LAYER}.self_attn.k_proj.bias"), {},
        rf"{LAYER}.self_attn.k_proj.bias: is missing .*q_proj.bias",
    ),
    "an expert that is missing": (
        "mixtral", drop(f"{LAYER}.block_sparse_moe.experts.1.w3.weight"), {}, r"experts.1.w3.weight: is missing",
    ),
    "experts that the config does not have": (
        "mixtral", config(num_local_experts=5), {}, r"w13_weight: the source has 4 experts .*expected 5 by config.json",
    ),
    "a head and tied embeddings": (
        "llama, tied", put("lm_head.weight", torch.ones(VOCAB, 64)), {},
        r"lm_head.weight: .* has 2 tensors of this name",
    ),
    "no head and untied embeddings": (
        "llama, tied", config(tie_word_embeddings=False), {}, r"lm_head.weight: is missing, but layout vllm req",
    ),
    "a constant's name": (
        "llama", put(f"{LAYER}.self_attn.attn._q_scale", torch.ones(())), {"tp": 1}, r"_q_scale",
    ),
    "whole experts": ("mixtral", None, {"ep": 2}, "which ep changes"),
    "a replicated tensor": ("llama", None, {"replicate": ("lm_head.weight",)}, "which replicate changes"),
    "another family": ("llama", None, {"rules": "llama"}, "which rules changes"),
    "an unknown layout": ("llama", None, {"layout": "tensorrt"}, "'tensorrt' is unknown .*native, dcp, vllm"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_checkpoints_are_refused(source_of, tmp_path, what):
    kind, change, options, message = REFUSED[what]
    source = shutil.copytree(source_of(kind), tmp_path / "source")
    if change is not None:
        change(source)
    with pytest.raises((PlanError, UsageError), match=re.compile(message, re.DOTALL)):
        shardconv.split(source, tmp_path / "out", **{"tp": 2, "layout": "vllm", **options})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("vocab", "tp"), [(130, 2), (160, 2), (100, 4), (255, 2)])
def test_vocabulary_is_padded_to_a_multiple_of_64(tmp_path, vocab, tp):
    source = Model("llama", {**GQA, "vocab_size": vocab}).write(tmp_path / "source")
    shardconv.split(source, tmp_path / "out", tp=tp, layout="vllm")
    full = read(source)["lm_head.weight"]
    padded = torch.nn.functional.pad(full, (0, 0, 0, -vocab % 64))
    for rank, expected in enumerate(padded.chunk(tp)):
        found = load_file(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors")
        assert torch.equal(found["lm_head.weight"], expected)
    shardconv.split(source, tmp_path / "native", tp=tp)
    shardconv.reshard(tmp_path / "native", tmp_path / "again", tp=tp, layout="vllm")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    shardconv.reshard(tmp_path / "out", tmp_path / "native again", tp=tp, layout="native", engine="shardconv")
    assert contents(tmp_path / "native again") == contents(tmp_path / "native")


@pytest.mark.parametrize(
    "options", [{"ep": 2}, {"replicate": ("lm_head.weight",)}], ids=lambda options: next(iter(options))
)
def test_reshard_refuses_another_plan(source_of, tmp_path, options):
    shardconv.split(source_of("mixtral"), tmp_path / "native", tp=2, **options)
    with pytest.raises(
        UsageError, match=f'layout="vllm" requires the plan of vllm, which {next(iter(options))}(=True)? changes'
    ):
        shardconv.reshard(tmp_path / "native", tmp_path / "out", tp=4, layout="vllm")
    assert not (tmp_path / "out").exists()


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(0, 64, 7))
def test_damaged_constant_is_found(source_of, tmp_path, at):
    """Constants do not have checksums, so their values are compared."""
    shardconv.split(source_of("llama"), tmp_path / "out", tp=2, layout="vllm")
    path = tmp_path / "out" / "model-rank-1-part-0.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    assert data[start : start + 4] == np.float32(1).tobytes()
    data[start + at % 32] ^= 1
    path.write_bytes(data)
    assert path.name in shardconv.verify(tmp_path / "out").differences[0]
    with pytest.raises(SplitCheckpointError, match=path.name):
        shardconv.merge(tmp_path / "out", tmp_path / "back")


#: A tensor of the source.
NORM = f"{LAYER}.input_layernorm.weight"


def qkv(layout):
    return next(tensor for tensor in layout["changed"] if tensor["name"].endswith("0.self_attn.qkv_proj.weight"))


#: Malicious changes of the layout in a manifest.
LIES = {
    "a path out of the folder": lambda layout: layout.update(file_name="../model-{rank}.safetensors"),
    "one file for all ranks": lambda layout: layout.update(file_name="model.safetensors"),
    "the name of the manifest": lambda layout: layout.update(file_name="shardconv.json"),
    "no file name": lambda layout: layout.update(file_name=7),
    "a tensor that does not exist": lambda layout: layout["changed"][0]["members"].append("nothing"),
    "a tensor in two places": lambda layout: layout["changed"].append({"name": "x", "members": [NORM, NORM]}),
    "a tensor without members": lambda layout: layout["changed"][0].update(members=[]),
    "two tensors of one name": lambda layout: layout["changed"][0].update(name="model.norm.weight"),
    "metadata": lambda layout: layout["changed"][0].update(name="__metadata__"),
    "a stack that does not fit": lambda layout: qkv(layout).update(stack=2),
    "members of other shapes": lambda layout: qkv(layout).update(stack=3),
    "members that cannot be concatenated": lambda layout: qkv(layout)["members"].append(NORM),
    "a dim 0 of another size": lambda layout: qkv(layout).update(squeeze=True),
    "a vector of matrices": lambda layout: qkv(layout).update(is_vector=True),
    "a vector that is not a flag": lambda layout: qkv(layout).update(is_vector=1),
    "values that do not follow from others": lambda layout: qkv(layout).update(implied=[NORM]),
    "a tensor that is implied twice": lambda layout: qkv(layout).update(implied=[NORM, NORM]),
    "implied tensors that are not a list": lambda layout: qkv(layout).update(implied=NORM),
    "a dim that members do not have": lambda layout: qkv(layout).update(dim=2),
    "a dim of another size": lambda layout: qkv(layout).update(dim=1),
    "a negative dim": lambda layout: qkv(layout).update(dim=-1),
    "a dim that is not a number": lambda layout: qkv(layout).update(dim="1"),
    "a dim of a vector": lambda layout: qkv(layout).update(dim=1, is_vector=True),
    "a negative stack": lambda layout: layout["changed"][0].update(stack=-1),
    "a huge constant": lambda layout: layout["constants"][0].update(shape=[10**15]),
    "a constant of a negative shape": lambda layout: layout["constants"][0].update(shape=[-1]),
    "a constant of an unknown dtype": lambda layout: layout["constants"][0].update(dtype="F7"),
    "a constant that does not fit": lambda layout: layout["constants"][0].update(dtype="I8", value=1000),
    "a constant beside nothing": lambda layout: layout["constants"][0].update(beside="no.weight"),
    "constants of an odd size": lambda layout: layout["constants"][0].update(dtype="U8", value=1, shape=[1]),
    "offsets": lambda layout: layout.update(has_offsets=True),
    "no multiple": lambda layout: layout.update(padded_to={"lm_head.weight": 0}),
    "another multiple": lambda layout: layout.update(padded_to={"lm_head.weight": 96}),
}


@pytest.mark.parametrize("what", LIES)
def test_manifest_with_a_wrong_layout_is_refused(source_of, tmp_path, what):
    shardconv.split(source_of("llama"), tmp_path / "out", tp=2, layout="vllm")
    change_manifest(tmp_path / "out", lambda data: LIES[what](data["layout"]))
    with pytest.raises(SplitCheckpointError, match=r"shardconv\.json: cannot be used: "):
        read_manifest(tmp_path / "out")


def test_manifest_with_huge_constants_is_refused(source_of, tmp_path):
    """Each constant is small, but together they take gigabytes."""
    shardconv.split(source_of("llama"), tmp_path / "out", tp=2, layout="vllm")
    many = [{"name": f"c{number}", "dtype": "U8", "shape": [2**20], "value": 0} for number in range(4096)]
    change_manifest(tmp_path / "out", lambda data: data["layout"]["constants"].extend(many))
    with pytest.raises(SplitCheckpointError, match="its constants have more than 1048576 bytes"):
        shardconv.verify(tmp_path / "out")


# --- any layout over any placements ---------------------------------------------------------------------------------


@st.composite
def placed(draw, tp):
    """A shape and its placement."""
    kind = draw(st.sampled_from(["replicated", "rows", "padded", "replicas", "fused", "columns"]))
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4]))
    if kind == "replicated":
        return (rows, columns), Placement.replicated(tp)
    if kind == "columns":
        return (rows, columns * tp), shard_dim(1, [Unit(columns * tp)], tp)
    if kind == "replicas":
        return (rows, columns), shard_dim(0, [Unit(1, rows, replicate=True)], tp)
    units = {
        "rows": [Unit(rows * tp)],
        "padded": [Unit(rows * tp + 1, pad=True)],
        "fused": [Unit(rows * tp), Unit(tp)],
    }[kind]
    return (sum(unit.count for unit in units), columns), shard_dim(0, units, tp)


@st.composite
def laid_out(draw):
    """Placements of tensors of two dtypes, and a layout: some tensors are concatenated, stacked or renamed."""
    tp = draw(st.integers(1, 4))
    drawn = draw(st.lists(st.tuples(placed(tp), st.sampled_from(["F32", "BF16"])), min_size=1, max_size=12))
    tensors = {f"t{number}": (shape, placement, dtype) for number, ((shape, placement), dtype) in enumerate(drawn)}

    def local(name):
        shape, placement, _ = tensors[name]
        return [placement.shard_shape(shape, rank) for rank in range(tp)]

    left, changed = draw(st.permutations(list(tensors))), []
    while left:
        first = left[0]
        dim = draw(st.sampled_from([0, 1]))
        fitting = [
            name for name in left
            if tensors[name][2] == tensors[first][2]
            and [shape[1 - dim] for shape in local(name)] == [shape[1 - dim] for shape in local(first)]
        ]  # fmt: skip
        members = fitting[: draw(st.integers(1, len(fitting)))]
        is_alike = all(local(name) == local(first) for name in members)
        stacks = [size for size in range(1, len(members) + 1) if len(members) % size == 0]
        stack = draw(st.sampled_from([0, *stacks])) if is_alike else 0
        left = [name for name in left if name not in members]
        if draw(st.booleans()):
            changed.append(FileTensor(f"x{len(changed)}", tuple(members), stack, dim=dim))
    layout = FileLayout("any", "{ranks}-{rank}.safetensors", changed=tuple(changed))
    beside = layout.file_tensors(tensors)[0].name
    constants = [Constant(f"c{number}", "F32", (2,), number / 2, beside) for number in range(draw(st.integers(0, 2)))]
    return tp, tensors, replace(layout, constants=tuple(constants))


def write_source(path, tensors):
    header, end = {}, 0
    for name, (shape, _, dtype) in tensors.items():
        size = int(np.prod(shape)) * {"F32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    values = np.arange(end // 2, dtype=np.uint16)  # distinct, so that swaps are found
    path.write_bytes(safetensors_bytes(header, values.tobytes()))


def write_any(folder, drawn):
    """Write ``source.safetensors``, and its split in a layout, ``out``."""
    tp, tensors, layout = drawn
    write_source(folder / "source.safetensors", tensors)
    reason = Reason("test", "*")
    plans = {name: TensorPlan(placement, "any", (), reason) for name, (_, placement, _) in tensors.items()}
    source = open_source(folder / "source.safetensors")
    split_by(source, folder / "out", Plan.of_tensors(tp, None, plans, read_rules()), PlanRequest(), layout)
    return folder


@given(laid_out())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rank_files_of_any_layout_have_its_tensors(tmp_path_factory, drawn):
    """Concatenated or stacked shards, shards as they are, and constants; a merge restores the source from them."""
    tp, tensors, layout = drawn
    folder = write_any(tmp_path_factory.mktemp("any"), drawn)
    full = as_integers(folder / "source.safetensors")
    for rank in range(tp):
        found = as_integers(folder / "out" / f"{tp}-{rank}.safetensors")
        for tensor in layout.changed:
            shards = [shard_of(full[name], tensors[name][1], rank) for name in tensor.members]
            step = len(shards) // (tensor.stack or 1)
            blocks = [np.concatenate(shards[at : at + step], tensor.dim) for at in range(0, len(shards), step)]
            expected = np.stack(blocks) if tensor.stack else blocks[0]
            assert found[tensor.name].shape == expected.shape
            assert np.array_equal(found[tensor.name], expected)
        taken = {name for tensor in layout.changed for name in tensor.members}
        for name in tensors.keys() - taken:
            assert np.array_equal(found[name], shard_of(full[name], tensors[name][1], rank))
        for constant in layout.constants:
            assert found[constant.name].view(np.float32).tolist() == [constant.value] * 2
    assert read_manifest(folder / "out").layout == layout
    shardconv.merge(folder / "out", folder / "back.safetensors")
    assert (folder / "back.safetensors").read_bytes() == (folder / "source.safetensors").read_bytes()
    assert shardconv.verify(folder / "out", against=folder / "source.safetensors").differences == ()


def read_rules():
    """Rules for a manifest, which these tests do not apply."""
    from shardconv.plan.families.family import Family  # noqa: PLC0415
    from shardconv.plan.rule_set import rules_for  # noqa: PLC0415

    return rules_for(Family("none"), {})


def as_integers(path):
    """The tensors of a file as integers, so that every dtype can be compared."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    kinds = {"F32": np.uint32, "BF16": np.uint16}
    return {
        name: np.frombuffer(raw[start:][slice(*info["data_offsets"])], kinds[info["dtype"]]).reshape(info["shape"])
        for name, info in json.loads(raw[8:start]).items()
        if name != "__metadata__"
    }


# --- commands -------------------------------------------------------------------------------------------------------


def test_commands_print_the_layout_unless_it_is_native(source_of, split_of, tmp_path):
    split, native = split_of("llama", "vllm", 2), split_of("llama", "native", 2)
    runs = {
        "split": call("split", source_of("llama"), "--tp", 2, "--layout", "vllm", "-o", tmp_path / "out"),
        "reshard": call("reshard", split, "--tp", 4, "-o", tmp_path / "four"),
        "verify": call("verify", split),
        "plan": call("plan", split),
    }
    assert {name: (run.code, ", layout vllm" in run.out) for name, run in runs.items()} == dict.fromkeys(
        runs, (0, True)
    )
    assert ", layout" not in call("verify", native).out


def test_split_replaces_a_split_checkpoint_of_any_layout(source_of, tmp_path):
    """With --overwrite; a folder with other files is not replaced."""
    source, split = source_of("llama"), tmp_path / "out"
    for layout in ("native", "vllm", "vllm", "native"):
        shardconv.split(source, split, tp=2, layout=layout, overwrite=True)
        names = {path.name for path in split.glob("*.safetensors")}
        assert names == set(read_manifest(split).rank_files)
    shardconv.split(source, split, tp=2, layout="vllm", overwrite=True)
    (split / "rank-0-of-2.safetensors").write_bytes(b"")
    assert shardconv.verify(split).other_weights == ("rank-0-of-2.safetensors",)

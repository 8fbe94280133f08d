"""Adapters on disk: split by the plan of their base model, restored by a merge, and merged into its weights.

Shards and restored files are compared exactly. Merged weights differ from those of PEFT by the rounding of sums of
``rank`` products in float32, and those of 16 bits by one unit in the last place.
"""

import json
import math
import shlex
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.adapters import merge_adapter
from shardconv.checkpoint.adapters.adapter_settings import AdapterSettings, read_settings
from shardconv.checkpoint.sources import stored_tensors
from shardconv.checkpoint.sources.opening import open_source
from shardconv.layouts.layout import NATIVE
from shardconv.support.errors import PlanError, ShardconvError, SourceError, SplitCheckpointError
from tests.support.adapters import ADAPTERS, adapted, quiet, write_adapter
from tests.support.changes import block_scales, both, config, drop, remove
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.external import meta_ranks, meta_tensors, write_meta
from tests.support.models import MODELS, change_tensors, read
from tests.support.tensors import check_equal_files
from tests.support.torch_files import write_pytorch

WEIGHTS = "adapter_model.safetensors"
#: The tensor parallel sizes of split adapters.
TPS = (2, 4)
LAYER = "base_model.model.model.layers.0.self_attn"
A, B = f"{LAYER}.q_proj.lora_A.weight", f"{LAYER}.q_proj.lora_B.weight"
#: Their sizes in the adapter "llama".
SIZES = {A: (4, 64), B: (128, 4)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The checkpoint of a model and an adapter of it, once per case; ``-bf16`` is the model in bfloat16."""
    home = tmp_path_factory.mktemp("adapters")

    @cache
    def make(name, dtype=torch.float32):
        base, settings = ADAPTERS[name]
        source = home / f"{base}-{dtype}"
        if not source.exists():
            MODELS[base].build(0.3).to(dtype).save_pretrained(source)
        return source, write_adapter(home / f"{name}-{dtype}-adapter", source, **settings)

    return make


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_merge_restores_the_adapter(made, tmp_path, name, tp):
    source, adapter = made(name)
    shardconv.split(adapter, tmp_path / "split", tp=tp, base=source)
    assert shardconv.verify(tmp_path / "split", against=adapter).differences == ()
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert report.is_identical
    assert contents(tmp_path / "merged") == contents(adapter)


def test_shards_follow_the_base_weights(made, tmp_path):
    """B is sharded like the rows of the weight, with replicated KV heads, and A like its columns."""
    source, adapter = made("llama")
    shardconv.split(adapter, tmp_path / "split", tp=4, base=source)
    full = load_file(adapter / WEIGHTS)
    layer = "base_model.model.model.layers.0"
    for rank in range(4):
        shards = load_file(tmp_path / "split" / NATIVE.rank_file(rank, 4))
        head, kv_head = slice(rank * 32, rank * 32 + 32), slice(rank // 2 * 16, rank // 2 * 16 + 16)
        width, vocabulary = slice(rank * 24, rank * 24 + 24), slice(rank * 33, rank * 33 + 33)
        for module, rows, columns in (
            (f"{layer}.self_attn.q_proj", head, slice(None)),
            (f"{layer}.self_attn.k_proj", kv_head, slice(None)),
            (f"{layer}.self_attn.o_proj", slice(None), head),
            (f"{layer}.mlp.up_proj", width, slice(None)),
            (f"{layer}.mlp.down_proj", slice(None), width),
        ):
            assert torch.equal(shards[f"{module}.lora_A.weight"], full[f"{module}.lora_A.weight"][:, columns]), module
            assert torch.equal(shards[f"{module}.lora_B.weight"], full[f"{module}.lora_B.weight"][rows]), module
        head_b = full["base_model.model.lm_head.lora_B.weight"][vocabulary]
        assert torch.equal(shards["base_model.model.lm_head.lora_B.weight"][: len(head_b)], head_b)
        assert torch.equal(shards["base_model.model.model.norm.weight"], full["base_model.model.model.norm.weight"])


@pytest.mark.parametrize("kind", ["split", "config", "folder"])
def test_the_base_may_be_split_or_a_config(made, tmp_path, kind):
    source, adapter = made("gpt2")
    base = tmp_path / "base"
    if kind == "split":
        shardconv.split(source, base, tp=2)
    else:
        base.mkdir()
        shutil.copy(source / "config.json", base)
    shardconv.split(adapter, tmp_path / "expected", tp=2, base=source)
    shardconv.split(adapter, tmp_path / "found", tp=2, base=base / "config.json" if kind == "config" else base)
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


# --- with the base model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(made, tmp_path_factory):
    """A model that was split with two adapters."""
    home = tmp_path_factory.mktemp("together")
    source, adapter = made("llama")
    folders = [adapter, shutil.copytree(made("llama-dora")[1], home / "dora")]
    shardconv.split(source, home / "split", tp=2, adapters=folders)
    return source, folders, home / "split"


def test_merge_restores_the_model_and_its_adapters(together, tmp_path):
    source, adapters, split = together
    report = shardconv.merge(split, tmp_path / "merged")
    assert report.is_identical
    assert report.adapters == tuple(one.name for one in adapters)
    expected = {f"adapters/{one.name}/{name}": data for one in adapters for name, data in contents(one).items()}
    assert contents(tmp_path / "merged") == contents(source) | expected


@pytest.mark.parametrize("keeps_adapters", [True, False])
def test_merged_folder_is_split_again(together, tmp_path, keeps_adapters):
    """The message has the options that split the adapters, too, and those that leave them out."""
    source, _, split = together
    merged = tmp_path / "merged"
    shardconv.merge(split, merged)
    refused = call("split", merged, "--tp", 2, "-o", tmp_path / "again").err
    keeping, _, leaving = refused.partition("pass ")[2].partition(" to split them with the base model, or ")
    options = shlex.split(keeping if keeps_adapters else leaving.partition(" to leave")[0])
    assert call("split", merged, *options, "--tp", 2, "-o", tmp_path / "again").code == 0
    shardconv.merge(tmp_path / "again", tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(merged if keeps_adapters else source)


def test_one_adapter_of_a_merged_folder_does_not_leave_out_the_other(together, tmp_path):
    merged = tmp_path / "merged"
    shardconv.merge(together[2], merged)
    message = call("split", merged, "--adapter", merged / "adapters" / "dora", "--tp", 2, "-o", tmp_path / "again").err
    other = next(one.name for one in together[1] if one.name != "dora")
    assert f"holds PEFT adapters in subfolders (adapters/{other})" in message


def test_plan_names_adapters(together):
    _, adapters, split = together
    names = tuple(one.name for one in adapters)
    assert shardconv.report_plan(split).adapters == names
    assert f"\nwith 2 adapters: {', '.join(names)}\n" in call("plan", split).out


def test_reshard_takes_adapters_along(together, tmp_path):
    source, adapters, split = together
    shardconv.reshard(split, tmp_path / "resharded", tp=4)
    shardconv.split(source, tmp_path / "expected", tp=4, adapters=adapters)
    assert contents(tmp_path / "resharded") == contents(tmp_path / "expected")


def test_adapters_on_several_hosts(together, tmp_path):
    """Each host has the shards of its ranks, of the model and of its adapters."""
    source, adapters, split = together
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for rank, folder in enumerate(folders):
        shardconv.split(source, folder, tp=2, ranks=rank, adapters=adapters)
        assert shardconv.verify(folder).differences == ()
    shardconv.merge(folders, tmp_path / "merged")
    shardconv.merge(split, tmp_path / "expected")
    assert contents(tmp_path / "merged") == contents(tmp_path / "expected")
    shardconv.reshard(folders, tmp_path / "resharded", tp=4)
    shardconv.split(source, tmp_path / "four", tp=4, adapters=adapters)
    assert contents(tmp_path / "resharded") == contents(tmp_path / "four")


def test_hosts_that_merged_different_adapters(made, tmp_path, monkeypatch):
    """Adapted tensors are sampled beside others of their kind, of which the first is sampled here."""
    monkeypatch.setattr(stored_tensors, "_NUM_TENSORS", 1)
    source = made("llama")[0]
    adapter = write_adapter(tmp_path / "lora", source, target_modules=r".*\.1\.self_attn\.q_proj")
    other = shutil.copytree(adapter, tmp_path / "other" / "lora")
    save_file({name: 2 * value for name, value in load_file(adapter / WEIGHTS).items()}, other / WEIGHTS)
    hosts = {"first": [adapter], "same": [adapter], "none": [], "other": [other]}
    for host, adapters in hosts.items():
        shardconv.split(
            source, tmp_path / host / "split", tp=2, ranks=int(host != "first"), adapters=adapters,
            merge_adapter=bool(adapters),
        )  # fmt: skip
    for host, different in {"none": "merged adapter", "other": "sampled values"}.items():
        with pytest.raises(SplitCheckpointError, match=rf"\(different {different}\)"):
            shardconv.merge([tmp_path / "first" / "split", tmp_path / host / "split"], tmp_path / "merged")
    shardconv.merge([tmp_path / "first" / "split", tmp_path / "same" / "split"], tmp_path / "merged")


def test_an_adapter_without_tensors_is_refused(made, tmp_path):
    source, adapter = made("llama")
    empty = shutil.copytree(adapter, tmp_path / "lora")
    save_file({}, empty / WEIGHTS)
    with pytest.raises(PlanError, match="does not have tensors, so it changes nothing: save the adapter again"):
        shardconv.split(source, tmp_path / "split", tp=2, adapters=[empty], merge_adapter=True)


def test_verify_finds_adapters_of_hosts_that_differ(together, tmp_path):
    """Each folder alone is correct."""
    source, (_, adapter), _ = together
    other = shutil.copytree(adapter, tmp_path / adapter.name)
    save_file({name: tensor + 1 for name, tensor in load_file(adapter / WEIGHTS).items()}, other / WEIGHTS)
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for rank, (folder, one) in enumerate(zip(folders, (adapter, other), strict=True)):
        shardconv.split(source, folder, tp=2, ranks=rank, adapters=[one])
        assert shardconv.verify(folder).differences == ()
    (difference,) = shardconv.verify(folders).differences
    assert difference.startswith(f"adapter dora: {folders[1] / 'adapters' / 'dora'}: was split from another source")
    with pytest.raises(SplitCheckpointError, match="was split from another source"):
        shardconv.merge(folders, tmp_path / "merged")


def test_overwrite_replaces_adapters(together, made, tmp_path):
    _, _, split = together
    copied = shutil.copytree(split, tmp_path / "split")
    shardconv.split(made("llama")[0], copied, tp=2, overwrite=True)
    assert not (copied / "adapters").exists()
    shardconv.merge(split, tmp_path / "merged")
    shardconv.merge(split, tmp_path / "merged", overwrite=True)


def test_verify_finds_damaged_and_missing_adapters(together, tmp_path):
    copied = shutil.copytree(together[2], tmp_path / "split")
    assert shardconv.verify(copied).differences == ()
    with (copied / "adapters" / "dora" / NATIVE.rank_file(0, 2)).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"another.")
    assert "differ" in shardconv.verify(copied).differences[0]
    shutil.rmtree(copied / "adapters" / "dora")
    assert "dora: does not exist" in shardconv.verify(copied).differences[0]
    with pytest.raises(ShardconvError, match="dora: does not exist"):
        shardconv.merge(copied, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_next_to_its_model(made, tmp_path):
    source, adapter = made("llama")
    both = shutil.copytree(source, tmp_path / "both")
    for name in ("adapter_config.json", WEIGHTS):
        shutil.copy(adapter / name, both)
    with pytest.raises(SourceError, match=r"adapters=.*both\"\] to split both"):
        shardconv.split(both, tmp_path / "split", tp=2)
    report = shardconv.split(both, tmp_path / "split", tp=2, adapters=[both])
    assert report.adapters == ("both",)
    shardconv.merge(tmp_path / "split" / "adapters" / "both", tmp_path / "merged")
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()


# --- merged into the weights ----------------------------------------------------------------------------------------


@quiet
def merged_by_peft(source, adapter, folder):
    adapted(source, adapter).merge_and_unload().save_pretrained(folder)
    return read(folder)


def split_and_merged(source, adapter, folder, tp=2):
    shardconv.split(source, folder / "split", tp=tp, adapters=[adapter], merge_adapter=True)
    report = shardconv.merge(folder / "split", folder / "merged")
    assert not report.is_identical
    assert "is merged into it" in report.derived[0]
    return read(folder / "merged")


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_equal_those_of_peft(made, tmp_path, name):
    source, adapter = made(name)
    expected, before = merged_by_peft(source, adapter, tmp_path / "peft"), read(source)
    found = split_and_merged(source, adapter, tmp_path)
    assert list(found) == list(before)
    changed = [one for one in found if not torch.equal(found[one], before[one])]
    assert any("o_proj" in one or "c_proj" in one for one in changed)
    for one in found:
        limit = 16 * torch.finfo(torch.float32).eps * expected[one].abs().max()
        assert (found[one] - expected[one]).abs().max() <= (limit if one in changed else 0), one


def test_links_of_adapters_of_an_open_source_are_followed(made, tmp_path):
    source, adapter = made("llama")
    (tmp_path / "linked").mkdir()
    for path in adapter.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    options = {"tp": 2, "adapters": [tmp_path / "linked"], "merge_adapter": True}
    with pytest.raises(SourceError, match="follow_links=True"):
        shardconv.split(open_source(source), tmp_path / "split", **options)
    shardconv.split(open_source(source), tmp_path / "split", **options, follow_links=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merged_weights_of_16_bits_are_rounded_once(made, tmp_path, dtype):
    """The sum in float64, rounded to the dtype; PEFT rounds the product before the addition."""
    source, _ = made("llama", dtype)
    adapter = write_adapter(tmp_path / "adapter", source, target_modules=["embed_tokens", "o_proj"], lora_alpha=12)
    found, before = split_and_merged(source, adapter, tmp_path), read(source)
    factors = {
        name.removeprefix("base_model.model."): one.double() for name, one in load_file(adapter / WEIGHTS).items()
    }
    table, layer = "model.embed_tokens", "model.layers.0.self_attn.o_proj"
    for name, product in (
        (table, (factors[f"{table}.lora_embedding_B"] @ factors[f"{table}.lora_embedding_A"]).T),
        (layer, factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]),
    ):
        expected = (before[f"{name}.weight"].double() + 12 / 4 * product).to(dtype)
        assert (found[f"{name}.weight"] != expected).float().mean() < 0.01
        torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "problem"), [(float("nan"), "nan, which is not a number"), (3e38, "inf, which is too large for F32")]
)
def test_merged_elements_that_are_not_finite_are_an_error(made, tmp_path, value, problem):
    source, adapter = made("llama")
    shutil.copytree(adapter, tmp_path / "adapter")
    before = load_file(adapter / WEIGHTS)
    tensors(A=torch.ones_like(before[A]), B=torch.full_like(before[B], value))(tmp_path / "adapter")
    with pytest.raises(SourceError, match=rf"layers.0.self_attn.q_proj.weight: .* becomes -?{problem}.*merge_adapter"):
        split_and_merged(source, tmp_path / "adapter", tmp_path)
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(("name", "layer"), [("llama-dora", "self_attn.o_proj"), ("gpt2-dora", "attn.c_attn")])
def test_a_weight_of_dora_without_a_norm_is_an_error(made, tmp_path, name, layer):
    """Its rows are the outputs, or in GPT-2 its columns."""
    source, adapter = made(name)
    for folder in (source, adapter):
        zeros = {
            one: torch.zeros_like(tensor) if f".0.{layer}." in one and "magnitude" not in one else tensor
            for one, tensor in load_file(next(folder.glob("*model.safetensors"))).items()
        }
        shutil.copytree(folder, tmp_path / folder.name)
        save_file(zeros, next((tmp_path / folder.name).glob("*model.safetensors")), {"format": "pt"})
    with pytest.raises(
        SourceError, match=rf"^\S*0\.{layer}\.weight: DoRA divides by the norm .* is zero: .*merge_adapter"
    ):
        split_and_merged(tmp_path / source.name, tmp_path / adapter.name, tmp_path)


def test_merge_keeps_elements_that_are_infinite_in_the_model(made, tmp_path):
    source, adapter = made("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    shutil.copytree(source, tmp_path / "source")
    change_tensors(tmp_path / "source", lambda tensors: tensors[name][0, 0].fill_(math.inf))
    found = split_and_merged(tmp_path / "source", adapter, tmp_path)[name]
    assert found.isinf().sum() == found[0, 0].isinf() == 1


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    [
        ("llama", "bf16", "fp32"), ("llama", "bf16", "fp16"), ("llama", "fp32", "bf16"), ("llama-dora", "bf16", "fp32"),
        ("llama-dora", "fp32", "bf16"),
    ],
)  # fmt: skip
def test_dtype_converts_the_sums(made, tmp_path, monkeypatch, name, stored, dtype):
    """Sums are rounded once, as if the model were converted to float32 first, and to the dtype last."""
    monkeypatch.setattr(merge_adapter, "_NORM_ELEMENTS", 2**10)  # several blocks for the norms of a table
    source, adapter = made(name, {"bf16": torch.bfloat16, "fp32": torch.float32}[stored])
    options = {"tp": 2, "adapters": [adapter], "merge_adapter": True}
    shardconv.split(source, tmp_path / "split", dtype=dtype, **options)
    shardconv.split(source, tmp_path / "wide", tp=1, dtype="fp32")
    shardconv.merge(tmp_path / "wide", tmp_path / "wide-merged")
    shardconv.split(tmp_path / "wide-merged", tmp_path / "adapted", **options)
    shardconv.merge(tmp_path / "adapted", tmp_path / "adapted-merged")
    shardconv.split(tmp_path / "adapted-merged", tmp_path / "expected", tp=2, dtype=dtype)
    check_equal_files(tmp_path / "split", tmp_path / "expected")


def test_an_adapter_is_merged_into_metas_files(made, tmp_path):
    """The same as after a merge of Meta's files. Query and key rows are read in another order."""
    source, adapter = made("llama")
    found = read(source)
    heads = {"n_heads": 8, "n_kv_heads": 2, "head_dim": 16}
    params = {"dim": 64, "n_layers": 2, "norm_eps": 1e-6, "rope_theta": 10000.0, **heads}
    found |= {name: found[name][:130] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    ranks = meta_ranks(meta_tensors(found, 8, 2), 2, kv_heads=2, embedding_dim=0)
    meta = write_meta(tmp_path / "meta", ranks, params)
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    vocabulary = {name: tensor for name, tensor in load_file(adapter / WEIGHTS).items() if len(tensor) == 131}
    tensors(**{name: tensor[:130].contiguous() for name, tensor in vocabulary.items()})(adapter)
    assert_merged_in_one_step(meta, adapter, tmp_path)


@pytest.mark.parametrize("name", ["llama-dora", "gpt2-dora"])
def test_an_adapter_is_merged_into_a_pytorch_file_with_strides(made, tmp_path, name):
    source, adapter = made(name)
    strided = {one: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for one, tensor in read(source).items()}
    write_pytorch(tmp_path / "torch", strided)
    shutil.copy(source / "config.json", tmp_path / "torch")
    assert_merged_in_one_step(tmp_path / "torch", adapter, tmp_path)


def assert_merged_in_one_step(source, adapter, folder):
    """Compare with a split and a merge of the source, and a merge of the adapter into the result."""
    options = {"tp": 2, "adapters": [adapter], "merge_adapter": True}
    shardconv.split(source, folder / "split", **options)
    shardconv.split(source, folder / "plain", tp=1)
    shardconv.merge(folder / "plain", folder / "safetensors")
    shardconv.split(folder / "safetensors", folder / "expected", **options)
    check_equal_files(folder / "split", folder / "expected")


# --- adapter_model.bin ----------------------------------------------------------------------------------------------


@pytest.fixture
def as_bin(made, tmp_path):
    """An adapter as a PyTorch file; A of a layer is transposed in it."""
    source, adapter = made("llama")
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(adapter / "adapter_config.json", folder)
    found = load_file(adapter / WEIGHTS)
    torch.save({**found, A: found[A].T.contiguous().T}, folder / "adapter_model.bin")
    return source, adapter, folder


def test_a_pytorch_adapter_has_the_shards_of_a_safetensors_one(as_bin, tmp_path):
    source, adapter, folder = as_bin
    shardconv.split(folder, tmp_path / "split", tp=2, base=source)
    shardconv.split(adapter, tmp_path / "expected", tp=2, base=source)
    check_equal_files(tmp_path / "split", tmp_path / "expected")
    assert not shardconv.verify(tmp_path / "split", against=folder).differences
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert (report.is_identical, report.derived) == (False, ("converted from PyTorch files",))
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {WEIGHTS, "adapter_config.json"}
    check_equal_files(tmp_path / "merged", adapter)


def test_a_merge_says_which_adapters_are_converted(as_bin, tmp_path):
    source, adapter, folder = as_bin
    shardconv.split(source, tmp_path / "split", tp=2, adapters=[folder, adapter])
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert report.is_identical
    assert report.notes == ("adapter bin: converted from PyTorch files",)
    assert (tmp_path / "merged" / "adapters" / "bin" / WEIGHTS).exists()


def test_a_pytorch_adapter_is_merged_into_the_weights(as_bin, tmp_path):
    source, adapter, folder = as_bin
    for name, one in (("split", folder), ("expected", adapter)):
        shardconv.split(source, tmp_path / name, tp=2, adapters=[one], merge_adapter=True)
    check_equal_files(tmp_path / "split", tmp_path / "expected")


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_of_an_adapter_is_that_of_its_split(made, tmp_path):
    source, adapter = made("llama")
    shardconv.split(adapter, tmp_path / "split", tp=2, base=source)
    expected = json.loads(call("plan", tmp_path / "split", "--json").out)
    found = json.loads(call("plan", adapter, "--base", source, "--tp", 2, "--json").out)
    assert found["tensors"] == expected["tensors"]
    assert (found["supported_tp"], found["padded_tp"]) == (expected["supported_tp"], [])
    assert found["supported_tp"] == json.loads(call("plan", source, "--json").out)["supported_tp"]


# --- what is refused ------------------------------------------------------------------------------------------------


def settings(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(**changes):
    """Replace tensors; None removes one."""

    def change(folder):
        found = load_file(folder / WEIGHTS) | {{"A": A, "B": B}.get(name, name): make for name, make in changes.items()}
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / WEIGHTS)

    return change


#: An unusual adapter, the strings that the error has to contain, and the change.
REFUSED = {
    "rank of the settings": (settings(r=5), ("has rank 4 (expected 5 by r",)),
    "rank of one matrix": (tensors(A=torch.zeros(3, 64)), ("has rank 4 (expected 3", "damaged")),
    "width of the base": (tensors(A=torch.zeros(4, 32)), (B, "is for a weight of [128, 32]", "has [128, 64]")),
    "no B": (tensors(B=None), (A, "does not have its B")),
    "no magnitude": (settings(use_dora=True), ("no magnitude vector", "use_dora = True")),
    "module that the settings do not adapt": (
        settings(target_modules=["k_proj", "proj"]),
        ("PEFT does not adapt", "got k_proj, proj"),
    ),
    "module that the settings exclude": (
        settings(exclude_modules=["attn.q_proj", "self_attn.q_proj"]),
        ("PEFT does not adapt", A),
    ),
    "target modules that are not names": (
        settings(target_modules=[1]),
        ("target_modules is [1] ([0]: Expected `str`",),
    ),
    "module to save without tensors": (
        settings(modules_to_save=["norm", "embed_tokens"]),
        ("model.embed_tokens.weight: is in embed_tokens, one of modules_to_save",),
    ),
    "tensor with and without .base_layer": (
        tensors(**{f"base_model.model.model.norm{end}.weight": torch.zeros(64) for end in ("", ".base_layer")}),
        ("model.norm.weight: is for the same weight as", "model.norm.base_layer.weight"),
    ),
    "layer that is a linear layer and an embedding": (
        tensors(**{f"{LAYER}.q_proj.lora_embedding_A": torch.zeros(4, 128)}),
        ("q_proj.lora_embedding_A: is for the same weight as", A),
    ),
    "layer with and without the prefix of the model": (
        tensors(**{name.replace(".model.model.", ".model."): torch.zeros(size) for name, size in SIZES.items()}),
        ("are both model.layers.0.self_attn.q_proj.weight of the base model",),
    ),
    "layer that the base lacks": (
        tensors(**{A.replace(".0.", ".7."): torch.zeros(4, 64), B.replace(".0.", ".7."): torch.zeros(128, 4)}),
        ("does not have model.layers.7.self_attn.q_proj.weight",),
    ),
    "module that no rule matches": (
        tensors(**{one.replace("q_proj", "extra"): torch.zeros(4, 4) for one in (A, B)}),
        ("does not have model.layers.0.self_attn.extra.weight",),
    ),
    "tensor of another kind": (tensors(**{f"{LAYER}.q_proj.lora_E": torch.zeros(4, 1)}), ("lora_E: is not supported",)),
    "name without the prefix": (tensors(**{"q_proj.lora_A.weight": torch.zeros(4, 64)}), ("q_proj.lora_A.weight",)),
    "convolution": (tensors(A=torch.zeros(4, 64, 3, 3)), (A, "adapters of convolutions")),
    "replaced tensor of another shape": (
        tensors(**{"base_model.model.model.norm.weight": torch.zeros(65)}),
        ("model.norm.weight: has shape [65]", "[64]"),
    ),
    "trainable tokens": (settings(trainable_token_indices=[1]), ("trainable_token_indices is not supported",)),
    "parameters as targets": (settings(target_parameters=["experts"]), ("target_parameters is not supported",)),
    "unknown setting": (settings(use_future=True), ("use_future is not supported",)),
    "initialization that changes the base": (settings(init_lora_weights="pissa"), ("'pissa' changes the base model",)),
    "pattern that takes too long": (settings(rank_pattern={"(a+)+b": 4}), ("rank_pattern", "may take too long")),
    "pattern that is not valid": (settings(alpha_pattern={"(": 4}), ("alpha_pattern", "not a regular expression")),
    "alpha that is not a number": (settings(lora_alpha="8"), ("lora_alpha is '8' (Expected `float`, got `str`)",)),
    "alpha that is not finite": (settings(lora_alpha=math.inf), ("lora_alpha is inf (expected a finite number)",)),
    "alpha of a pattern that is not finite": (settings(alpha_pattern={"a": math.nan}), ("alpha_pattern.a is nan (",)),
    "rank of zero": (settings(r=0), ("r is 0 (Expected `int` >= 1)",)),
    "rank of a pattern of zero": (settings(rank_pattern={"q": 4, "a": 0}), ("rank_pattern.a is 0 (",)),
    "ranks that are not a table": (settings(rank_pattern=3), ("rank_pattern is 3 (Expected `object`, got `int`)",)),
    "no settings": (
        remove("adapter_config.json"),
        ("does not hold an adapter (expected adapter_config.json or ",),
    ),
    "no weights": (
        remove(WEIGHTS),
        ("without its weights (expected adapter_model.safetensors or adapter_model.bin)",),
    ),
    "truncated weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8]),
        (WEIGHTS,),
    ),
}
REFUSED |= {
    kind: (settings(peft_type=kind), (f"peft_type '{kind}' is not supported (expected LORA)", "merge_and_unload"))
    for kind in ("IA3", "VERA", "LOHA", "LOKR", "ADALORA", "OFT", "PROMPT_TUNING", "PREFIX_TUNING", "TRAINABLE_TOKENS")
}


@pytest.mark.parametrize("empty", [None, False, "", []])
@pytest.mark.parametrize("key", ["target_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora"])
def test_empty_settings_of_another_type_are_not_in_use(tmp_path, key, empty):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, key: empty}))
    assert read_settings(tmp_path / "adapter_config.json") == AdapterSettings(r=4)


def test_tensors_of_the_same_name_in_model_and_adapter_are_refused(made):
    source, adapter = (open_source(folder).stored for folder in made("llama"))
    other = replace(adapter, shards={next(iter(source.shards)): next(iter(adapter.shards.values()))})
    with pytest.raises(SourceError, match=r"both have a tensor \S+: rename it in one"):
        source.joined(other)


@pytest.mark.parametrize("options", [["--base"], ["--adapter"], ["--merge-adapter", "--adapter"]], ids=" ".join)
@pytest.mark.parametrize("case", REFUSED)
def test_unusual_adapters_are_refused(made, tmp_path, case, options):
    source, adapter = made("llama")
    changed = shutil.copytree(adapter, tmp_path / "changed")
    change, texts = REFUSED[case]
    change(changed)
    src, other = (changed, source) if options == ["--base"] else (source, changed)
    result = call("split", src, *options, other, "--tp", 2, "-o", tmp_path / "split", "-q")
    assert result.code == 1
    assert result.out == ""
    assert [text for text in texts if text not in result.err] == []
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]


def test_base_that_does_not_exist_gets_a_remedy(made, tmp_path, monkeypatch):
    (tmp_path / "base-model").mkdir()
    monkeypatch.chdir(tmp_path)
    result = call("split", made("llama")[1], "--base", "base-modle", "--tp", 2)
    assert (result.code, result.out) == (1, "")
    assert "--base base-modle: does not exist (similar: base-model): correct the path" in result.err
    hub = call("split", made("llama")[1], "--base", "org/model", "--tp", 2).err
    assert "if it is the name of a model on the Hugging Face Hub, download it first: hf download" in hub


#: Commands whose options do not fit together, and the error.
WRONG_OPTIONS = {
    "split {adapter} --base {source} --for vllm": "adapters are split for shardconv run only (got vllm)",
    "split {source} --adapter {adapter} --layout vllm": "adapters are split for shardconv run only (got vllm)",
    "reshard {split} --tp 2 --for vllm": "adapters are split for shardconv run only (got vllm)",
    "reshard {split}/adapters/dora --tp 2 --layout vllm": "adapters are split for shardconv run only (got vllm)",
    "split {adapter} --base {source} --layout megatron": "(got megatron): pass the adapter itself to megatron",
    "split {adapter} --base {source} --pad": "--pad is not supported for adapters",
    "split {source} --adapter {adapter} --pad": "--pad is not supported for adapters",
    "split {source} --merge-adapter": "merges one adapter (got 0): pass --adapter ADAPTER",
    "split {source} --merge-adapter --adapter {adapter} --adapter {adapter}": "merges one adapter (got 2)",
    "split {source} --adapter {adapter} --adapter {adapter}": "two adapters have the same name",
    "split {adapter} --base {source} --adapter {adapter}": "remove one of the two",
    "plan {adapter}": "pass --base BASE to shardconv plan or split",
    "plan {adapter} --base {source} --prove": "--base does not apply to --prove",
    "plan {adapter} --base {source} --cost": "--base plans an adapter, which is not a model of its own",
    "plan {adapter} --base {source} --dtype bf16": "--dtype converts models, not adapters",
    "plan {adapter} --base {source} --pad": "--pad is not supported for adapters",
    "plan {split}/adapters/dora --base {source}": "which stores its plan: remove --base",
    "merge {split} -o merged.safetensors": "expected a folder, also for the adapters",
}


@pytest.mark.parametrize("command", WRONG_OPTIONS)
def test_options_that_do_not_fit_are_refused(together, tmp_path, monkeypatch, command):
    source, (adapter, _), split = together
    monkeypatch.chdir(tmp_path)
    words = command.format(source=source, adapter=adapter, split=split).split()
    result = call(*words, *(["--tp", 2] if words[0] == "split" else []))
    assert result.code in {1, 2}
    assert WRONG_OPTIONS[command] in result.err
    assert not any(tmp_path.iterdir())


def test_an_adapter_is_not_merged_into_quantized_weights(made, tmp_path):
    source, adapter = made("llama")
    quantized = shutil.copytree(source, tmp_path / "quantized")
    block_scales(8)(quantized)
    with pytest.raises(PlanError, match=r"/quantized: is quantized \(got model.layers.0.*_proj, "):
        shardconv.split(quantized, tmp_path / "split", tp=2, adapters=[adapter], merge_adapter=True)
    shardconv.split(adapter, tmp_path / "found", tp=2, base=quantized)
    shardconv.split(adapter, tmp_path / "expected", tp=2, base=source)
    check_equal_files(tmp_path / "found", tmp_path / "expected")


def tied(source, folder):
    """A copy of a model whose head is tied to the embedding table."""
    shutil.copytree(source, folder)
    both(drop("lm_head.weight"), config(tie_word_embeddings=True))(folder)
    return folder


def test_merge_says_that_a_tied_head_changes_with_its_table(made, tmp_path):
    """The shared weight is that of merge_and_unload of PEFT; before, only the embedding had the product."""
    source = tied(made("llama")[0], tmp_path / "tied")
    adapter = write_adapter(tmp_path / "adapter", source, target_modules=["embed_tokens", "q_proj"])
    report = shardconv.split(source, tmp_path / "split", tp=2, adapters=[adapter], merge_adapter=True)
    (note,) = (one for one in report.assumed if "model.embed_tokens.weight" in one)
    assert "and into the head if the two are tied" in note
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    expected = merged_by_peft(source, adapter, tmp_path / "peft")["model.embed_tokens.weight"]
    torch.testing.assert_close(read(tmp_path / "merged")["model.embed_tokens.weight"], expected)
    report = shardconv.split(made("llama")[0], tmp_path / "untied", tp=2, adapters=[adapter], merge_adapter=True)
    assert not [one for one in report.assumed if "embed_tokens" in one]


def test_merge_refuses_a_replaced_table_that_may_be_tied(made, tmp_path):
    """PEFT unties the head, whose weight the checkpoint does not have."""
    source = tied(made("llama")[0], tmp_path / "tied")
    adapter = write_adapter(tmp_path / "a", source, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(PlanError, match="may be tied to the head"):
        shardconv.split(source, tmp_path / "split", tp=2, adapters=[adapter], merge_adapter=True)


def test_a_matrix_is_kept_while_another_thread_reads_one():
    """Reads wait for buffers of other threads, which must not wait for the thread that reads."""
    matrices, is_reading, may_end = merge_adapter.MatrixCache(), threading.Event(), threading.Event()

    def read(name: str, _offset: int, data: memoryview) -> None:
        if name == "slow":
            is_reading.set()
            assert may_end.wait(60)
        data[:] = bytes(len(data))

    slow, fast = (merge_adapter.StoredMatrix(name, "F32", (2, 2)) for name in ("slow", "fast"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(matrices.get, slow, read)
        assert is_reading.wait(60)
        try:
            assert pool.submit(matrices.get, fast, read).result(60).shape == (2, 2)
        finally:
            may_end.set()
        assert first.result(60) is matrices.get(slow, read)

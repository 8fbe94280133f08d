"""Adapters on split models: logits equal those of PEFT on the unsharded model.

Logits are compared to 1e-4 of the largest, as in test_load.py: sums over features are computed per rank.
"""

import itertools
import json
import logging
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import shardconv
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.commands.run import _verdict
from shardconv.hf.package import _is_no_kernel_warning
from shardconv.runtime.comparison import apply_adapter
from shardconv.runtime.outputs import RunOptions
from shardconv.runtime.run import check_run, run_rank
from shardconv.support.errors import RunError
from tests.support.adapters import ADAPTERS, adapted, unadapted, write_adapter
from tests.support.command import call
from tests.support.loading import check_fails
from tests.support.matrix import cases
from tests.support.models import MODELS, VOCAB

TP = {"pair": 2, "four": 4}
#: Patterns of ranks, DoRA and an embedding, biases of adapters, fused projections, and latent attention.
BY_DEFAULT = {"llama", "llama-dora", "llama-regex", "gpt2", "deepseek"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def made(home):
    """The checkpoint of a model and an adapter of it, once per case."""

    @cache
    def make(name):
        base, settings = ADAPTERS[name]
        source = home / base
        if not source.exists():
            MODELS[base].build(0.3).save_pretrained(source)
        return source, write_adapter(home / f"{name}-adapter", source, **settings)

    return make


@pytest.fixture(scope="module")
def split(home, made):
    """The split checkpoint and the split adapter of a case, once per tp."""

    @cache
    def make(name, tp):
        source, adapter = made(name)
        folder = home / f"{source.name}-tp{tp}"
        if not folder.exists():
            shardconv.split(source, folder, tp=tp)
        shardconv.split(adapter, home / f"{name}-adapter-tp{tp}", tp=tp, base=folder)
        return folder, home / f"{name}-adapter-tp{tp}"

    return make


def ids():
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def check_logits(axis, folder, adapter, expected, without):
    with torch.inference_mode():
        found = shardconv.load(folder, device="cpu", group=axis, adapter=adapter)(ids()).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (found - without).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("layout", "name"),
    cases(
        itertools.product(TP, ADAPTERS),
        lambda layout, name: layout == ("four" if name == "deepseek" else "pair") and name in BY_DEFAULT,
    ),
)
def test_logits_equal_those_of_peft(ranks, made, split, name, layout):
    source, adapter = made(name)
    with torch.inference_mode():
        expected, without = adapted(source, adapter)(ids()).logits, unadapted(source)(ids()).logits
    ranks(layout, check_logits, *split(name, TP[layout]), expected, without)


def run_on_rank(axis, folder, adapter, source):
    options = RunOptions(max_new_tokens=4, device="cpu", check=source, token_ids=True, adapter=adapter)
    check_run(open_loadable(folder, tp=None, options={}), [], options)
    report = run_rank(folder, [], options, lambda _: None)
    return report.differences, report.error, _verdict(report, 0.0)


def test_check_compares_with_peft(ranks, home, made, split):
    """And finds a difference from another source."""
    folder, adapter = split("llama", 4)
    for differences, error, verdict in ranks("four", run_on_rank, folder, adapter, made("llama")[0]):
        assert (differences, error < 1e-4) == ((), True)
        assert f"equal to the unsharded model with the adapter {adapter}, by PEFT, in float32" in verdict
    other = home / "other-source"
    MODELS["llama"].build(0.25).save_pretrained(other)
    for differences, _, _ in ranks("four", run_on_rank, folder, adapter, other):
        assert "logits differ" in differences[0]


def test_check_of_a_merged_adapter_is_refused_with_the_remedy(home, made):
    source, adapter = made("llama")
    shardconv.split(source, home / "merged-tp2", tp=2, adapters=[adapter], merge_adapter=True)
    result = call("run", home / "merged-tp2", "--token-ids", "1 2", "--device", "cpu", "--check", source)
    assert (result.code, result.out) == (2, "")
    assert f"the adapter {adapter.name} is merged into it, so that it differs from its source" in result.err
    assert f"shardconv merge {home / 'merged-tp2'} -o MERGED; shardconv run MERGED --tp 2 --check MERGED" in result.err


def test_only_the_kernel_warning_of_bitsandbytes_is_hidden(caplog):
    logger = logging.getLogger("tests.bitsandbytes")
    logger.addFilter(_is_no_kernel_warning)
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("another")
    logger.warning(ValueError("not a text"))
    assert caplog.messages == ["another", "not a text"]


def test_without_peft_the_check_names_it_and_leaves_no_filter(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RunError, match="PEFT, which is not installed"):
        apply_adapter(nn.Linear(1, 1), Path("adapter"))
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").filters


def with_other_settings(adapter, folder):
    changed = shutil.copytree(adapter, folder / "changed-settings")
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    return changed


@pytest.mark.parametrize(
    ("layout", "adapter", "message"),
    [
        (
            "four",
            lambda split, _: split("llama", 2)[1],
            r"is split for tp=2 \(expected tp=4, as the base model\): run shardconv reshard \S+ --tp 4$",
        ),
        ("pair", lambda split, _: split("gpt2", 2)[1], "split the adapter for this base model"),
        (
            "pair",
            lambda split, folder: with_other_settings(split("llama", 2)[1], folder),
            "adapter_config.json: differs from its checksum",
        ),
    ],
    ids=["another tp", "another model", "changed settings"],
)
def test_another_adapter_is_refused(ranks, split, tmp_path, layout, adapter, message):
    folder = split("llama", TP[layout])[0]
    ranks(layout, check_fails, folder, [message], {"adapter": adapter(split, tmp_path)})


def check_is_not_saved(axis, folder, adapter, target):
    with pytest.raises(ValueError, match="the model has adapters"):
        shardconv.load(folder, device="cpu", group=axis, adapter=adapter).save_pretrained(target)


def test_a_model_with_adapters_is_not_saved(ranks, split, tmp_path):
    ranks("pair", check_is_not_saved, *split("llama", 2), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- adapters that are not applied, or without a base model ---------------------------------------------------------


def run_without(axis, folder, options):
    options = RunOptions(max_new_tokens=1, device="cpu", token_ids=True, **options)
    return run_rank(folder, ["1 2 3"], options, lambda _: None).notes


@pytest.fixture(scope="module")
def with_adapter(home, made):
    """A model that was split with an adapter."""
    source, adapter = made("llama")
    shardconv.split(source, home / "with-adapter", tp=4, adapters=[adapter])
    return home / "with-adapter"


def test_adapters_of_a_split_checkpoint_that_are_not_applied_are_named(ranks, with_adapter):
    (note,) = ranks("four", run_without, with_adapter, {})[0]
    assert note == "adapters that are not applied: llama-adapter (pass --adapter NAME to apply one)"
    assert ranks("four", run_without, with_adapter, {"adapter": "llama-adapter"})[0] == ()


def test_an_adapter_that_a_source_leaves_out_is_named(ranks, made, tmp_path):
    source, adapter = made("llama")
    place = shutil.copytree(source, tmp_path / "place")
    shutil.copytree(adapter, place, dirs_exist_ok=True)
    (note,) = ranks("four", run_without, place, {"tp": 4, "plan": {"ignore": ("adapter_*", "README.md")}})[0]
    assert note.startswith("adapters that are not applied: place (to apply one, shardconv split ")
    command = note.partition("(to apply one, ")[2].partition(", and pass")[0]
    assert call(*command.split()[1:], "-o", tmp_path / "split").code == 0
    assert ranks("four", run_without, tmp_path / "split", {"adapter": "place"})[0] == ()


@pytest.mark.parametrize("tp", [(), ("--tp", "2")], ids=["without tp", "with tp"])
def test_run_of_an_adapter_names_its_base_and_the_commands(made, tp):
    source, adapter = made("llama")
    result, size = call("run", adapter, *tp, "--token-ids", "1"), tp[-1] if tp else "N"
    assert result.err == (
        f"shardconv: {adapter}: is a PEFT adapter of {source}, not a model: split it with its base model (shardconv "
        f"split BASE --adapter {adapter} --tp {size}), then run both (shardconv run BASE-tp{size} --adapter "
        f"{adapter.name})\n"
    )


def test_run_of_a_split_adapter_names_its_base_and_the_command(made, split):
    adapter = split("llama", 2)[1]
    assert call("run", adapter, "--token-ids", "1").err == (
        f"shardconv: {adapter}: is a PEFT adapter of {made('llama')[0]}, not a model: run its base model with it "
        f"(shardconv run BASE --adapter {adapter})\n"
    )

"""Data groups that share experts: outputs, greedy tokens and gradients equal those of the unsharded model."""

import copy
import io
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers

import shardconv
from shardconv import gather_state_dict
from shardconv.distributed.groups import _current, init_parallel
from shardconv.support.errors import RunError, UsageError
from tests.support.adapters import adapted, write_adapter
from tests.support.matrix import cases
from tests.support.models import GQA, MLA, MOE, Model
from tests.support.ranks import on_ranks

VOCAB = 99
KINDS = {
    "qwen3_moe": Model("qwen3_moe", {**GQA, **MOE, "vocab_size": VOCAB}),
    "mixtral": Model("mixtral", {**GQA, **MOE, "vocab_size": VOCAB}),
    "deepseek_v3": Model("deepseek_v3", {**MLA, **MOE, "vocab_size": VOCAB}),
}
#: Tensor and expert parallel sizes of four ranks, the number of stages, and the number of experts.
SIZES = [(2, 4, 1, 8), (2, 4, 1, 5), (1, 4, 1, 6), (1, 2, 2, 3), (2, 2, 2, 5), (4, 4, 1, 7)]


def with_experts(name, count):
    numbers = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count)
    return replace(KINDS[name], config={**KINDS[name].config, **numbers})


@contextmanager
def current_groups(**options):
    """Data groups of two ranks, which are current."""
    try:
        yield init_parallel(tensor=2, data=2, device_type="cpu", **options)
    finally:
        _current.groups = None


def check_logits(model, unsharded):
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        expected, found = (one(input_ids=ids).logits for one in (unsharded, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def check_outputs(axis, source, path, options):
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    model = shardconv.load(path, device="cpu", **options)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = (one(input_ids=ids).logits for one in (unsharded, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        given = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(**given), unsharded.generate(**given))
    own, full = (sum(one.numel() for name, one in each.named_parameters() if ".experts." in name)
                 for each in (model, unsharded))  # fmt: skip
    return own / full


@pytest.mark.parametrize(("tp", "ep", "pp", "experts"), SIZES)
@pytest.mark.parametrize("name", cases(KINDS, lambda name: name == "qwen3_moe"))
def test_outputs_equal_those_of_the_unsharded_model(ranks, tmp_path, name, tp, ep, pp, experts):
    """From rank files, whose sizes may be given, and from the source."""
    source, sizes = tmp_path / "source", {"tp": tp, "ep": ep, "pp": pp}
    with_experts(name, experts).build(0.3).save_pretrained(source)
    shardconv.split(source, tmp_path / "split", **sizes)
    held = ranks("four", check_outputs, source, tmp_path / "split", sizes)
    assert max(held) <= -(-experts // ep) / experts
    assert ranks("four", check_outputs, source, source, sizes) == held


@pytest.mark.parametrize(("name", "command"), [("tp", "--tp 1"), ("ep", "--tp 2 --ep 1"), ("pp", "--tp 2 --pp 1")])
def test_other_sizes_than_those_of_a_split_are_refused(tmp_path, name, command):
    source, sizes = with_experts("mixtral", 4).write(tmp_path / "source"), {"tp": 2, "ep": 2, "pp": 2}
    shardconv.split(source, tmp_path / "split", **sizes)
    message = rf'is split for tp=2 ep=2 stages="1,1" \(got {name}=1\): .* shardconv reshard .*split {command}$'
    with pytest.raises(UsageError, match=message):
        shardconv.load(tmp_path / "split", device="cpu", **{**sizes, name: 1})


def check_adapter(axis, source, lora, path):
    expected, model = adapted(source, lora), shardconv.load(path, device="cpu", adapter="lora")
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, expected(input_ids=ids).logits, rtol=0, atol=1e-3)


def test_adapter(ranks, tmp_path):
    source, lora = with_experts("mixtral", 4).write(tmp_path / "source"), tmp_path / "lora"
    write_adapter(lora, source, target_modules=["q_proj", "o_proj"])
    shardconv.split(source, tmp_path / "split", tp=2, ep=4, adapters=[lora])
    ranks("four", check_adapter, source, lora, tmp_path / "split")


def losses(model, batches):
    return [model(input_ids=ids, labels=ids).loss for ids in batches]


@pytest.mark.parametrize("name", KINDS)
@on_ranks("four")
def test_gradients_of_groups_with_other_numbers_of_tokens(axis, name):
    """Of each group's loss for dense parameters, and of the sum of both losses for experts."""
    unsharded = with_experts(name, 5).build(0.3)
    with current_groups() as groups:
        model, own = shardconv.convert_model(copy.deepcopy(unsharded), ep=4), groups.data.rank
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, VOCAB, (2, tokens), generator=generator) for tokens in (9, 4)]
    (found,), expected = losses(model, [batches[own]]), losses(unsharded, batches)
    torch.testing.assert_close(found, expected[own], rtol=1e-5, atol=0)
    found.backward()
    parameters = dict(unsharded.named_parameters())
    of_groups = [torch.autograd.grad(loss, [*parameters.values()], allow_unused=True) for loss in expected]
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gathered = gather_state_dict(model)
    for key, *grads in zip(parameters, *of_groups, strict=True):
        full = [torch.zeros_like(parameters[key]) if grad is None else grad for grad in grads]
        wanted = sum(full) if ".experts." in key else full[own]
        torch.testing.assert_close(gathered[key], wanted, rtol=1e-3, atol=1e-5 * max(wanted.abs().max().item(), 1))


def check_other_order(axis, source, path):
    with current_groups(ranks=[3, 2, 1, 0]):
        check_logits(shardconv.load(path, device="cpu"), transformers.AutoModelForCausalLM.from_pretrained(source))


def test_load_in_groups_of_another_order(ranks, tmp_path):
    """A rank reads its own file, and has its own experts, whatever the order of the current groups."""
    source = with_experts("mixtral", 8).write(tmp_path / "source")
    shardconv.split(source, tmp_path / "split", tp=2, ep=4)
    ranks("four", check_other_order, source, tmp_path / "split")


@on_ranks("four")
def test_a_pickled_model(axis):
    with current_groups():
        unsharded, file = with_experts("qwen3_moe", 5).build(0.3), io.BytesIO()
        torch.save(shardconv.convert_model(copy.deepcopy(unsharded), ep=4), file)
        file.seek(0)
        check_logits(torch.load(file, weights_only=False), unsharded)


def add_one(model, groups):
    model.lm_head.weight.data += groups.data.rank


def change_dtype(model, groups):
    if dist.get_rank() == 1:
        model.lm_head.weight.data = model.lm_head.weight.data.to(torch.complex64)


@pytest.mark.parametrize(
    ("change", "message"),
    [(add_one, "hold different values in lm_head"), (change_dtype, "lm_head|do not hold the same layers")],
)
@on_ranks("four")
def test_groups_that_differ_are_refused_on_all_ranks(axis, change, message):
    with current_groups() as groups:
        model = with_experts("mixtral", 8).build(0.3)
        change(model, groups)
        with pytest.raises(ValueError, match=message):
            shardconv.convert_model(model, ep=4)


def check_seeds(axis, path):
    """Ranks of a data group have the same seed, and groups have others."""
    model = shardconv.load(path, device="cpu", tp=2, ep=4).train()
    ids = torch.arange(3, 12)[None]
    torch.manual_seed(dist.get_rank() // 2)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.manual_seed(dist.get_rank() % 2)
    with pytest.raises(RuntimeError, match="seeded differently"):
        model(input_ids=ids)


def test_dropout_with_a_seed_for_each_group(ranks, tmp_path):
    dropping = replace(KINDS["qwen3_moe"], config={**KINDS["qwen3_moe"].config, "attention_dropout": 0.1})
    ranks("four", check_seeds, dropping.write(tmp_path / "source"))


def test_other_groups_are_refused(ranks):
    ranks("four", check_refused)


def check_refused(axis):
    model = with_experts("mixtral", 8).build()
    with pytest.raises(UsageError, match=r"ep=8 needs 8 ranks in data groups of 4: .*tensor=4, data=2"):
        shardconv.convert_model(model, ep=8, group=axis)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2, "ep": 2}, r"would be loaded for 2 ranks, and there are 4 processes: .*or pass tp=4 ep=1"),
        ({"tp": 1, "ep": 2}, r"would be loaded for 2 ranks, and there are 4 processes"),
    ],
)
def test_other_numbers_of_processes_are_refused(ranks, tmp_path, options, message):
    source = with_experts("mixtral", 4).write(tmp_path / "source")
    ranks("four", check_not_loaded, source, options, message)


def check_not_loaded(axis, source, options, message):
    with pytest.raises(RunError, match=message):
        shardconv.load(source, device="cpu", **options)

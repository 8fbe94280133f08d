"""Loading split checkpoints: models equal the unsharded ones, and every rank raises on errors.

Logits are compared to 1e-4 of the largest, as sums over features are computed per rank.
"""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.split.rank_reader import _StripeChecks
from shardconv.layouts.layout import NATIVE
from shardconv.support.errors import RunError, UsageError
from tests.support.damage import flip
from tests.support.loading import NAMES, TP, check_fails, check_logits, inputs_of, source_and_split
from tests.support.matrix import cases
from tests.support.models import MODELS, change_config
from tests.support.ranks import on_ranks

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
#: Models that run by default: on four ranks, and models of other structures on two.
ON_FOUR_RANKS = {"llama", "phi3", "mixtral", "gpt2"}
ON_TWO_RANKS = {"bloom", "deepseek_v3", "falcon-40b", "gpt_oss", "mamba2", "t5"}
LAYOUTS_AND_NAMES = cases(
    [(layout, name) for layout in TP for name in NAMES],
    lambda layout, name: name in (ON_FOUR_RANKS if layout == "four" else ON_TWO_RANKS),
)


@pytest.mark.parametrize(("layout", "name"), LAYOUTS_AND_NAMES)
def test_logits_equal_those_of_the_unsharded_model(ranks, home, layout, name):
    ranks(layout, check_logits, name, *source_and_split(home, name, TP[layout]))


@contextmanager
def opened_files():
    """The safetensors files that are opened meanwhile."""
    opened, is_counting = set(), [True]
    sys.addaudithook(lambda event, arguments: is_counting[0] and event == "open" and opened.add(str(arguments[0])))
    try:
        yield opened
    finally:
        is_counting[0] = False
        opened -= {path for path in opened if not path.endswith(".safetensors")}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="requires /proc")
@on_ranks("pair")
def test_each_rank_reads_its_own_file_once(axis, source, split):
    """Check that a rank opens only its rank file, and that parameters are views of it."""
    with opened_files() as opened:
        model = shardconv.load(split, device="cpu", group=axis)
    own = str(split / NATIVE.rank_file(axis.rank, axis.size))
    assert opened == {own}
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if line.endswith(own)]
    assert all(any(low <= parameter.data_ptr() < high for low, high in maps) for parameter in model.parameters())
    held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert held < Path(own).stat().st_size
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert held <= 0.6 * sum(parameter.numel() * parameter.element_size() for parameter in unsharded.parameters())


def check_several_files(axis, source, split):
    """Check logits, and that a rank opens all of its files, and no others."""
    with opened_files() as opened:
        check_logits(axis, "llama", source, split)
    found = {path for path in opened if path.startswith(str(split))}
    assert found == {str(path) for path in split.glob(f"rank-{axis.rank}-of-2-file-*.safetensors")}
    assert len(found) > 2


def test_rank_with_several_files(ranks, source, tmp_path):
    shardconv.split(source, tmp_path / "split", tp=2, max_file_size="100kB")
    ranks("pair", check_several_files, source, tmp_path / "split")


def check_converted(axis, source, split):
    model = shardconv.load(split, device="cpu", group=axis)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {model.config.dtype} == {torch.bfloat16}
    norm, expected = (one.model.norm.weight for one in (model, unsharded))
    assert torch.equal(norm, expected)
    rows = unsharded.model.layers[0].mlp.up_proj.weight.chunk(axis.size)[axis.rank]
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, rows)


def test_converted_checkpoint_is_loaded_in_its_dtype(ranks, source, tmp_path):
    shardconv.split(source, tmp_path / "split", tp=2, dtype="bf16")
    ranks("pair", check_converted, source, tmp_path / "split")


def check_generation(axis, source, split):
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source)
    model = shardconv.load(split, device="cpu", group=axis)
    ids = inputs_of("llama", unsharded)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generation_config.max_length == 77  # from the checkpoint's generation_config.json
    assert torch.equal(model.generate(ids, **options), unsharded.generate(ids, **options))


def test_generation_config_of_the_checkpoint_is_used(ranks, source, tmp_path):
    source = shutil.copytree(source, tmp_path / "source")
    (source / "generation_config.json").write_text('{"max_length": 77, "eos_token_id": 2, "pad_token_id": 0}')
    shardconv.split(source, tmp_path / "split", tp=2)
    ranks("pair", check_generation, source, tmp_path / "split")


@on_ranks("pair")
def test_dtype_by_its_name(axis, split):
    """Check that one in another spelling is refused with those that are known."""
    model = shardconv.load(split, device="cpu", dtype="bf16", group=axis)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(UsageError, match=r"dtype 'bfloat16' is unknown.*bf16, fp16, fp32"):
        shardconv.load(split, device="cpu", dtype="bfloat16", group=axis)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_world_of_another_size(ranks, split):
    message = "is for 2 ranks, and there are 4 processes: start it by torchrun --nproc-per-node 2, or .* --tp 4"
    ranks("four", check_fails, split, [message])


@pytest.fixture
def damaged(split, tmp_path):
    return shutil.copytree(split, tmp_path / "split")


def truncate(folder, path, _):
    path.write_bytes(path.read_bytes()[:-100])


def move_out(folder, path, _):
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


#: Changes of the folder and the file of rank 0, given a split of another model; and the message of each rank.
DAMAGES = {
    "missing": (lambda _, path, __: path.unlink(), "is missing: copy it to this host"),
    "truncated": (truncate, "was modified or truncated"),
    "of another split": (lambda _, path, other: shutil.copyfile(other / path.name, path), "expected"),
    "a link out of the folder": (move_out, "is a link out of its folder"),
    "config missing": (lambda folder, *_: (folder / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_folder(ranks, home, damaged, what):
    damage, message = DAMAGES[what]
    damage(damaged, damaged / NATIVE.rank_file(0, 2), source_and_split(home, "qwen2", 2)[1])
    messages = [message] if what.startswith("config") else [message, f"rank 0: .*{message}"]
    ranks("pair", check_fails, damaged, messages)


def test_code_in_the_checkpoint_is_not_run(ranks, source, tmp_path):
    source = shutil.copytree(source, tmp_path / "source")
    change_config(source, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}})
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shardconv.split(source, tmp_path / "split", tp=2, rules="llama")
    ranks("pair", check_fails, tmp_path / "split", ["code in the checkpoint \\(evil.Evil, .*trust_remote_code=True"])
    assert not (tmp_path / "ran").exists()


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = output.logits * 2
        return output
"""


def check_own_code(axis, source, split):
    unsharded = transformers.LlamaForCausalLM.from_pretrained(source).eval()
    model = shardconv.load(split, device="cpu", group=axis, trust_remote_code=True)
    expected, found = (one(**inputs_of("llama", one)).logits for one in (unsharded, model))
    assert (found - 2 * expected).abs().max() <= 1e-4 * expected.abs().max()


def test_code_in_the_checkpoint_that_is_trusted(ranks, source, tmp_path):
    own = shutil.copytree(source, tmp_path / "own")
    auto_map = {"AutoConfig": "code_of_mine.MineConfig", "AutoModelForCausalLM": "code_of_mine.MineForCausalLM"}
    change_config(own, {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto_map})
    (own / "code_of_mine.py").write_text(OWN_CODE)
    shardconv.split(own, tmp_path / "split", tp=2, rules="llama")
    ranks("pair", check_own_code, source, tmp_path / "split")


def check_verified(axis, split, is_right):
    if is_right:
        shardconv.load(split, device="cpu", group=axis)
    else:
        check_fails(axis, split, ["^.*rank-0-of-2.* differ from their checksum", "^rank 0: "])
        shardconv.load(split, device="cpu", group=axis, verify=False)


@on_ranks("pair")
def test_the_file_is_checked_while_the_model_is_built(axis, split):
    """Check that all checksums are compared before the conversion ends, without a read of any tensor."""
    module, started = sys.modules["shardconv.runtime.load"], []
    start, convert = _StripeChecks.start, module.convert_with_request

    def convert_later(model, *arguments, **options):
        (checks,) = started
        checks.wait()
        return convert(model, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_StripeChecks, "start", lambda checks: (started.append(checks), start(checks)))
        patch.setattr(module, "convert_with_request", convert_later)
        shardconv.load(split, device="cpu", group=axis)


@on_ranks("pair")
def test_error_of_a_progress_callback_is_not_one_of_the_config(axis, split):
    def progress(*_) -> None:
        raise TypeError("of the caller")

    with pytest.raises(RunError, match=r"TypeError: of the caller"):
        shardconv.load(split, device="cpu", group=axis, progress=progress)


def check_dtype(axis, split) -> None:
    assert shardconv.load(split, device="cpu", group=axis).dtype == torch.bfloat16


def test_model_whose_config_has_no_dtype_has_the_dtype_of_its_tensors(ranks, tmp_path):
    MODELS["qwen2"].build().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", {"dtype": None})
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=2)
    ranks("pair", check_dtype, tmp_path / "split")


def test_contents_are_checked_unless_verify_is_false(ranks, damaged):
    ranks("pair", check_verified, damaged, True)
    flip(damaged / NATIVE.rank_file(0, 2))
    ranks("pair", check_verified, damaged, False)


def check_seen_by_one(axis, split, other):
    """Check that all ranks raise if one of them finds another checkpoint, or none."""
    mine = split if axis.rank == 0 else other
    messages = ["rank 1: .*does not exist", "does not exist"]
    check_fails(axis, mine if axis.rank == 0 else other.parent / "nothing", messages)
    check_fails(axis, mine, ["checkpoints differ between ranks"])


def test_ranks_with_different_checkpoints(ranks, home, damaged):
    shardconv.split(source_and_split(home, "qwen2", 2)[0], damaged.parent / "other", tp=2)
    ranks("pair", check_seen_by_one, damaged, damaged.parent / "other")


@on_ranks("pair")
def test_memory_is_checked_for_the_copied_shards_of_all_ranks_of_a_host(axis, source):
    """Check the row parallel ones, and vocabulary with padding; the other shards of a source are views of its file."""
    tensors = load_file(source / "model.safetensors")
    needed = sum(tensor.nbytes // 2 for name, tensor in tensors.items() if name.endswith(ROW_PARALLEL))
    if axis.rank == 1:
        vocabulary = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        needed += sum(-(-len(tensor) // 2) * tensor[0].nbytes for tensor in vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setattr(os, "sysconf", lambda name: 2 * needed if name == "SC_PAGE_SIZE" else 1)
        shardconv.load(source, device="cpu", group=axis, tp=2)
        patch.setattr(os, "sysconf", lambda name: 2 * needed - 1 if name == "SC_PAGE_SIZE" else 1)
        with pytest.raises(shardconv.ShardconvError, match=r"the values of 2 ranks are .* and cpu has room for"):
            shardconv.load(source, device="cpu", group=axis, tp=2)


# --- unused tensors and missing parameters --------------------------------------------------------------------------


def changed_tensors(source, tmp_path, change):
    """Split a checkpoint with changed tensors for 2 ranks."""
    source = shutil.copytree(source, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    shardconv.split(source, tmp_path / "split", tp=2)
    return tmp_path / "split"


def check_unused(axis, split, pattern):
    shardconv.load(split, device="cpu", group=axis, unused=(pattern,))


def test_unused_option_permits_tensors(ranks, source, tmp_path):
    """A bias without attention_bias in the config, which is an error otherwise; MTP layers are known to be unused."""
    name = "model.layers.0.self_attn.q_proj"
    add = lambda tensors: tensors.update({f"{name}.bias": torch.ones(len(tensors[f"{name}.weight"]))})  # noqa: E731
    split = changed_tensors(source, tmp_path, add)
    message = rf"tensors that LlamaForCausalLM does not use \(1\): {name}.bias. The .*unused="
    ranks("pair", check_fails, split, [message])
    ranks("pair", check_unused, split, "*.q_proj.bias")


def test_heads_of_pretraining_may_be_unused(ranks, tmp_path):
    """As in bert-base-uncased, whose config has BertForMaskedLM."""
    made = transformers.BertForPreTraining(MODELS["bert"].build().config)
    made.save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", {"architectures": ["BertForMaskedLM"]})
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=2)
    ranks("pair", check_unused, tmp_path / "split", "nothing")


def test_parameter_without_a_tensor_is_an_error(ranks, source, tmp_path):
    name = "model.layers.1.post_attention_layernorm.weight"
    split = changed_tensors(source, tmp_path, lambda tensors: tensors.pop(name))
    ranks("pair", check_fails, split, [rf"parameters of LlamaForCausalLM without a tensor \(1\): {name}"])


@on_ranks("pair")
def test_ranks_with_different_versions(axis, split):
    with pytest.MonkeyPatch.context() as patch:
        if axis.rank == 1:
            module = sys.modules["shardconv.runtime.ranks"]
            found = module._version
            patch.setattr(module, "_version", lambda package: "9.9" if package == "torch" else found(package))
        check_fails(axis, split, ["versions of torch differ between ranks .rank 0: 2", "rank 1: 9.9"])

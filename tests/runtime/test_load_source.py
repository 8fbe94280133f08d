"""Loading checkpoints that are not split: parameters are those from a split checkpoint, bit for bit."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.rank_reader import RankSourceReader
from tests.support.loading import NAMES, PLAN, TP, Mlp, check_fails, source_and_split
from tests.support.matrix import cases
from tests.support.models import change_config
from tests.support.ranks import on_ranks
from tests.support.torch_files import SINGLE, write_pytorch

DATA = Path(__file__).parents[1] / "data" / "quantized"


# --- equality with a split checkpoint -------------------------------------------------------------------------------


def check_equal(axis, source, split, loading, planning):
    """Check that both models have equal values and classes; ``loading`` are options of both."""
    from_split = shardconv.load(split, device="cpu", group=axis, **loading)
    from_source = shardconv.load(source, tp=axis.size, device="cpu", group=axis, **loading, **planning)
    expected, found = (
        {**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (from_split, from_source)
    )
    assert [str(module) for module in from_source.modules()] == [str(module) for module in from_split.modules()]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num()), name


@pytest.mark.parametrize(
    ("layout", "name"),
    cases(
        [(layout, name) for layout in TP for name in NAMES],
        lambda layout, name: (layout, name) in {("pair", "phi3"), ("pair", "gpt2"), ("four", "llama")},
    ),
)
def test_values_equal_those_from_a_split(ranks, home, layout, name):
    ranks(layout, check_equal, *source_and_split(home, name, TP[layout]), {}, {})


@pytest.mark.parametrize(
    ("parts", "name"),
    cases([(1, "pytorch_model.bin"), (2, None), (1, "model.pt"), (1, "model.pth")], lambda parts, name: parts == 2),
)
def test_values_of_pytorch_files_equal_those_from_a_split(ranks, source, split, tmp_path, parts, name):
    """Each rank reads its shards where the PyTorch file has them."""
    written = write_pytorch(tmp_path / "model", load_file(source / "model.safetensors"), parts=parts)
    shutil.copy(source / "config.json", written)
    if name is not None:
        (written / SINGLE).rename(written / name)
    ranks("pair", check_equal, written, split, {}, {})


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    cases(
        [
            ("pair", "mixtral", {"ep": 2}),
            ("pair", "llama", {"engine": "vllm"}),
            ("pair", "llama", {"replicate": ("lm_head.weight",), "ignore": ("nothing.*",)}),
            ("three", "llama", {"pad": True}),
        ],
        lambda layout, name, options: options.keys() & {"ep", "pad"},
    ),
)
def test_plan_options_have_the_effect_that_they_have_on_a_split(ranks, home, tmp_path, layout, name, options):
    source = shutil.copytree(source_and_split(home, name, 2)[0], tmp_path / "source")
    (source / "nothing.bin").write_text("left out" if "ignore" in options else "")
    if "ignore" not in options:
        (source / "nothing.bin").unlink()
    shardconv.split(source, tmp_path / "split", tp=3 if layout == "three" else 2, **options)
    ranks(layout, check_equal, source, tmp_path / "split", {}, options)


@pytest.mark.parametrize(
    "name",
    cases(["gptq-3", "gptq-4-act-order", "gptq-2-one-group", "awq-4"], lambda name: name == "gptq-3"),
)
def test_dequantized_values_equal_those_from_a_split(ranks, tmp_path, name):
    """Indices of groups count from the first group of a rank."""
    shardconv.split(DATA / name, tmp_path / "split", tp=2)
    ranks("pair", check_equal, DATA / name, tmp_path / "split", {"dequantize": True}, {})


def test_dtype(ranks, source, split):
    ranks("pair", check_equal, source, split, {"dtype": torch.bfloat16}, {})


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    save_file(Mlp().state_dict(), tmp_path / "mlp.safetensors")
    return tmp_path / "mlp.safetensors"


@on_ranks("pair", plan=PLAN)
def test_own_module_of_a_file_with_a_plan_file(axis, plan, file):
    unsharded = Mlp()
    unsharded.load_state_dict(load_file(file))
    model = shardconv.load(file, tp=2, rules=plan, model=Mlp, device="cpu", group=axis)
    assert tuple(model.up.weight.shape) == (12, 8)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), unsharded(x))


def check_config_option(axis, file, config):
    check_fails(axis, file, ["does not have a config.json.* config=FILE"], {"tp": 2, "head_dim": 16})
    model = shardconv.load(file, tp=2, config=config, device="cpu", group=axis)
    assert type(model).__name__.endswith("LlamaForCausalLM")


def test_file_without_a_config_is_loaded_with_another(ranks, source, tmp_path):
    shutil.copyfile(source / "model.safetensors", tmp_path / "weights.safetensors")
    ranks("pair", check_config_option, tmp_path / "weights.safetensors", source / "config.json")


# --- what a rank reads ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="requires /proc")
@on_ranks("pair")
def test_only_row_parallel_weights_are_copied(axis, source):
    """Check that parameters are views of the source, except those that are not one range of it."""
    model = shardconv.load(source, tp=2, device="cpu", group=axis)
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if str(source) in line]
    copied = {
        name.split(".")[-2]
        for name, parameter in model.named_parameters()
        if not any(low <= parameter.data_ptr() < high for low, high in maps)
    }
    padded = {"embed_tokens", "lm_head"} if axis.rank == 1 else set()  # its vocabulary is odd
    assert copied == {"o_proj", "down_proj"} | padded


# --- errors ---------------------------------------------------------------------------------------------------------


def check_seen(axis, paths, messages, options=None):
    """Check that all ranks raise if each loads another path."""
    check_fails(axis, paths[axis.rank], messages, {"tp": 2} if options is None else options[axis.rank])


@pytest.fixture
def copied(source, tmp_path):
    """Two equal sources with other names of their folders."""
    return [shutil.copytree(source, tmp_path / name) for name in ("one", "other")]


def change_values(source):
    """Add to the weights that a training of low-rank adapters changes."""
    tensors = load_file(source / "model.safetensors")
    changed = {name: tensor + 0.5 * name.endswith("q_proj.weight") for name, tensor in tensors.items()}
    save_file(changed, source / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "other values": (
        change_values,
        r"values of tensors differ between ranks \(rank 0 in .*/one differs from rank 1 in .*/other\)",
    ),
    "other config": (
        lambda source: change_config(source, {"rope_theta": 7.0, "rms_norm_eps": 1e-3}),
        "checkpoints differ between ranks",
    ),
    "other auxiliary file": (
        lambda source: (source / "generation_config.json").write_text('{"eos_token_id": 5}'),
        "checkpoints differ between ranks",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_with_different_sources(ranks, copied, what):
    change, message = CHANGES[what]
    change(copied[1])
    ranks("pair", check_seen, copied, [message])


@on_ranks("pair")
def test_ranks_with_equal_sources_in_other_folders(axis, copied):
    shardconv.load(copied[axis.rank], tp=2, device="cpu", group=axis)


def test_ranks_with_a_source_and_a_split(ranks, copied, tmp_path):
    shardconv.split(copied[0], tmp_path / "split", tp=2)
    message = (
        rf"kinds of checkpoints differ between ranks \(rank 0 in {copied[0]}: a source; "
        rf"rank 1 in {tmp_path / 'split'}: a split checkpoint with all ranks\): make"
    )
    ranks("pair", check_seen, [copied[0], tmp_path / "split"], [message])


def test_ranks_with_different_options(ranks, copied):
    options = [{"tp": 2}, {"tp": 2, "replicate": ("lm_head.weight",)}]
    ranks("pair", check_seen, copied, ["checkpoints differ between ranks"], options)


def test_source_that_one_rank_cannot_read(ranks, copied):
    os.truncate(copied[1] / "model.safetensors", 5000)
    ranks("pair", check_seen, copied, ["rank 1: .*model.safetensors", "model.safetensors"])


@on_ranks("pair")
def test_source_that_changes_while_it_is_loaded(axis, copied):
    """Check that a source that changes between two tensors is refused."""
    path = copied[0]
    read = RankSourceReader.read

    def read_later(self, name):
        if axis.rank == 1:
            os.utime(path / "model.safetensors", ns=(1, 1))
        return read(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankSourceReader, "read", read_later)
        check_fails(axis, path, ["changed while it was read"], {"tp": 2})


@on_ranks("pair")
def test_source_that_changes_while_its_values_are_converted(axis, copied):
    """Check that a source that changes after its last tensor was mapped is refused."""
    path, module = copied[0], sys.modules["shardconv.runtime.load"]
    load_shards = module.load_shards

    def load_later(*arguments, **options):
        model = load_shards(*arguments, **options)
        os.utime(path / "model.safetensors", ns=(1, 1))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_shards", load_later)
        check_fails(axis, path, ["changed while it was read"], {"tp": 2, "dtype": "bf16"})


@pytest.mark.parametrize(
    ("layout", "tp", "message"),
    [
        ("four", 2, "would be loaded for 2 ranks, and there are 4 processes: .*--nproc-per-node 2, or pass tp=4"),
        ("three", 3, "3 neither divides 2 nor is a multiple of 2"),
    ],
)
def test_wrong_sizes(ranks, source, layout, tp, message):
    ranks(layout, check_fails, source, [message], {"tp": tp})


def test_rank_files_without_their_manifest_are_not_a_source(ranks, split, tmp_path):
    split = shutil.copytree(split, tmp_path / "split")
    (split / MANIFEST_NAME).unlink()
    ranks("pair", check_fails, split, ["holds rank-0-of-2.safetensors, a rank file .*: restore"], {"tp": 2})

"""split --dtype: the result is that of converting the checkpoint with torch first, and splitting it then."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.sources.planning import plan_source
from shardconv.checkpoint.split.rank_reader import RankSourceReader
from shardconv.support.errors import PlanError, SourceError, UsageError
from tests.support.checkpoints import contents, llama_config, llama_specs, part_names, write_config, write_index
from tests.support.command import call
from tests.support.tensors import Tensors, bits, check_equal, tensors_of

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
IDS, NORM, UP = "model.ids.order", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
MANIFEST = "shardconv.json"


def write(folder: Path, tensors: Tensors, **config: object) -> Path:
    """Write a checkpoint in two files with an index, as transformers does."""
    folder.mkdir()
    write_config(folder, {**llama_config(), **config})
    names = list(tensors)
    weight_map = {name: part_names(2)[number % 2] for number, name in enumerate(names)}
    for part in part_names(2):
        save_file({name: tensors[name] for name in names if weight_map[name] == part}, folder / part, {"format": "pt"})
    index = json.loads(write_index(folder, weight_map).read_text())
    index["metadata"]["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    return folder


def random_tensors(dtype: torch.dtype) -> Tensors:
    torch.manual_seed(0)
    specs = llama_specs(llama_config())
    found = {name: torch.randn(shape).to(dtype) for name, (_, shape) in specs.items()}
    return found | {IDS: torch.arange(7), "model.ids.mask": torch.tensor([True, False, True])}


def to(dtype: str, tensors: Tensors) -> Tensors:
    return {name: tensor.to(TORCH[dtype]) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


OPTIONS = {"tp": 4, "replicate": ("model.ids.*",)}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("dtype") / "source", random_tensors(torch.float32), dtype="float32")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    """The source, split for four ranks in bf16."""
    folder = tmp_path_factory.mktemp("converted") / "split"
    shardconv.split(source, folder, dtype="bf16", **OPTIONS)
    return folder


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rank_files_are_those_of_the_converted_checkpoint(tmp_path, stored, dtype):
    tensors, name = random_tensors(stored), str(stored).removeprefix("torch.")
    write(tmp_path / "source", tensors, dtype=name)
    write(tmp_path / "converted", to(dtype, tensors), dtype=CONFIG_NAMES[dtype])
    report = shardconv.split(tmp_path / "source", tmp_path / "out", dtype=dtype, **OPTIONS)
    shardconv.split(tmp_path / "converted", tmp_path / "expected", **OPTIONS)
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "expected")
    assert json.loads(found.pop("config.json")) == json.loads(expected.pop("config.json"))
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} <= {MANIFEST}
    assert report.rank_bytes == tuple(len(expected[f"rank-{rank}-of-4.safetensors"]) for rank in range(4))


def test_merge_gives_the_converted_checkpoint(source, converted, tmp_path):
    report = shardconv.merge(converted, tmp_path / "merged")
    assert (report.is_identical, report.derived) == (False, ("converted to bf16",))
    write(tmp_path / "expected", to("bf16", random_tensors(torch.float32)), dtype="bfloat16")
    found, expected = contents(tmp_path / "merged"), contents(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert json.loads(found.pop("config.json")) == json.loads(expected.pop("config.json"))
    assert found["model.safetensors.index.json"] == expected["model.safetensors.index.json"]
    check_equal(tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "expected"))
    assert (source / "config.json").read_text() != (tmp_path / "merged" / "config.json").read_text()


def test_verify_compares_with_the_source_before_the_conversion(source, converted, tmp_path):
    assert shardconv.verify(converted, against=source).differences == ()
    tensors = random_tensors(torch.float32)
    tensors[UP][5, 7] += 1
    other = write(tmp_path / "other", tensors, dtype="float32")
    (difference,) = shardconv.verify(converted, against=other).differences
    assert UP in difference


def test_reshard_keeps_the_conversion(source, converted, tmp_path):
    shardconv.reshard(converted, tmp_path / "tp2", tp=2)
    assert shardconv.verify(tmp_path / "tp2", against=source).differences == ()
    assert shardconv.merge(tmp_path / "tp2", tmp_path / "merged").derived == ("converted to bf16",)


def test_shards_that_an_engine_reads_of_the_source(source, converted):
    planned = plan_source(source, dtype="bf16", replicate=OPTIONS["replicate"])
    reader = RankSourceReader(planned.source, planned.planner.plan(4), 1)
    with safe_open(converted / "rank-1-of-4.safetensors", "pt") as file:
        for name in reader.tensors:
            assert bytes(reader.read(name)) == bits(file.get_tensor(name)).numpy().tobytes(), name


def test_source_that_has_the_dtype_stays_identical(tmp_path):
    source = write(tmp_path / "source", random_tensors(torch.bfloat16), dtype="bfloat16")
    assert shardconv.split(source, tmp_path / "out", dtype="bf16", **OPTIONS).derived == ()
    assert shardconv.merge(tmp_path / "out", tmp_path / "merged").is_identical
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tensors_that_are_wider_than_most_are_kept(tmp_path, dtype):
    tensors = to("fp16" if dtype == "bf16" else "bf16", random_tensors(torch.float32)) | {NORM: torch.randn(64)}
    source = write(tmp_path / "source", tensors)
    report = shardconv.split(source, tmp_path / "out", dtype=dtype, **OPTIONS)
    assert report.derived == (f"converted to {dtype}, except tensors that the source keeps in F32 ({NORM})",)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    check_equal(tensors_of(tmp_path / "merged"), to(dtype, tensors) | {NORM: tensors[NORM]})
    assert shardconv.split(source, tmp_path / "wide", dtype="fp32", **OPTIONS).derived == ("converted to fp32",)


def test_pytorch_file_with_a_transposed_view(tmp_path):
    """Its elements are put in order, and then converted."""
    tensors = random_tensors(torch.float32)
    tensors[UP] = torch.randn(64, 96).T
    (tmp_path / "source").mkdir()
    write_config(tmp_path / "source", llama_config())
    torch.save(tensors, tmp_path / "source" / "pytorch_model.bin")
    shardconv.split(tmp_path / "source", tmp_path / "out", dtype="bf16", **OPTIONS)
    assert shardconv.verify(tmp_path / "out", against=tmp_path / "source").differences == ()
    report = shardconv.merge(tmp_path / "out", tmp_path / "merged")
    assert report.derived == ("converted from PyTorch files", "converted to bf16")
    check_equal(tensors_of(tmp_path / "merged"), to("bf16", tensors))


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float64, "bf16"), (torch.float16, "fp32")])
def test_tensor_of_several_blocks(tmp_path, stored, dtype):
    """The size of a block need not be a multiple of that of an element."""
    tensors = {"first": torch.ones(1, dtype=torch.uint8), "large": torch.randn(150_001).to(stored)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardconv.checkpoint.engine.copy._MAX_BLOCKS_BYTES", 70_001)
        options = {"tp": 1, "threads": 1, "replicate": ("*",)}
        shardconv.split(tmp_path / "model.safetensors", tmp_path / "out", dtype=dtype, **options)
        assert not shardconv.verify(tmp_path / "out", against=tmp_path / "model.safetensors", threads=1).differences
    check_equal(tensors_of(tmp_path / "out"), to(dtype, tensors))


def test_data_of_merged_files_stays_aligned(tmp_path):
    """A tensor of 16 bits moves behind one of 32 bits that followed it when it had 32 bits itself."""
    tensors = {"a": torch.randn(3), "b": torch.arange(4, dtype=torch.int32), "c": torch.randn(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    shardconv.split(tmp_path / "model.safetensors", tmp_path / "out", tp=1, dtype="bf16", replicate=("*",))
    shardconv.merge(tmp_path / "out", tmp_path / "merged.safetensors")
    check_equal(load_file(tmp_path / "merged.safetensors"), to("bf16", tensors))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "torch.float16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": None}, {"dtype": None}),
        ({}, {}),
        ({"audio": {"dtype": "float32", "mamba_ssm_dtype": "float32"}},
         {"audio": {"dtype": "bfloat16", "mamba_ssm_dtype": "float32"}}),
    ],
)  # fmt: skip
def test_dtype_in_the_config(tmp_path, before, after):
    source = write(tmp_path / "source", random_tensors(torch.float32), **before)
    shardconv.split(source, tmp_path / "out", dtype="bf16", **OPTIONS)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**llama_config(), **after}
    if before == after:
        assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_element_that_is_too_large_names_its_tensor(tmp_path):
    tensors = random_tensors(torch.float32)
    tensors[UP][2, 3] = -65520.0
    source = write(tmp_path / "source", tensors)
    index = 2 * tensors[UP].shape[1] + 3
    with pytest.raises(
        SourceError, match=rf"{UP}: element {index} is -65520, which is too large for fp16.*dtype=\"bf16\""
    ):
        shardconv.split(source, tmp_path / "out", dtype="fp16", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    shardconv.split(source, tmp_path / "out", dtype="bf16", **OPTIONS)


def test_quantized_sources_are_refused(source, tmp_path):
    tensors = random_tensors(torch.float32) | {UP: torch.zeros(96, 64).to(torch.float8_e4m3fn)}
    with pytest.raises(PlanError, match=f"{UP}: is quantized.*dtype"):
        shardconv.split(write(tmp_path / "fp8", tensors), tmp_path / "out", dtype="bf16", **OPTIONS)
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with pytest.raises(PlanError, match=r"gptq: is quantized.*dtype"):
        shardconv.split(write(tmp_path / "gptq", random_tensors(torch.float32), **settings), dtype="bf16", **OPTIONS)
    with pytest.raises(UsageError, match="'int8' is unknown"):
        shardconv.split(source, dtype="int8", **OPTIONS)


def test_plan_has_the_sizes_after_the_conversion(source, converted):
    options = ["--tp", 4, "--replicate", "model.ids.*", "--json"]
    half, full = (json.loads(call("plan", source, *options, *more).out) for more in (["--dtype", "bf16"], []))
    assert half["num_bytes"] < full["num_bytes"]
    assert {one["dtype"] for one in half["tensors"]} == {"BF16", "I64", "BOOL"}
    assert sum(half["rank_bytes"]) == sum(sum(one["shard_bytes"]) for one in half["tensors"])
    assert "pass the source" in call("plan", converted, "--dtype", "bf16").err
    assert call("plan", source, "--prove", "--dtype", "bf16").code == 2

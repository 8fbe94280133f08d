"""Split checkpoints with pipeline stages.

Files are compared with those of a split without stages, of which each stage has the tensors of its layers; merged files
with the source.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors import deserialize

import shardconv
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.files.input_files import LocalFile
from shardconv.support.errors import OutputError, SplitCheckpointError, UsageError
from tests.support.checkpoints import (
    contents,
    llama_config,
    llama_specs,
    write_checkpoint,
    write_config,
    write_weights,
)
from tests.support.command import call
from tests.support.damage import flip, place
from tests.support.faults import failing_after
from tests.support.manifests import change_manifest
from tests.support.matrix import needs_torch

LAYERS = 4

pytestmark = pytest.mark.usefixtures("stripes_without_gaps")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A source whose tensors four ranks shard, pad and replicate, with replicated KV heads."""
    return write_checkpoint(tmp_path_factory.mktemp("stages") / "source", parts=2, config=llama_config(layers=LAYERS))


@pytest.fixture(scope="module")
def without_stages(source, tmp_path_factory):
    """Return the tensors of each rank of a split without stages."""
    folder = tmp_path_factory.mktemp("whole")

    def tensors(tp):
        if not (folder / str(tp)).exists():
            shardconv.split(source, folder / str(tp), tp=tp)
        return [tensors_of(path) for path in rank_files(folder / str(tp))]

    return tensors


def change_config(folder: Path, **fields: object) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.safetensors"))


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name to dtype, shape and bytes, read by the reference library."""
    found = deserialize(path.read_bytes())
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def stage_of(name: str, numbers: tuple[int, ...]) -> int:
    """The stage of a tensor of a Llama whose head is not tied."""
    if name.startswith("model.layers."):
        return next(at for at in range(len(numbers)) if int(name.split(".")[2]) < sum(numbers[: at + 1]))
    return 0 if name.startswith("model.embed_tokens.") else len(numbers) - 1


SIZES = {
    (1, (2, 2)): {"pp": 2},
    (2, (1, 2, 1)): {"pp": 3},
    (4, (1, 3)): {"stages": "1,3"},
    (2, (1, 1, 1, 1)): {"pp": 4},
}


@pytest.mark.parametrize(("tp", "numbers"), SIZES)
def test_files_have_the_layers_of_their_stages(source, without_stages, tmp_path, tp, numbers):
    report = shardconv.split(source, tmp_path / "out", tp=tp, **SIZES[tp, numbers])
    assert (report.stages, len(report.rank_bytes), report.ranks) == (
        numbers, tp * len(numbers), tuple(range(tp * len(numbers))),
    )  # fmt: skip
    files = rank_files(tmp_path / "out")
    assert [file.stat().st_size for file in files] == list(report.rank_bytes)
    for rank, file in enumerate(files):
        stage, tp_rank = divmod(rank, tp)
        expected = without_stages(tp)[tp_rank]
        assert tensors_of(file) == {
            name: tensor for name, tensor in expected.items() if stage_of(name, numbers) == stage
        }  # fmt: skip
    assert call("verify", tmp_path / "out", "--against", source).code == 0
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_default_name_and_names_of_files(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shardconv.split(source, tp=2, pp=2)
    assert [path.name for path in rank_files(tmp_path / "source-tp2-pp2")] == [
        f"rank-{rank}-of-4.safetensors" for rank in range(4)
    ]
    shardconv.reshard("source-tp2-pp2", tp=1, pp=4)
    shardconv.reshard("source-tp1-pp4", tp=4, pp=1)
    shardconv.split(source, "expected", tp=4)
    assert contents(Path("source-tp4")) == contents(Path("expected"))
    shardconv.merge("source-tp2-pp2")
    assert contents(Path("source-merged")) == contents(source)


@pytest.mark.parametrize(("tp", "numbers"), SIZES)
def test_reshard_equals_a_split(source, tmp_path, tp, numbers):
    shardconv.split(source, tmp_path / "old", tp=2, pp=2)
    shardconv.reshard(tmp_path / "old", tmp_path / "new", tp=tp, **SIZES[tp, numbers])
    shardconv.split(source, tmp_path / "expected", tp=tp, **SIZES[tp, numbers])
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")


def test_tied_embedding_is_compared_between_stages(tmp_path):
    config = {**llama_config(layers=LAYERS), "tie_word_embeddings": True}
    source = write_checkpoint(tmp_path / "tied", config=config)
    shardconv.split(source, tmp_path / "out", tp=2, pp=2)
    held = ["model.embed_tokens.weight" in tensors_of(file) for file in rank_files(tmp_path / "out")]
    assert held == [True] * 4
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    shardconv.split(source, tmp_path / "unchecked", tp=2, pp=2, checksums=False)
    damaged = rank_files(tmp_path / "unchecked")[2]
    flip(damaged, place(damaged, "model.embed_tokens.weight")[0])
    found = shardconv.verify(tmp_path / "unchecked").differences
    assert len(found) == 1
    assert "model.embed_tokens.weight differs from the shard of a lower rank" in found[0]


def test_files_of_an_engine_are_overwritten(source, tmp_path):
    for _ in range(2):
        shardconv.split(source, tmp_path / "split", tp=2, pp=2, layout="vllm", overwrite=True)
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()


def test_ranks_of_a_stage_are_written_and_read_alone(source, tmp_path):
    whole = tmp_path / "whole"
    shardconv.split(source, whole, tp=2, pp=2)
    for host, ranks in enumerate(("0-1", "2,3")):
        shardconv.split(source, tmp_path / f"host{host}", tp=2, pp=2, ranks=ranks)
    of_hosts = [*rank_files(tmp_path / "host0"), *rank_files(tmp_path / "host1")]
    assert [tensors_of(file) for file in of_hosts] == [tensors_of(file) for file in rank_files(whole)]
    report = shardconv.verify(tmp_path / "host1", against=source)
    assert (report.ranks, report.pp, report.differences) == ((2, 3), 2, ())
    with pytest.raises(OutputError, match=r"exists \(with ranks 2, 3 of 4, which overwrite=True would remove\)"):
        shardconv.split(source, tmp_path / "host1", tp=2, pp=2, ranks="0-1")
    with pytest.raises(SplitCheckpointError, match=r"ranks 0, 1 of 4 are missing .* stages=\"2,2\" ranks="):
        shardconv.merge(tmp_path / "host1", tmp_path / "back")
    shardconv.merge([tmp_path / "host1", tmp_path / "host0"], tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_only_the_layers_of_a_stage_are_read(source, tmp_path, monkeypatch):
    read, original = [], LocalFile.read

    def counted(file, buffer, offset):
        read.append(len(buffer))
        return original(file, buffer, offset)

    monkeypatch.setattr(LocalFile, "read", counted)
    report = shardconv.split(source, tmp_path / "out", tp=1, pp=2, ranks=1, checksums=False)
    assert sum(read) < 1.2 * report.rank_bytes[0]  # with headers and samples; the other stage has as many bytes


#: Models with experts in one tensor or in several, with a latent, with an old buffer, and without a prefix and a head.
KINDS = ("qwen3_moe", "qwen3_moe-packed", "deepseek_v3", "llama-old", "llama-base")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", KINDS)
def test_models_of_other_kinds(checkpoint, tmp_path, name, tp):
    source = checkpoint(name)
    shardconv.split(source, tmp_path / "out", tp=tp, pp=2)
    assert shardconv.verify(tmp_path / "out", against=source).differences == ()
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    shardconv.split(source, tmp_path / "one", tp=2)
    shardconv.reshard(tmp_path / "out", tmp_path / "again", tp=2, pp=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "one")
    shardconv.reshard(tmp_path / "one", tmp_path / "stages", tp=tp, pp=2)
    assert contents(tmp_path / "stages") == contents(tmp_path / "out")
    held = [{*tensors_of(file)} for file in rank_files(tmp_path / "out")]
    assert set().union(*held) == {*read_manifest(tmp_path / "out").plan.tensors}
    layers = [{int(name.split("layers.")[1].split(".")[0]) for name in one if "layers." in name} for one in held]
    assert layers == [{0}] * tp + [{1}] * tp


#: Tensors of an image encoder or its projector.
ENCODER = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector)\.")


@needs_torch
@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_image_encoders_are_on_all_stages(tmp_path, model_type):
    """As vLLM has them: its models construct the encoder on each stage. The text model is divided."""
    from tests.support.models import model_class  # noqa: PLC0415 - imports torch
    from tools.model_matrix.trial import small  # noqa: PLC0415

    source = tmp_path / "source"
    small(model_class("image-text-to-text", model_type)).save_pretrained(source)
    shardconv.split(source, tmp_path / "one", tp=2)
    shardconv.split(source, tmp_path / "out", tp=2, pp=2)
    whole = [tensors_of(file) for file in rank_files(tmp_path / "one")]
    for rank, file in enumerate(rank_files(tmp_path / "out")):
        stage, tp_rank = divmod(rank, 2)
        encoder = {name for name in whole[tp_rank] if ENCODER.match(name)}
        held = tensors_of(file)
        assert encoder
        assert held.keys() & encoder == encoder
        layers = {int(found[1]) for name in held.keys() - encoder if (found := re.search(r"layers\.(\d+)\.", name))}
        assert layers == {stage}
        assert held == {name: tensor for name, tensor in whole[tp_rank].items() if name in held}
    assert shardconv.verify(tmp_path / "out", against=source).differences == ()
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    shardconv.reshard(tmp_path / "out", tmp_path / "again", tp=2, pp=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "one")


def test_adapters_are_in_the_stages_of_their_layers(tmp_path, checkpoint):
    pytest.importorskip("peft")
    from tests.support.adapters import ADAPTERS, write_adapter  # noqa: PLC0415 - imports PEFT

    source = checkpoint("llama")
    adapter = write_adapter(tmp_path / "adapter", source, **ADAPTERS["llama-dora"][1])
    shardconv.split(source, tmp_path / "out", tp=2, pp=2, adapters=[adapter])
    for rank, file in enumerate(rank_files(tmp_path / "out" / "adapters" / "adapter")):
        names = [name.removeprefix("base_model.model.") for name in tensors_of(file)]
        assert names
        assert {stage_of(name, (1, 1)) for name in names} == {rank // 2}
    assert shardconv.verify(tmp_path / "out", against=source).differences == ()
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back" / "adapters" / "adapter") == contents(adapter)
    shardconv.reshard(tmp_path / "out", tmp_path / "one", tp=1, pp=1)
    shardconv.reshard(tmp_path / "one", tmp_path / "again", tp=2, pp=2)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    shardconv.split(adapter, tmp_path / "alone", base=source, tp=2, pp=2)
    shardconv.merge(tmp_path / "alone", tmp_path / "adapter again")
    assert contents(tmp_path / "adapter again") == contents(adapter)


@pytest.mark.parametrize("act_order", [False, True])
def test_quantized_layers(tmp_path, act_order):
    """Codes, scales, zero points and groups of a layer are in its stage; of rows, each rank counts groups from 0."""
    from tests.support.gptq import write_gptq  # noqa: PLC0415 - imports torch

    source = write_gptq(tmp_path / "source", bits=4, group=8, act_order=act_order, layers=2)
    shardconv.split(source, tmp_path / "whole", tp=2)
    shardconv.split(source, tmp_path / "out", tp=2, pp=2)
    whole = [tensors_of(file) for file in rank_files(tmp_path / "whole")]
    for rank, file in enumerate(rank_files(tmp_path / "out")):
        stage, tp_rank = divmod(rank, 2)
        expected = {name: one for name, one in whole[tp_rank].items() if stage_of(name, (1, 1)) == stage}
        assert tensors_of(file) == expected
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_interrupted_split_is_continued(source, tmp_path):
    with failing_after(4):
        assert call("split", source, "--tp", 2, "--pp", 2, "-o", tmp_path / "out", "--resume").code == 1
    other = call("split", source, "--tp", 2, "--stages", "1,3", "-o", tmp_path / "out", "--resume")
    assert other.code == 1
    assert "the interrupted run had --stages 2,2 (got --stages 1,3)" in other.err
    report = shardconv.split(source, tmp_path / "out", tp=2, pp=2, resume=True)
    assert report.resumed_bytes
    shardconv.split(source, tmp_path / "expected", tp=2, pp=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_plan_has_bytes_of_stages_and_proposes_even_ones(tmp_path):
    """The vocabulary is large, so that the first and the last stage have to have fewer layers."""
    source = write_checkpoint(tmp_path / "large", config=llama_config(layers=8, vocab=1200))
    report = shardconv.report_plan(source, tp=2, pp=4)
    assert report.stages == (2, 2, 2, 2)
    assert len(report.even_stages) == 4
    assert report.even_bytes < max(report.rank_bytes)
    even = shardconv.report_plan(source, tp=2, stages=report.even_stages)
    assert (even.even_stages, max(even.rank_bytes)) == (report.even_stages, report.even_bytes)
    shardconv.split(source, tmp_path / "out", tp=2, stages=report.even_stages)
    sizes = [sum(len(data) for _, _, data in tensors_of(file).values()) for file in rank_files(tmp_path / "out")]
    assert sizes == list(even.rank_bytes)
    text = call("plan", source, "--tp", 2, "--pp", 4).out
    assert f"more even: --stages {','.join(map(str, report.even_stages))} (" in text


def test_even_stages_have_the_layers_to_which_vllm_adds_images_in_the_first(tmp_path):
    """The embedding is large, so that without an engine the first stage has one layer."""
    text = {**llama_config(layers=8, vocab=1200), "model_type": "qwen3_vl_text"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"deepstack_visual_indexes": [0, 1, 2]}}
    source = tmp_path / "source"
    source.mkdir()
    write_config(source, config)
    specs = {name.replace("model.", "model.language_model."): spec for name, spec in llama_specs(text).items()}
    write_weights(source / "model.safetensors", specs)
    options = {"tp": 2, "stages": "5,1,1,1"}
    assert shardconv.report_plan(source, **options).even_stages[0] == 1
    even = shardconv.report_plan(source, engine="vllm", **options).even_stages
    assert even[0] == 3
    shardconv.split(source, tmp_path / "out", tp=2, stages=even, engine="vllm")


def test_reshard_keeps_the_stages(source, tmp_path):
    shardconv.split(source, tmp_path / "old", tp=2, stages="1,3")
    shardconv.reshard(tmp_path / "old", tmp_path / "new", tp=4)
    shardconv.split(source, tmp_path / "expected", tp=4, stages="1,3")
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")
    assert shardconv.report_plan(tmp_path / "old", tp=2).stages == (1, 3)
    assert shardconv.report_plan(tmp_path / "old", tp=2, pp=1).stages == ()
    assert "--tp 2 --pp 1\n" in call("plan", tmp_path / "old", "--tp", 2, "--pp", 1).out


LIMIT = 20_000
#: Layout to the name of a file of several of a rank.
NAMES = {
    "native": "rank-{rank}-of-4-file-{file}-of-{count}.safetensors",
    "vllm": "model-pp-{stage}-tp-{tp_rank}-part-{file}.safetensors",
}


@pytest.mark.parametrize("layout", NAMES)
def test_several_files_per_rank(source, tmp_path, layout):
    """A stage with more layers has more files, which together have the tensors of one file without a limit."""
    options = {"tp": 2, "stages": "1,3", "layout": layout}
    one = shardconv.split(source, tmp_path / "one", **options)
    report = shardconv.split(source, tmp_path / "out", max_file_size=LIMIT, **options)
    held, counts = [], []
    for rank, name in enumerate(read_manifest(tmp_path / "one").rank_files):
        stage, tp_rank = divmod(rank, 2)
        marks = {"rank": rank, "stage": stage, "tp_rank": tp_rank}
        counts.append(len([*(tmp_path / "out").glob(NAMES[layout].format(**marks, file="*", count="*"))]))
        files = [tmp_path / "out" / NAMES[layout].format(**marks, file=n, count=counts[-1]) for n in range(counts[-1])]
        tensors = [tensors_of(file) for file in files]
        held += files
        assert all(file.stat().st_size <= LIMIT or len(has) == 1 for file, has in zip(files, tensors, strict=True))
        assert sum(map(len, tensors)) == len(tensors_of(tmp_path / "one" / name))
        assert {key: value for has in tensors for key, value in has.items()} == tensors_of(tmp_path / "one" / name)
    assert 1 < counts[0] == counts[1] < counts[2] == counts[3] == report.files_per_rank
    assert sorted(held) == sorted((tmp_path / "out").glob("*-*.safetensors"))
    assert one.files_per_rank == 1
    assert sum(report.rank_bytes) == sum(file.stat().st_size for file in held)
    assert shardconv.verify(tmp_path / "out", against=source).differences == ()
    shardconv.merge(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("old", [{"tp": 2}, {"tp": 1, "pp": 4}])
@pytest.mark.parametrize("layout", NAMES)
def test_reshard_of_several_files(source, tmp_path, old, layout):
    shardconv.split(source, tmp_path / "old", layout=layout, max_file_size=LIMIT, **old)
    shardconv.reshard(tmp_path / "old", tmp_path / "new", tp=2, stages="3,1")
    shardconv.split(source, tmp_path / "expected", tp=2, stages="3,1", layout=layout, max_file_size=LIMIT)
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")


def test_several_files_of_some_ranks(source, tmp_path):
    options = {"tp": 2, "stages": "1,3", "max_file_size": LIMIT}
    shardconv.split(source, tmp_path / "all", **options)
    for ranks in ("0,3", "1-2"):
        shardconv.split(source, tmp_path / ranks, ranks=ranks, **options)
        assert shardconv.verify(tmp_path / ranks, against=source).differences == ()
        for file in rank_files(tmp_path / ranks):
            assert tensors_of(file) == tensors_of(tmp_path / "all" / file.name)
    shardconv.merge([tmp_path / "1-2", tmp_path / "0,3"], tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_several_files_of_an_interrupted_split(source, tmp_path):
    arguments = ["split", source, "--tp", 2, "--stages", "1,3", "--max-file-size", f"{LIMIT}B"]
    with failing_after(4):
        assert call(*arguments, "-o", tmp_path / "out", "--resume").code == 1
    found = call(*arguments, "-o", tmp_path / "out", "--resume", "--json")
    assert json.loads(found.out)["resumed_bytes"]
    assert "in up to " in call(*arguments, "-o", tmp_path / "expected").out
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_damage_names_one_of_several_files(source, tmp_path):
    shardconv.split(source, tmp_path / "out", tp=2, stages="1,3", max_file_size=LIMIT)
    damaged = rank_files(tmp_path / "out")[-1]
    flip(damaged)
    (found,) = shardconv.verify(tmp_path / "out").differences
    assert damaged.name in found
    assert "rank-2-of-4" not in found


def test_plan_has_the_stages(source, tmp_path):
    plan = shardconv.make_plan(source, tp=2, stages="3,1")
    assert "stages of (3, 1) layers" in repr(plan)
    assert shardconv.split(source, tmp_path / "out", tp=2, rules=plan).stages == (3, 1)


def test_stages_of_a_source_without_a_number_of_layers(source, tmp_path):
    """Layers after those of the config are MTP layers; without a config, there are none."""
    folder = shutil.copytree(source, tmp_path / "source")
    change_config(folder, num_hidden_layers=None)
    with pytest.raises(UsageError, match=r'stages="1,1" has 2 layers \(expected 4, of model.layers\)'):
        shardconv.split(folder, tmp_path / "out", tp=2, stages="1,1")
    assert shardconv.split(folder, tmp_path / "out", tp=2, stages="1,3").stages == (1, 3)


REFUSED = {
    "megatron": ({"layout": "megatron"}, UsageError, "layout megatron does not have pipeline stages"),
    "meta": ({"layout": "meta"}, UsageError, "layout meta does not have pipeline stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(source, tmp_path, case):
    options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        shardconv.split(source, tmp_path / "out", tp=1, pp=2, **options)
    assert not [*tmp_path.iterdir()]


CHANGES = {
    "stage that does not exist": (["plan", "placements", 0, "stages"], [7], "a stage that does not exist"),
    "stages that are not consecutive": (["plan", "stages", "layers", "ranks"], [[[2, 4]], [[0, 2]]], "not consecutive"),
    "fewer stages": (["plan", "stages", "layers", "ranks"], [[[0, 4]]], "a stage that does not exist"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_manifests_are_refused(source, tmp_path, case):
    (*path, last), value, message = CHANGES[case]
    shardconv.split(source, tmp_path / "out", tp=1, pp=2)

    def change(manifest):
        for key in path:
            manifest = manifest[key]
        manifest[last] = value

    change_manifest(tmp_path / "out", change)
    with pytest.raises(SplitCheckpointError, match=message):
        read_manifest(tmp_path / "out")

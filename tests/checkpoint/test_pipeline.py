"""Pipelines: each component is a split checkpoint of its own, a merge gives every byte back, and nothing gets mixed."""

import itertools
import json
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

import shardconv
from shardconv.checkpoint.engine.layout import PIPELINE_NAME
from shardconv.checkpoint.sources import planning
from shardconv.checkpoint.sources.opening import open_source
from shardconv.support.errors import OutputError, PlanError, SourceError, SplitCheckpointError, UsageError
from tests.support.checkpoints import contents, llama_config, llama_specs, write_checkpoint, write_weights
from tests.support.command import call
from tests.support.damage import flip
from tests.support.faults import beside, failing_after, kill_before, status_of_child
from tests.support.manifests import change_manifest
from tests.support.matrix import MATRIX, needs_torch
from tests.support.pipelines import COMPONENTS, SHARDED, write_index, write_pipeline

TP = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline") / "source")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """The split pipeline."""
    folder = tmp_path_factory.mktemp("pipeline") / "split"
    shardconv.split(source, folder, tp=TP)
    return folder


@pytest.fixture
def split(whole, tmp_path) -> Path:
    """A copy of the split pipeline, to be changed."""
    return shutil.copytree(whole, tmp_path / "split")


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_components_are_split_checkpoints_and_other_files_are_copied(source, whole, tmp_path):
    expected = {name: data for name, data in contents(source).items() if name.partition("/")[0] not in SHARDED}
    for name in SHARDED:
        shardconv.split(source / name, tmp_path / name, tp=TP)
    expected |= contents(tmp_path)
    found = contents(whole)
    assert PIPELINE_NAME in found
    del found[PIPELINE_NAME]
    assert found == expected


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"tp": 4, "layout": "dcp", "replicate": ()},
        {"tp": 3, "pad": True},
        {"tp": 2, "max_file_size": 20_000},
    ],
)
def test_merge_restores_the_source(tmp_path, options):
    source = tmp_path / "source"
    write_pipeline(source)
    if options.get("layout") == "dcp":  # which does not support padding
        for name in SHARDED:
            write_checkpoint(source / name, config=llama_config(layers=1, vocab=128))
        for path in (source / "text_encoder").glob("model*0000*"):
            path.unlink()
        (source / "text_encoder" / "model.safetensors.index.json").unlink()
    shardconv.split(source, tmp_path / "split", **options)
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    assert report.is_identical


def test_reshard_equals_a_split(source, whole, tmp_path):
    shardconv.reshard(whole, tmp_path / "resharded", tp=4)
    shardconv.split(source, tmp_path / "expected", tp=4)
    assert contents(tmp_path / "resharded") == contents(tmp_path / "expected")


def test_chosen_components_are_split_and_others_are_copied(source, tmp_path):
    report = shardconv.split(source, tmp_path / "split", tp=TP, components=("transformer",))
    assert report.copied["text_encoder"] == "LlamaModel, not chosen"
    assert contents(tmp_path / "split" / "text_encoder") == contents(source / "text_encoder")
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_dtype_converts_what_is_split(source, tmp_path):
    shardconv.split(source, tmp_path / "split", tp=TP, dtype="fp32")
    for name in SHARDED:
        shardconv.split(source / name, tmp_path / name, tp=TP, dtype="fp32")
        assert contents(tmp_path / "split" / name) == contents(tmp_path / name)
    assert contents(tmp_path / "split" / "vae") == contents(source / "vae")


def test_ranks_in_several_folders(source, whole, tmp_path):
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for rank, folder in enumerate(folders):
        shardconv.split(source, folder, tp=TP, ranks=rank)
    assert shardconv.verify(folders).ranks == (0, 1)
    shardconv.merge(folders, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    with pytest.raises(SplitCheckpointError, match=r"component text_encoder .*rank 1 of 2 is missing"):
        shardconv.merge(folders[0], tmp_path / "again")
    with pytest.raises(OutputError, match=r"exists \(with rank 0 of 2"):
        shardconv.split(source, folders[0], tp=TP, ranks=1)


def test_folders_of_two_splits(source, tmp_path):
    for rank in range(TP):
        shardconv.split(source, tmp_path / f"{rank}", tp=TP, ranks=rank)
    shardconv.split(source, tmp_path / "other", tp=TP, ranks=1, components=("transformer",))
    with pytest.raises(SplitCheckpointError, match="is not of the same split as"):
        shardconv.merge([tmp_path / "0", tmp_path / "other"], tmp_path / "merged")


def test_a_pipeline_in_a_cache(source, tmp_path):
    """Its files are links to blobs beside the snapshots."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for number, (name, data) in enumerate(contents(source).items()):
        (blobs / str(number)).write_bytes(data)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    report = shardconv.split(snapshot, tmp_path / "split", tp=TP)
    assert report.components == {name: COMPONENTS[name][1] for name in SHARDED}
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    (blobs.parent / "secret").write_text("outside")
    (snapshot / "vae" / "link.txt").symlink_to(blobs.parent / "secret")
    with pytest.raises(SourceError, match="is a link out of its folder"):
        shardconv.split(snapshot, tmp_path / "again", tp=TP)


def test_pad_and_unpad(source, tmp_path):
    report = shardconv.pad(source, tmp_path / "padded", tp=3, check_model=False)
    alone = {name: shardconv.pad(source / name, tmp_path / name, tp=3, check_model=False) for name in SHARDED}
    for name in SHARDED:
        assert contents(tmp_path / "padded" / name) == contents(tmp_path / name)
    assert contents(tmp_path / "padded" / "vae") == contents(source / "vae")
    fields = [f"{name}/{one.field}" for name, padded in alone.items() for one in padded.config]
    assert [one.field for one in report.config] == fields
    padding = sum(one.num_bytes - one.source_bytes for one in alone.values())
    assert report.padding.memory == pytest.approx(padding / report.source_bytes)
    shardconv.unpad(tmp_path / "padded", tmp_path / "unpadded")
    assert contents(tmp_path / "unpadded") == contents(source)
    with pytest.raises(SplitCheckpointError, match="does not have a padded component"):
        shardconv.unpad(source, tmp_path / "again")


# --- reports --------------------------------------------------------------------------------------------------------


def test_reports_count_all_components(source, whole, tmp_path):
    report = shardconv.split(source, tmp_path / "split", tp=4, dry_run=True)
    alone = [shardconv.split(source / name, tmp_path / name, tp=4) for name in SHARDED]
    assert report.rank_bytes == tuple(map(sum, zip(*(one.rank_bytes for one in alone), strict=True)))
    assert report.source_bytes == sum(one.source_bytes for one in alone)
    assert report.num_tensors == sum(one.num_tensors for one in alone)
    assert report.components == {"text_encoder": "LlamaModel", "transformer": "FluxTransformer2DModel"}
    assert report.copied == {
        "scheduler": "FlowMatchEulerDiscreteScheduler, without weights",
        "tokenizer": "LlamaTokenizer, without weights",
        "vae": "AutoencoderKL, not sharded",
    }
    assert not (tmp_path / "split").exists()


def test_plan_of_a_pipeline(source, whole):
    alone = {name: shardconv.report_plan(source / name, tp=TP) for name in SHARDED}
    for path in (source, whole):
        report = shardconv.report_plan(path, tp=TP)
        assert report.rank_bytes == tuple(map(sum, zip(*(one.rank_bytes for one in alone.values()), strict=True)))
        assert [one.name for one in report.tensors] == [
            f"{name}/{one.name}" for name, of in alone.items() for one in of.tensors
        ]


@pytest.fixture
def uneven(source, tmp_path) -> Path:
    """A pipeline whose text encoder has 4 heads, and its transformer 6."""
    shutil.copytree(source, tmp_path / "source")
    shutil.rmtree(tmp_path / "source" / "transformer")
    write_checkpoint(tmp_path / "source" / "transformer", config=llama_config(heads=6, kv_heads=6, hidden=96))
    return tmp_path / "source"


def test_supported_sizes_are_those_of_all_components(uneven):
    report = shardconv.report_plan(uneven)
    alone = [shardconv.report_plan(uneven / name) for name in SHARDED]
    assert report.supported_tp == tuple(sorted(set(alone[0].supported_tp) & set(alone[1].supported_tp))) == (1, 2)
    assert report.supported_bytes == tuple(sum(one.supported_bytes[at] for one in alone) for at in (0, 1))
    by_tp = {one.tp: one.tensor.partition("/")[0] for one in report.blocked_tp}
    assert (by_tp[3], by_tp[4], by_tp[8]) == ("text_encoder", "transformer", "transformer")


def test_padded_sizes_are_those_of_all_components(uneven):
    """Also of components that support a size without padding, as 3 and 4 here, whose vocabulary is not counted."""
    found = {one.tp: one for one in shardconv.report_plan(uneven).padded_tp}
    for tp in (3, 4, 5):
        report = shardconv.report_plan(uneven, tp=tp, pad=True)
        assert found[tp].memory == pytest.approx(report.padding.memory, abs=1e-3)
        assert found[tp].num_bytes == pytest.approx(sum(report.rank_bytes), rel=1e-2)
    assert "(additional memory): 3 (" in call("plan", uneven).out


@pytest.mark.parametrize(
    ("tp", "remedy"), [(3, ". To leave text_encoder unsharded, pass --component transformer"), (5, "")]
)
def test_remedies_for_an_unsupported_size_work(uneven, tmp_path, tp, remedy):
    """Components that do not support the size either are not proposed."""
    command = ["split", uneven, "--tp", tp, "-o", tmp_path / "split"]
    error = call(*command).err
    assert error.endswith(f"All components support --tp 1, 2{remedy}\n")
    if remedy:
        assert call(*command, *remedy.split()[-2:]).code == 0


@pytest.mark.parametrize("tp", [3, 4])
def test_components_are_opened_once_for_remedies(uneven, tmp_path, monkeypatch, tp):
    """Before the component with the error and after it."""
    opened: list[str] = []
    monkeypatch.setattr(
        planning, "open_source", lambda path, **options: opened.append(path.name) or open_source(path, **options)
    )
    with pytest.raises(PlanError, match=f"component {'text_encoder' if tp == 3 else 'transformer'} "):
        shardconv.split(uneven, tmp_path / "split", tp=tp)
    assert opened == ["text_encoder", "transformer"]


@needs_torch
def test_errors_of_pad_do_not_have_remedies_of_split(uneven, tmp_path):
    """Sizes that are supported do not need padding."""
    with pytest.raises(PlanError, match=r"or check_model=False for an engine that accepts this config$"):
        shardconv.pad(uneven, tmp_path / "padded", tp=3)


@needs_torch
def test_errors_of_a_component_that_is_loaded_do_not_propose_others(uneven):
    with pytest.raises(PlanError, match=r"All components support tp 1, 2$"):
        shardconv.load(uneven, tp=3, component="text_encoder", device="cpu")


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"tp": 0}, {"ep": "2"}, {"dry_run": 1}])
def test_wrong_arguments_do_not_name_a_component(uneven, tmp_path, wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} is .* \\(expected "):
        shardconv.split(uneven, tmp_path / "split", **{"tp": 2, **wrong})


def test_components_with_plans_do_not_get_other_sizes(uneven):
    """Other sizes and components do not help, as the layout does not have padding."""
    error = call("split", uneven, "--tp", 3, "--pad", "--layout", "dcp").err
    assert "without padding. Replicate it (--replicate model.embed_tokens.weight)" in error
    assert error.endswith(". To pass --rules or --replicate, also pass --component text_encoder\n")


@pytest.mark.parametrize("chosen", ["transformer", "text_encoder"])
def test_remedies_for_a_tensor_without_a_rule_work(source, tmp_path, chosen):
    shutil.copytree(source, tmp_path / "source")
    specs = llama_specs(llama_config(layers=1)) | {"foo.bar": ("BF16", (2,))}
    write_weights(tmp_path / "source" / "transformer" / "model.safetensors", specs)
    command = ["split", tmp_path / "source", "--tp", TP, "-o", tmp_path / "split"]
    error = call(*command).err
    assert error.endswith(
        "--replicate foo.bar to replicate it. To pass --rules or --replicate, also pass --component transformer. To "
        "leave transformer unsharded, pass --component text_encoder\n"
    )
    replicated = ["--replicate", "foo.bar"] if chosen == "transformer" else []
    assert call(*command, "--component", chosen, *replicated).code == 0


def test_commands_list_the_components(source, tmp_path):
    out = call("split", source, "--tp", TP, "-o", tmp_path / "split").out
    assert "components: text_encoder (LlamaModel), transformer (FluxTransformer2DModel)\n" in out
    assert "copied (without weights): scheduler, tokenizer\ncopied (not sharded): vae\n" in out
    for command in (["plan", source], ["verify", tmp_path / "split"]):
        assert "components: text_encoder (LlamaModel)" in call(*command).out


def test_progress_counts_all_components(source, tmp_path):
    calls: list[tuple[int, int]] = []
    report = shardconv.split(source, tmp_path / "split", tp=TP, progress=lambda *call: calls.append(call))
    assert {total for _, total in calls} == {report.source_bytes}
    assert all(before[0] <= after[0] for before, after in pairwise(calls))
    assert calls[-1][0] == report.source_bytes


# --- verification ---------------------------------------------------------------------------------------------------


def test_a_changed_byte_in_any_file_is_found(whole, split):
    for name in contents(whole):
        flip(split / name)
        assert any(name.rpartition("/")[2] in text for text in problems(split)), name
        shutil.copy(whole / name, split / name)
    assert problems(split) == []


def problems(folder: Path) -> list[str]:
    """Differences, or the error about a manifest that cannot be read."""
    try:
        report = shardconv.verify(folder)
        assert report.is_damaged == bool(report.differences)
        return [*report.differences]
    except SplitCheckpointError as error:
        return [str(error)]


def test_another_source_is_found(source, whole, tmp_path):
    other = write_pipeline(tmp_path / "other", seed=1)
    (other / "scheduler" / "scheduler_config.json").write_text("{}")
    found = shardconv.verify(whole, against=other)
    assert not found.is_damaged
    for expected in ("scheduler/scheduler_config.json: differs", "text_encoder: ", "transformer: "):
        assert any(text.startswith(expected) for text in found.differences), expected
    with pytest.raises(SourceError, match=r"is not a pipeline \(no model_index.json\)"):
        shardconv.verify(whole, against=source / "transformer")


@pytest.mark.parametrize("name", ["../outside", "transformer/config.json", "/etc/passwd", "a/../b"])
def test_names_in_the_manifest_do_not_lead_out(split, name):
    """They are untrusted; also where the checksum of the manifest is right."""
    change_manifest(split, lambda manifest: manifest["files"].update({name: "0" * 32}), name=PIPELINE_NAME)
    with pytest.raises(SplitCheckpointError, match="is not a valid file name"):
        shardconv.verify(split)


# --- pipelines that are refused -------------------------------------------------------------------------------------


def unknown_model(folder: Path) -> None:
    write_weights(folder / "transformer" / "model.safetensors", {"a.b.weight": ("F16", (8, 8))})
    (folder / "transformer" / "config.json").write_text('{"_class_name": "MyTransformer"}')
    write_index(folder, {**COMPONENTS, "transformer": ["diffusers", "MyTransformer"]})


def two_variants(folder: Path) -> None:
    shutil.copy(folder / "transformer" / "model.safetensors", folder / "transformer" / "model.fp16.safetensors")


def single_file(folder: Path) -> None:
    write_weights(folder / "flux1-dev.safetensors", {"double_blocks.0.img_attn.qkv.weight": ("F16", (8, 8))})


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"../x": ["a", "B"]}, "'../x': is not a name of a folder"),
        ({"unet": ["diffusers"]}, "unet: is not .library"),
    ],
)
def test_refused_components(source, tmp_path, component, message):
    """test_never_silent.py has further pipelines that are refused."""
    shutil.copytree(source, tmp_path / "source")
    write_index(tmp_path / "source", {**COMPONENTS, **component})
    with pytest.raises(SourceError, match=message):
        shardconv.report_plan(tmp_path / "source", tp=TP)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["noise_refiner.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"], "ZImageTransformer2DModel"),
        (["noise_refiner.0.attention.qkv.weight"], "Lumina2Transformer2DModel"),
        (["model.diffusion_model.patchify_proj.weight"], "LTXVideoTransformer3DModel"),
    ],
)
def test_the_class_that_converts_original_names(tmp_path, names, kind):
    write_weights(tmp_path / "model.safetensors", dict.fromkeys(names, ("F16", (8, 8))))
    with pytest.raises(SourceError, match=rf"{kind}\.from_single_file"):
        shardconv.split(tmp_path / "model.safetensors", tmp_path / "out", tp=TP)


def test_the_remedy_for_gguf_names_the_class_of_diffusers(tmp_path):
    (tmp_path / "q4.gguf").touch()
    for name, text in (("FluxTransformer2DModel", "FluxTransformer2DModel.from_single_file("), ("", "AutoModelFor")):
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(SourceError) as error:
            shardconv.split(tmp_path, tmp_path / "split", tp=TP)
        assert text in str(error.value)


def test_a_component_of_an_unknown_class_can_be_copied(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    unknown_model(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=TP, components=("text_encoder",))
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "source")


@pytest.mark.parametrize("change", [single_file, two_variants])
def test_files_that_are_ignored(source, tmp_path, change):
    shutil.copytree(source, tmp_path / "source")
    change(tmp_path / "source")
    pattern = "flux1-dev.safetensors" if change is single_file else "transformer/*.fp16.safetensors"
    report = shardconv.split(tmp_path / "source", tmp_path / "split", tp=TP, ignore=(pattern,))
    assert report.left_out == {pattern.replace("*", "model"): f"ignored by {pattern!r}"}
    assert shardconv.verify(tmp_path / "split", against=tmp_path / "source").differences == ()
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


OPTIONS = {
    "--component vae": "--component vae is copied (AutoencoderKL, not sharded) (expected one of text_encoder",
    "--component x": "--component x is not a component (expected one of text_encoder, transformer)",
    "--layout megatron": "--layout megatron is for one model, and its readers do not read pipelines",
    "--for vllm": "--for vllm is for one model",
    "--head-dim 8": "--head-dim is for one model",
    "--rules llama": "--rules is for one model, and the pipeline has text_encoder, transformer",
    "-o x.safetensors": "x.safetensors: is one file (expected a folder, for a pipeline)",
    "--ignore none": "matches no file",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_refused_options(source, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    result = call("split", source, "--tp", TP, *options.split())
    assert result.code == 2
    assert OPTIONS[options] in result.err
    assert [*tmp_path.iterdir()] == []


def test_options_of_one_model_apply_to_one_component(source, tmp_path):
    options = {"replicate": ("lm_head",), "tp": TP}
    shardconv.split(source, tmp_path / "split", components=("transformer",), **options)
    shardconv.split(source / "transformer", tmp_path / "expected", **options)
    assert contents(tmp_path / "split" / "transformer") == contents(tmp_path / "expected")


def test_the_option_for_components_needs_a_pipeline(source, tmp_path):
    with pytest.raises(UsageError, match="only applies to pipelines"):
        shardconv.split(source / "transformer", tmp_path / "split", tp=TP, components=("transformer",))


def test_an_adapter_of_a_component(source, tmp_path):
    """One of PEFT is split with the component that is chosen; with several, it is unknown whose it is."""
    adapter = tmp_path / "lora"
    adapter.mkdir()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    specs = {f"{layer}.lora_A.weight": ("F32", (4, 64)), f"{layer}.lora_B.weight": ("F32", (64, 4))}
    write_weights(adapter / "adapter_model.safetensors", specs)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="does not name the component that it is for"):
        shardconv.split(source, tmp_path / "out", tp=TP, adapters=[adapter])
    shardconv.split(source, tmp_path / "out", tp=TP, components=("transformer",), adapters=[adapter])
    shardconv.split(source / "transformer", tmp_path / "expected", tp=TP, adapters=[adapter])
    assert contents(tmp_path / "out" / "transformer") == contents(tmp_path / "expected")
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    found = contents(tmp_path / "merged")
    assert {name: found.pop(f"transformer/adapters/lora/{name}") for name in contents(adapter)} == contents(adapter)
    assert found == contents(source)


def test_a_split_pipeline_is_not_split_again(whole, tmp_path):
    with pytest.raises(SourceError, match="is a split pipeline: pass the source that was split"):
        shardconv.split(whole, tmp_path / "again", tp=TP)


def test_exchanged_arguments_of_verify_are_named(source, whole):
    for src, against in [(source, whole), (source, whole / "transformer"), (source / "transformer", whole)]:
        with pytest.raises(UsageError, match=rf"exchange the two \(shardconv verify {against} --against {src}\)$"):
            shardconv.verify(src, against=against)


def test_a_source_is_not_merged(source, tmp_path):
    with pytest.raises(SplitCheckpointError, match="is not a split pipeline: make one with shardconv split"):
        shardconv.merge(source, tmp_path / "merged")


def test_a_plan_is_of_one_component(source):
    with pytest.raises(
        SourceError, match=r"is a pipeline \(expected one model\): pass .* \(text_encoder, transformer, vae\)"
    ):
        shardconv.make_plan(source, tp=TP)


@needs_torch
def test_an_engine_takes_one_component(whole):
    with pytest.raises(SplitCheckpointError, match=r"is a split pipeline .*: pass the folder of a component"):
        shardconv.check_engine(whole)


# --- all or nothing -------------------------------------------------------------------------------------------------


def test_an_error_in_the_last_component_leaves_nothing(source, tmp_path):
    """It is found before the first one is copied, where it does not depend on the data."""
    shutil.copytree(source, tmp_path / "source")
    unknown_model(tmp_path / "source")
    calls: list[object] = []
    with pytest.raises(PlanError):
        shardconv.split(tmp_path / "source", tmp_path / "out" / "split", tp=TP, progress=lambda *one: calls.append(one))
    assert calls == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "options", "stride"),
    [
        ("split", ["--resume"], 17),
        *(
            pytest.param(name, options, 1, marks=MATRIX)
            for name in ("split", "merge")
            for options in ([], ["--resume"])
        ),
    ],
)
def test_killed_before_every_step(source, whole, tmp_path, command, options, stride):
    """The next run continues or starts over, and leaves nothing else."""
    target = tmp_path / "out" / "place"
    target.parent.mkdir()
    expected = contents(source if command == "merge" else whole)
    arguments = [command, source, "--tp", TP] if command == "split" else [command, whole]
    for step in itertools.count(1, stride):

        def die(step: int = step) -> int:
            kill_before(step, target.parent)
            return call(*arguments, "-o", target, *options, "--threads", "1").code

        status = status_of_child(die)
        assert not target.exists() or contents(target) == expected
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if not target.exists():
            assert call(*arguments, "-o", target, *options).code == 0
        shutil.rmtree(target.parent / ".place.partial", ignore_errors=True)  # of a run that was killed at its end
        assert contents(target.parent) == {f"place/{name}": data for name, data in expected.items()}
        shutil.rmtree(target)
    assert step > 50  # else nothing was counted


PLACES = {
    "split": lambda source, whole, place, **how: shardconv.split(source, place, tp=4, **how),
    "reshard": lambda source, whole, place, **how: shardconv.reshard(whole, place, tp=4, **how),
    "merge": lambda source, whole, place, **how: shardconv.merge(whole, place, **how),
    "pad": lambda source, whole, place, **how: shardconv.pad(source, place, tp=3, check_model=False, **how),
}


@pytest.mark.parametrize("new", PLACES)
@pytest.mark.parametrize("old", PLACES)
def test_overwrite(source, whole, tmp_path, old, new):
    """A pipeline replaces another one in any form, but nothing that holds other files."""
    target = tmp_path / "out" / "place"
    PLACES[old](source, whole, target)
    (target / "vae" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds vae/notes\.txt, which is not part of a checkpoint"):
        PLACES[new](source, whole, target, overwrite=True)
    (target / "vae" / "notes.txt").unlink()
    before = contents(target)
    with pytest.raises(OutputError, match="exists: choose another path"):
        PLACES[new](source, whole, target)
    assert contents(target) == before
    PLACES[new](source, whole, target, overwrite=True)
    PLACES[new](source, whole, tmp_path / "expected")
    assert contents(target) == contents(tmp_path / "expected")
    assert beside(target) == ["place"]


@pytest.mark.parametrize("name", ["split", "merge", "reshard"])
def test_resume_after_a_damage(source, whole, tmp_path, name):
    """A finished component that differs from what was written is written again."""
    target = tmp_path / "out" / "place"
    run = PLACES[name]
    run(source, whole, tmp_path / "expected")
    with failing_after(1), pytest.raises(OutputError, match="cannot be written"):
        run(source, whole, target, resume=True, threads=1)
    (staged,) = target.parent.glob(".place.partial/result/text_encoder")
    flip(next(staged.glob("*.safetensors")))
    assert run(source, whole, target, resume=True).resumed_bytes == 0
    assert contents(target) == contents(tmp_path / "expected")


def test_resume_with_other_options(source, tmp_path):
    with failing_after(1):
        assert call("split", source, "--tp", 2, "-o", tmp_path / "out", "--resume", "--threads", 1).code == 1
    for options, message in {
        "--tp 4": "the interrupted run had --tp 2 (got --tp 4)",
        "--tp 2 --component transformer": "did not have --component (got --component transformer)",
        "--tp 2 --max-file-size 20kB": "did not have --max-file-size (got --max-file-size 20kB)",
    }.items():
        result = call("split", source, *options.split(), "-o", tmp_path / "out", "--resume")
        assert message in result.err
        assert "remove --resume to start over" in result.err
    (source / "README.md").touch()
    result = call("split", source, "--tp", 2, "-o", tmp_path / "out", "--resume")
    assert f"{source / 'README.md'} is not as in the interrupted run" in result.err


@pytest.mark.parametrize("number", range(4))
def test_resume_keeps_finished_components(source, whole, tmp_path, monkeypatch, number):
    """The run fails at stripe ``number`` of the last component, which has one stripe, or before."""
    target = tmp_path / "out" / "split"
    target.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 65536)
        with failing_after(number):
            result = call("split", source, "--tp", TP, "-o", target, "--resume", "--threads", 1)
        assert (result.code, result.err.count("\n")) == (1, 1)
        assert beside(target) == ([".split.partial"] if number else [])
        assert ("finished stripes are kept in" in result.err) == bool(number)
        report = shardconv.split(source, target, tp=TP, resume=True)
        shardconv.split(source, tmp_path / "expected", tp=TP)
    assert (report.resumed_bytes > 0) == bool(number)
    assert contents(target) == contents(tmp_path / "expected")
    assert beside(target) == ["split"]

"""Pipelines that ranks load: latents and images equal those of the unsharded ones within errors of float32.

Latents are compared to 1e-4 of the largest, as sums over features are computed per rank.
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.split import loadable
from shardconv.hf.package import quiet
from shardconv.layers.sharding import take_shard
from shardconv.runtime.pipeline_run import PipelineOptions, _generate, run_pipeline
from shardconv.support.errors import (
    PeerError,
    PlanError,
    RunError,
    SourceError,
    SplitCheckpointError,
    UsageError,
    WorldSizeError,
)
from tests.support.command import call
from tests.support.damage import flip
from tests.support.diffusion import CALLS, IMAGES, ip_adapter, latents, load_ip_adapter, write_diffusion
from tests.support.matrix import cases, each_once
from tests.support.ranks import on_ranks
from tests.support.recording_group import recording_axis

TPS = {"pair": 2, "four": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline, and its splits, once per name."""
    home = tmp_path_factory.mktemp("pipelines")

    def make(name: str, tp: int) -> tuple[Path, Path]:
        source, split = home / name, home / f"{name}-tp{tp}"
        if not source.exists():
            write_diffusion(source, name)
        if not split.exists():
            shardconv.split(source, split, tp=tp)
        return source, split

    return make


@pytest.fixture
def source(made):
    return made("flux", 2)[0]


@pytest.fixture
def split(made):
    return made("flux", 2)[1]


def unsharded(source: Path, **options: object):
    with quiet():
        return diffusers.DiffusionPipeline.from_pretrained(source, **options)


def check_latents(axis, name, source, split):
    """Also of a source that is not split; and the images of the decoder."""
    whole = unsharded(source)
    expected = latents(whole, name)
    for options in ({"path": split}, {"path": source, "tp": axis.size}):
        pipeline = shardconv.load(**options, device="cpu", group=axis)
        assert type(pipeline) is type(whole)
        found = latents(pipeline, name)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    pictures = [torch.from_numpy(latents(one, name, output_type="np")) for one in (pipeline, whole)]
    assert (pictures[0] - pictures[1]).abs().max() <= 1e-4
    for part in ("transformer", "text_encoder"):
        counts = [sum(one.numel() for one in getattr(of, part).parameters()) for of in (pipeline, whole)]
        assert counts[0] < 0.8 * counts[1], part


@pytest.mark.parametrize(
    ("layout", "name"),
    cases(
        [(layout, name) for layout in TPS for name in CALLS],
        lambda layout, name: (layout == "four") == (name == "flux"),
    ),
)
def test_latents_equal_those_of_the_unsharded_pipeline(ranks, made, layout, name):
    ranks(layout, check_latents, name, *made(name, TPS[layout]))


#: Sizes of a step that estimates do not take from the call: tokens of text, and pixels where the VAE does not compress.
SIZES = {
    "flux": {"seq": 16, "height": 8 * 16, "width": 8 * 16},
    "sd3": {"seq": 2 * 16, "height": 8 * 32, "width": 8 * 32},
    "wan": {"seq": 16, "height": 16, "width": 16, "frames": 5},
}


def check_step(axis, name, source, expected):
    """The collectives of the transformer in a denoising step are the estimated ones."""
    pipeline, recording = unsharded(source), recording_axis(axis)
    shardconv.convert_model(pipeline.transformer, group=recording)
    found = []
    pipeline.transformer.register_forward_pre_hook(lambda *_: recording.group.seen.clear())
    pipeline.transformer.register_forward_hook(lambda *_: found.append(Counter(recording.group.taken())))
    latents(pipeline, name, steps=1, guidance_scale=1.0)
    assert found == [expected]


@pytest.mark.parametrize("name", SIZES)
def test_estimated_collectives_of_a_denoising_step_are_the_real_ones(ranks, made, name):
    source, _ = made(name, 2)
    (cost,) = shardconv.estimate_cost(source, tps=[2], **SIZES[name]).components["transformer"].costs
    expected = Counter({(one.collective, one.num_bytes): one.count for one in cost.decode.collectives})
    assert expected.total() > 10
    ranks("pair", check_step, name, source, expected)


@pytest.mark.parametrize("option", ["--prompt", "--check"])
def test_a_transformer_is_not_run_without_its_pipeline(made, option):
    source, split = made("flux", 2)
    result = call("run", split / "transformer", option, source / "transformer")
    assert result.code != 0
    assert "is a FluxTransformer2DModel of diffusers, which a pipeline calls: run the folder" in result.err


@pytest.mark.parametrize("component", [None, "transformer"])
def test_components_of_a_source_are_planned_once(made, monkeypatch, component):
    source, planned = made("flux", 2)[0], []
    plan = loadable.plan_source
    monkeypatch.setattr(
        loadable, "plan_source", lambda path, **options: planned.append(path.name) or plan(path, **options)
    )
    shardconv.load(source, tp=1, device="cpu", component=component)
    assert planned == (["text_encoder", "text_encoder_2", "transformer"] if component is None else [component])


def test_an_unsupported_size_of_a_source_names_the_component(made, tmp_path):
    """Before any component is loaded."""
    source = made("flux", 2)[0]
    arguments = ("run", source, "--tp", 3, "--prompt", "a cat", "-o", tmp_path / "cat.png", "--device", "cpu")
    result = call(*arguments)
    assert result.code != 0
    assert result.err.startswith("shardconv: component text_encoder (CLIPTextModel): --tp 3 is unsupported")
    assert result.err.endswith("All components support --tp 1, 2, 4\n")


def test_size_of_a_picture_is_for_diffusion_only(made):
    source = made("flux", 2)[0]
    with pytest.raises(UsageError, match="height=64 is for transformers of diffusers: remove it"):
        shardconv.estimate_cost(source / "text_encoder", height=64)
    with pytest.raises(UsageError, match=r"component text_encoder .*height=64 is for transformers of diffusers"):
        shardconv.estimate_cost(source, height=64, components=["text_encoder"])
    with pytest.raises(UsageError, match=r"component transformer .*depends on frames=5: remove it"):
        shardconv.estimate_cost(source, frames=5)


@on_ranks("pair")
def test_a_pipeline_with_weights_of_one_variant(axis, fp16):
    pipeline = shardconv.load(fp16, tp=2, device="cpu", group=axis)
    assert {part.dtype for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder)} == {torch.float16}


@pytest.fixture
def fp16(source, tmp_path):
    unsharded(source, dtype=torch.float16).save_pretrained(tmp_path / "fp16", variant="fp16")
    return tmp_path / "fp16"


@on_ranks("pair")
def test_components_have_the_dtype_that_is_stored_or_asked_for(axis, source, split):
    """VAEs, too, which diffusers would load in float32."""
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"dtype": "bf16"})):
        pipeline = shardconv.load(split, device="cpu", group=axis, **options)
        assert {part.dtype for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder)} == {dtype}


@on_ranks("pair")
def test_modules_that_diffusers_keeps_in_float32(axis, wan_bf16):
    source, split = wan_bf16
    expected = {name: one.dtype for name, one in unsharded(source, dtype=torch.bfloat16).transformer.named_parameters()}
    assert {*expected.values()} == {torch.bfloat16, torch.float32}
    for options in ({}, {"dtype": "bf16"}):
        found = shardconv.load(split, component="transformer", device="cpu", group=axis, **options)
        assert {name: one.dtype for name, one in found.named_parameters()} == expected


@pytest.fixture
def wan_bf16(tmp_path):
    source = write_diffusion(tmp_path / "source", "wan", torch.bfloat16)
    shardconv.split(source, tmp_path / "split", tp=2)
    return source, tmp_path / "split"


@on_ranks("pair")
def test_chosen_components_of_a_source(axis, source, split):
    whole = unsharded(source)
    pipeline = shardconv.load(source, tp=2, components=("transformer",), device="cpu", group=axis)
    sizes = [sum(one.numel() for one in of.text_encoder.parameters()) for of in (pipeline, whole)]
    assert sizes[0] == sizes[1]
    expected = latents(whole, "flux")
    assert (latents(pipeline, "flux") - expected).abs().max() <= 1e-4 * expected.abs().max()


@on_ranks("pair")
def test_shards_are_not_saved_as_a_pipeline(axis, source, split, tmp_path):
    pipeline = shardconv.load(split, device="cpu", group=axis)
    with pytest.raises(ValueError, match="save_pretrained would write the shards of one rank"):
        pipeline.save_pretrained(tmp_path / f"saved-{axis.rank}")


def check_ip_adapter(axis, name, source, split):
    """Of a pipeline that is loaded, and of a transformer that is converted; it can be replaced and removed."""
    whole, loaded, converted = unsharded(source), shardconv.load(split, device="cpu", group=axis), unsharded(source)
    shardconv.convert_model(converted.transformer, group=axis)
    before = latents(whole, name)
    load_ip_adapter(loaded, name, seed=1)
    for pipeline in (whole, loaded, converted):
        load_ip_adapter(pipeline, name)
    expected = latents(whole, name, **IMAGES[name])
    assert (expected - before).abs().max() > 1e-2 * before.abs().max()
    for pipeline in (loaded, converted):
        found = latents(pipeline, name, **IMAGES[name])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        sizes = [
            sum(one.numel() for key, one in of.transformer.named_parameters() if "_ip." in key)
            for of in (pipeline, whole)
        ]
        assert sizes[0] * axis.size == sizes[1] > 0
        pipeline.unload_ip_adapter()
        assert (latents(pipeline, name) - before).abs().max() <= 1e-4 * before.abs().max()


@pytest.mark.parametrize(("layout", "name"), each_once(TPS, IMAGES))
def test_ip_adapters_are_sharded_by_heads(ranks, made, layout, name):
    ranks(layout, check_ip_adapter, name, *made(name, TPS[layout]))


def last_call(pipeline, name):
    """The arguments of the transformer in the last step."""
    calls = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda _, __, options: calls.append(options), with_kwargs=True
    )
    latents(pipeline, name, **IMAGES[name])
    hook.remove()
    return calls[-1]


def check_ip_gradients(axis, name, source, pad):
    """Also of padded heads: three ranks have four heads."""
    whole, converted = unsharded(source), unsharded(source)
    shardconv.convert_model(converted.transformer, pad=pad, group=axis)
    for pipeline in (whole, converted):
        load_ip_adapter(pipeline, name)
    call = last_call(whole, name)
    expected, found = (one.transformer(**call)[0] for one in (whole, converted))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    for output in (expected, found):
        output.square().sum().backward()
    parts = dict(converted.transformer.named_modules())
    for key, parameter in whole.transformer.named_parameters():
        is_zero = key.endswith("to_k_ip.0.bias")  # it adds the same to all scores
        if ("processor" in key or "image" in key) and not is_zero:
            module, _, own = key.rpartition(".")
            local = parts[module].get_parameter(own).grad
            placement = getattr(parts[module], "placements", {}).get(own)
            gradient = parameter.grad if placement is None else take_shard(parameter.grad, placement, axis.rank)
            assert (local - gradient).abs().max() <= 1e-3 * parameter.grad.abs().max(), key


@pytest.mark.parametrize(
    ("layout", "name", "pad"),
    [("pair", "flux", False), ("pair", "sd3", False), ("three", "flux", True), ("three", "sd3", True)],
)
def test_gradients_of_ip_adapters(ranks, made, layout, name, pad):
    ranks(layout, check_ip_gradients, name, made(name, 2)[0], pad)


@on_ranks("pair")
def test_ip_adapters_that_differ_between_ranks_are_refused(axis, source, split):
    """The pipeline is then as before."""
    pipeline = shardconv.load(split, device="cpu", group=axis)
    before = latents(pipeline, "flux")
    with pytest.raises(ValueError, match=r"hold different values in .*processor"):
        load_ip_adapter(pipeline, "flux", seed=axis.rank)
    assert latents(pipeline, "flux").equal(before)


def check_earlier_ip_adapter(axis, name, source, split):
    """Rank 1 changes the second adapter."""
    match, change = CHANGES[name]
    pipeline = shardconv.load(split, device="cpu", group=axis)
    load_ip_adapter(pipeline, "flux")
    before = latents(pipeline, "flux", **IMAGES["flux"])
    adapter = ip_adapter("flux", seed=1)
    if axis.rank == 1:
        change(adapter)
    with pytest.raises((RunError, ValueError), match=match):
        pipeline.load_ip_adapter(adapter, weight_name="", image_encoder_pretrained_model_name_or_path=None)
    assert latents(pipeline, "flux", **IMAGES["flux"]).equal(before)


def add_one(tensors):
    tensors.update({name: tensor + 1 for name, tensor in tensors.items()})


CHANGES = {
    "other keys": ("hold different values in .*processor", lambda adapter: add_one(adapter["ip_adapter"])),
    "other projection": ("hold different values in encoder_hid_proj", lambda adapter: add_one(adapter["image_proj"])),
    "missing keys": ("KeyError: '0.to_k_ip.weight'", lambda adapter: adapter["ip_adapter"].pop("0.to_k_ip.weight")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_earlier_ip_adapter_stays_where_another_is_refused(ranks, made, change):
    ranks("pair", check_earlier_ip_adapter, change, *made("flux", 2))


@on_ranks("pair", plan='[rules]\n"**.*" = { style = "replicate" }')
def test_ip_adapters_that_no_rule_shards_are_refused(axis, rules, source):
    pipeline = unsharded(source)
    shardconv.convert_model(pipeline.transformer, rules, group=axis)
    with pytest.raises(PlanError, match="the rules do not shard keys of IP adapters"):
        load_ip_adapter(pipeline, "flux")


@on_ranks("pair")
def test_transformer_with_an_ip_adapter_is_not_converted(axis, source):
    pipeline = unsharded(source)
    load_ip_adapter(pipeline, "flux")
    with pytest.raises(PlanError, match=r"to_k_ip.* is a tensor of an IP adapter: call unload_ip_adapter"):
        shardconv.convert_model(pipeline.transformer, group=axis)
    pipeline.unload_ip_adapter()
    shardconv.convert_model(pipeline.transformer, group=axis)
    load_ip_adapter(pipeline, "flux")
    assert pipeline.transformer.transformer_blocks[0].attn.processor.to_k_ip[0].weight.shape == (32, 32)


@pytest.fixture
def with_ip_adapter(made, tmp_path):
    """Return a function that writes a pipeline whose transformer was saved with an IP adapter."""

    def make(name: str, dtype: torch.dtype = torch.float32, variant: str | None = None) -> Path:
        pipeline = unsharded(made(name, 2)[0])
        load_ip_adapter(pipeline, name)
        shutil.copytree(made(name, 2)[0], tmp_path / "source")
        shutil.rmtree(tmp_path / "source" / "transformer")
        transformer = pipeline.transformer.to(dtype)
        for module, part in transformer.named_modules():
            if module.endswith(".processor") or module in {"encoder_hid_proj", "image_proj"}:
                part.to(torch.float32)  # the dtype of the adapter is not the dtype of the model
        transformer.save_pretrained(tmp_path / "source" / "transformer", variant=variant)
        return tmp_path / "source"

    return make


@pytest.mark.parametrize(("name", "dtype", "variant"), [("flux", torch.bfloat16, None), ("sd3", torch.float32, "fp32")])
def test_transformer_with_an_ip_adapter_is_not_split(
    made, with_ip_adapter, tmp_path, monkeypatch, name, dtype, variant
):
    """diffusers saves its tensors, and does not load them. The remedy in the error works."""
    source = with_ip_adapter(name, dtype, variant)
    with pytest.raises(SourceError, match=r"put the new folder in the place of ") as error:
        shardconv.split(source, tmp_path / "split", tp=2)
    monkeypatch.chdir(tmp_path)
    with quiet():
        exec(str(error.value).partition("\n")[2])
    shutil.rmtree(source / "transformer")
    (tmp_path / "transformer-without-adapter").rename(source / "transformer")
    shardconv.split(source, tmp_path / "split", tp=2)
    expected, found = (
        load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        for folder in (made(name, 2)[0], source)
    )
    assert found.keys() == expected.keys()
    assert all(found[key].equal(expected[key].to(dtype)) for key in expected)


def test_transformer_with_an_ip_adapter_is_not_padded(with_ip_adapter, tmp_path):
    with pytest.raises(SourceError, match=r"component transformer .*to_k_ip.*: is a tensor of an IP adapter"):
        shardconv.pad(with_ip_adapter("flux"), tmp_path / "padded", tp=8, components="transformer")


DAMAGES = {
    "component of another tp": (
        lambda source, split: (
            shutil.rmtree(split / "transformer"), shardconv.split(source / "transformer", split / "transformer", tp=4),
        ),
        "component transformer .* is for 4 ranks .expected 2.",
    ),
    "component that is missing": (
        lambda source, split: shutil.rmtree(split / "transformer"), "component transformer .* is missing"
    ),
    "flipped bit of the VAE": (
        lambda source, split: flip(split / "vae" / "diffusion_pytorch_model.safetensors"),
        "vae/diffusion_pytorch_model.safetensors: differs from its checksum",
    ),
    "flipped bit of a rank file": (
        lambda source, split: flip(split / "transformer" / "rank-0-of-2.safetensors"), "rank-0-of-2.safetensors"
    ),
    "model_index.json that was edited": (
        lambda source, split: (split / "model_index.json").write_text(
            (split / "model_index.json").read_text().replace("FluxPipeline", "FluxInpaintPipeline")
        ),
        "model_index.json: differs from its checksum",
    ),
    "config that was edited": (
        lambda source, split: (split / "transformer" / "config.json").write_text('{"_class_name": "Other"}'),
        "config.json: differs from the config that was split",
    ),
}  # fmt: skip


def check_refused(axis, split, message):
    """Ranks that are right themselves raise the error of the first one that is not."""
    with pytest.raises((SplitCheckpointError, PeerError), match=message):
        shardconv.load(split, device="cpu", group=axis)


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_pipelines(ranks, source, split, tmp_path, case):
    damage, message = DAMAGES[case]
    changed = shutil.copytree(split, tmp_path / "split")
    damage(source, changed)
    ranks("pair", check_refused, changed, message)


#: A folder, options, and the error.
OPTIONS = {
    "component that is copied": (
        "flux-tp2", {"component": "vae"}, UsageError, "is not sharded .expected one of text_encoder, ",
    ),
    "module of the caller": ("flux-tp2", {"model": torch.nn.Module}, UsageError, "is for one component"),
    "another tp": (
        "flux-tp2", {"tp": 4}, UsageError, "flux-tp2: is split for tp=2 .* shardconv reshard .*flux-tp2 --tp 4",
    ),
    "another number of processes": ("flux-tp2", {}, WorldSizeError, "flux-tp2: is for 2 ranks, and there is 1 process"),
    "component of a model": (
        "flux-tp2/transformer", {"component": "transformer"}, UsageError, "only applies to pipelines",
    ),
    "source without tp": ("flux", {}, SplitCheckpointError, "is not a split pipeline: make one with .* or load it"),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_refused_options(source, split, case):
    folder, options, error, message = OPTIONS[case]
    with pytest.raises(error, match=message):
        shardconv.load(source.parent / folder, device="cpu", **options)


# --- run ------------------------------------------------------------------------------------------------------------


def picture_options(**options) -> PipelineOptions:
    return PipelineOptions(device="cpu", steps=2, height=16, width=16, **options)


@on_ranks("four")
def test_pictures_are_those_of_the_unsharded_pipeline(axis, source, split4, tmp_path):
    """To one level of brightness; each of them has its own noise."""
    report = run_pipeline(split4, ["a cat", "a dog"], picture_options(output=tmp_path / "picture.png", seed=3))
    assert report.files == (str(tmp_path / "picture-0.png"), str(tmp_path / "picture-1.png"))
    whole = unsharded(source)
    whole.set_progress_bar_config(disable=True)
    expected = whole(
        prompt=["a cat", "a dog"],
        num_inference_steps=2,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(3),
    ).images
    torch.distributed.barrier()  # the first rank writes
    for path, picture in zip(report.files, expected, strict=True):
        difference = np.array(Image.open(path)).astype(int) - np.array(picture).astype(int)
        assert abs(difference).max() <= 1
    assert not np.array_equal(*map(np.array, expected))


@on_ranks("four")
def test_frames_of_a_video(axis, video, tmp_path):
    """By default, Wan makes 81."""
    report = run_pipeline(video, ["a cat"], picture_options(output=tmp_path / "video.gif"))
    torch.distributed.barrier()  # the first rank writes
    assert Image.open(report.files[0]).n_frames == 81


@pytest.fixture
def video(made):
    return made("wan", 4)[1]


@pytest.fixture
def split4(made):
    return made("flux", 4)[1]


@on_ranks("four")
def test_check_compares_latents(axis, source, split4, other):
    report = run_pipeline(split4, ["a cat"], picture_options(check=source))
    assert (report.differences, report.files) == ((), ())
    assert report.error <= 1e-4
    (difference,) = run_pipeline(split4, ["a cat"], picture_options(check=other)).differences
    assert difference.startswith("latents after one step: differ by")


@pytest.fixture
def other(source, tmp_path):
    """A pipeline with another transformer."""
    folder = shutil.copytree(source, tmp_path / "other")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 1.1 for name, tensor in load_file(weights).items()}, weights)
    return folder


RUNS = {
    "no prompt": ("split -o a.png", "no prompt given"),
    "no file": ("split --prompt x", "the file of the picture is missing"),
    "file that exists": ("split --prompt x -o there.png", "there.png: exists: choose another file"),
    "no picture": ("split --prompt x -o a.txt", "a.txt: is not a picture"),
    "missing folder": ("split --prompt x -o no/a.png", "no: is not a folder"),
    "source without tp": ("source --prompt x -o a.png", "source: is not split: pass --tp"),
    "another tp": ("split --prompt x -o a.png --tp 4", "split: is split for --tp 2 (got --tp 4)"),
    "adapter that no component has": ("split --prompt x -o a.png --adapter y", "split: no component has an adapter y"),
    "split pipeline to compare with": ("split --prompt x --check split", "split: is not an unsharded pipeline"),
    "dtype of a comparison": ("split --prompt x --check source --dtype bf16", "--check compares in float32"),
    "option of text models": ("split --prompt x -o a.png --chat", "--chat does not apply to split, a pipeline"),
    "option of pipelines": ("split/transformer --prompt x --steps 2", "--steps applies to pipelines of diffusers only"),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_that_are_refused(source, split, tmp_path, monkeypatch, case):
    """Before processes are started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").symlink_to(source)
    (tmp_path / "split").symlink_to(split)
    (tmp_path / "there.png").touch()
    arguments, message = RUNS[case]
    result = call("run", *arguments.split())
    assert result.code in {1, 2}
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"other": 1}, "FluxPipeline does not take other .expected one of prompt, "),
        ({"num_inference_steps": 1, "max_sequence_length": 4096}, "FluxPipeline: ValueError: .*max_sequence_length"),
    ],
)
def test_arguments_that_a_pipeline_does_not_take(made, arguments, message):
    whole = unsharded(made("flux", 2)[0])
    with pytest.raises(RunError, match=message):
        _generate(whole, ["a cat"], picture_options(), **arguments)


def test_errors_of_a_pipeline_that_does_not_check_its_inputs(made):
    class Unchecked:
        def __call__(self, prompt, num_inference_steps, height, width, generator, return_dict):
            raise ValueError("height must be divisible by 32.")

        def set_progress_bar_config(self, disable):
            assert disable

    with pytest.raises(RunError, match="Unchecked: ValueError: height must be divisible by 32: correct the option"):
        _generate(Unchecked(), ["a cat"], picture_options())


def test_a_pipeline_that_needs_more_than_a_prompt(made):
    class Guided(diffusers.FluxPipeline):
        def __call__(
            self, image, prompt=None, num_inference_steps=1, height=1, width=1, generator=None, return_dict=True
        ):
            raise AssertionError

    whole = unsharded(made("flux", 2)[0])
    whole.__class__ = Guided
    with pytest.raises(RunError, match="Guided needs image besides a prompt"):
        _generate(whole, ["a cat"], picture_options())

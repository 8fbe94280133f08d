"""LoRA files of diffusers and Kohya on split pipelines: latents equal those of diffusers with ``load_lora_weights``.

Latents are compared to 1e-4 of the largest, as in test_pipeline.py.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

import shardconv
from shardconv.hf.package import quiet
from shardconv.runtime.pipeline_run import PipelineOptions, run_pipeline
from tests.support.diffusion import latents, write_diffusion
from tests.support.lora import FILES, save_by_diffusers, write_lora
from tests.support.ranks import on_ranks

ADAPTERS = [*FILES, "saved", "saved-without-metadata"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline, a LoRA file and the split pipeline with it, once per name of the file and tp."""
    home = tmp_path_factory.mktemp("lora")

    def make(name: str, tp: int = 2) -> tuple[Path, Path, Path]:
        kind, parts = FILES.get(name, ("flux", {}))
        source, adapter, split = home / kind, home / (f"{name}.safetensors" if parts else name), home / f"{name}-tp{tp}"
        if not source.exists():
            write_diffusion(source, kind)
        if not adapter.exists() and parts:
            write_lora(adapter, parts)
        elif not adapter.exists():
            save_by_diffusers(adapter, source, has_metadata=name == "saved")
        if not split.exists():
            shardconv.split(source, split, tp=tp, adapters=[adapter])
        return source, adapter, split

    return make


@pytest.fixture(params=ADAPTERS)
def case(request, made):
    return request.param, *made(request.param)


def unsharded(source: Path, adapter: Path | None = None):
    with quiet():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(source)
        if adapter is not None:
            pipeline.load_lora_weights(adapter)
    return pipeline


@on_ranks("pair")
def test_latents_equal_those_of_diffusers(axis, case):
    name, source, adapter, split = case
    kind = FILES.get(name, ("flux", {}))[0]
    expected = latents(unsharded(source, adapter), kind)
    assert (latents(unsharded(source), kind) - expected).abs().max() > 0.01 * expected.abs().max()
    found = latents(shardconv.load(split, device="cpu", group=axis, adapter=name), kind)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@on_ranks("pair")
def test_merged_latents_equal_those_of_diffusers(axis, merged):
    source, adapter, split = merged
    expected = latents(unsharded(source, adapter), "flux")
    found = latents(shardconv.load(split, device="cpu", group=axis), "flux")
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture
def merged(made, tmp_path):
    source, adapter, _ = made("kohya")
    shardconv.split(source, tmp_path / "merged", tp=2, adapters=[adapter], merge_adapter=True)
    return source, adapter, tmp_path / "merged"


@on_ranks("pair")
def test_one_component_has_its_part(axis, saved):
    _, _, split = saved
    whole = shardconv.load(split, device="cpu", group=axis, adapter="saved").transformer
    alone = shardconv.load(split, component="transformer", device="cpu", group=axis, adapter="saved")
    assert all(torch.equal(one, other) for one, other in zip(alone.parameters(), whole.parameters(), strict=True))
    assert any(name.endswith("lora_a") for name, _ in alone.named_parameters())
    other = shardconv.load(split, component="text_encoder_2", device="cpu", group=axis)
    assert not any("lora" in name for name, _ in other.named_parameters())


@pytest.fixture
def saved(made):
    return made("saved")


@on_ranks("four")
def test_runs_are_compared_with_the_adapter(axis, saved4):
    source, _, split = saved4
    options = {"device": "cpu", "height": 16, "width": 16, "check": source}
    report = run_pipeline(split, ["a cat"], PipelineOptions(adapter=Path("saved"), **options))
    assert (report.differences, report.notes) == ((), ())
    (note,) = run_pipeline(split, ["a cat"], PipelineOptions(**options)).notes
    assert note == "adapters that are not applied: saved (pass --adapter NAME to apply one)"


@pytest.fixture
def saved4(made):
    return made("saved", 4)

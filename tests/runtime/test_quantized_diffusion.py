"""Pipelines with a transformer that diffusers quantized: split, restored, and loaded as unquantized models.

Latents are those of diffusers with the same weights, to 1e-4 of the largest: see test_pipeline.py.
"""

import json
import shutil

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers.quantizers.bitsandbytes import bnb_quantizer
from safetensors.torch import load_file

import shardconv
from shardconv.hf.package import quiet
from shardconv.runtime.pipeline_run import PipelineOptions, run_pipeline
from shardconv.support.errors import PeerError, RunError
from tests.support.checkpoints import contents
from tests.support.diffusion import latents, write_diffusion
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*Quanto.* is deprecated:FutureWarning")
SETTINGS = {
    "quanto": lambda: diffusers.QuantoConfig(weights_dtype="int8"),
    "bitsandbytes": lambda: diffusers.BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_diffusion(tmp_path_factory.mktemp("flux") / "source", "flux")


@pytest.fixture
def quantized(source, tmp_path, monkeypatch):
    """Write a pipeline with a quantized transformer; diffusers would ask for a GPU, and bitsandbytes does not."""

    def write(kind):
        if kind == "quanto":
            pytest.importorskip("optimum.quanto")
        quantizer = bnb_quantizer.BnB8BitDiffusersQuantizer
        monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
        folder = shutil.copytree(source, tmp_path / kind)
        shutil.rmtree(folder / "transformer")
        with quiet():
            model = diffusers.FluxTransformer2DModel.from_pretrained(
                source / "transformer", quantization_config=SETTINGS[kind](), device_map={"": "cpu"}
            )
            model.save_pretrained(folder / "transformer")
        return folder

    return write


def expected_latents(folder):
    """The latents with the weights that a file of bitsandbytes stores; diffusers runs Quanto's itself."""
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    if not any(name.endswith("SCB") for name in weights):
        with quiet():
            return latents(diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32), "flux")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    del config["quantization_config"]
    model = diffusers.FluxTransformer2DModel.from_config(config)
    state = {name: one.float() for name, one in weights.items() if not name.endswith(("SCB", "weight_format"))}
    for name in [name for name in weights if name.endswith("SCB")]:
        state[name.replace("SCB", "weight")] *= weights[name][:, None] / 127
    model.load_state_dict(state)
    with quiet():
        return latents(diffusers.FluxPipeline.from_pretrained(folder, transformer=model, dtype=torch.float32), "flux")


def check_latents(axis, folder, split, expected):
    pipeline = shardconv.load(split, device="cpu", group=axis, dequantize=True, dtype="fp32")
    found = latents(pipeline, "flux")
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises((RunError, PeerError), match="transformer: is quantized: pass dequantize=True"):
        shardconv.load(split, device="cpu", group=axis)


@pytest.mark.parametrize("kind", SETTINGS)
def test_latents_of_a_quantized_transformer(ranks, quantized, tmp_path, kind):
    """The text encoders are not quantized."""
    folder = quantized(kind)
    shardconv.split(folder, tmp_path / "split", tp=2)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(folder)
    ranks("pair", check_latents, folder, tmp_path / "split", expected_latents(folder))


@on_ranks("four")
def test_components_of_several_dtypes(axis, mixed):
    options = {"device": "cpu", "steps": 1, "height": 16, "width": 16}
    with pytest.raises(RunError, match=r"several dtypes \(.*transformer bfloat16.*pass dtype"):
        run_pipeline(mixed, ["a cat"], PipelineOptions(output=mixed / "x.png", **options))


@pytest.fixture
def mixed(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "mixed")
    with quiet():
        model = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
        model.save_pretrained(folder / "transformer")
    shardconv.split(folder, tmp_path / "split", tp=4)
    return tmp_path / "split"

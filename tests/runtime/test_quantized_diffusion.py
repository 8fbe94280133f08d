"""Pipelines with a component that its library quantized: split, restored, and loaded as unquantized models.

Latents are those of diffusers with the same weights, to 1e-4 of the largest: see test_pipeline.py.
"""

import shutil
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
import transformers
from diffusers.quantizers.bitsandbytes import bnb_quantizer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import shardconv
from shardconv.hf.package import quiet
from shardconv.runtime.pipeline_run import PipelineOptions, run_pipeline
from shardconv.support.errors import PeerError, PlanError, RunError
from tests.support.checkpoints import contents
from tests.support.diffusion import latents, write_diffusion
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*Quanto.* is deprecated:FutureWarning")
TRANSFORMER, ENCODER = "transformer", "text_encoder_2"
FLUX, T5 = diffusers.FluxTransformer2DModel, transformers.T5EncoderModel


def torchao(name):
    """The settings of a class of torchao, which takes seconds to import."""
    return diffusers.TorchAoConfig(getattr(pytest.importorskip("torchao.quantization"), name)())


def fp8(**settings):
    return transformers.FineGrainedFP8Config(weight_block_size=[16, 16], **settings)


#: The library that a form needs, the component, its class, and the settings.
SETTINGS = {
    "Quanto int8": ("optimum", TRANSFORMER, FLUX, lambda: diffusers.QuantoConfig(weights_dtype="int8")),
    "Quanto float8": ("optimum", TRANSFORMER, FLUX, lambda: diffusers.QuantoConfig(weights_dtype="float8")),
    "bitsandbytes": ("diffusers", TRANSFORMER, FLUX, lambda: diffusers.BitsAndBytesConfig(load_in_8bit=True)),
    "torchao int8": ("torchao", TRANSFORMER, FLUX, lambda: torchao("Int8WeightOnlyConfig")),
    "torchao float8": ("torchao", TRANSFORMER, FLUX, lambda: torchao("Float8WeightOnlyConfig")),
    "FP8 of transformers": ("transformers", ENCODER, T5, fp8),
}
FORMS = [
    pytest.param(form, marks=pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed"))
    for form, (needs, *_) in SETTINGS.items()
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_diffusion(tmp_path_factory.mktemp("flux") / "source", "flux")


@pytest.fixture
def quantized(source, tmp_path, monkeypatch):
    """Write a pipeline with a quantized component; the quantizers would ask for a GPU, which they do not need."""

    def write(form):
        for quantizer in (bnb_quantizer.BnB8BitDiffusersQuantizer, FineGrainedFP8HfQuantizer):
            monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
        _, component, kind, settings = SETTINGS[form]
        place = {} if form.startswith("torchao") else {"device_map": {"": "cpu"}}  # an offload, for torchao
        folder = shutil.copytree(source, tmp_path / "source")
        shutil.rmtree(folder / component)
        with quiet():
            model = kind.from_pretrained(source / component, quantization_config=settings(), **place)
            model.save_pretrained(folder / component)
        return folder

    return write


def state_of_bitsandbytes(path):
    weights = load_file(path)
    state = {name: one.float() for name, one in weights.items() if not name.endswith(("SCB", "weight_format"))}
    for name in [name for name in weights if name.endswith("SCB")]:
        state[name.replace("SCB", "weight")] *= weights[name][:, None] / 127
    return state


def state_of_torchao(path):
    from torchao.prototype.safetensors import safetensors_support  # noqa: PLC0415 - takes seconds to import

    with safe_open(path, "pt") as file:
        tensors, _ = safetensors_support.unflatten_tensor_state_dict(load_file(path), file.metadata())
    return {
        name: one.dequantize(torch.float32) if hasattr(one, "qdata") else one.float() for name, one in tensors.items()
    }


def expected_latents(folder, form):
    """The latents with the stored weights; diffusers runs Quanto's itself, and transformers dequantizes FP8."""
    path, components = folder / TRANSFORMER / "diffusion_pytorch_model.safetensors", {}
    with quiet():
        if form in ("bitsandbytes", "torchao int8", "torchao float8"):
            config = {name: value for name, value in FLUX.load_config(path.parent).items() if "quant" not in name}
            components[TRANSFORMER] = FLUX.from_config(config)
            state = (state_of_bitsandbytes if form == "bitsandbytes" else state_of_torchao)(path)
            components[TRANSFORMER].load_state_dict(state)
        elif form == "FP8 of transformers":
            components[ENCODER] = T5.from_pretrained(folder / ENCODER, quantization_config=fp8(dequantize=True))
        return latents(diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.float32, **components), "flux")


def check_latents(axis, component, split, expected):
    pipeline = shardconv.load(split, device="cpu", group=axis, dequantize=True, dtype="fp32")
    found = latents(pipeline, "flux")
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises((RunError, PeerError), match=f"{component}: is quantized: pass dequantize=True"):
        shardconv.load(split, device="cpu", group=axis)


@pytest.mark.parametrize("form", FORMS)
def test_latents_of_a_quantized_component(ranks, quantized, tmp_path, form):
    """The other components are not quantized."""
    folder = quantized(form)
    shardconv.split(folder, tmp_path / "split", tp=2)
    assert shardconv.verify(tmp_path / "split", against=folder).differences == ()
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(folder)
    ranks("pair", check_latents, SETTINGS[form][1], tmp_path / "split", expected_latents(folder, form))


def test_a_transformer_in_fp8_without_scales_is_refused(source, tmp_path):
    """Layerwise casting of diffusers stores it, which no config describes."""
    folder = shutil.copytree(source, tmp_path / "source")
    with quiet():
        model = FLUX.from_pretrained(source / TRANSFORMER)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        model.save_pretrained(folder / TRANSFORMER)
    with pytest.raises(PlanError, match=r"component transformer .*F8_E4M3.*no quantization_config describes it"):
        shardconv.split(folder, tmp_path / "split", tp=2)


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

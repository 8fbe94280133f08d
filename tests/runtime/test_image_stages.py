"""Models with an image encoder in pipeline stages: outputs and greedy tokens equal those of the unsharded model.

The first stage has the encoder. Logits are compared to 1e-4 of the largest.
"""

import re
from unittest.mock import patch

import pytest
import torch
import transformers

import shardconv
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.hf.build import build_small
from shardconv.hf.inputs import example_inputs
from shardconv.hf.small import default_config, small_fields
from shardconv.support.errors import PeerError, RunError
from tests.support.adapters import adapted, write_adapter
from tests.support.command import call
from tests.support.disguised import ACCELERATOR, with_accelerator
from tests.support.matrix import MATRIX, each_once
from tests.support.models import model_class

LAYERS, TOKENS = 4, 6
KIND = "image-text-to-text"
TYPES = ("gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl")
#: Types that are also tried with videos, whose features Qwen3-VL computes by its method for images.
VIDEOS = ("qwen2_5_vl", "qwen3_vl")
#: Other types that run in stages.
OTHERS = (
    "aria", "aya_vision", "cohere2_vision", "cohere_compass", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr",
    "glmga", "got_ocr2", "granite_docling", "idefics2", "idefics3", "internvl", "lfm2_vl", "lfm3_vl", "llava_next",
    "llava_next_video", "llava_onevision", "paligemma", "pp_chart2table", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl_moe", "shieldgemma2", "smolvlm", "vipllava",
)  # fmt: skip
FIELDS = {model_type: {"text_config": {"num_hidden_layers": LAYERS}} for model_type in TYPES}
FIELDS["gemma3"]["text_config"]["layer_types"] = ["sliding_attention", "full_attention"] * 2
FIELDS["qwen2_5_vl"]["text_config"]["layer_types"] = ["full_attention"] * LAYERS
#: Features of images are added to the outputs of the first two layers, which are in different stages with 4 of them.
FIELDS["qwen3_vl"]["vision_config"] = {"deepstack_visual_indexes": [0, 1]}
SIZES = [(2, 2), (1, 4)]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Write the checkpoint of a type."""
    home = tmp_path_factory.mktemp("images")

    def write(model_type):
        if not (home / model_type).exists():
            kind = model_class(KIND, model_type)
            fields = small_fields(default_config(kind.config_class))
            for name, given in FIELDS.get(model_type, {}).items():
                fields[name] = {**fields.get(name, {}), **given}
            build_small(kind, kind.config_class(**fields)).save_pretrained(home / model_type)
        return home / model_type

    return write


def inputs_of(model):
    """Prompts with one image each."""
    inputs = example_inputs(model)
    if model.config.model_type == "gemma3":  # tokens of an image attend to each other
        inputs["token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()
    return inputs


def as_video(model, inputs):
    """Prompts with one frame of a video each, of the same patches."""
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    return {
        "input_ids": ids.masked_fill(ids == model.config.image_token_id, model.config.video_token_id),
        "mm_token_type_ids": 2 * types,
        "pixel_values_videos": inputs["pixel_values"],
        "video_grid_thw": inputs["image_grid_thw"],
    }


def relative(found, expected):
    return (found - expected).abs().max() / expected.abs().max()


def check_outputs(axis, source, path, options):
    unsharded = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    model = shardconv.load(path, device="cpu", **options)
    images = inputs_of(unsharded)
    given = [images, {"input_ids": torch.arange(3, 9)[None]}]
    if unsharded.config.model_type in VIDEOS:
        given.append(as_video(unsharded, images))
    with torch.inference_mode():
        for inputs in given:
            expected = unsharded(**inputs).logits
            assert relative(model(**inputs).logits, expected) <= 1e-4
            options = {"max_new_tokens": TOKENS, "do_sample": False}
            assert torch.equal(model.generate(**inputs, **options), unsharded.generate(**inputs, **options))
        other = {**images, "pixel_values": -images["pixel_values"]}
        assert relative(unsharded(**other).logits, unsharded(**images).logits) > 1e-2
    encoder = re.compile(r"model\.(vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline)\b")
    return any(encoder.match(name) for name, _ in model.named_parameters())


def check_all(ranks, source, path, tp, options):
    """Compare the outputs; only ranks of the first stage have parameters of the encoder."""
    held = ranks("four", check_outputs, source, path, options)
    assert held == [rank < tp for rank in range(4)]


@pytest.mark.parametrize(("model_type", "tp", "pp"), each_once(TYPES, SIZES))
def test_outputs_equal_those_of_the_unsharded_model(ranks, source_of, tmp_path, model_type, tp, pp):
    source = source_of(model_type)
    shardconv.split(source, tmp_path / "split", tp=tp, pp=pp)
    check_all(ranks, source, tmp_path / "split", tp, {})


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=MATRIX) for name in OTHERS])
def test_other_types(ranks, source_of, model_type):
    check_all(ranks, source_of(model_type), source_of(model_type), 2, {"tp": 2, "pp": 2})


def check_on_device(axis, source):
    unsharded = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    images = inputs_of(unsharded)
    with with_accelerator(), torch.no_grad():
        model = shardconv.load(source, device=ACCELERATOR, tp=2, pp=2)
        found = model(**{name: value.to(model.device) for name, value in images.items()}).logits.cpu()
    with torch.no_grad():
        assert relative(found, unsharded(**images).logits) <= 1e-4


@pytest.mark.parametrize("model_type", ["llava", pytest.param("qwen2_5_vl", marks=MATRIX)])
def test_on_a_device(ranks, source_of, model_type):
    ranks("four", check_on_device, source_of(model_type))


def check_read(axis, path, options):
    """Load, and return whether tensors of the image encoder are read."""
    names = []

    def record(reader, name, read=RankReader.read_local):
        names.append(name)
        return read(reader, name)

    with patch.object(RankReader, "read_local", record):
        shardconv.load(path, device="cpu", **options)
    return any("vision_tower" in name for name in names)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_later_stages_do_not_read_the_encoder(ranks, source_of, tmp_path, engine):
    """A split has its tensors for all of them, as vLLM needs them."""
    source = source_of("llava")
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, engine=engine)
    assert ranks("four", check_read, tmp_path / "split", {}) == [True, True, False, False]
    assert ranks("four", check_read, source, {"tp": 2, "pp": 2}) == [True, True, False, False]


def check_adapter(axis, source, adapter, path):
    expected, model = adapted(source, adapter), shardconv.load(path, device="cpu", adapter="lora")
    images = inputs_of(expected.base_model.model)
    with torch.inference_mode():
        assert relative(model(**images).logits, expected(**images).logits) <= 1e-4


def test_adapter_of_the_encoder_and_the_layers(ranks, source_of, tmp_path):
    source = source_of("qwen3_vl")
    adapter = write_adapter(tmp_path / "lora", source, target_modules=["linear_fc1", "q_proj", "down_proj"])
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, adapters=[adapter])
    ranks("four", check_adapter, source, adapter, tmp_path / "split")


def check_error(axis, source, path):
    unsharded = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    model, images = shardconv.load(path, device="cpu"), inputs_of(unsharded)
    with torch.inference_mode():
        with pytest.raises(RunError, match=r"ValueError: Input image size \(16\*7\)"):
            model(**{**images, "pixel_values": images["pixel_values"][..., :7]})
        assert relative(model(**images).logits, unsharded(**images).logits) <= 1e-4


def test_error_in_the_encoder_is_raised_on_all_stages(ranks, source_of, tmp_path):
    """The model runs afterward."""
    source = source_of("llava")
    shardconv.split(source, tmp_path / "split", tp=2, pp=2)
    ranks("four", check_error, source, tmp_path / "split")


def check_error_in_a_layer(axis, source):
    model = shardconv.load(source, device="cpu", tp=2, pp=2)
    is_failing = axis.rank < 2

    def fail(*_):
        raise ValueError("of a hook")

    if is_failing:
        model.model.language_model.layers[1].register_forward_hook(fail)
    kind, message = (
        (ValueError, "^of a hook") if is_failing else (PeerError, "^pipeline stage 0: ValueError: of a hook")
    )
    with torch.inference_mode(), pytest.raises(kind, match=message):
        model(**inputs_of(model))


def test_error_in_a_layer_is_raised_on_all_stages(ranks, source_of):
    ranks("four", check_error_in_a_layer, source_of("qwen3_vl"))


def check_text_only(axis, source):
    unsharded = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    model, text = shardconv.load(source, device="cpu", tp=2, pp=2), {"input_ids": torch.arange(3, 9)[None]}
    message = "Llama4MultiModalProjector is called outside of get_image_features and get_video_features: run it in one"
    with torch.inference_mode():
        with pytest.raises(RunError, match=message):
            model(**inputs_of(unsharded))
        assert relative(model(**text).logits, unsharded(**text).logits) <= 1e-4


def test_images_are_refused_if_the_encoder_is_used_outside_of_its_method(ranks, source_of):
    """On all stages: later ones do not have its parameters. Text is not refused."""
    ranks("four", check_text_only, source_of("llama4"))


#: Type to the reason why it does not run in stages.
REFUSED = {
    "mllama": r"no method get_image_features has all of model.multi_modal_projector, model.vision_model",
    "glm5_next": r"a Glm5NextTextDecoderLayer returns a tuple, not hidden states",
}


def check_refused(axis, path, message):
    with pytest.raises(RunError, match=rf"does not run in pipeline stages: {message}: run it in one stage"):
        shardconv.load(path, device="cpu", tp=2, pp=2)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(ranks, source_of, model_type):
    ranks("four", check_refused, source_of(model_type), REFUSED[model_type])


def test_run(source_of, tmp_path, forked_ranks, capfd):
    source = source_of("qwen2_5_vl")
    assert call("split", source, "--tp", 2, "--pp", 2, "-o", tmp_path / "split").code == 0
    result = call("run", tmp_path / "split", "--token-ids", "5 6 7", "--max-new-tokens", 4, "--check", source)
    assert result.code == 0
    assert "greedy tokens are equal" in capfd.readouterr().err

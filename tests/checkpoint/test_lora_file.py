"""LoRA files on disk: names, rows of fused layers, and what is refused. tests/runtime compares outputs."""

import json
import shutil

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.hf.build import build_small
from shardconv.hf.diffusion import default_fields, small_config
from shardconv.support.errors import ShardconvError, UsageError
from tests.support.checkpoints import contents
from tests.support.diffusion import write_diffusion
from tests.support.lora import FILES, WIDTH, change_lora, write_lora

PREFIX = "base_model.model"
LINEAR1 = "single_transformer_blocks.0"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_diffusion(tmp_path_factory.mktemp("flux") / "source", "flux")


@pytest.fixture(scope="module")
def kohya(tmp_path_factory):
    return write_lora(tmp_path_factory.mktemp("flux") / "kohya.safetensors", FILES["kohya"][1])


@pytest.fixture
def linear1(tmp_path):
    """An adapter of the projection that a single block of the original checkpoint has for four layers."""
    return write_lora(tmp_path / "linear1.safetensors", {"lora_unet_": {"single_blocks.0.linear1": (64, 448, 4, 2)}})


def test_rows_of_a_fused_layer_become_layers(source, linear1, tmp_path):
    shardconv.split(source / "transformer", tmp_path / "split", tp=2, adapters=[linear1])
    shardconv.merge(tmp_path / "split" / "adapters" / "linear1", tmp_path / "merged")
    found, stored = load_file(tmp_path / "merged" / "adapter_model.safetensors"), load_file(linear1)
    layers = [*(f"{LINEAR1}.attn.{name}" for name in ("to_q", "to_k", "to_v")), f"{LINEAR1}.proj_mlp"]
    rows = stored["lora_unet_single_blocks_0_linear1.lora_up.weight"].split([WIDTH, WIDTH, WIDTH, 4 * WIDTH])
    expected = {f"{PREFIX}.{layer}.lora_B.weight": part for layer, part in zip(layers, rows, strict=True)}
    shared = stored["lora_unet_single_blocks_0_linear1.lora_down.weight"]
    expected |= {f"{PREFIX}.{layer}.lora_A.weight": shared for layer in layers}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    settings = json.loads((tmp_path / "merged" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["alpha_pattern"]) == (4, 2, {})


def test_a_merge_writes_what_is_split_again(source, kohya, tmp_path):
    """The merged adapters are in folders of their components, which tell what they are for."""
    shardconv.split(source, tmp_path / "split", tp=2, adapters=[kohya])
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert report.adapters == ("text_encoder/kohya", "transformer/kohya")
    folders = [tmp_path / "merged" / name / "adapters" / "kohya" for name in ("text_encoder", "transformer")]
    shardconv.split(tmp_path / "merged", tmp_path / "again", tp=2, adapters=folders)
    again, split = contents(tmp_path / "again"), contents(tmp_path / "split")
    ranks = {name: data for name, data in split.items() if "rank-" in name}
    assert {name: data for name, data in again.items() if "rank-" in name} == ranks


def test_an_adapter_in_the_folder_of_the_pipeline_is_no_component(source, kohya, tmp_path):
    folder = shutil.copytree(source, tmp_path / "pipeline")
    shutil.copy(kohya, folder / "kohya.safetensors")
    report = shardconv.split(folder, tmp_path / "split", tp=2, adapters=[folder / "kohya.safetensors"])
    assert report.left_out == {"kohya.safetensors": "ignored by 'kohya.safetensors'"}


def test_names_with_a_prefix_that_new_text_encoders_lack(source, kohya, tmp_path):
    """Checkpoints of CLIP have it or not, and so do LoRA files."""
    folder = shutil.copytree(source / "text_encoder", tmp_path / "text_encoder")
    weights = folder / "model.safetensors"
    save_file({f"text_model.{name}": one for name, one in load_file(weights).items()}, weights, {"format": "pt"})
    for name, base in (("old", folder), ("new", source / "text_encoder")):
        part = change_lora(kohya, tmp_path / "part.safetensors", lambda tensors: _keep(tensors, "lora_te1_"))
        shardconv.split(base, tmp_path / name, tp=2, adapters=[part])
    old, new = (load_file(tmp_path / name / "adapters" / "part" / "rank-0-of-2.safetensors") for name in ("old", "new"))
    assert {name.replace("text_model.", "") for name in old} == {*new}


def _keep(tensors, start):
    for name in [name for name in tensors if not name.startswith(start)]:
        del tensors[name]


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


QKV, PROJ = "lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_double_blocks_0_img_attn_proj"
NORM_Q = "transformer.transformer_blocks.0.attn.norm_q"
#: Changes of the layers of the transformer in a file, and the error.
REFUSED = {
    "kind of adapter that is unknown": (
        rename(f"{PROJ}.alpha", f"{PROJ}.dora_scale"),
        f"{PROJ}.dora_scale: is not a tensor of a LoRA adapter that is supported",
    ),
    "IP adapter": (
        put("ip_adapter.0.to_k_ip.weight", WIDTH, WIDTH),
        "ip_adapter.0.to_k_ip.weight: is a tensor of an IP adapter, which is not split",
    ),
    "layer whose name ends like a tensor of an IP adapter": (
        put("transformer.output_image_proj.lora_A.weight", 4, WIDTH), "does not have a layer output_image_proj: fuse",
    ),
    "fused layer of another model": (
        put(f"{QKV}.lora_up.weight", 96, 4),
        f"{QKV}.lora_up.weight: has shape [96, 4] (expected 192 rows, as transformer_blocks.0.attn.to_q, ",
    ),
    "layer without A": (
        lambda tensors: tensors.pop(f"{PROJ}.lora_down.weight"),
        "does not have A: save the adapter again",
    ),
    "layer with alpha alone": (
        lambda tensors: [tensors.pop(name) for name in (f"{PROJ}.lora_down.weight", f"{PROJ}.lora_up.weight")],
        f"{PROJ}.alpha: its layer double_blocks_0_img_attn_proj does not have A",
    ),
    "A that is a scalar": (put(f"{PROJ}.lora_down.weight"), "attn.to_out.0 is 0 (Expected `int` >= 1)"),
    "layer with a vector": (
        lambda tensors: tensors.update({f"{NORM_Q}.lora_{one}.weight": torch.ones(4, 4) for one in "AB"}),
        "attn.norm_q.lora_B.weight: is for a weight of [4, 4] (output x input), and ",
    ),
    "alpha with several numbers": (put(f"{PROJ}.alpha", 2), f"{PROJ}.alpha: is F32 [2] (expected one number)"),
    "two tensors of a layer": (put(f"{PROJ}.lora_A.weight", 4, WIDTH), "are the same tensor of a layer"),
    "layers without a component, too": (
        put("x.lora_A.weight", 1), "has layers of an unnamed component, transformer, and this is one model",
    ),
    "layers of another component, too": (
        put("lora_te1_text_model_x.alpha", 1),
        "has layers of text_encoder, transformer, and this is one model: pass the pipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusual_files_are_refused(source, kohya, tmp_path, case):
    change, text = REFUSED[case]
    adapter = change_lora(
        kohya, tmp_path / "changed.safetensors", lambda all_: (_keep(all_, "lora_unet_"), change(all_))
    )
    with pytest.raises(ShardconvError) as error:
        shardconv.split(source / "transformer", tmp_path / "split", tp=2, adapters=[adapter])
    assert text in str(error.value)


def test_layers_without_a_component_are_refused(source, linear1, tmp_path):
    adapter = change_lora(
        linear1, tmp_path / "changed.safetensors",
        lambda tensors: [rename(name, name.replace("lora_unet_", ""))(tensors) for name in [*tensors]],
    )  # fmt: skip
    with pytest.raises(UsageError, match="does not name the component that it is for"):
        shardconv.split(source, tmp_path / "split", tp=2, adapters=[adapter])


def test_a_component_that_is_not_chosen(source, kohya, tmp_path):
    with pytest.raises(UsageError, match=r"text_encoder is not sharded .*choose it with components="):
        shardconv.split(source, tmp_path / "split", tp=2, adapters=[kohya], components=("transformer",))


def test_metadata_beside_alphas_is_refused(source, kohya, tmp_path):
    tensors = {name: one for name, one in load_file(kohya).items() if name.startswith(PROJ)}
    for text, message in (('{"transformer.r": 4}', "has both lora_adapter_metadata and"), ("[", "is not JSON")):
        save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": text})
        with pytest.raises(ShardconvError, match=message):
            shardconv.split(source / "transformer", tmp_path / "split", tp=2, adapters=[tmp_path / "x.safetensors"])


#: Class to the fields of a config, the converter of diffusers, and original layers to the features of input and output.
ORIGINAL = {
    "HunyuanVideoTransformer3DModel": (
        {},
        "_convert_hunyuan_video_lora_to_diffusers",
        {
            **{f"double_blocks.0.{stream}_attn_qkv": (64, 192) for stream in ("img", "txt")},
            **{f"double_blocks.0.{stream}_attn_proj": (64, 64) for stream in ("img", "txt")},
            **{f"double_blocks.0.{stream}_mlp.fc1": (64, 256) for stream in ("img", "txt")},
            **{f"double_blocks.0.{stream}_mlp.fc2": (256, 64) for stream in ("img", "txt")},
            **{f"double_blocks.0.{stream}_mod.linear": (64, 384) for stream in ("img", "txt")},
            "single_blocks.0.linear2": (320, 64),
            "single_blocks.0.modulation.linear": (64, 192),
        },
    ),
    "WanTransformer3DModel": (
        {"image_dim": 1280, "added_kv_proj_dim": 5120},
        "_convert_non_diffusers_wan_lora_to_diffusers",
        {
            **{f"blocks.0.{attention}_attn.{one}": (64, 64) for attention in ("self", "cross") for one in "qkvo"},
            "blocks.0.cross_attn.k_img": (64, 64),
            "blocks.0.cross_attn.v_img": (64, 64),
            "blocks.0.ffn.0": (64, 96),
            "blocks.0.ffn.2": (96, 64),
            "time_projection.1": (64, 384),
            "text_embedding.0": (24, 64),
            "text_embedding.2": (64, 64),
            "time_embedding.0": (16, 64),
            "time_embedding.2": (64, 64),
            "img_emb.proj.1": (28, 28),
            "img_emb.proj.3": (28, 64),
            "head.head": (64, 32),
        },
    ),
    "Flux2Transformer2DModel": (
        {},
        "_convert_non_diffusers_flux2_lora_to_diffusers",
        {
            **{f"double_blocks.0.{stream}_attn.qkv": (64, 192) for stream in ("img", "txt")},
            **{f"double_blocks.0.{stream}_attn.proj": (64, 64) for stream in ("img", "txt")},
            **{f"double_blocks.1.{stream}_mlp.0": (64, 384) for stream in ("img", "txt")},
            **{f"double_blocks.1.{stream}_mlp.2": (192, 64) for stream in ("img", "txt")},
            "single_blocks.0.linear1": (64, 576),
            "single_blocks.1.linear2": (256, 64),
            "img_in": (8, 64),
            "txt_in": (24, 64),
            "final_layer.linear": (64, 8),
            "time_in.in_layer": (16, 64),
            "guidance_in.out_layer": (64, 64),
            "single_stream_modulation.lin": (64, 192),
            "double_stream_modulation_img.lin": (64, 384),
            "double_stream_modulation_txt.lin": (64, 384),
        },
    ),
    "Lumina2Transformer2DModel": (
        {},
        "_convert_non_diffusers_lumina2_lora_to_diffusers",
        {
            f"{part}.0.{name}": features
            for part, count in (("layers", 6), ("noise_refiner", 6), ("context_refiner", 5))
            for name, features in [
                ("attention.qkv", (64, 128)),
                ("attention.out", (64, 64)),
                ("feed_forward.w1", (64, 256)),
                ("feed_forward.w2", (256, 64)),
                ("feed_forward.w3", (64, 256)),
                ("adaLN_modulation.1", (64, 256)),
            ][:count]
        },
    ),
    "LTX2VideoTransformer3DModel": (
        {},
        "_convert_non_diffusers_ltx2_lora_to_diffusers",
        {
            "patchify_proj": (8, 64),
            "audio_patchify_proj": (8, 32),
            "adaln_single.linear": (64, 384),
            "audio_adaln_single.emb.timestep_embedder.linear_1": (256, 32),
            "av_ca_a2v_gate_adaln_single.linear": (64, 64),
            "av_ca_audio_scale_shift_adaln_single.emb.timestep_embedder.linear_2": (32, 32),
            "transformer_blocks.0.attn1.to_q": (64, 64),
        },
    ),
    "ZImageTransformer2DModel": (
        {},
        "_convert_non_diffusers_z_image_lora_to_diffusers",
        {
            "layers.0.attention.out": (48, 48),
            "noise_refiner.0.attention.to_q": (48, 48),
            "layers.1.feed_forward.w1": (48, 128),
        },
    ),
}


#: Features of queries, keys and values of the published Lumina 2, to the features of the small model.
LUMINA = {(2304, 768, 768): (64, 32, 32)}


def adapter_of(folder, adapter):
    """The tensors of the adapter of PEFT that a file becomes."""
    shardconv.split(folder / "base", folder / "split", tp=2, adapters=[adapter])
    shardconv.merge(folder / "split" / "adapters" / "lora", folder / "merged")
    return load_file(folder / "merged" / "adapter_model.safetensors")


@pytest.mark.parametrize("class_name", ORIGINAL)
def test_names_are_those_of_the_converters_of_diffusers(tmp_path, monkeypatch, class_name):
    """Of files without an alpha, with which the converters multiply weights; with the width of a small Lumina 2."""
    fields, converter, layers = ORIGINAL[class_name]
    kind = getattr(diffusers, class_name)
    build_small(kind, small_config({**default_fields(kind), **fields})).save_pretrained(tmp_path / "base")
    sizes = {name: (*features, 4, None) for name, features in layers.items()}
    adapter = write_lora(tmp_path / "lora.safetensors", {"diffusion_model.": sizes})
    stored = load_file(adapter)
    monkeypatch.setattr(torch, "split", lambda one, sizes, dim=0: one.split(LUMINA.get(tuple(sizes), sizes), dim))
    if any(name in converter for name in ("hunyuan", "ltx2", "lumina2")):
        stored = {one.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): stored[one] for one in stored}
    expected = {
        name.replace("transformer.", f"{PREFIX}.", 1): one
        for name, one in getattr(lora_conversion_utils, converter)(stored).items()
    }
    found = adapter_of(tmp_path, adapter)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


#: Original layers of a small Stable Diffusion 3, to the features of input and output.
SD3 = {
    **{f"joint_blocks.0.{stream}_block.attn.qkv": (64, 192) for stream in ("x", "context")},
    **{f"joint_blocks.0.{stream}_block.attn.proj": (64, 64) for stream in ("x", "context")},
    **{f"joint_blocks.0.{stream}_block.mlp.fc1": (64, 256) for stream in ("x", "context")},
    **{f"joint_blocks.0.{stream}_block.mlp.fc2": (256, 64) for stream in ("x", "context")},
    "joint_blocks.0.x_block.attn2.qkv": (64, 192),
    "joint_blocks.0.x_block.attn2.proj": (64, 64),
    "joint_blocks.0.x_block.adaLN_modulation.1": (64, 576),
    "joint_blocks.0.context_block.adaLN_modulation.1": (64, 384),
    "joint_blocks.1.context_block.adaLN_modulation.1": (64, 128),
    "t_embedder.mlp.0": (256, 64),
    "y_embedder.mlp.2": (64, 64),
    "context_embedder": (24, 64),
    "final_layer.linear": (64, 32),
    "final_layer.adaLN_modulation.1": (64, 128),
}


class Changes(dict):
    """The changes of an original checkpoint; none of other tensors."""

    def pop(self, name):
        return super().pop(name, torch.zeros(6, 1))


def test_layers_of_stable_diffusion_3_are_those_of_its_checkpoints(tmp_path):
    """Products change the weights that diffusers converts; it does not convert names of adapters of this model."""
    kind, fields = diffusers.SD3Transformer2DModel, {"qk_norm": "rms_norm", "dual_attention_layers": [0]}
    build_small(kind, small_config({**default_fields(kind), **fields})).save_pretrained(tmp_path / "base")
    parts = {"lora_unet_": {name: (*features, 4, None) for name, features in SD3.items()}}
    adapter = write_lora(tmp_path / "lora.safetensors", parts)
    stored, found = load_file(adapter), adapter_of(tmp_path, adapter)
    names = {name: f"lora_unet_{name.replace('.', '_')}" for name in SD3}
    products = {
        f"{name}.weight": stored[f"{flat}.lora_up.weight"] @ stored[f"{flat}.lora_down.weight"]
        for name, flat in names.items()
    }
    converted = convert_sd3_transformer_checkpoint_to_diffusers(Changes(products))
    expected = {name.removesuffix(".weight"): one for name, one in converted.items() if one.any()}
    modules = {name.removeprefix(f"{PREFIX}.").rpartition(".lora_")[0] for name in found}
    assert modules == expected.keys()
    for module, product in expected.items():
        a, b = (found[f"{PREFIX}.{module}.lora_{one}.weight"] for one in "AB")
        assert torch.equal(b @ a, product), module

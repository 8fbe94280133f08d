"""Models of diffusers: trials of some classes, proofs, and docs/diffusion-models.md."""

import json
from functools import reduce
from importlib.machinery import ModuleSpec
from itertools import cycle

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from diffusers.configuration_utils import register_to_config
from diffusers.hooks.tensor_parallel import PackedColwiseParallel
from safetensors.torch import load_file, save_file

from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.sources.planning import make_plan
from shardconv.convert.model import config_fields, convert_model
from shardconv.hf.build import build_small
from shardconv.hf.diffusion import default_fields, of_class, small_config
from shardconv.hf.inputs import diffusion_inputs
from shardconv.hf.small import HEADS
from shardconv.plan.families.family import DIFFUSERS
from shardconv.plan.families.library_plans import library_family
from shardconv.plan.families.loading import family_for
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.proof.model_check import check_model
from shardconv.proof.prove import prove
from shardconv.runtime.dry_run import MetaModel, denoise
from shardconv.runtime.estimate import estimate_cost
from shardconv.runtime.load import load
from shardconv.support.errors import PlanError, RunError, SourceError, UsageError
from tests.support.diffusion import write_diffusion
from tests.support.matrix import MATRIX, cases
from tests.support.recording_group import recording_axis
from tests.support.verdicts import verdict
from tools.model_matrix import diffusion
from tools.model_matrix.trial import DIFFUSION, model_class, specs_in_memory, try_type

pytestmark = pytest.mark.usefixtures("forked_ranks")

ROWS = diffusion.written()
RIGHT = [row.model_type for row in ROWS if row.has_passed]
#: One stream beside an MLP, norms over all heads, and two streams.
DEFAULT = ("FluxTransformer2DModel", "WanTransformer3DModel", "SD3Transformer2DModel")

#: Configs with other modules than by default, as published checkpoints have them.
VARIANTS = {
    "Wan, images to videos": ("WanTransformer3DModel", {"image_dim": 1280, "added_kv_proj_dim": 5120}),
    "SkyReels": (
        "SkyReelsV2Transformer3DModel",
        {"image_dim": 1280, "added_kv_proj_dim": 5120, "inject_sample_info": True},
    ),
    "SD 3.5": ("SD3Transformer2DModel", {"qk_norm": "rms_norm", "dual_attention_layers": [0]}),
    "FLUX.1 dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "LTX 2": ("LTX2VideoTransformer3DModel", {"rope_type": "split"}),
    "LTX 2 with gates": (
        "LTX2VideoTransformer3DModel",
        {
            "rope_type": "split",
            **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
        },
    ),
    "CogVideoX 1.5": (
        "CogVideoXTransformer3DModel",
        {"patch_size_t": 2, "ofs_embed_dim": 512, "patch_bias": False, "use_rotary_positional_embeddings": True},
    ),
    "HunyuanVideo, images to videos": ("HunyuanVideoTransformer3DModel", {"image_condition_type": "token_replace"}),
    "PixArt with sizes": ("PixArtTransformer2DModel", {"use_additional_conditions": True}),
    "Sana": ("SanaTransformer2DModel", {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True}),
    "Qwen-Image-Edit": ("QwenImageTransformer2DModel", {"zero_cond_t": True}),
    "Z-Image with images": ("ZImageTransformer2DModel", {"siglip_feat_dim": 1152}),
    "Cosmos": ("CosmosTransformer3DModel", {"use_crossattn_projection": True, "extra_pos_embed_type": None}),
    "Motif-Video": (
        "MotifVideoTransformer3DModel",
        {
            "image_embed_dim": 1152,
            **dict.fromkeys(("enable_text_cross_attention_dual", "enable_text_cross_attention_single"), True),
        },
    ),
    "PRX": ("PRXTransformer2DModel", {"bottleneck_size": 16}),
    "Helios": ("HeliosTransformer3DModel", {"is_amplify_history": True}),
    "Helios, one scale": (
        "HeliosTransformer3DModel",
        {"is_amplify_history": True, "history_scale_mode": "scalar"},
    ),
    "EasyAnimate": ("EasyAnimateTransformer3DModel", {"after_norm": True, "add_norm_text_encoder": True}),
    "Stable Audio 3": ("StableAudio3DiTModel", {"use_differential_attention": False}),
}


def small_model(name, *, heads=HEADS, **fields):
    kind = model_class(DIFFUSION, name)
    return build_small(kind, small_config({**default_fields(kind), **fields}, heads=heads))


@pytest.mark.parametrize("name", cases(RIGHT, lambda name: name in DEFAULT))
def test_classes_are_right(ranks, tmp_path, name):
    row = try_type(ranks, tmp_path, DIFFUSION, name, [2], at_default_size=False)
    assert row.verdicts == ("passed",), row


@pytest.mark.parametrize("variant", cases(VARIANTS, lambda variant: variant == "Wan, images to videos"))
def test_variants_are_right(ranks, tmp_path, variant):
    name, fields = VARIANTS[variant]
    model = small_model(name, **fields)
    model.save_pretrained(tmp_path / "source")
    split(tmp_path / "source", tmp_path / "split", tp=2)
    paths = (tmp_path / "source", tmp_path / "split")
    assert verdict(ranks, "pair", type(model), *paths, PlanRequest()) == "passed"


def test_page_has_all_classes():
    assert [row.model_type for row in ROWS] == diffusion.classes()
    assert [row.model_type for row in ROWS if row.verdicts] == [
        name for name in diffusion.classes() if family_for(name) is not None
    ]
    assert diffusion.page(ROWS) == diffusion.PAGE.read_text("utf-8")
    assert not diffusion.unexplained(ROWS)


@MATRIX
def test_padding_is_proven_with_the_heads_of_the_source(tmp_path):
    """Z-Image has 30 heads, which are padded for 4 ranks."""
    small_model("ZImageTransformer2DModel", heads=6).save_pretrained(tmp_path / "z-image")
    report = prove(tmp_path / "z-image", tps=[4], pad=True)
    assert (report.is_proven, report.skipped) == (True, ()), report


def test_tensors_of_another_model_are_refused():
    model = small_model("WanTransformer3DModel")
    config, specs = config_fields(model), specs_in_memory(model)
    assert check_model(config, specs).is_match
    other = small_model("WanVACETransformer3DModel")
    found = check_model(config, specs_in_memory(other))
    assert (found.missing, bool(found.unused), found.is_match) == ((), True, False)


def cost_of_config(folder, name, sizes=None, **fields):
    """The cost of a class by its config alone, for ``sizes`` of the result."""
    config = {**default_fields(model_class(DIFFUSION, name)), **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return estimate_cost(folder / "config.json", tps=[1, 2], **(sizes or {}))


@pytest.mark.parametrize("frames", [81, 80])
def test_a_config_alone_is_counted(tmp_path, frames):
    """In a step of the default size: 81 frames, of which the VAE makes 21, with a token for 16 x 16 pixels.

    The pipeline makes 81 frames for 80, too.
    """
    sizes = {} if frames == 81 else {"frames": frames}
    report = cost_of_config(tmp_path, "WanTransformer3DModel", sizes, num_layers=1, num_attention_heads=2, ffn_dim=64)
    assert (report.model, report.seq) == ("WanTransformer3DModel", 512)
    assert (report.height, report.width, report.frames) == (480, 832, frames)
    one, two = report.costs
    assert two.weight_bytes < 0.6 * one.weight_bytes
    assert (one.decode.collectives, one.prefill, two.prefill) == ((), None, None)
    tokens = 21 * (480 // 16) * (832 // 16)
    counts = {(each.collective, each.num_bytes): each.count for each in two.decode.collectives}
    assert counts["all_reduce", tokens * 2 * 128 * 4] == 3  # two attentions and an MLP


@pytest.mark.parametrize(
    ("name", "fields", "height", "expected"),
    [
        ("FluxTransformer2DModel", {}, 1032, "16: pass height=1024 or height=1040"),
        ("SanaTransformer2DModel", {}, 1040, "32: pass height=1024 or height=1056"),
        ("WanTransformer3DModel", {"in_channels": 48}, 16, "32: pass height=32"),
    ],
)
def test_height_between_patches_is_refused(tmp_path, name, fields, height, expected):
    """The pixels of a patch follow from the class, and its VAE."""
    with pytest.raises(UsageError, match=f"height={height} is not a multiple of {expected}$"):
        cost_of_config(tmp_path, name, {"height": height}, **fields)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("DiTTransformer2DModel", "seq"),
        ("HunyuanDiT2DModel", "seq"),  # its config has the numbers of tokens
        ("LatteTransformer3DModel", "frames"),  # likewise
        ("PriorTransformer", "height"),
    ],
)
def test_sizes_that_a_step_does_not_have_are_refused(tmp_path, name, size):
    with pytest.raises(UsageError, match=f"no input of a {name} depends on {size}=16: remove it"):
        cost_of_config(tmp_path, name, {size: 16}, **config_fields(small_model(name)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AceStepTransformer1DModel", "the inputs depend on the length of the audio, which no option sets"),
        (
            "ErnieImageTransformer2DModel",
            "the pipeline does not have a default number of tokens: pass --seq TOKENS",
        ),
        ("CosmosTransformer3DModel", "a CosmosTransformer3DModel needs torchvision: pip install torchvision"),
    ],
)
def test_steps_that_are_not_counted(tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr("shardconv.hf.inputs.find_spec", lambda _: None)
    report = cost_of_config(tmp_path, name, num_layers=1)
    assert report.costs[1].weight_bytes
    assert report.costs[1].not_counted == reason


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, r"config: TypeError: unsupported .* \(null in the config: in_channels, patch_size\)$"),
        ({"in_channels": "4", "patch_size": 2}, r"config: TypeError: [^(]*$"),
    ],
)
def test_null_fields_of_a_config_are_named_where_they_are_the_cause(tmp_path, fields, problem):
    with pytest.raises(RunError, match=problem):
        cost_of_config(tmp_path, "HunyuanDiT2DModel", **fields)


#: Classes whose steps are counted.
COUNTED = [name for name in RIGHT if "step" in (entry := of_class(name)) and "not_counted" not in entry]
#: One with sizes of tokens as inputs, and two with inputs that keep their values, one of them in autocast.
DEFAULT_COUNTED = ("LTXVideoTransformer3DModel", "QwenImage21Transformer2DModel", "MochiTransformer3DModel")
#: Sizes of a step with the inputs of a small model.
STEP = {"batch": 2, "seq": 6, "height": 64, "width": 64, "frames": 17}


def check_counted(axis, name, calls):
    """The collectives of a small model on real ranks are those of a dry run."""
    model, recording = small_model(name), recording_axis(axis)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)  # LuminaNextDiT2DModel does not initialize all
    inputs = diffusion_inputs(model, torch.Generator().manual_seed(0), STEP)
    convert_model(model, group=recording)
    recording.group.taken()
    with torch.no_grad():
        model(**inputs)
    assert recording.group.taken() == calls


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers, in the constructor of Chroma
@pytest.mark.parametrize("name", cases(COUNTED, lambda name: name in DEFAULT_COUNTED))
def test_counted_collectives_are_the_real_ones(ranks, name):
    model = MetaModel(config_fields(small_model(name)), torch.float32)
    usage = denoise(model, PlanRequest(), 2, STEP)
    assert usage.decode
    ranks("pair", check_counted, name, [(one.collective, one.num_bytes) for one in usage.decode])


def check_other_order_of_defaults(axis):
    model = small_model("FluxTransformer2DModel")
    names = ["guidance_embeds", "out_channels"]
    model.register_to_config(_use_default_values=names if axis.rank else names[::-1])
    convert_model(model, group=axis)


def test_names_of_defaults_may_differ_in_order(ranks):
    """diffusers has them in the order of a set, which differs between processes."""
    ranks("pair", check_other_order_of_defaults)


def check_chroma_with_images(axis):
    """Chroma has the IP adapters of FLUX; tests/runtime has pipelines of FLUX and Stable Diffusion 3."""
    models = [small_model("ChromaTransformer2DModel") for _ in range(2)]
    convert_model(models[1], group=axis)
    generator = torch.Generator().manual_seed(0)
    inputs, shapes = diffusion_inputs(models[0], generator), {"weight": (64, 24), "bias": (64,)}
    projection = {"proj.weight": (96, 8), "proj.bias": (96,), "norm.weight": (24,), "norm.bias": (24,)}
    layers = {f"{layer}.to_{one}_ip.{own}": shapes[own] for layer in range(2) for one in "kv" for own in shapes}
    adapter = {
        part: {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()}
        for part, tensors in (("image_proj", projection), ("ip_adapter", layers))
    }
    images = {"ip_adapter_image_embeds": [torch.ones(2, 1, 8)]}
    with torch.no_grad():
        before = models[0](**inputs)[0]
        for model in models:
            model._load_ip_adapter_weights(adapter)
        expected, found = (model(**inputs, joint_attention_kwargs=images)[0] for model in models)
    assert (expected - before).abs().max() > 0.1
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers, in the constructor of Chroma
def test_ip_adapter_of_chroma(ranks):
    ranks("pair", check_chroma_with_images)


@pytest.mark.parametrize("name", ["QwenImageTransformer2DModel", "QwenImage21Transformer2DModel"])
def test_tp_plan_of_diffusers_is_right(ranks, tmp_path, monkeypatch, name):
    monkeypatch.setattr("shardconv.plan.request.family_for", lambda _: None)
    model = small_model(name)
    model.save_pretrained(tmp_path / "source")
    report = split(tmp_path / "source", tmp_path / "split", tp=2)
    assert (report.family, "diffusers' own plan" in report.assumed[0]) == (DIFFUSERS, True)
    paths = (tmp_path / "source", tmp_path / "split")
    assert verdict(ranks, "pair", type(model), *paths, PlanRequest(DIFFUSERS)) == "passed"


#: A class of diffusers with a plan, whose attention has one projection for q, k and v, as has its gated MLP for both.
PLANNED = """
class Planned(ModelMixin, ConfigMixin):
    _tp_plan = {
        "attn.to_qkv": PackedColwiseParallel([1, 1, 1]),
        "attn.to_out": "rowwise",
        "ff.linear_in": PackedColwiseParallel([1, 1]),
        "ff.linear_out": "rowwise",
    }

    @register_to_config
    def __init__(self, num_attention_heads=4, attention_head_dim=6):
        super().__init__()
        width = num_attention_heads * attention_head_dim
        self.attn, self.ff, self.norm = torch.nn.Module(), torch.nn.Module(), torch.nn.LayerNorm(width)
        self.attn.heads = num_attention_heads
        self.attn.to_qkv, self.attn.to_out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.ff.linear_in, self.ff.linear_out = torch.nn.Linear(width, 2 * 16), torch.nn.Linear(16, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.attn.heads, -1)).transpose(1, 2) for y in self.attn.to_qkv(x).chunk(3, -1))
        x = self.norm(x + self.attn.to_out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2)))
        gate, up = self.ff.linear_in(x).chunk(2, dim=-1)
        return x + self.ff.linear_out(gate.sigmoid() * up)
"""


def planned_class():
    """The class, as diffusers would have it."""
    names = {
        "torch": torch, "ModelMixin": diffusers.ModelMixin, "ConfigMixin": diffusers.ConfigMixin,
        "register_to_config": register_to_config, "PackedColwiseParallel": PackedColwiseParallel,
    }  # fmt: skip
    exec(PLANNED, names)
    return names["Planned"]


def check_planned(axis, source, folder):
    """The largest difference of a rank's output from the unsharded model's."""
    torch.manual_seed(0)
    x, unsharded = torch.randn(2, 3, 24), planned_class().from_pretrained(source)
    sharded = load(folder, model=planned_class(), device="cpu", group=axis)
    return (sharded(x) - unsharded(x)).abs().max().item(), sharded.attn.to_qkv.weight.shape


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A checkpoint of the class, whose source is the only one of the installed diffusers."""
    (tmp_path / "diffusers" / "models").mkdir(parents=True)
    spec = ModuleSpec("diffusers", None)
    spec.submodule_search_locations = [str(tmp_path / "diffusers")]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)

    def write(plan_source):
        library_family.cache_clear()
        (tmp_path / "diffusers" / "models" / "planned.py").write_text(plan_source)
        planned_class()().save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    yield write
    library_family.cache_clear()


def test_fused_layers_of_a_tp_plan_are_sharded_by_heads(ranks, planned, tmp_path):
    source = planned(PLANNED)
    assert split(source, tmp_path / "split", tp=2).family == DIFFUSERS
    for difference, shape in ranks("pair", check_planned, source, tmp_path / "split"):
        assert (difference < 1e-6, shape) == (True, (36, 24))
    with pytest.raises(PlanError, match="4 is not a multiple of 8"):
        split(source, tmp_path / "eight", tp=8)


@pytest.mark.parametrize("style", ["PackedColwiseParallel()", "PackedColwiseParallel([1, 2])", '"sequence"'])
def test_a_tp_plan_with_another_style_is_refused(planned, style):
    """Sizes that only the code determines, unequal ones, and an unknown style."""
    with pytest.raises(PlanError, match="no family is known for class 'Planned' of diffusers"):
        make_plan(planned(PLANNED.replace("PackedColwiseParallel([1, 1])", style)), tp=2)


def test_classes_without_a_family_are_refused():
    """Also if rules by names would match all tensors."""
    with pytest.raises(PlanError, match="no family is known for class 'AutoencoderKL' of diffusers"):
        planner_for({}, {"_class_name": "AutoencoderKL"}, PlanRequest())


#: Rules for the attention of EasyAnimate in its second block, if its text is not projected.
UNPROJECTED = """
rules."transformer_blocks.1.attn1.**.*" = { style = "replicate" }
modules."transformer_blocks.1.attn1" = { attributes = { heads = "num_attention_heads" } }
"""


def test_layers_without_projections_of_the_text_are_refused(tmp_path):
    """EasyAnimate would use heads of all ranks there; the remedy of the error works."""
    small_model("EasyAnimateTransformer3DModel", mmdit_layers=1).save_pretrained(tmp_path / "source")
    problem = r"blocks.1.attn1.to_q.bias: .*blocks.1.attn1.add_q_proj.weight, which is not in the checkpoint"
    with pytest.raises(PlanError, match=problem + r" \(got mmdit_layers = 1 in the config\): .*pass rules=FILE"):
        make_plan(tmp_path / "source", tp=2)
    (tmp_path / "rules.toml").write_text(UNPROJECTED)
    report = prove(tmp_path / "source", tps=[2], rules=tmp_path / "rules.toml")
    assert report.is_proven, report


#: Texts in names of tensors of LTX-Video in diffusers, to the texts in original names.
ORIGINAL = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm", "norm_k": "k_norm"}


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float32)])
def test_lines_that_convert_original_names_keep_the_values(tmp_path, monkeypatch, dtypes):
    """diffusers has the config from the Hub, and loads in float32 by default."""
    model = small_model("LTXVideoTransformer3DModel")
    expected = {name: one.to(dtype) for (name, one), dtype in zip(model.state_dict().items(), cycle(dtypes))}
    original = {
        reduce(lambda text, pair: text.replace(*pair), ORIGINAL.items(), name): one for name, one in expected.items()
    }
    save_file(original, tmp_path / "ltx.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(model), "load_config", lambda **_: dict(model.config))
    with pytest.raises(SourceError, match="original names") as error:
        split("ltx.safetensors", tp=2)
    exec(str(error.value).partition("\n")[2])
    found = load_file("ltx-diffusers/diffusion_pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name].to(dtypes[-1])) for name in found)
    assert {one.dtype for one in found.values()} == {dtypes[-1]}


def test_unknown_classes_are_refused(tmp_path):
    with pytest.raises(RunError, match="does not name a model class of diffusers"):
        check_model({"_class_name": "FluxPipeline"}, {})


def test_a_changed_config_is_refused(tmp_path):
    """Other layers than those of the checkpoint."""
    small_model("WanTransformer3DModel").save_pretrained(tmp_path / "wan")
    config = json.loads((tmp_path / "wan" / "config.json").read_text())
    (tmp_path / "wan" / "config.json").write_text(json.dumps({**config, "num_layers": 1}))
    split(tmp_path / "wan", tmp_path / "split", tp=1)
    with pytest.raises(RunError, match="tensors that WanTransformer3DModel does not use"):
        load(tmp_path / "split", device="cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return write_diffusion(tmp_path_factory.mktemp("pipeline") / "flux", "flux")


def test_a_pipeline_is_proven_by_components(pipeline):
    report = prove(pipeline, tps=[2], components=("text_encoder", "transformer"))
    assert [(name, one.model) for name, one in report.components.items()] == [
        ("text_encoder", "CLIPTextModel"), ("transformer", "FluxTransformer2DModel")
    ]  # fmt: skip
    assert (report.is_proven, report.components["transformer"].family) == (True, "flux"), report


def test_a_rank_holds_the_weights_of_all_components(pipeline, tmp_path):
    """Those of split files, and those of files that are copied."""
    report = estimate_cost(pipeline, tps=[1, 2])
    split(pipeline, tmp_path / "split", tp=2)
    ranks = [load_file(path) for path in (tmp_path / "split").glob("*/rank-0-of-2.safetensors")]
    sharded = sum(tensor.nbytes for tensors in ranks for tensor in tensors.values())
    assert report.copied_bytes == (pipeline / "vae" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert report.weight_bytes[2] == sharded + report.copied_bytes
    assert report.components["text_encoder"].costs[1].prefill.sent_bytes > 0


def test_a_size_that_one_component_does_not_support(pipeline):
    with pytest.raises(PlanError, match=r"component text_encoder \(CLIPTextModel\): "):
        estimate_cost(pipeline, tps=[8])

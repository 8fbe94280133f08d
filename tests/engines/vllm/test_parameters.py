"""Parameters of vLLM's models, loaded from rank files and by vLLM's default loader from the source.

Bytes are compared before ``process_weights_after_loading``, which includes models whose kernels
the CPU build does not have.
"""

import shutil
import tomllib
from pathlib import Path
from unittest import mock

import pytest

import shardconv
from shardconv.engines.check import check_engine
from shardconv.engines.vllm_plugin import LOAD_FORMAT
from shardconv.layouts import choice
from shardconv.plan.experts import Expert, place_expert
from shardconv.support.errors import PlanError, SourceError
from tests.engines.vllm.parameters import assert_same, parameters
from tests.engines.vllm.small import CASES, MODELS, write
from tests.support.models import model_class
from tools.model_matrix.trial import small

pytestmark = pytest.mark.usefixtures("plugin")


def has_layout(model_type):
    """Whether vLLM's layout supports a model type."""
    return model_type in tomllib.loads(Path(choice.__file__).with_name("vllm.toml").read_text())["types"]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_parameters(name, tp, sources, tmp_path):
    """From the source, a split for vLLM, and its merge."""
    source = write(name, sources)
    split, merged = tmp_path / "split", tmp_path / "merged"
    shardconv.split(source, split, tp=tp, engine="vllm")
    shardconv.merge(split, merged)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == {
        path.name: path.read_bytes() for path in merged.iterdir()
    }
    assert check_engine(split).differences == ()
    for rank in range(tp):
        expected = parameters(source, tp, rank, "auto")
        assert_same(parameters(split, tp, rank, LOAD_FORMAT), expected)
        assert_same(parameters(source, tp, rank, LOAD_FORMAT), expected)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_layout(name, tp, sources, tmp_path):
    """From rank files in vLLM's layout, if it supports the type."""
    source, split = write(name, sources), tmp_path / "split"
    if not has_layout(MODELS[name].model_type):
        with pytest.raises(PlanError, match=MODELS[name].model_type):
            shardconv.split(source, split, tp=tp, layout="vllm")
        return
    shardconv.split(source, split, tp=tp, layout="vllm")
    assert check_engine(split).differences == ()
    for rank in range(tp):
        assert_same(parameters(split, tp, rank, "sharded_state"), parameters(source, tp, rank, "auto"))


@pytest.mark.parametrize("options", [{"layout": "vllm"}, {"engine": "vllm"}], ids=["sharded_state", "shardconv"])
def test_several_files_per_rank_of_a_converted_checkpoint(sources, tmp_path, options):
    """vLLM reads all files of a rank."""
    source, split = write("llama", sources), tmp_path / "split"
    shardconv.split(source, tmp_path / "one", tp=1, dtype="bf16")
    shardconv.merge(tmp_path / "one", tmp_path / "converted")
    report = shardconv.split(source, split, tp=2, dtype="bf16", max_file_size="20kB", **options)
    assert report.files_per_rank > 2
    load_format = "sharded_state" if "layout" in options else LOAD_FORMAT
    for rank in range(2):
        assert_same(parameters(split, 2, rank, load_format), parameters(tmp_path / "converted", 2, rank, "auto"))


@pytest.mark.parametrize(("total", "ep"), [(8, 2), (5, 2), (7, 4), (60, 8), (3, 3)])
def test_experts_of_a_rank(total, ep):
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map  # noqa: PLC0415

    placement = place_expert(Expert(None, total), (total,), 1, ep)
    for rank in range(ep):
        _, numbers, _ = determine_expert_map(ep, rank, total)
        (interval,) = placement.ranks[rank]
        assert (numbers >= 0).nonzero().flatten().tolist() == [*range(*interval)]


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (2, 4), (1, 2)])
@pytest.mark.parametrize("name", ["mixtral", "mixtral, 5 experts", "qwen3_moe", "gpt_oss"])
def test_expert_parallel_ranks(name, tp, ep, sources, tmp_path):
    """Of data groups of vLLM, with and without a split."""
    source, split = write(name, sources), tmp_path / "split"
    shardconv.split(source, split, tp=tp, ep=ep, engine="vllm")
    assert check_engine(split).differences == ()
    for rank in range(ep):
        expected = parameters(source, tp, rank, "auto", ep)
        assert_same(parameters(split, tp, rank, LOAD_FORMAT, ep), expected)
        assert_same(parameters(source, tp, rank, LOAD_FORMAT, ep), expected)


def test_shared_experts_are_replicated_in_data_groups(sources, tmp_path):
    source, split = write("deepseek_v2", sources), tmp_path / "split"
    shardconv.split(source, tmp_path / "other", tp=2, ep=4, engine="vllm")
    assert "--ep 4 --for vllm --replicate NAME" in check_engine(tmp_path / "other").differences[0]
    shardconv.split(source, split, tp=2, ep=4, engine="vllm", replicate=("**.shared_experts.*",))
    assert check_engine(split).differences == ()
    for rank in range(4):
        assert_same(parameters(split, 2, rank, LOAD_FORMAT, 4), parameters(source, 2, rank, "auto", 4))


#: Models whose stages are known, and the layouts that vLLM reads them in.
STAGED = [
    *((name, "native") for name in ("llama", "phi3", "gpt_oss", "deepseek_v2", "olmo2", "qwen3_next")),
    *(
        (name, layout)
        for name in ("llama, tied", "gemma3_text", "qwen3_moe", "mixtral")
        for layout in ("native", "vllm")
    ),
]


@pytest.mark.parametrize(("name", "layout"), STAGED)
def test_each_stage_has_the_parameters_of_the_model(name, layout, sources, tmp_path):
    """vLLM constructs each stage on the meta device, and loads all parameters of it."""
    source = write(name, sources)
    options = {"engine": "vllm"} if layout == "native" else {"layout": layout}
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, **options)
    assert check_engine(tmp_path / "split").differences == ()


@pytest.mark.parametrize(
    ("model_type", "tp"), [("qwen2_5_vl", 2), ("mistral3", 1), ("qwen3_vl", 1), ("qwen3_5", 1), ("qwen3_5_moe", 1)]
)
def test_an_image_encoder_is_on_all_stages(tmp_path, model_type, tp):
    """Also of models whose text model has the embedding on all stages, as Qwen3.5."""
    from vllm.model_executor.models import registry  # noqa: PLC0415 - after the environment is set

    small(model_class("image-text-to-text", model_type)).save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=tp, pp=2, engine="vllm")
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):  # which has torchvision
        assert check_engine(tmp_path / "split").differences == ()


def test_a_split_without_the_engine_may_lack_tensors(tmp_path):
    source = write("qwen3_moe", tmp_path)
    shardconv.split(source, tmp_path / "split", tp=1, pp=2)
    found = check_engine(tmp_path / "split").differences
    assert "stage 1 of vllm needs model.embed_tokens.weight, which is on others" in found[1]
    assert "--for vllm" in found[1]


def test_source_that_changes_after_the_iterator_ended(sources, tmp_path):
    """Some models of vLLM copy weights then, as Llama 4 does."""
    from vllm.model_executor.models.llama import LlamaForCausalLM  # noqa: PLC0415 - after the environment is set

    source = shutil.copytree(write("llama", sources), tmp_path / "source")
    file = next(source.glob("*.safetensors"))

    def load_weights(self, weights):
        kept = list(weights)
        file.write_bytes(file.read_bytes())
        return original(self, kept)

    original = LlamaForCausalLM.load_weights
    with (
        mock.patch.object(LlamaForCausalLM, "load_weights", load_weights),
        pytest.raises(SourceError, match="changed while it was read"),
    ):
        parameters(source, 2, 0, LOAD_FORMAT)

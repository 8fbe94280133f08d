"""The tensors that a rank of an engine reads in its pipeline stage, and the bytes that are read and verified."""

import re
import shlex

import pytest

import shardconv
from shardconv.engines.weights import EngineStages, open_for_engine, rank_weights
from shardconv.support.errors import IntegrityError, NotHeldError, WorldSizeError
from tests.checkpoint.test_stages import rank_files, stage_of, tensors_of
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import call
from tests.support.damage import flip, place

LAYERS = (1, 2, 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "source", config=llama_config(layers=sum(LAYERS)))


@pytest.fixture(autouse=True)
def _small_stripes(monkeypatch):
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 5000)


def opened(folder, stage, rank=0, *, layers=LAYERS, verify=True):
    stages = None if layers is None else EngineStages(layers, stage)
    return open_for_engine(folder, tp=2, rank=rank, engine="vllm", verify=verify, stages=stages)


@pytest.fixture(scope="module")
def splits(source, tmp_path_factory):
    """The source, a split with the stages of the engine, and one without stages."""
    folder = tmp_path_factory.mktemp("splits")
    shardconv.split(source, folder / "stages", tp=2, stages=LAYERS, engine="vllm")
    shardconv.split(source, folder / "one", tp=2, engine="vllm")
    return {"source": source, "stages": folder / "stages", "no stages": folder / "one"}


@pytest.mark.parametrize("kind", ["source", "stages", "no stages"])
@pytest.mark.parametrize("stage", range(len(LAYERS)))
def test_tensors_and_bytes_are_those_of_the_stage(splits, kind, stage):
    expected = {
        name: len(data)
        for name, (_, _, data) in tensors_of(rank_files(splits["no stages"])[1]).items()
        if stage_of(name, LAYERS) == stage
    }
    weights = opened(splits[kind], stage, rank=1)
    assert {name for name, tensor in rank_weights(weights) if tensor.numel()} == set(expected)
    for name in expected:
        weights.reader.read(name)
    read = weights.reader.num_bytes_read
    assert read <= 2 * sum(expected.values())


@pytest.mark.parametrize("kind", ["stages", "no stages"])
def test_only_bytes_of_the_stage_are_verified(source, tmp_path, kind):
    options = {"stages": LAYERS} if kind == "stages" else {}
    shardconv.split(source, tmp_path / "split", tp=2, engine="vllm", **options)
    damaged = rank_files(tmp_path / "split")[2 if kind == "stages" else 0]
    flip(damaged, place(damaged, "model.layers.1.mlp.up_proj.weight")[0])
    for stage in (0, 2):
        list(rank_weights(opened(tmp_path / "split", stage)))
    with pytest.raises(IntegrityError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        list(rank_weights(opened(tmp_path / "split", 1)))


@pytest.mark.parametrize(("layers", "expected"), [((2, 2), "2,2"), (None, "all")])
def test_other_stages_are_refused(splits, layers, expected, tmp_path):
    """The command that the message has makes a checkpoint that the engine accepts."""
    message = rf"got 1,2,1 layers, expected {expected} .*VLLM_PP_LAYER_PARTITION=1,2,1, or run shardconv (reshard .*)"
    with pytest.raises(WorldSizeError, match=message) as error:
        opened(splits["stages"], 0, layers=layers)
    command = re.search(message, str(error.value))[1]
    call(*shlex.split(command), "--for", "vllm", "-o", tmp_path / "again", "-q")
    opened(tmp_path / "again", 0, layers=layers)


def test_tensors_that_the_engine_has_on_all_stages(tmp_path):
    """vLLM's class of Gemma has embedding, norm and head on each stage; a split for another engine lacks them."""
    config = {**llama_config(layers=2), "model_type": "gemma"}
    source = write_checkpoint(tmp_path / "source", config=config)
    shardconv.split(source, tmp_path / "split", tp=2, pp=2)
    with pytest.raises(NotHeldError, match=r"stage 1 of vllm needs model.embed_tokens.weight.* --for vllm"):
        opened(tmp_path / "split", 1, layers=(1, 1))
    shardconv.reshard(tmp_path / "split", tmp_path / "again", tp=2, pp=2, engine="vllm")
    names = [name for name, _ in rank_weights(opened(tmp_path / "again", 1, layers=(1, 1)))]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= {*names}

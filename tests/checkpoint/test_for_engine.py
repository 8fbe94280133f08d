"""Plans that follow an engine's boundaries, and readers of one rank's bytes."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.engine import shards
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import make_plan, plan_source
from shardconv.checkpoint.split import loadable, rank_reader
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader, RankSourceReader
from shardconv.engines.rank_tensor import RankTensor
from shardconv.engines.weights import RankSource, open_for_engine, rank_weights
from shardconv.files.input_files import InputFiles
from shardconv.layers.sharding import take_shard
from shardconv.plan.engines import Engine
from shardconv.plan.families.loading import family_for
from shardconv.plan.placement import IndivisibleError, Interval, Padding, Unit, shard_dim
from shardconv.plan.rule_set import RuleSet, rules_for
from shardconv.support.errors import IntegrityError, NotHeldError, SourceError, UsageError, WorldSizeError
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.command import call
from tests.support.damage import flip
from tests.support.models import Model
from tests.support.tensors import bits, tensors_of


@given(st.integers(1, 10_000), st.integers(1, 8))
def test_vocabulary_is_padded_as_vllm_pads_it(vocabulary, tp):
    """vLLM 0.32 pads with ``pad_vocab_size`` to a multiple of 64, which tp has to divide; ranks have equal rows."""
    padded = (vocabulary + 63) // 64 * 64
    unit = Unit(vocabulary, pad=True, multiple=64)
    if padded % tp:
        with pytest.raises(IndivisibleError, match=f"{padded} .{vocabulary} padded to a multiple of 64. is not a mult"):
            shard_dim(0, [unit], tp)
        return
    rows = padded // tp
    for rank, entries in enumerate(shard_dim(0, [unit], tp).ranks):
        first, last = min(rank * rows, vocabulary), min((rank + 1) * rows, vocabulary)
        expected = [Interval(first, last)] * (first < last) + [Padding(rows - (last - first))] * (last - first < rows)
        assert list(entries) == expected


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A vocabulary of 131: 192 when it is padded."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), parts=2)


def test_boundaries_of_vllm(source, tmp_path):
    """Rank files have 48 rows each; reshard equals a split, and merge restores the source."""
    shardconv.split(source, tmp_path / "four", tp=4, engine="vllm")
    full = tensors_of(source)
    for rank in range(4):
        found = load_file(tmp_path / "four" / f"rank-{rank}-of-4.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.nn.functional.pad(full[name], (0, 0, 0, 192 - 131))
            assert torch.equal(bits(found[name]), bits(padded[rank * 48 : (rank + 1) * 48]))
    shardconv.reshard(tmp_path / "four", tmp_path / "two", tp=2)
    shardconv.split(source, tmp_path / "direct", tp=2, engine="vllm")
    assert contents(tmp_path / "two") == contents(tmp_path / "direct")
    shardconv.split(source, tmp_path / "own", tp=4)
    shardconv.reshard(tmp_path / "own", tmp_path / "vllm", tp=2, engine="vllm")
    assert contents(tmp_path / "vllm") == contents(tmp_path / "direct")
    shardconv.merge(tmp_path / "two", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_plan_of_a_split_names_its_engine(source, tmp_path):
    for engine in (None, "vllm"):
        shardconv.split(source, tmp_path / f"{engine}", tp=2, engine=engine)
        report = json.loads(call("plan", tmp_path / f"{engine}", "--json").out)
        assert report["engine"] == engine
        line = "sharded at the boundaries of vllm (--for vllm)\n"
        assert (line in call("plan", tmp_path / f"{engine}").out) == (engine is not None)


def test_unknown_engine_is_refused(source):
    with pytest.raises(UsageError, match=r"engine 'other' is not supported \(expected vllm, sglang, shardconv\)"):
        make_plan(source, tp=2, engine="other")


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """A model with norms over all heads, of which vLLM has the full weights on each rank."""
    config = {"num_key_value_heads": 2, "head_dim": 16}
    return Model("olmo2", config).write(tmp_path_factory.mktemp("norms") / "olmo2")


def test_norms_of_a_submodel():
    """The rules of an engine apply to the model type of each submodel."""
    text = {"model_type": "gemma4_text", "num_hidden_layers": 1, "hidden_size": 64}
    own = Engine("own", replicated={"gemma4_text": ("**.per_layer_projection",)})
    for config in (text, {"model_type": "gemma4", "text_config": text}):
        rules = rules_for(family_for(config["model_type"]), config).for_engine(own)
        again = msgspec.json.decode(msgspec.json.encode(rules.stored()), type=RuleSet)
        for found in (rules, again, again.without_engine().for_engine(own)):
            origins = [rule.origin for scope in found.models for rule in scope.family.rules]
            texts = [scope for scope in found.models if (scope.config or {}).get("model_type") == "gemma4_text"]
            assert origins.count("engine own") == len(texts) > 0


def test_rules_of_the_user_come_before_those_of_an_engine(norms, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[rules]\n"model.layers.*.self_attn.q_norm" = { style = "colwise" }\n')
    made = make_plan(norms, tp=2, engine="vllm", rules=plan)
    assert made.placement("model.layers.0.self_attn.q_norm.weight").dim == 0
    assert made.placement("model.layers.0.self_attn.k_norm.weight").dim is None


def test_model_type_that_is_not_a_name(source, tmp_path):
    """A model_type that is not a string is planned by the names of tensors."""
    folder = shutil.copytree(source, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": ["llama"]}))
    assert make_plan(folder, tp=2, engine="vllm").family == "by_name"


# --- readers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("engine", [None, "vllm"])
def test_readers_return_the_shards(tp, engine, tmp_path):
    """From a rank file and from the source, including shards whose rows are wide enough to be read one by one."""
    config = llama_config(layers=1, hidden=64, intermediate=4096 * tp)
    source = write_checkpoint(tmp_path / "source", parts=2, config=config)
    shardconv.split(source, tmp_path / "split", tp=tp, engine=engine)
    manifest = read_manifest(tmp_path / "split")
    opened, _, _, planner, _ = plan_source(source, engine=engine)
    for rank in range(tp):
        expected = load_file(manifest.rank_paths(tmp_path / "split")[rank])
        readers = RankFileReader(manifest, tmp_path / "split", rank), RankSourceReader(opened, planner.plan(tp), rank)
        for reader in readers:
            assert reader.tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert bytes(reader.read(name)) == bits(tensor).numpy().tobytes(), (name, rank)
            reader.finish()
            reader.close()
        size = sum(tensor.nbytes for tensor in expected.values())
        assert readers[0].num_bytes_read == size


def test_source_is_read_by_ranges(tmp_path):
    """Of a row parallel weight, only the rank's columns are read."""
    config = llama_config(layers=1, hidden=64, intermediate=8192)
    opened = open_source(write_checkpoint(tmp_path / "source", config=config))
    name = "model.layers.0.mlp.down_proj.weight"
    for rank in range(2):
        reader = RankSourceReader(opened, make_plan(tmp_path / "source", tp=2), rank)
        data = reader.read(name)
        full = load_file(tmp_path / "source" / "model.safetensors")[name]
        assert bytes(data) == bits(full[:, rank * 4096 : (rank + 1) * 4096]).numpy().tobytes()
        assert reader.num_bytes_read == full.nbytes // 2
        reader.close()


def test_source_that_cannot_be_mapped_is_read_in_blocks(monkeypatch, tmp_path):
    """Blocks that end within rows, of tensors that are larger than a block."""
    monkeypatch.setattr(InputFiles, "map", lambda *_: None)
    monkeypatch.setattr(rank_reader, "_BLOCK_BYTES", 20 * 2**10)
    config = llama_config(layers=1, hidden=64, intermediate=8192)
    full = load_file(write_checkpoint(tmp_path / "source", config=config) / "model.safetensors")
    plan = make_plan(tmp_path / "source", tp=2)
    for rank in range(2):
        reader = RankSourceReader(open_source(tmp_path / "source"), plan, rank)
        for name, tensor in full.items():
            assert bytes(reader.read(name)) == bits(take_shard(tensor, plan.placement(name), rank)).numpy().tobytes(), (
                name
            )


def as_torch_file(source):
    """Matrices are stored transposed."""
    found = load_file(source / "model.safetensors")
    transposed = {name: one.t().contiguous().t() if one.dim() == 2 else one for name, one in found.items()}
    torch.save(transposed, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


def as_dcp(source):
    found = load_file(source / "model.safetensors")
    dcp.save(found, checkpoint_id=source, no_dist=True)
    (source / "model.safetensors").unlink()


def aligned(source):
    save_file(load_file(source / "model.safetensors"), source / "model.safetensors")


#: For each kind of source the change that makes it, and whether its tensors are views of mapped files.
SOURCES = {"aligned": (aligned, True), "misaligned": (lambda _: None, False), "torch": (as_torch_file, False),
           "dcp": (as_dcp, False), "not mapped": (aligned, False)}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")  # without a process group
@pytest.mark.parametrize("engine", [None, "vllm"])
@pytest.mark.parametrize("kind", SOURCES)
def test_weights_of_a_source(kind, engine, monkeypatch, tmp_path):
    """For vLLM, shards of embeddings have padding. Tensors of mapped files are full ones, which are not copied."""
    source = write_checkpoint(tmp_path / "source")
    full, (change, is_view) = load_file(source / "model.safetensors"), SOURCES[kind]
    change(source)
    if kind == "not mapped":
        monkeypatch.setattr(InputFiles, "map", lambda *_: None)
    plan = make_plan(source, tp=2, engine=engine)
    for rank in range(2):
        reader = RankSourceReader(open_source(source), plan, rank)
        for name, weight in rank_weights(RankSource(reader, "")):
            placement, mapped = plan.placement(name), reader.map_full(name)
            assert isinstance(weight, RankTensor) == (placement.dim is not None and not is_view)
            if placement.dim is not None:
                assert (mapped is not None) == is_view
            if mapped is not None:
                assert weight.data_ptr() == torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
            if not isinstance(weight, RankTensor):
                assert torch.equal(bits(weight), bits(full[name]))
                continue
            for one, _ in placement.local_intervals(rank):
                found, expected = (of.narrow(placement.dim, one.start, one.size) for of in (weight, full[name]))
                assert torch.equal(bits(found.read()), bits(expected)), name


RANK_FILE = "rank-1-of-2.safetensors"


def test_engine_refuses_other_and_damaged_checkpoints(source, tmp_path):
    """Before the engine has all tensors."""
    shardconv.split(source, tmp_path / "split", tp=2, engine="vllm")
    flip(tmp_path / "split" / RANK_FILE)
    with pytest.raises(IntegrityError, match="differ from their checksum"):
        list(rank_weights(open_for_engine(tmp_path / "split", tp=2, rank=1, engine="vllm", verify=True)))
    with pytest.raises(WorldSizeError, match=r"parallel size \(got 2, expected 4 of the engine\): .* --tp 4"):
        open_for_engine(tmp_path / "split", tp=4, rank=0, engine="vllm", verify=True)


def test_a_source_is_opened_without_checksums_of_its_other_files(source, monkeypatch):
    monkeypatch.setattr(loadable, "checksum_file", pytest.fail)
    assert open_for_engine(source, tp=2, rank=0, engine="vllm", verify=False).reader.tensors


def test_remedies(source, tmp_path):
    """Remedies in messages differ by the kind of checkpoint."""
    shardconv.split(source, tmp_path / "own", tp=2)
    shardconv.split(source, tmp_path / "vllm", tp=2, engine="vllm")
    own, vllm, full = (
        open_for_engine(folder, tp=2, rank=0, engine="vllm", verify=False).remedy
        for folder in (tmp_path / "own", tmp_path / "vllm", source)
    )
    assert own == (
        "split the source again with shardconv split SRC --tp 2 --for vllm, or run shardconv reshard "
        f"{tmp_path / 'own'} --tp 2 --for vllm"
    )
    assert str(NotHeldError(f"w: elements [0, 1) are not on this rank: {own}")).endswith(own)  # also in Python
    assert "--for" not in vllm + full


def test_files_are_closed_with_the_last_reference(source):
    gc.collect()
    before = len(list(Path("/dev/fd").iterdir()))
    reader = RankSourceReader(open_source(source), make_plan(source, tp=2), 0)
    weights = rank_weights(RankSource(reader, ""))
    del weights, reader
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_kept_weight_is_read_behind_the_end_of_the_iterator(source):
    reader = RankSourceReader(open_source(source), make_plan(source, tp=2), 0)
    kept = dict(rank_weights(RankSource(reader, "")))["lm_head.weight"]
    del reader
    rows = load_file(source / "model-00002-of-00002.safetensors")["lm_head.weight"][:66]
    assert torch.equal(kept[:66].view(torch.int16) + 0, rows.view(torch.int16))


@pytest.mark.parametrize(
    "use",
    [
        lambda reader: reader.finish(),
        lambda reader: reader.read("lm_head.weight"),
        lambda reader: reader.map_full("lm_head.weight"),
    ],
    ids=["finish", "read", "map_full"],
)
def test_source_that_changes_while_it_is_read_is_refused(tmp_path, use):
    source = write_checkpoint(tmp_path / "source")
    reader = RankSourceReader(open_source(source), make_plan(source, tp=2), 0)
    path = source / "model.safetensors"
    flip(path)
    with pytest.raises(SourceError, match="changed while it was read"):
        use(reader)
    reader.close()


@pytest.mark.parametrize("checked_bytes", [97, shards._CHECKED_BYTES])
def test_damage_is_found_by_every_later_call(source, monkeypatch, tmp_path, checked_bytes):
    """The first error is that of all later ones, and a reader that is closed does not return unchecked shards."""
    monkeypatch.setattr(shards, "_CHECKED_BYTES", checked_bytes)
    shardconv.split(source, tmp_path / "split", tp=2)
    manifest, name = read_manifest(tmp_path / "split"), "model.layers.0.mlp.up_proj.weight"
    reader = RankFileReader(manifest, tmp_path / "split", 1, verify=True)
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(name)
    flip(tmp_path / "split" / RANK_FILE)
    with RankFileReader(manifest, tmp_path / "split", 1, verify=True) as reader:
        for call in (lambda: reader.read(name), reader.finish, lambda: reader.read(name)):
            with pytest.raises(IntegrityError, match=f"{RANK_FILE}: the bytes of .* differ from their checksum"):
                call()


@pytest.mark.parametrize(("ranks", "expected"), [(1, 4), (2, 2), (8, 1)])
def test_threads_that_check_have_the_processors_of_the_rank(source, monkeypatch, tmp_path, ranks, expected):
    """And the thread that reads the shards does not check."""
    shardconv.split(source, tmp_path / "split", tp=2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    started, checking = list[threading.Thread](), set[int]()
    start, check = threading.Thread.start, shards.ShardReader.check
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    monkeypatch.setattr(
        shards.ShardReader, "check", lambda *arguments: (checking.add(threading.get_ident()), check(*arguments))
    )
    with RankFileReader(read_manifest(tmp_path / "split"), tmp_path / "split", 1, verify=True) as reader:
        reader.finish()
    assert len(started) == expected
    assert checking
    assert checking <= {thread.ident for thread in started}


def test_process_exits_while_its_files_are_checked(source, tmp_path):
    """An error ends the process without reading the rest of the files."""
    shardconv.split(source, tmp_path / "split", tp=2)
    program = (
        "import time, sys\n"
        "from pathlib import Path\n"
        "from shardconv.checkpoint.engine.shards import ShardReader\n"
        "from shardconv.checkpoint.split.manifest_file import read_manifest\n"
        "from shardconv.checkpoint.split.rank_reader import RankFileReader\n"
        "ShardReader.check = lambda *_: time.sleep(600)\n"
        "folder = Path(sys.argv[1])\n"
        "reader = RankFileReader(read_manifest(folder), folder, 1, verify=True)\n"
        "raise SystemExit(7)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "split")], timeout=60, check=False)
    assert result.returncode == 7


def test_file_that_is_truncated_while_it_is_checked(monkeypatch, source, tmp_path):
    shardconv.split(source, tmp_path / "split", tp=2)
    views = InputFiles.views

    def truncated(files):
        found = views(files)
        os.truncate(tmp_path / "split" / RANK_FILE, 4096)
        return found

    monkeypatch.setattr(InputFiles, "views", truncated)
    with pytest.raises(SourceError, match=f"{RANK_FILE}: was truncated while it was read: it ends at byte 4096"):
        RankFileReader(read_manifest(tmp_path / "split"), tmp_path / "split", 1, verify=True).finish()

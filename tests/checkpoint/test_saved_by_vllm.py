"""Folders as saved by vLLM's save_sharded_state, made with torch: merge, verify and reshard, and refused folders.

All comparisons are exact.
"""

import re
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.layouts import full_shapes
from shardconv.layouts.layout_file import layout_file
from shardconv.support.errors import ShardconvError
from tests.support.changes import config, remove
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.models import GQA, Model, read
from tests.support.tensors import check_equal

DENSE = {**GQA, "vocab_size": 1000, "intermediate_size": 128}
LAYER, TPS = "model.layers.0", (1, 2, 4)
#: One of each form: biases everywhere, tied embeddings, biases of q, k and v only, norms of heads.
KINDS = {
    "llama": Model("llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": Model("llama", {**DENSE, "tie_word_embeddings": True}),
    "qwen2": Model("qwen2", {**DENSE, "layer_types": None}),
    "qwen3": Model("qwen3", DENSE),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {kind: model.write(folder / kind) for kind, model in KINDS.items()}


# --- what vLLM writes -----------------------------------------------------------------------------------------------


def heads_of(tensor, tp, rank):
    """The rows of a rank's KV heads, of two in total; four ranks replicate them."""
    head = rank * 2 // tp
    return tensor.unflatten(0, (2, -1))[head : head + max(2 // tp, 1)].flatten(0, 1)


def vocabulary_of(tensor, tp, rank):
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % 64))
    return padded.chunk(tp)[rank]


def state_dict(full, tp, rank):
    """The tensors of a rank of vLLM, in the order of its modules, without aliases."""
    own = {}
    for name, tensor in full.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith(("embed_tokens", "lm_head")):
            own["lm_head.weight" if "lm_head.weight" not in full else name] = vocabulary_of(tensor, tp, rank)
        elif module.endswith("q_proj"):
            at = module.removesuffix("q_proj")
            rows = [heads_of(full[f"{at}{other}_proj.{leaf}"], tp, rank) for other in "kv"]
            own[f"{at}qkv_proj.{leaf}"] = torch.cat([tensor.chunk(tp)[rank], *rows])
        elif module.endswith("gate_proj"):
            up = full[name.replace("gate", "up")]
            own[name.replace("gate", "gate_up")] = torch.cat([tensor.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif module.endswith(("o_proj", "down_proj")) and leaf == "weight":
            own[name] = tensor.chunk(tp, 1)[rank].contiguous()
            if module.endswith("o_proj"):
                at = module.removesuffix("o_proj")
                own |= {f"{at}attn._{scale}_scale": torch.tensor(1.0) for scale in ("q", "k", "v", "prob")}
        elif not module.endswith(("k_proj", "v_proj", "up_proj")):
            own[name] = tensor
    return own


def save(source, folder, tp, full=None):
    """Write a folder as vLLM saves it, with several files of up to 100 kB per rank."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for rank in range(tp):
        part, size, number = {}, 0, 0
        for name, tensor in state_dict(full or read(source), tp, rank).items():
            if part and size + tensor.nbytes > 100_000:
                save_file(part, folder / f"model-rank-{rank}-part-{number}.safetensors")
                part, size, number = {}, 0, number + 1
            part[name], size = tensor, size + tensor.nbytes
        save_file(part, folder / f"model-rank-{rank}-part-{number}.safetensors")
    return folder


def change(folder, rank, name, function):
    """Change a tensor of a rank; None removes it."""
    for path in folder.glob(f"model-rank-{rank}-part-*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = function(tensors[name])
            save_file({key: value for key, value in tensors.items() if value is not None}, path)
            return
    raise AssertionError(f"{name} not found")


# --- merge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", TPS)
def test_merge(sources, tmp_path, kind, tp):
    """Four ranks hold the two KV heads twice; the vocabulary of 1000 is padded to 1024."""
    folder = save(sources[kind], tmp_path / "saved", tp)
    assert len(list(folder.glob("model-rank-0-part-*"))) > 1
    report = shardconv.merge(folder, tmp_path / "merged")
    assert (report.is_identical, report.num_tensors) == (False, len(read(sources[kind])))
    # the source is one file that the library safetensors wrote, and so is the result, as it would write it
    assert contents(tmp_path / "merged") == contents(sources[kind])


def test_merge_of_another_dtype_than_the_config_has(sources, tmp_path):
    """An F32 checkpoint that vLLM converted to BF16 and saved: config.json is unchanged, and an index may be left."""
    full = {name: tensor.bfloat16() for name, tensor in read(sources["llama"]).items()}
    saved = save(sources["llama"], tmp_path / "saved", 2, full=full)
    (saved / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    result = call("merge", saved, "-o", tmp_path / "merged")
    printed = " ".join(result.out.split())
    assert result.code == 0
    assert re.search(r"converted from \d+ files of vLLM's layout", printed)
    assert "the source's bytes" not in printed
    assert "tensors are BF16, but config.json has float32" in printed
    check_equal(read(tmp_path / "merged"), full)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {path.name for path in sources["llama"].iterdir()}


# --- verify and reshard ---------------------------------------------------------------------------------------------


def test_verify_against_the_source(sources, tmp_path):
    folder = save(sources["llama"], tmp_path / "saved", 4)
    report = shardconv.verify(folder, against=sources["llama"])
    assert (report.differences, report.is_compared, report.has_checksums) == ((), True, False)
    assert "auxiliary files" not in report.checked
    change(folder, 1, f"{LAYER}.self_attn.qkv_proj.weight", lambda tensor: tensor.index_fill(0, torch.tensor([0]), 0.0))
    (difference,) = shardconv.verify(folder, against=sources["llama"]).differences
    assert difference.startswith(f"{LAYER}.self_attn.q_proj.weight: byte ")
    assert call("verify", folder, "--against", sources["llama"]).code == 3


def test_verify_without_a_source(sources, tmp_path):
    """Checks, and reports, only that replicas are equal and padding is zero."""
    folder = save(sources["llama"], tmp_path / "saved", 4)
    result = call("verify", folder)
    assert (result.code, "no checksums: the checkpoint has files of vLLM's layout" in result.out) == (0, True)
    assert "correct" not in result.out
    change(folder, 3, "lm_head.weight", lambda tensor: tensor + 1)
    (difference,) = shardconv.verify(folder).differences
    assert "the padding of lm_head.weight is not zero" in difference


RESHARDS = {
    f"{kind} to tp {tp}, {layout or 'same'} layout": (kind, tp, layout)
    for kind in ("llama", "llama, tied")
    for tp, layout in ((2, "native"), (2, "vllm"), (4, None))
}


@pytest.mark.parametrize("case", RESHARDS)
def test_resharded_files_equal_those_of_a_split_of_the_source(sources, tmp_path, case):
    kind, tp, layout = RESHARDS[case]
    report = shardconv.reshard(save(sources[kind], tmp_path / "saved", 4), tmp_path / "new", tp=tp, layout=layout)
    assert (report.layout, report.old_layout) == (layout or "vllm", "vllm")
    assert any("converted from" in note for note in report.notes)
    shardconv.split(sources[kind], tmp_path / "split", tp=tp, layout=layout or "vllm", engine="vllm")
    expected, found = contents(tmp_path / "split"), contents(tmp_path / "new")
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} <= {"shardconv.json"}
    assert shardconv.verify(tmp_path / "new", against=sources[kind]).differences == ()


# --- refusals -------------------------------------------------------------------------------------------------------


def put(name, tensor):
    """A further tensor on each rank."""

    def add(folder):
        for path in folder.glob("model-rank-*-part-0.safetensors"):
            save_file({**load_file(path), name: tensor}, path)

    return add


def on_rank(rank, name, function):
    return lambda folder: change(folder, rank, name, function)


def on_all(name, function):
    def both(folder):
        for rank in range(4):
            change(folder, rank, name, function)

    return both


def removed(*texts):
    """Remove all tensors with one of these texts in their names."""

    def remove(folder):
        for path in folder.glob("model-rank-*"):
            tensors = load_file(path)
            save_file({name: one for name, one in tensors.items() if not any(text in name for text in texts)}, path)

    return remove


def to_one(folder):
    """Rename the files of rank 3, as if there were five ranks."""
    for path in folder.glob("model-rank-3-*"):
        path.rename(folder / path.name.replace("rank-3", "rank-4"))


#: By what is changed at four ranks: the kind, the change, and what the error has to say.
REFUSED = {
    "the last rank is missing": (
        "llama", remove("model-rank-3-*"), "has files of 3 ranks, .*is not a multiple of 3",
    ),
    "a rank between others": ("llama", to_one, "the file of rank 3, is missing"),
    "a part between others": ("llama", remove("model-rank-1-part-1.*"), "the file of part 1, is missing"),
    "the last part of a rank": (
        "llama", lambda folder: max(folder.glob("model-rank-1-*")).unlink(),
        "rank 1 does not have .*, which other ranks have",
    ),
    "no config": ("llama", remove("config.json"), "does not have config.json"),
    "a type without rules": ("llama", config(model_type="bloom"), "does not support model type 'bloom'"),
    "a quantized model": (
        "llama", config(quantization_config={"quant_method": "fp8"}), "does not support quantized checkpoints",
    ),
    "a model that vLLM quantized": (
        "llama", put(f"{LAYER}.self_attn.qkv_proj.weight_scale", torch.ones(8)), "only quantized checkpoints have",
    ),
    "experts": (
        "llama", put(f"{LAYER}.mlp.experts.routed_experts.w2_weight", torch.ones(4, 8, 8)),
        r"w2_weight: belongs to experts, which vLLM repacks .*use the checkpoint that the engine was started with",
    ),
    "a tensor that is not known": (
        "llama", put(f"{LAYER}.extra.weight", torch.ones(8)), r"extra.weight \(F32 \[8\]\): no rule of family llama",
    ),
    "a tensor that is missing": (
        "llama", on_all(f"{LAYER}.mlp.gate_up_proj.weight", lambda _: None),
        f"{LAYER}.mlp.gate_proj.weight: is missing, but another layer of this type has it",
    ),
    "a row-parallel weight that is missing in all layers": (
        "llama", removed("self_attn.o_proj.weight", "mlp.down_proj.weight", "attn._"),
        "does not have a row-parallel weight, for example because vLLM ran on a CPU",
    ),
    "weights of the MLP": ("llama", removed(".mlp."), r"gate_up_proj.weight: is missing in all layers"),
    "all weights of linear layers": ("qwen3", removed("_proj."), r"qkv_proj.weight: is missing in all layers"),
    "another number of heads": ("llama", config(num_attention_heads=4), "o_proj.weight is F32"),
    "another number of layers": ("llama", config(num_hidden_layers=3), "got 2 layers, .*expected 3"),
    "another vocabulary": ("llama", config(vocab_size=1100), "embed_tokens.weight|lm_head.weight"),
    "a matrix of another shape": (
        "llama", on_all(f"{LAYER}.mlp.down_proj.weight", lambda tensor: tensor[:, 1:].contiguous()),
        r"down_proj.weight is F32 \[64, 31\] on rank 0 \(expected F32 \[64, 32\]",
    ),
    "tied embeddings that the config does not have": (
        "llama, tied", config(tie_word_embeddings=False),
        "model.embed_tokens.weight: is missing .got lm_head.weight, .* if config.json has tie_word_embeddings",
    ),
    "untied embeddings of a tied config": (
        "llama", config(tie_word_embeddings=True), "model.embed_tokens.weight: is in 2 tensors of a rank",
    ),
    "other weights": (
        "llama", lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), "weights or an adapter besides the",
    ),
    "pipeline parallelism": (
        "llama", lambda folder: (folder / "model-rank-0-part-0.safetensors").rename(
            folder / "model-pp-0-tp-0-part-0.safetensors"
        ), "pipeline parallelism is not supported",
    ),
    "a scale that is not 1": (
        "llama", on_rank(2, f"{LAYER}.self_attn.attn._k_scale", lambda scale: scale * 2), "_k_scale has other values",
    ),
    "KV heads that differ": (
        "llama", on_rank(1, f"{LAYER}.self_attn.qkv_proj.weight", lambda tensor: tensor.index_add(
            0, torch.tensor([len(tensor) - 1]), torch.ones(1, tensor.shape[1])
        )), r"model-rank-1-part-\d.safetensors: .*v_proj.weight differs from the shard",
    ),
    "padding that is not zero": (
        "llama", on_rank(3, "lm_head.weight", lambda tensor: tensor.index_fill(0, torch.tensor([255]), 1.0)),
        r"model-rank-3-part-\d.safetensors: the padding of lm_head.weight is not zero",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_folders_are_refused(sources, tmp_path, what):
    kind, damage, message = REFUSED[what]
    folder = save(sources[kind], tmp_path / "saved", 4)
    damage(folder)
    with pytest.raises(ShardconvError, match=re.compile(message, re.DOTALL)) as error:
        shardconv.merge(folder, tmp_path / "merged")
    assert "--layout" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_fused_tensor_that_the_checkpoint_may_have_is_refused(tmp_path, monkeypatch):
    """glm4 stores q, k and v, and phi3 stores qkv: a family of both does not determine the names."""
    types = {**layout_file("vllm").types, "phi3": ("attention", "vocabulary")}
    changed = msgspec.structs.replace(layout_file("vllm"), types=types)
    monkeypatch.setattr(full_shapes, "layout_file", lambda _: changed)
    source = Model("phi3", {**DENSE, "vocab_size": 256}).write(tmp_path / "source")
    shardconv.split(source, tmp_path / "saved", tp=2, layout="vllm")
    (tmp_path / "saved" / "shardconv.json").unlink()
    with pytest.raises(ShardconvError, match=r"qkv_proj.weight: may be one tensor of the checkpoint or 3"):
        shardconv.merge(tmp_path / "saved", tmp_path / "merged")

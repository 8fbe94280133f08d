"""Unusual inputs: every command has a correct result, an error or a warning for each of them.

``CASES`` is the table. A row has the change and one outcome for each command: ``right`` (compared here with torch and
transformers alone), ``error`` (an exit code other than 0, a message that names the tensor or file, no output
files), ``warning`` (exit code 0, on stderr also with ``-q``), or ``na`` with the reason. Another input is
one more entry in ``CASES``.
"""

import argparse
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

import shardconv
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.operations.split_writing import split_by
from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.commands.split import split as split_command
from shardconv.hf.classes import diffusers_class
from shardconv.hf.diffusion import default_fields
from shardconv.layouts.layout import NATIVE
from shardconv.proof import prove
from shardconv.proof.ranks import REFERENCE, SMALL, SPLIT, Proof, sharded_fraction
from shardconv.runtime.outputs import RunOptions
from shardconv.runtime.run import check_run, run_rank
from shardconv.support.errors import ShardconvError
from tests.support.adapters import write_adapter
from tests.support.changes import Change, block_scales, both, config, drop, put, remove, rename, tensors
from tests.support.checkpoints import DEMO, contents, write_index
from tests.support.command import Result, call
from tests.support.external import meta_ranks, meta_tensors, write_meta
from tests.support.faults import before_copying, failing_after, refuse_locks
from tests.support.manifests import change_manifest
from tests.support.matrix import MATRIX, cases
from tests.support.megatron import megatron_tensors, write_megatron
from tests.support.models import Tensors, change_config, read
from tests.support.pages import Parsed
from tools.model_matrix.trial import LAYOUTS, check, model_class, small, worst

TP, PROMPT, TOKENS = 4, "An exception is", 6
COMMANDS = (
    "plan", "plan --prove", "split", "verify", "verify --against", "merge", "reshard", "run", "run --check", "load",
)  # fmt: skip
#: Commands that read a source, and those that read a split checkpoint.
OF_SOURCE, OF_SPLIT = COMMANDS[:3], COMMANDS[3:]
#: Commands that copy bytes, and commands that build the model.
BYTES, MODEL = ("verify", "verify --against", "merge", "reshard"), ("run", "run --check", "load")
LAYER = "model.layers.0"
pytestmark = pytest.mark.timeout(200)


# --- outcomes -------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The expected outcome of a command.

    Attributes:
        kind: ``right``, ``error``, ``warning`` or ``na``.
        texts: strings that the message has to contain; for ``na``, the reason.
    """

    kind: str
    texts: tuple[str, ...] = ()


RIGHT = Outcome("right")


def error(*texts: str) -> Outcome:
    return Outcome("error", texts)


def warning(*texts: str) -> Outcome:
    return Outcome("warning", texts)


def na(reason: str) -> Outcome:
    return Outcome("na", (reason,))


Expected = dict[str, Outcome]


def every(commands: tuple[str, ...], outcome: Outcome) -> Expected:
    return dict.fromkeys(commands, outcome)


def refused(outcome: Outcome) -> Expected:
    """Outcomes for a source that cannot be split."""
    return every(OF_SOURCE, outcome) | every(OF_SPLIT, na("the source is not split"))


def moved(model: Outcome, *, proof: Outcome = RIGHT, **others: Outcome) -> Expected:
    """Outcomes for a source whose bytes are copied; ``model`` is the outcome of building the model."""
    commands = {name.replace("__", " --"): outcome for name, outcome in others.items()}
    expected = every(("plan", "split", *BYTES), RIGHT) | every(MODEL, model) | {"plan --prove": proof}
    return expected | commands


def damaged(outcome: Outcome, **others: Outcome) -> Expected:
    """Outcomes for a damaged split checkpoint."""
    commands = {name.replace("__", " --"): other for name, other in others.items()}
    return every(OF_SOURCE, na("the source is unchanged")) | every(OF_SPLIT, outcome) | commands


def only_split(outcome: Outcome) -> Expected:
    """Outcomes of a split that resumes an interrupted one."""
    return every(COMMANDS, na("nothing was interrupted")) | {"split": outcome}


# --- changes --------------------------------------------------------------------------------------------------------


def in_place(source: Path) -> None:
    """Change bytes of the existing file; safetensors would replace the file."""
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"another.")


def other_values(source: Path) -> None:
    """Change all values, but neither the size nor the time of the file."""
    path = source / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    save_file({name: tensor + 1 for name, tensor in read(source).items()}, path, metadata={"format": "pt"})
    os.utime(path, ns=times)


def flip_all(staged: Path) -> None:
    """Change all bytes of the files in a staging folder."""
    for path in staged.rglob("*.safetensors"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def damage_journal(staged: Path) -> None:
    lines = (staged / "journal").read_bytes().split(b"\n")
    (staged / "journal").write_bytes(b"\n".join([lines[0], lines[1][:-1], *lines[2:]]))


def in_two_files(
    *, second: Callable[[dict[str, torch.Tensor]], list[str]], index: bool, names: int | None = None
) -> Change:
    """Write two files, the second with some of the tensors, and an index of the first ``names`` tensors."""

    def apply(source: Path) -> None:
        found = read(source)
        (source / "model.safetensors").unlink()
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        chosen = second(found)
        rest = [name for name in found if name not in chosen]
        if not index:  # both files have the same tensor
            rest = list(found)
        save_file({name: found[name] for name in rest}, source / files[0], metadata={"format": "pt"})
        save_file({name: found[name] for name in chosen}, source / files[1], metadata={"format": "pt"})
        of_file = {**dict.fromkeys(rest, files[0]), **dict.fromkeys(chosen, files[1])}
        write_index(source, dict(list(of_file.items())[:names]))

    return apply


def two_checkpoints(source: Path) -> None:
    (source / "model.safetensors").rename(source / "a.safetensors")
    shutil.copyfile(source / "a.safetensors", source / "b.safetensors")


def pytorch(
    change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None, damage: Change = lambda _: None
) -> Change:
    """Write a PyTorch file in place of the safetensors file; ``change`` its tensors, and ``damage`` the file."""

    def apply(source: Path) -> None:
        found = read(source)
        (source / "model.safetensors").unlink()
        change(found)
        torch.save(found, source / "pytorch_model.bin")
        damage(source / "pytorch_model.bin")

    return apply


def with_strides(found: dict[str, torch.Tensor]) -> None:
    """A transposed matrix, a part of a larger one, and an embedding that is also the head."""
    found[UP] = found[UP].T.contiguous().T
    found[DOWN] = torch.nn.functional.pad(found[DOWN], (3, 5, 2, 1))[2:-1, 3:-5]
    found["lm_head.weight"] = found["model.embed_tokens.weight"]


class Bomb:
    """A pickle that exits the process that executes it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def adapter(source: Path) -> None:
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 64)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def fp8_scales(source: Path) -> None:
    """Quantize as NVIDIA ModelOpt does: FP8 weights, scales per weight and input, and a config file."""

    def change(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if name.endswith("_proj.weight")]:
            found[name] = found[name].to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = torch.tensor(0.5)
            found[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.25)

    tensors(change)(source)
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')


def compressed(**settings: Any) -> Change:
    """Settings of compressed-tensors for FP8 with one scale per weight, of a checkpoint that is not quantized."""
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    table = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, **settings}
    return config(quantization_config=table)


def tile_packed(source: Path) -> None:
    """Save as torchao does: a flat tensor of a kernel, and its class in the metadata."""
    found = read(source)
    found[f"{LAYER}.mlp.up_proj._weight_qdata"] = found.pop(UP)
    metadata = {UP: json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}}), "tensor_names": json.dumps([UP])}
    save_file(found, source / "model.safetensors", metadata=metadata)
    change_config(source, {"quantization_config": {"quant_method": "torchao"}})


def gptq(source: Path) -> None:
    def change(found: dict[str, torch.Tensor]) -> None:
        weight = found.pop(f"{LAYER}.mlp.up_proj.weight")
        rows, columns = weight.shape
        shapes = {"qweight": (columns // 8, rows), "qzeros": (2, rows // 8), "g_idx": (columns,)}
        found.update({f"{LAYER}.mlp.up_proj.{end}": torch.zeros(s, dtype=torch.int32) for end, s in shapes.items()})
        found[f"{LAYER}.mlp.up_proj.scales"] = torch.ones(2, rows, dtype=torch.float16)

    tensors(change)(source)


def plan_file(text: str) -> Change:
    """Write a plan file next to the source's folder, for plan and split."""
    return lambda source: source.with_name("plan.toml").write_text(text)


def as_megatron(change: Callable[[Tensors], object]) -> Change:
    """Write a checkpoint of Megatron-Core in place of the checkpoint, with changed tensors."""

    def write(source: Path) -> None:
        found = megatron_tensors(read(source), json.loads((source / "config.json").read_text()))
        (source / "model.safetensors").unlink()
        change(found)
        write_megatron(source, found)

    return write


def as_meta(change: Callable[[list[dict[str, torch.Tensor]]], object], tp: int = 2) -> Change:
    """Write Meta's files in place of the checkpoint, with changed tensors of its ranks; safetensors for tp 1."""

    def apply(source: Path) -> None:
        found = read(source) | {
            name: read(source)[name][: -1 or None] for name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        fields = json.loads((source / "config.json").read_text())
        heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        ranks = meta_ranks(meta_tensors(found, heads, kv_heads), tp, kv_heads=kv_heads, embedding_dim=0)
        change(ranks)
        params = {
            "dim": fields["hidden_size"],
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "norm_eps": 1e-6,
            "head_dim": fields["head_dim"],
            "vocab_size": len(found["lm_head.weight"]),
        }
        change_config(source, {"vocab_size": params["vocab_size"]})
        written = write_meta(source / "meta", ranks, {**params, "n_layers": fields["num_hidden_layers"]})
        for path in written.iterdir():
            path.rename(source / path.name)
        written.rmdir()
        (source / "model.safetensors").unlink()
        if tp == 1:
            (source / "consolidated.00.pth").unlink()
            save_file(ranks[0], source / "consolidated.safetensors")

    return apply


def copied(name: str, to: str) -> Change:
    return lambda source: shutil.copyfile(source / name, source / to)


def vocabulary(size: int) -> Change:
    """Leave out the last rows of the embedding table and of the head."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return both(
        tensors(lambda found: found.update({name: found[name][:size] for name in names})), config(vocab_size=size)
    )


def as_deepspeed(source: Path) -> None:
    """Write files with the names that DeepSpeed's init_inference gives them, in place of the checkpoint."""
    found = read(source)
    (source / "model.safetensors").unlink()
    for name in ("non-tp.pt", "tp_00_00.pt", "tp_01_00.pt"):
        torch.save(
            {one: tensor for one, tensor in found.items() if ("layers" in one) == (name[0] == "t")}, source / name
        )
    (source / "ds_inference_config.json").write_text('{"type": "ds_model", "parallelization": "tp", "tp_size": 2}')


def first_rank_of_vllm(source: Path) -> None:
    """Write the first of two rank files in vLLM's layout in place of the checkpoint."""
    split = source.with_name("vllm")
    shardconv.split(source, split, tp=2, layout="vllm")
    (split / "model-rank-0-part-0.safetensors").rename(source / "model-rank-0-part-0.safetensors")
    shutil.rmtree(split)
    (source / "model.safetensors").unlink()


def metadata_with_code(source: Path) -> None:
    """Write a checkpoint of torch.distributed.checkpoint whose metadata would run a command."""
    (source / "model.safetensors").unlink()
    (source / "__0_0.distcp").write_bytes(b"")
    (source / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def metadata_that_repeats_a_long_tuple(source: Path) -> None:
    """Give all chunks of a checkpoint one long tuple of sizes, which the pickle has once."""
    path = source / "iter_0000500" / ".metadata"
    metadata, sizes = pickle.loads(path.read_bytes()), torch.Size([1] * 10**5)
    for tensor in metadata.state_dict_metadata.values():
        tensor.chunks = [ChunkStorageMetadata(chunk.offsets, sizes) for chunk in tensor.chunks]
    path.write_bytes(pickle.dumps(metadata))


def metadata_that_repeats_a_long_path(source: Path) -> None:
    """Give many entries of a checkpoint one path of long keys, which the pickle has once."""
    path = source / "iter_0000500" / ".metadata"
    metadata, names = pickle.loads(path.read_bytes()), [f"optimizer.{number}" for number in range(100)]
    metadata.planner_data = dict.fromkeys(names, ("x" * 4000,) * 60)
    metadata.state_dict_metadata |= dict.fromkeys(names, BytesStorageMetadata())
    path.write_bytes(pickle.dumps(metadata))


def chunk_of(value: object) -> Change:
    """Replace a chunk of a checkpoint by an archive with another value, to which the list of chunks refers."""

    def apply(source: Path) -> None:
        folder = source / "iter_0000500"
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        index = next(one for one in metadata.storage_data if one.fqn == FINAL_NORM)
        position = metadata.storage_data[index]
        torch.save(value, file := io.BytesIO())
        with (folder / position.relative_path).open("ab") as chunks:
            metadata.storage_data[index] = replace(position, offset=chunks.tell(), length=len(file.getvalue()))
            chunks.write(file.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def odd_heads(found: Tensors) -> None:
    """Remove the last of the 16 features of each head."""
    for name, tensor in found.items():
        if "self_attn" in name:
            dim = int("o_proj" in name)
            found[name] = tensor.unflatten(dim, (-1, 16)).narrow(dim + 1, 0, 15).flatten(dim, dim + 1)


# --- damages of a split checkpoint ----------------------------------------------------------------------------------

Damage = Callable[[Path, Path], object]


def other_split(source: Path, *, tp: int = TP) -> Path:
    """Split a checkpoint with the same names and shapes, and other values."""
    other, place = source.with_name("other"), source.with_name(f"other-tp{tp}")
    if not other.exists():
        shutil.copytree(source, other)
        add_one = tensors(lambda found: found.update({name: tensor + 1 for name, tensor in found.items()}))
        for path in other.rglob("model.safetensors"):
            add_one(path.parent)
    if not place.exists():
        shardconv.split(other, place, tp=tp)
    return place


def vae_with_variants(source: Path) -> None:
    """Add a component that is copied, in two variants."""
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", "AutoencoderKL"]}))
    (source / "vae").mkdir()
    for name in ("model.safetensors", "model.fp16.safetensors"):
        copied("transformer/model.safetensors", f"vae/{name}")(source)


def lora(*names: str, shape: tuple[int, ...] = (2, 64)) -> Change:
    """Add a LoRA file with these tensors."""
    return lambda source: save_file({name: torch.zeros(shape) for name in names}, source / "lora.safetensors")


def replace_component(split: Path, other: Path) -> None:
    """Replace the transformer of a split pipeline."""
    shutil.rmtree(split / "transformer")
    shutil.copytree(other / "transformer", split / "transformer")


def from_other(name: str, *, tp: int = TP, to: str | None = None) -> Damage:
    """Copy a file of another split over a file of this one, or next to its files."""
    return lambda source, split: shutil.copyfile(other_split(source, tp=tp) / name, split / (to or name))


def newer_manifest(_: Path, split: Path) -> None:
    data = json.loads((split / MANIFEST_NAME).read_text())
    (split / MANIFEST_NAME).write_text(json.dumps({**data, "format_version": 99}))


def all_rank_files(source: Path, split: Path) -> None:
    for rank in range(TP):
        from_other(NATIVE.rank_file(rank, TP))(source, split)


def without_some_ranks(source: Path, split: Path) -> None:
    shardconv.split(source, split, tp=TP, ranks="1-2", overwrite=True)


def second_file_of_another(source: Path, split: Path) -> None:
    other = source.with_name("other-several")
    shardconv.split(other_split(source).with_name("other"), other, tp=TP, max_file_size=SEVERAL)
    shutil.copyfile(other / SECOND_FILE, split / SECOND_FILE)


def exchanged_files(_: Path, split: Path) -> None:
    first, second = sorted(split.glob("rank-1-of-4-file-*"))[:2]
    data = first.read_bytes()
    second.replace(first)
    second.write_bytes(data)


def other_host(source: Path, split: Path) -> None:
    """Split the first half of the ranks with a merged adapter, and the others, in a folder of their own, without."""
    lora = write_adapter(split.with_name("lora"), source, target_modules=["q_proj"])
    shardconv.split(source, split, tp=TP, ranks="0-1", overwrite=True, adapters=[lora], merge_adapter=True)
    shardconv.split(source, host_beside(split), tp=TP, ranks="2-3")


def only_first_layer(found: dict[str, torch.Tensor]) -> None:
    for name in [name for name in found if name.startswith("model.layers.1.")]:
        del found[name]


def exchanged_stages(_: Path, split: Path) -> None:
    first, second = (split / NATIVE.rank_file(rank, TP) for rank in (0, 2))
    data = first.read_bytes()
    second.replace(first)
    second.write_bytes(data)


def other_stage(source: Path, split: Path) -> None:
    other = split.with_name("other-stages")
    shardconv.split(other_split(source).with_name("other"), other, tp=2, pp=2)
    shutil.copyfile(other / NATIVE.rank_file(3, TP), split / NATIVE.rank_file(3, TP))


def other_adapter(source: Path, split: Path) -> None:
    """Split an adapter of the model for four ranks without stages, beside the split checkpoint."""
    lora = write_adapter(split.with_name("lora"), source, target_modules=["q_proj"])
    shardconv.split(lora, split.with_name("adapter"), base=source, tp=4)


def constant_beside_nothing(source: Path, split: Path) -> None:
    shardconv.split(source, split, tp=2, pp=2, layout="vllm", overwrite=True)
    constant = {"name": "scale", "dtype": "F32", "shape": [1], "value": 1.0, "beside": "nothing"}
    change_manifest(split, lambda manifest: manifest["layout"].update(constants=[constant]))


def images(model_type: str, **vision: Any) -> Change:
    """A change of the model to a small one with an image encoder."""

    def change(source: Path) -> None:
        small(model_class("image-text-to-text", model_type)).save_pretrained(source)
        stored = json.loads((source / "config.json").read_text())["vision_config"]
        change_config(source, {"vision_config": stored | vision})

    return change


def other_index(_: Path, split: Path) -> None:
    (split / "rank-1-of-4.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "a.safetensors"}}')


#: The outcome of a proof for a case about stages.
NO_STAGES = na("plan --prove does not have --pp")
OF_MODEL = na("an option of run and load")
ONE_FOLDER = na("reads one folder")

# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        expected: the outcome of each command.
        change: a change of the source before anything else.
        damage: a change of the split checkpoint, after the split of an unchanged source.
        base: the model type.
        while_split: a change of the source while it is split.
        interrupted: a change of the source and the staging folder between a split that fails and one that resumes it.
        has_locks: whether the file system of the destination supports locks.
        has_plan: whether plan and split get the plan file that the change wrote.
        options: further options of plan and split; SOURCE in them is the path of the source.
        left_out: files of the source that these options exclude.
        layout: the layout of the rank files.
        max_file_size: of the split checkpoint that is damaged.
        dequantize: whether the model is loaded with ``--dequantize``.
        page: the file of ``plan --html``, beside the source's folder.
        pp: number of pipeline stages of the split, which has as many ranks as without stages.
        run_options: further options of run and load; the adapter is beside the split checkpoint.
    """

    expected: Expected
    change: Change = lambda _: None
    damage: Damage | None = None
    base: str = "llama"
    while_split: Change | None = None
    interrupted: Damage | None = None
    has_locks: bool = True
    has_plan: bool = False
    options: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    layout: str = "native"
    max_file_size: str | None = None
    dequantize: bool = False
    page: str | None = None
    pp: int = 1
    run_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """The tensor parallel size."""
        return TP // self.pp

    @property
    def size(self) -> list[Any]:
        """The options for tensor parallel size and stages."""
        return ["--tp", self.tp, *(["--pp", self.pp] if self.pp > 1 else [])]


def of_pipeline(outcome: Outcome, change: Change) -> Case:
    """The row of a pipeline that cannot be split."""
    return Case(refused(outcome), change, base="pipeline")


def split_with(outcome: Outcome, change: Change, *options: str) -> Case:
    """The row of a pipeline that is split with options of this command."""
    return Case(
        every(COMMANDS, na("an option of split")) | {"split": outcome}, change, base="pipeline", options=options
    )


def cost_of_config(text: str, name: str, *options: str) -> Case:
    """The row of a config of a class of diffusers, without weights, whose cost is counted with these options."""

    def change(source: Path) -> None:
        (source / "model.safetensors").unlink()
        (source / "config.json").write_text(json.dumps({**default_fields(diffusers_class(name)), "num_layers": 1}))

    expected = every(COMMANDS, na("options of plan --cost")) | {"plan": error(text)}
    return Case(expected, change, options=("--cost", *options))


def damaged_pipeline(outcome: Outcome, damage: Damage) -> Case:
    """The row of a split pipeline that is damaged."""
    run = na("runtime/test_pipeline.py runs pipelines")
    return Case(damaged(outcome, run=run, run__check=run), damage=damage, base="pipeline")


def unsupported(*texts: str, **settings: Any) -> Case:
    """The row of a quantization method."""
    outcome = error(*texts, "split the unquantized checkpoint")
    return Case(refused(outcome), config(quantization_config=settings))


def in_megatron_layout(outcome: Outcome, change: Change = lambda _: None, *options: str) -> Case:
    """The row of a source that is split in Megatron-Core's layout."""
    expected = every(COMMANDS, na("test_megatron compares the tensors")) | {"split": outcome}
    return Case(expected, change, options=("--layout", "megatron", *options))


def in_meta_layout(change: Change, *texts: str) -> Case:
    """The row of a source that is split in Meta's layout."""
    expected = every(COMMANDS, na("test_external compares the tensors")) | {"split": error(*texts)}
    return Case(expected, change, options=("--layout", "meta"))


def of_megatron(change: Change, *texts: str) -> Case:
    """The row of a checkpoint of Megatron-Core that is changed after it is written."""
    return Case(refused(error(*texts)), both(as_megatron(lambda _: None), change))


Q, UP, DOWN, NORM = (
    f"{LAYER}.{name}.weight" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
)
BIAS = f"{LAYER}.self_attn.q_proj.bias"
QKV = f"{LAYER}.self_attn.qkv_proj.weight (colwise instead of packed_colwise)"
FINAL_NORM = "decoder.final_layernorm.weight"
FUSED_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
NO_RULE = "no rule of family llama matches it"

MARKUP = "</script><script>alert(1)</script>"
GROUPS = "test_padding compares the shards of padded groups with query heads"
OTHER_NAMES = "test_vllm_layout compares the names and shapes of its files"

NAN, INFINITY = float("nan"), float("inf")
#: A maximum file size with which each rank has several files, and the second of them of rank 1.
SEVERAL, SECOND_FILE = "60kB", "rank-1-of-4-file-1-of-4.safetensors"

CASES: Mapping[str, Case] = {
    "unchanged": Case(moved(RIGHT)),
    # tensors
    "additional tensor of an unknown name": Case(
        refused(error(f"{LAYER}.adapter.down.weight", NO_RULE, "--replicate")),
        put(f"{LAYER}.adapter.down.weight", lambda _: torch.zeros(8, 64)),
    ),
    "additional scalar of an unknown name": Case(
        moved(error(f"{LAYER}.adapter.gain"), proof=error(f"{LAYER}.adapter.gain", "unused")),
        put(f"{LAYER}.adapter.gain", lambda _: torch.tensor(2.0)),
    ),
    "additional bias": Case(
        moved(error(BIAS), proof=error(BIAS, "--config")), put(BIAS, lambda _: torch.ones(128)),
    ),
    "missing norm": Case(moved(error(NORM), proof=error(NORM, "missing")), drop(NORM)),
    "missing weight of a layer": Case(moved(error(DOWN), proof=error(DOWN, "missing")), drop(DOWN)),
    "renamed tensor": Case(refused(error(f"{LAYER}.mlp.up.weight", NO_RULE)), rename(UP, f"{LAYER}.mlp.up.weight")),
    "tensor with and without its prefix": Case(
        refused(error("layers.0.mlp.up_proj.weight", "with and without the prefix")),
        put("layers.0.mlp.up_proj.weight", lambda found: found[UP] + 1),
    ),
    "tensor in two files": Case(
        refused(error("is in both")), in_two_files(second=lambda found: [UP], index=False),
    ),
    "transposed weight of attention": Case(refused(error(Q, "--config")), put(Q, lambda found: found[Q].T)),
    "transposed weight of an MLP": Case(refused(error(UP, "--config")), put(UP, lambda found: found[UP].T)),
    "weight of NaN": Case(
        moved(
            error("NaN"), load=RIGHT,
        ),
        put(UP, lambda found: torch.full_like(found[UP], torch.nan)),
    ),
    "one tensor of another dtype": Case(moved(RIGHT), put(UP, lambda found: found[UP].half())),
    "weight of another shape": Case(
        refused(error(f"{LAYER}.self_attn.k_proj.weight", "64", "--config")),
        put(f"{LAYER}.self_attn.k_proj.weight", lambda _: torch.zeros(48, 64)),
    ),
    "norm of another shape": Case(
        moved(error(NORM), proof=error(NORM, "expected [64]")), put(NORM, lambda _: torch.ones(65)),
    ),
    # configs that contradict tensors
    "config: fewer heads": Case(refused(error(".self_attn.", "--config")), config(num_attention_heads=4)),
    "config: fewer kv heads": Case(refused(error(".self_attn.", "--config")), config(num_key_value_heads=2)),
    "config: smaller vocabulary": Case(
        refused(error("lm_head.weight", "1999", "expected", "1990", "--config")),
        config(vocab_size=1990),
    ),
    "config: without the model class": Case(
        moved(error("architectures"), proof=error("architectures"), plan=warning("architectures"),
              split=warning("architectures")),
        config(architectures=None),
    ),
    "config: tied, with another head stored": Case(moved(RIGHT), config(tie_word_embeddings=True)),
    "config: tied, without a head": Case(moved(RIGHT), both(config(tie_word_embeddings=True), drop("lm_head.weight"))),
    "config: not tied, without a head": Case(
        moved(error("lm_head.weight"), proof=error("lm_head.weight")), drop("lm_head.weight"),
    ),
    "config: more layers": Case(
        moved(error("model.layers.2."), proof=error("model.layers.2.", "missing")), config(num_hidden_layers=3),
    ),
    "config: fewer layers": Case(
        moved(error("model.layers.1."), proof=error("model.layers.1.", "unused")),
        config(num_hidden_layers=1),
    ),
    "config: more experts": Case(
        moved(error("experts"), proof=error("experts", "of another shape")),
        config(num_local_experts=8), base="mixtral",
    ),
    "config: fewer experts": Case(
        moved(error("experts"), proof=error("experts", "of another shape")),
        config(num_local_experts=2), base="mixtral",
    ),
    # rank files of other tools
    "layout of Meta, a vocabulary that does not divide": in_meta_layout(
        lambda _: None, "lm_head.weight: 1999 rows do not divide over 4 ranks", "tp sizes that divide: 1",
    ),
    "layout of Meta, an activation that its models do not have": in_meta_layout(
        both(vocabulary(1996), config(hidden_act="gelu")), "cannot express hidden_act = 'gelu'", "--layout native",
    ),
    "layout of Meta, heads of another size": in_meta_layout(
        both(vocabulary(1996), config(num_local_experts=None)),
        "cannot express head_dim = 16", "hidden_size / num_attention_heads = 8",
    ),
    "layout of Meta, scaled rotary embeddings of another kind": in_meta_layout(
        both(vocabulary(1996), config(num_local_experts=None, rope_parameters={"rope_type": "linear", "factor": 2.0})),
        "does not support rotary embeddings of type 'linear'", "--layout native",
    ),
    "layout of Meta, heads of an odd size": in_meta_layout(
        both(vocabulary(1996), tensors(odd_heads), config(num_local_experts=None, head_dim=15)),
        "self_attn.", "has heads of 15 rows (expected an even number): correct head_dim",
    ),
    **{
        f"layout of Meta, without {text}": in_meta_layout(
            both(vocabulary(1996), drop(text)), f"{target} is missing (expected by the config", "add the tensor"
        )
        for text, target in {
            "embed_tokens": "tok_embeddings.weight", "model.norm": "norm.weight", "up_proj": "0.feed_forward.w3.weight",
            "0.mlp.gate_proj": "0.feed_forward.w1.weight", "1.mlp.up_proj": "layers.1.feed_forward.w3.weight",
        }.items()
    },
    "layout of Meta, without a layer": in_meta_layout(
        both(vocabulary(1996), drop("layers.1.")), "layers are missing (got 1 layer", "correct num_hidden_layers",
    ),
    "layout of Meta, fewer layers in the config": in_meta_layout(
        both(vocabulary(1996), config(num_hidden_layers=1)), "got 2 layers", "expected 1", "correct num_hidden_layers",
    ),
    "layout of Meta, a tied model with a head": in_meta_layout(
        both(vocabulary(1996), config(tie_word_embeddings=True)), "lm_head.weight is stored", "remove the tensor",
    ),
    "layout of Megatron-Core, a tensor that it does not have": in_megatron_layout(
        error("layout megatron does not have this tensor", "inv_freq"),
        tensors(lambda found: found.update({f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    ),
    "layout of Megatron-Core, a model type that it does not have": in_megatron_layout(
        error("layout megatron does not support model type 'helium'", "--layout native"), config(model_type="helium"),
    ),
    "layout of Megatron-Core, fewer layers in the config": in_megatron_layout(
        error("model.layers.1 is not an MTP layer", "num_hidden_layers 1"), config(num_hidden_layers=1),
    ),
    "layout of Megatron-Core, a tensor is missing": in_megatron_layout(
        error("decoder.layers.0.input_layernorm.weight is missing"), drop(NORM),
    ),
    "layout of Megatron-Core, replicated tensors": in_megatron_layout(
        error("--replicate", "does not apply to layout megatron"), lambda _: None, "--replicate", "lm_head.weight",
    ),
    "layout of Megatron-Core, an activation that is not SwiGLU": in_megatron_layout(
        error("does not support hidden_act 'gelu' of the config (expected 'silu')", "--layout native"),
        config(hidden_act="gelu"),
    ),
    "checkpoint of Megatron-Core, a config of a quantized model": of_megatron(
        config(quantization_config={"quant_method": "fp8"}),
        "layout megatron does not have quantized tensors",
    ),
    "checkpoint of Megatron-Core, a long tuple in the list of chunks": of_megatron(
        metadata_that_repeats_a_long_tuple, "has 100000 sizes or offsets of a tensor (expected at most 64)"
    ),
    "checkpoint of Megatron-Core, a long path in the list of chunks": of_megatron(
        metadata_that_repeats_a_long_path, "repeats names and sizes too often (expected a list of at most"
    ),
    "checkpoint of Megatron-Core, a chunk that executes code": of_megatron(
        chunk_of(Bomb()), "__0_0.distcp", "posix._exit"
    ),
    "checkpoint of Megatron-Core, a chunk of another shape": of_megatron(
        chunk_of(torch.ones(63)), f"a chunk of {FINAL_NORM} is F32 [63] (expected F32 [64])"
    ),
    "checkpoint of Megatron-Core, the list of chunks is missing": of_megatron(
        remove("iter_0000500/.metadata"),
        ".metadata: is missing (expected beside .distcp files)", "copy it",
    ),
    "checkpoint of Megatron-Core, a tensor that the model type does not have": Case(
        refused(error("tensor vision_model.weight is not one of a 'llama' model")),
        as_megatron(lambda found: found.update({"vision_model.weight": torch.ones(2)})),
    ),
    "checkpoint of Megatron-Core, a tensor is missing": Case(
        refused(error("decoder.layers.0.input_layernorm.weight is missing")),
        as_megatron(lambda found: found.pop("decoder.layers.0.input_layernorm.weight")),
    ),
    "checkpoint of Megatron-Core, two names of a tensor with different values": Case(
        refused(error("are one tensor with two names, but have different bytes")),
        as_megatron(lambda found: found.update({FUSED_NORM: torch.full((64,), 2.0)})),
    ),
    "checkpoint of Megatron-Core, other heads in the config": of_megatron(
        config(num_key_value_heads=8),
        "linear_qkv.weight: has 256 rows (expected a multiple of 24", "--config",
    ),
    "checkpoint of Megatron-Core without a config": of_megatron(
        remove("config.json"),
        "does not have a config.json, which has the model type", "--config",
    ),
    "checkpoint of Megatron-Core, the file with the arguments is truncated": of_megatron(
        lambda source: (path := source / "iter_0000500" / "common.pt").write_bytes(path.read_bytes()[:300]),
        "common.pt: is truncated or damaged: download or save it again, or move it to another folder",
    ),
    "checkpoint of Megatron-Core, biases in the config that are not stored": of_megatron(
        config(attention_bias=True), "linear_qkv.bias is missing (expected by the config",
    ),
    "checkpoint of Megatron-Core, another epsilon in the arguments": of_megatron(
        lambda source: torch.save(
            {"args": argparse.Namespace(norm_epsilon=0.5)}, source / "iter_0000500" / "common.pt"
        ),
        "(expected 0.5 by common.pt)", "--config",
    ),
    "checkpoint of Megatron-Core, norms of another kind in the arguments": of_megatron(
        lambda source: torch.save(
            {"args": argparse.Namespace(normalization="LayerNorm")}, source / "iter_0000500" / "common.pt"
        ),
        "normalization is RMSNorm for model type", "(expected LayerNorm by common.pt)", "--config",
    ),
    "checkpoint of Megatron-Core, the description of its files is missing": of_megatron(
        lambda source: (source / "iter_0000500" / "metadata.json").unlink(),
        "holds files of Megatron-Core, without iter_0000500/metadata.json: copy it", "--from megatron",
    ),
    "checkpoint of Megatron-Core, the file that names its iteration is missing": of_megatron(
        remove("latest_checkpointed_iteration.txt"), "latest_checkpointed_iteration.txt: is missing: copy it, or pass",
    ),
    "checkpoint of Megatron-Core, its iteration is missing": of_megatron(
        lambda source: (source / "latest_checkpointed_iteration.txt").write_text("600"),
        "names '600', whose folder is not there",
    ),
    "rank files of Meta, an unknown tensor": Case(
        refused(error("extra.weight is unknown in Meta's layout")),
        as_meta(lambda ranks: ranks[0].update({"extra.weight": torch.ones(2)}), tp=1),
    ),
    "rank files of Meta, a tensor of another shape": Case(
        refused(error("layers.0.attention.wk.weight", "num_key_value_heads * head_dim")),
        as_meta(lambda ranks: ranks[0].update({"layers.0.attention.wk.weight": torch.ones(8, 64)}), tp=1),
    ),
    "rank files of Meta, a replicated head": Case(
        refused(error("lm_head.weight", "3996 elements (expected 1998 by vocab_size=1998"))
        | {"plan --prove": error("lm_head.weight (got [3996, 64], expected [1998, 64])")},
        as_meta(lambda ranks: [rank.update({"output.weight": torch.zeros(1998, 64)}) for rank in ranks]),
    ),
    "rank files of Meta, a tied head of another shape": Case(
        refused(error("lm_head.weight is F32 [3996, 64] (expected F32 [1998, 64], a copy of", "tie_word_embeddings")),
        both(
            config(tie_word_embeddings=True),
            as_meta(lambda ranks: [rank.update({"output.weight": torch.zeros(1998, 64)}) for rank in ranks]),
        ),
    ),
    "rank files of Meta, a tied head that differs": Case(
        every(COMMANDS, na("test_external compares the tensors"))
        | {"split": error("lm_head.weight: differs from model.embed_tokens.weight", "correct tie_word_embeddings")},
        both(config(tie_word_embeddings=True), as_meta(lambda _: None)),
    ),
    "rank files of Meta, a tensor is missing": Case(
        refused(error("layers.0.feed_forward.w1.weight is missing (expected by the config", "copy the folder again")),
        as_meta(lambda ranks: [rank.pop("layers.0.feed_forward.w1.weight") for rank in ranks]),
    ),
    "rank files of Meta, one is missing": Case(
        refused(error("consolidated.00.pth, the file of rank 0, is missing")),
        both(as_meta(lambda _: None), remove("consolidated.00.pth")),
    ),
    "rank files of Meta, the last one is missing": Case(
        refused(error("consolidated.01.pth, the file of rank 1, is missing", "expected 2 ranks")),
        both(as_meta(lambda _: None), remove("consolidated.01.pth")),
    ),
    "rank files of Meta without params.json": Case(
        refused(error("consolidated.00.pth", "copy params.json into the folder")),
        both(as_meta(lambda _: None), remove("params.json")),
    ),
    "rank files of Meta, a replica that differs": Case(
        every(COMMANDS, na("test_external compares the tensors"))
        | {"split": error("consolidated.01.pth: model.norm.weight differs from the shard", "convert the model again")},
        as_meta(lambda ranks: ranks[1].update({"norm.weight": ranks[1]["norm.weight"] + 1})),
    ),
    "rank files of DeepSpeed, some are missing": Case(
        refused(error("rank 0 of 2 has 1 file", "expected 8")), as_deepspeed,
    ),
    "metadata of torch.distributed.checkpoint with code": Case(
        refused(error("asks for os.system", "nothing in it is executed")), metadata_with_code,
    ),
    # files
    "two checkpoints in a folder": Case(
        refused(error("a.safetensors, b.safetensors", "pass one of the files")), two_checkpoints,
    ),
    "two variants of a checkpoint": Case(
        refused(error("2 variants of a checkpoint (model.fp16.safetensors, model.safetensors)", "--ignore")),
        lambda source: shutil.copyfile(source / "model.safetensors", source / "model.fp16.safetensors"),
    ),
    "index that lists a subset of a file": Case(
        refused(error("is not in the index")),
        in_two_files(second=lambda found: [UP, "lm_head.weight"], index=True, names=-1),
    ),
    "index that lists a subset of the files": Case(
        refused(error("not in model.safetensors.index.json", "model-00002-of-00002.safetensors", "--ignore")),
        in_two_files(second=lambda found: [UP], index=True, names=-1),
    ),
    "adapter next to the base": Case(
        refused(error("adapter_model.safetensors", "--adapter", "--merge-adapter", "--ignore")), adapter,
    ),
    "adapter in place of a model": Case(
        refused(error("is a PEFT adapter", "--adapter")),
        both(adapter, remove("model.safetensors")),
    ),
    "adapter next to the base, excluded by an option": Case(
        moved(RIGHT), adapter, options=("--ignore", "adapter_*"),
        left_out=("adapter_model.safetensors", "adapter_config.json"),
    ),
    "PyTorch adapter next to the base": Case(
        refused(error("adapter_model.bin", "--adapter", "--merge-adapter", "--ignore")),
        both(adapter, lambda at: (at / "adapter_model.safetensors").rename(at / "adapter_model.bin")),
    ),
    "adapter next to rank files of DeepSpeed": Case(
        refused(error("adapter_config.json, adapter_model.safetensors", "--ignore")), both(as_deepspeed, adapter),
    ),
    "rank files that vLLM saved, without one": Case(
        refused(error("rank files are missing", "save the folder again")), first_rank_of_vllm,
    ),
    "rank file of a split without its manifest": Case(
        refused(error("rank-0-of-2.safetensors, a rank file of shardconv", "restore shardconv.json")),
        lambda source: (source / "model.safetensors").rename(source / "rank-0-of-2.safetensors"),
    ),
    "rank file of a split under another name": Case(
        refused(error("model.safetensors, a rank file of shardconv", "restore shardconv.json")),
        lambda source: save_file(read(source), source / "model.safetensors", metadata={"shardconv": "0" * 32}),
    ),
    "lock of an unfinished upload": Case(
        refused(error("a run has not finished writing it", "remove", ".shardconv.lock")),
        lambda source: (source / ".shardconv.lock").write_text("{}"),
    ),
    "pointer of git LFS": Case(
        refused(error("model.safetensors: is a pointer of git LFS", "git lfs pull")),
        lambda source: (source / "model.safetensors").write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 6770176\n"
        ),
    ),
    "page of a website in place of weights": Case(
        refused(error("model.safetensors: is an HTML or XML page", "download it again")),
        lambda source: (source / "model.safetensors").write_text("<!DOCTYPE html><title>404</title>"),
    ),
    "PyTorch file that may be another model": Case(
        refused(error("pytorch_model.bin", "--ignore")),
        lambda source: (source / "pytorch_model.bin").write_bytes(b"not a copy"),
    ),
    "other format beside": Case(
        refused(error("rust_model.ot", "--ignore")),
        lambda source: (source / "rust_model.ot").write_bytes(b"x"),
    ),
    "trainer state beside": Case(
        moved(RIGHT), lambda source: (source / "optimizer.pt").write_bytes(b"state"),
        left_out=("optimizer.pt",),
    ),
    # PyTorch files
    "PyTorch file": Case(moved(RIGHT), pytorch(with_strides)),
    "PyTorch file with a pickle that executes code": Case(
        refused(error("pytorch_model.bin", "posix._exit", "if you trust the file")),
        pytorch(lambda found: found.update(x=Bomb())),
    ),
    "PyTorch file that is empty": Case(
        refused(error("pytorch_model.bin: is empty", "download or save it again")),
        pytorch(damage=lambda path: os.truncate(path, 0)),
    ),
    "PyTorch file that is truncated": Case(
        refused(error("pytorch_model.bin: is truncated or damaged: download or save it again")),
        pytorch(damage=lambda path: os.truncate(path, path.stat().st_size - 5000)),
    ),
    "PyTorch file with a list of tensors": Case(
        refused(error("pytorch_model.bin", "'x' holds tensors", "save the state dict alone")),
        pytorch(lambda found: found.update(x=[torch.ones(2)])),
    ),
    "PyTorch file with many names of one tensor of 64 dims": Case(
        refused(error("pytorch_model.bin", "repeats names and sizes too often", "save its tensors again")),
        pytorch(lambda found: found.update(dict.fromkeys(map(str, range(20_000)), torch.zeros(0, *[1] * 63)))),
    ),
    "PyTorch file of complex numbers": Case(
        refused(error(UP, "torch.complex128", "save it in another dtype")),
        pytorch(lambda found: found.update({UP: found[UP].to(torch.complex128)})),
    ),
    "PyTorch file without a tensor of its index": Case(
        refused(error(DOWN, "no file of the index", "download both again")),
        both(
            pytorch(lambda found: found.pop(DOWN)),
            lambda source: write_index(
                source, dict.fromkeys([DOWN], "pytorch_model.bin"), "pytorch_model.bin.index.json"
            ),
        ),
    ),
    # quantized weights
    "fp8 with one scale per tensor": Case(moved(error("is quantized: pass --dequantize")), fp8_scales),
    "fp8 with block scales": Case(moved(error("is quantized: pass --dequantize")), block_scales(8)),
    "block scales without a block size": Case(
        refused(error("proj.weight_scale_inv", "block size", "--config")), block_scales(8, weight_block_size=None),
    ),
    "block scales of another block size": Case(
        refused(error("proj.weight_scale_inv", "expected", "--config")), block_scales(8, weight_block_size=[16, 16]),
    ),
    "block scales that are missing": Case(
        refused(error(f"{UP}_scale_inv is missing")), both(block_scales(8), drop(f"{UP}_scale_inv")),
    ),
    "dequantization of a checkpoint that is not quantized": Case(
        moved(error("is not quantized", "remove --dequantize")), dequantize=True,
    ),
    "quantized layer that the settings leave unquantized": Case(
        refused(error("down_proj.weight is quantized", "down_proj")),
        block_scales(8, modules_to_not_convert=["down_proj"]),
    ),
    "quantization method that is not supported": unsupported("'hqq' is not", "4 bits", quant_method="hqq"),
    "EETQ": unsupported("'eetq' is not supported", "interleaved", quant_method="eetq"),
    "bitsandbytes with 4 bits": unsupported(
        "4 bits is not supported", "64 x 256", quant_method="bitsandbytes", load_in_4bit=True
    ),
    "Quanto with 4 bits": unsupported("Quanto with weights of 'int4'", quant_method="quanto", weights="int4"),
    "compressed-tensors with sparse compression": Case(
        refused(error("sparsity_config", "sparse-24-bitmask", "save the checkpoint without sparse compression")),
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
    ),
    "compressed-tensors with a pattern that takes too long": Case(
        refused(error("ignore", "(a+)+$", "may take too long to match")), compressed(ignore=["re:(a+)+$"]),
    ),
    "scales of a KV cache that are not one per head": Case(
        refused(error("k_scale", "one per KV head", "one scale per layer")),
        both(
            compressed(kv_cache_scheme={"num_bits": 8}),
            put(f"{LAYER}.self_attn.k_scale", lambda _: torch.ones(3)),
        ),
    ),
    "torchao with the layout of a kernel": Case(
        refused(error(UP, "Int4TilePackedTo4dTensor", "split the unquantized checkpoint")), tile_packed,
    ),
    # quantized weights without a quantization_config
    "fp8 without a config": Case(
        refused(error(UP, "quantization_config", "--config")),
        both(
            put(UP, lambda found: found[UP].to(torch.float8_e4m3fn)), remove("config.json"),
        ),
        options=("--head-dim", "16"),
    ),
    "GPTQ": Case(refused(error(f"{LAYER}.mlp.up_proj.", "quantization_config", "--config")), gptq),
    # engines
    "boundaries of vLLM": Case(moved(RIGHT), options=("--for", "vllm")),
    "boundaries of vLLM, norms over heads": Case(moved(RIGHT), base="olmo2", options=("--for", "vllm")),
    "layout of vLLM": Case(moved(RIGHT, split=na(OTHER_NAMES), reshard=na(OTHER_NAMES)), layout="vllm"),
    # sizes that do not divide
    "heads and widths that do not divide": Case(
        refused(error("a multiple of", "--pad to pad with zeros")), base="odd",
    ),
    "experts whose width does not divide": Case(
        refused(error("--ep 4 for whole experts on each rank, or --pad to pad with zeros"))
        | {"plan --prove": na("the experts of the small model have another width, and the report says so")},
        base="narrow",
    ),
    "heads and widths that do not divide, padded": Case(moved(RIGHT), base="odd", options=("--pad",)),
    "slopes for each head, padded in each group": Case(
        moved(RIGHT, plan=na(GROUPS), split=na(GROUPS)), base="minimax", options=("--pad",),
    ),
    "padding for vLLM, which reads its sizes from the config": Case(
        refused(error("--pad is not supported with the boundaries of vllm", "shardconv pad")), base="odd",
        options=("--pad", "--for", "vllm"),
    ),
    "padding of a model of an unknown type": Case(
        refused(error("--pad is not supported for this model", "no family is known")), config(model_type="unheard_of"),
        base="odd", options=("--pad",),
    ),
    # plan files
    "plan file that matches too much": Case(
        moved(
            error("plan.toml"), load=na("a warning has the plan file, and forward fails in torch"),
            plan=warning(NORM), split=warning(NORM), proof=error("not proven"),
        ),
        plan_file('[rules]\n"**.*" = { style = "colwise", pad = true }\n'), has_plan=True,
    ),
    "plan file that shadows a fused rule": Case(
        moved(
            warning("plan.toml", QKV), plan=warning("plan.toml", QKV), split=warning("plan.toml", QKV),
            proof=error("not proven"), run__check=error("logits differ"),
        ),
        plan_file('[rules]\n"**.qkv_proj" = { style = "colwise" }\n'), base="phi3", has_plan=True,
    ),
    "plan file with a block that matches no module": Case(
        refused(error("blocks 'model.layer.*.self_attn' = 'gathered_attention'", "none of its rules applies")),
        plan_file('[blocks]\n"model.layer.*.self_attn" = "gathered_attention"\n'), has_plan=True,
    ),
    "plan file with a block whose tensors another block covers": Case(
        refused(error("blocks 'model.layers.*.self_attn' = 'attention'", "none of its rules applies")),
        plan_file('[blocks]\n"model.layers.*.self_attn" = ["gathered_attention", "attention"]\n'), has_plan=True,
    ),
    "plan file with a misspelled field of a block": Case(
        refused(error("block 'mlp' does not read 'intermediate_sise'", "it reads intermediate_size")),
        plan_file('[blocks]\n"model.layers.*.mlp" = { block = "mlp", intermediate_sise = "ffn_size" }\n'),
        has_plan=True,
    ),
    "plan file that redefines a unit of the family": Case(
        refused(error("unit 'query_head' is ", "rename it")),
        plan_file('[units]\nquery_head = { count = "num_attention_heads // 2", size = "head_dim * 2" }\n[rules]\n'
                  '"lm_head" = { style = "colwise", unit = "query_head" }\n'), has_plan=True,
    ),
    "plan file with a submodel without a config": Case(
        refused(error("submodel 'model.layers'", "nested config 'text_config'")),
        plan_file('[submodels]\n"model.layers" = { config = "text_config", family = "llama" }\n'), has_plan=True,
    ),
    "plan file with a prefix without a final dot": Case(
        refused(error("plan file plan.toml", "prefix 'model' does not end with a dot")),
        plan_file('prefix = "model"\n[rules]\n"model.layers.*.mlp.up_proj" = { style = "colwise" }\n'), has_plan=True,
    ),
    "plan file with a config field that no rule reads": Case(
        refused(error("[config] head_dims", "no rule reads this field")),
        plan_file('[config]\nhead_dims = 8\n'), has_plan=True,
    ),
    # sources that change
    "source changed after plan": Case(moved(RIGHT), put(UP, lambda found: found[UP] + 1)),
    "source changed during split": Case(
        every(COMMANDS, na("nothing else reads the source then")) | {"split": error("model.safetensors", "changed")},
        while_split=in_place,
    ),
    "config changed during split": Case(
        every(COMMANDS, na("nothing else reads the source then")) | {"split": error("config.json", "changed")},
        while_split=config(num_key_value_heads=8),
    ),
    # interrupted runs
    "resumed split": Case(only_split(RIGHT), interrupted=lambda *_: None),
    "resumed split with damaged rank files": Case(only_split(RIGHT), interrupted=lambda _, staged: flip_all(staged)),
    "resumed split with a damaged journal": Case(
        only_split(error("target", "the journal of the interrupted run is damaged")),
        interrupted=lambda _, staged: damage_journal(staged),
    ),
    "resumed split of a modified source": Case(
        only_split(error("model.safetensors", "is not as in the interrupted run")),
        interrupted=lambda source, _: in_place(source),
    ),
    "resumed split of other values with the same time": Case(
        only_split(error("target", "another sample of the source's values")),
        interrupted=lambda source, _: other_values(source),
    ),
    "resumed split on a file system without locks": Case(
        only_split(error("cannot be resumed", "does not support locks", "remove --resume")),
        options=("--resume",), has_locks=False,
    ),
    # chosen ranks
    "rank with more digits than any rank has": Case(
        every(COMMANDS, na("only split has --ranks"))
        | {"split": error("--ranks has rank 99999999999 (expected ranks from 0 to 3, of 4 ranks)")},
        options=("--ranks", "0-99999999999"),
    ),
    # plans of libraries
    "plan of a library that does not have the model": Case(
        refused(error("the installed diffusers does not have a tensor parallel plan for model type 'llama'")),
        options=("--rules", "diffusers"),
    ),
    # whole experts
    "expert parallel size that is not a multiple of tp": Case(
        refused(error("--ep 3 is not a multiple of --tp", "pass --ep 1, or a multiple")), base="mixtral",
        options=("--ep", "3"),
    ),
    "more expert parallel ranks than experts": Case(
        refused(error("--ep 8 is more than the 4 experts", "pass --ep 1, or a multiple of --tp that is at most 4")),
        base="mixtral", options=("--ep", "8"),
    ),
    "expert parallel size of a model without experts": Case(
        refused(error("--ep 4: no tensor is known to be of an expert")),
        options=("--ep", "4"),
    ),
    # pipeline stages
    "two stages": Case(moved(RIGHT, proof=NO_STAGES), pp=2),
    "a tied head in two stages": Case(
        moved(RIGHT, proof=NO_STAGES), both(drop("lm_head.weight"), config(tie_word_embeddings=True)), pp=2
    ),
    "numbers of layers that are not the model's": Case(
        refused(error("has 3 layers (expected 2, of model.layers)")) | {"plan --prove": NO_STAGES},
        options=("--stages", "1,2"),
    ),
    "more stages than layers": Case(
        refused(error("more than the 1 layers of model.layers")) | {"plan --prove": NO_STAGES},
        both(config(num_hidden_layers=1), tensors(only_first_layer)), pp=2,
    ),
    "more stages than ranks that a plan may have": Case(
        refused(error("--pp is 4097 (expected an integer from 1 to 4096)")) | {"plan --prove": NO_STAGES},
        options=("--pp", "4097"),
    ),
    "stages of a number of layers that no model has": Case(
        refused(error("model.layers.2 is missing (expected 1000000000 layers")) | {"plan --prove": NO_STAGES},
        config(num_hidden_layers=10**9), pp=2,
    ),
    "stages of a model without a family": Case(
        refused(error("--pp is not supported for family by_name")) | {"plan --prove": NO_STAGES},
        config(model_type=None), pp=2,
    ),
    "stages of a model whose layers return tuples": Case(
        moved(
            error("a FalconH1DecoderLayer returns a tuple", "run it in one stage"), proof=NO_STAGES,
            plan=na("the expected shards lack Mamba layers"), split=na("the expected shards lack Mamba layers"),
        ),
        base="falcon_h1", pp=2,
    ),
    "stages in the layout of SGLang": Case(
        every(COMMANDS, na("only split and reshard have --layout"))
        | {"split": error("layout sglang does not have pipeline stages (got 2)", "--pp 1")},
        options=("--layout", "sglang"), pp=2,
    ),
    "rank files of two stages exchanged": Case(
        damaged(error(NATIVE.rank_file(0, TP)), load=error(NATIVE.rank_file(0, TP))), damage=exchanged_stages, pp=2
    ),
    "rank file of a stage of another split": Case(
        damaged(error(NATIVE.rank_file(3, TP)), load=error(NATIVE.rank_file(3, TP))), damage=other_stage, pp=2
    ),
    "constant beside a tensor that is not there": Case(
        damaged(error(MANIFEST_NAME, "does not have nothing beside it")), damage=constant_beside_nothing, pp=2
    ),
    "other stages than those of the split": Case(
        every(COMMANDS, OF_MODEL) | every(MODEL, error("is split for --tp 2 --stages 1,1 (got --pp 4)")),
        run_options={"pp": 4}, pp=2,
    ),
    "adapter of other stages": Case(
        every(COMMANDS, OF_MODEL) | every(MODEL, error("is split for --tp 4 (expected --tp 2 --stages 1,1")),
        damage=other_adapter, run_options={"adapter": "adapter"}, pp=2,
    ),
    "stages of a model whose layers read images": Case(
        every(COMMANDS, na("the expected shards lack image encoders"))
        | every(MODEL, error("no method get_image_features has all of", "run it in one stage")),
        images("mllama"), pp=2,
    ),
    "first stage without the layers to which vLLM adds images": Case(
        refused(error("in the first stage (expected at least 2", "pass --pp 1")) | {"plan --prove": NO_STAGES},
        images("qwen3_vl", deepstack_visual_indexes=[0, 1]), options=("--for", "vllm"), pp=2,
    ),
    # split checkpoints
    "additional rank file of another tp": Case(
        damaged(RIGHT, verify=warning(NATIVE.rank_file(0, 2)),
                verify__against=warning(NATIVE.rank_file(0, 2))),
        damage=from_other(NATIVE.rank_file(0, 2), tp=2),
    ),
    "config.json edited after the split": Case(
        damaged(error("config.json")), damage=lambda _, split: change_config(split, {"num_attention_heads": 4}),
    ),
    "rank file replaced by one of another tp": Case(
        damaged(error(NATIVE.rank_file(0, TP))),
        damage=from_other(NATIVE.rank_file(0, 2), tp=2, to=NATIVE.rank_file(0, TP)),
    ),
    "rank file of another split": Case(
        damaged(error(NATIVE.rank_file(1, TP)), load=error(NATIVE.rank_file(1, TP))),
        damage=from_other(NATIVE.rank_file(1, TP)),
    ),
    "rank files of another split": Case(
        damaged(error(NATIVE.rank_file(0, TP)), load=error(NATIVE.rank_file(0, TP))),
        damage=all_rank_files,
    ),
    "manifest of another split": Case(
        damaged(error(NATIVE.rank_file(0, TP)), load=error(NATIVE.rank_file(0, TP))),
        damage=from_other(MANIFEST_NAME),
    ),
    "manifest of another tp": Case(
        damaged(error(NATIVE.rank_file(0, 2)), load=error("is for 2 ranks", "torchrun")),
        damage=from_other(MANIFEST_NAME, tp=2),
    ),
    "folder with some of the ranks": Case(
        damaged(error("ranks 0, 3 of 4 are missing"), verify=RIGHT, verify__against=RIGHT,
                run=error("does not have ranks 0, 3"), run__check=error("does not have ranks 0, 3"),
                load=error("does not have rank 0")),
        damage=without_some_ranks,
    ),
    "hosts of which one merged an adapter": Case(
        damaged(error("different merged adapter"), run=ONE_FOLDER, run__check=ONE_FOLDER, load=ONE_FOLDER),
        damage=other_host,
    ),
    "manifest of a later version": Case(damaged(error(MANIFEST_NAME, "update shardconv")), damage=newer_manifest),
    "missing file of a rank with several": Case(
        damaged(error(SECOND_FILE)), damage=lambda _, split: (split / SECOND_FILE).unlink(), max_file_size=SEVERAL,
    ),
    "file of another split for a rank with several": Case(
        damaged(error(SECOND_FILE)), damage=second_file_of_another, max_file_size=SEVERAL,
    ),
    "two files of a rank exchanged": Case(
        damaged(error("rank-1-of-4-file-")), damage=exchanged_files, max_file_size=SEVERAL,
    ),
    "index that contradicts the files of a rank": Case(
        damaged(RIGHT, verify=error("rank-1-of-4.safetensors.index.json"),
                verify__against=error("rank-1-of-4.safetensors.index.json")),
        damage=other_index, max_file_size=SEVERAL,
    ),
    # diffusion models
    "config of a VAE": Case(
        refused(error("no family is known for class 'AutoencoderKL' of diffusers")),
        config(model_type=None, _class_name="AutoencoderKL"),
    ),
    "config of a transformer without its tensors": Case(
        refused(error("lm_head.weight", "no rule of family flux matches it")),
        config(model_type=None, _class_name="FluxTransformer2DModel"),
    ),
    "height between the patches of a picture": cost_of_config(
        "--height 1032 is not a multiple of 16: pass --height 1024 or --height 1040", "FluxTransformer2DModel",
        "--height", "1032",
    ),
    "frames of a model that makes pictures": cost_of_config(
        "no input of a FluxTransformer2DModel depends on --frames 16: remove it", "FluxTransformer2DModel",
        "--frames", "16",
    ),
    "prompt of a model without text": cost_of_config(
        "no input of a DiTTransformer2DModel depends on --seq 16: remove it", "DiTTransformer2DModel", "--seq", "16",
    ),
    # pipelines
    "component that is missing": of_pipeline(
        error("component transformer (FluxTransformer2DModel) is missing"),
        lambda source: shutil.rmtree(source / "transformer"),
    ),
    "component without weights": of_pipeline(
        error("component transformer (FluxTransformer2DModel) has config.json and no weights"),
        lambda source: (source / "transformer" / "model.safetensors").unlink(),
    ),
    "component of an unknown class": of_pipeline(
        error(
            "component transformer (FluxTransformer2DModel)", "no family is known",
            "unsharded, pass --component text_encoder",
        ),
        lambda source: both(put("proj_mlp.weight", lambda _: torch.zeros(8, 8)), config(model_type=None))(
            source / "transformer"
        ),
    ),
    "component whose config is of another class": of_pipeline(
        error("config.json", "config of a 'FluxControlNetModel' (expected 'FluxTransformer2DModel', as in model_index"),
        lambda source: config(_class_name="FluxControlNetModel")(source / "transformer"),
    ),
    "component with two variants": of_pipeline(
        error("component transformer", "2 variants", "--ignore"),
        copied("transformer/model.safetensors", "transformer/model.fp16.safetensors"),
    ),
    "copied component with two variants": of_pipeline(
        error("component vae (AutoencoderKL) has 2 variants", "--ignore vae/model.safetensors"), vae_with_variants,
    ),
    "component in the format GGUF": of_pipeline(
        error("transformer/q4.gguf: is in the format GGUF", "--ignore", "AutoModelForCausalLM"),
        lambda at: (at / "transformer" / "model.safetensors").rename(at / "transformer" / "q4.gguf"),
    ),
    "LoRA file for a component that is not sharded": split_with(
        error("unet is not sharded (expected only text_encoder, transformer)", "load_lora_weights"),
        lora("unet.down.lora_A.weight"), "--adapter", "SOURCE/lora.safetensors",
    ),
    "IP adapter as an adapter": split_with(
        error("image_proj.norm.weight", "is a tensor of an IP adapter"),
        lora("image_proj.norm.weight"), "--adapter", "SOURCE/lora.safetensors",
    ),
    "LoRA file with a layer that the component lacks": split_with(
        error("other.lora_A.weight", "does not have a layer other: fuse it into the pipeline in Python", "load_lora_w"),
        lora("transformer.other.lora_A.weight"), "--adapter", "SOURCE/lora.safetensors",
    ),
    "LoRA file with the alpha of a layer alone": split_with(
        error("x_embedder.alpha: its layer x_embedder does not have A"),
        lora("transformer.x_embedder.alpha", shape=()), "--adapter", "SOURCE/lora.safetensors",
    ),
    "LoRA file with a scalar as A": split_with(
        error("x_embedder.lora_A.weight"),
        lora("transformer.x_embedder.lora_A.weight", "transformer.x_embedder.lora_B.weight", shape=()),
        "--adapter", "SOURCE/lora.safetensors",
    ),
    "LoRA file without tensors": split_with(
        error("lora.safetensors", "does not have tensors"), lora(), "--adapter", "SOURCE/lora.safetensors",
    ),
    "pipeline for an engine": split_with(
        error("--for vllm is for one model", "pass a component"), lambda _: None, "--for", "vllm",
    ),
    "single-file checkpoint beside the components": of_pipeline(
        error("not of a component: flux1-dev.safetensors", "--ignore"),
        copied("transformer/model.safetensors", "flux1-dev.safetensors"),
    ),
    "component of another pipeline": damaged_pipeline(
        error("component transformer (FluxTransformer2DModel) is of another split"),
        lambda source, split: replace_component(split, other_split(source)),
    ),
    "component for another tp": damaged_pipeline(
        error("component transformer (FluxTransformer2DModel) is for 2 ranks (expected 4)"),
        lambda source, split: replace_component(split, other_split(source, tp=2)),
    ),
    "split component that is missing": damaged_pipeline(
        error("component transformer (FluxTransformer2DModel) is missing (no transformer/shardconv.json)"),
        lambda _, split: shutil.rmtree(split / "transformer"),
    ),
    "split pipeline without model_index.json": damaged_pipeline(
        error("model_index.json"), lambda _, split: (split / "model_index.json").unlink()
    ),
    "split pipeline without its manifest": damaged_pipeline(
        error("split components (", "without shardconv-pipeline.json"),
        lambda _, split: (split / "shardconv-pipeline.json").unlink(),
    ),
    "model_index.json edited after the split": damaged_pipeline(
        error("model_index.json: differs from its checksum"),
        lambda _, split: (split / "model_index.json").write_text('{"transformer": ["diffusers", "Other"]}'),
    ),
    "config.json of a component edited after the split": damaged_pipeline(
        error("transformer", "config.json", "differs from"),
        lambda _, split: change_config(split / "transformer", {"num_attention_heads": 4}),
    ),
    "transformer that was saved with an IP adapter": Case(
        refused(error("attn.processor.to_k_ip.0.weight", "AutoModel.from_pretrained(")),
        put("transformer_blocks.0.attn.processor.to_k_ip.0.weight", lambda _: torch.zeros(8, 8)),
    ),
    "single-file checkpoint with original names": Case(
        refused(error("double_blocks.0.img_attn.qkv.weight", "FluxTransformer2DModel.from_single_file(")),
        tensors(lambda found: found.update({"double_blocks.0.img_attn.qkv.weight": found.pop(UP)})),
    ),
    # pages
    "name that is markup, in a page": Case(
        every(COMMANDS, na("test_html and test_browser have other pages")) | {"plan": RIGHT},
        put(MARKUP, lambda _: torch.tensor(2.0)), page="page.html",
    ),
    "page in place of another file": Case(
        every(COMMANDS, na("a page is of a plan")) | {"plan": error("notes.txt: is not a page of shardconv")},
        lambda source: source.with_name("notes.txt").write_text("notes"), page="notes.txt",
    ),
    # conversions
    "element that is too large for --dtype": Case(
        every(COMMANDS, na("the source is not split"))
        | {"plan": RIGHT, "plan --prove": error("--dtype"), "split": error(UP, "too large for fp16", "--dtype bf16")},
        put(UP, lambda found: found[UP].index_fill(0, torch.tensor([5]), 65520.0)), options=("--dtype", "fp16"),
    ),
    "NaN and infinity with --dtype": Case(
        every(("plan", "split", *BYTES), RIGHT) | every(MODEL, na("test_load loads a converted checkpoint"))
        | {"plan --prove": error("--dtype")},
        put(UP, lambda found: torch.cat([found[UP][:94], torch.tensor([[NAN], [INFINITY]]).expand(2, 64)])),
        options=("--dtype", "bf16"),
    ),
    "quantized weights with --dtype": Case(
        refused(error("is quantized", "--dtype")) | {"plan --prove": error("--dtype")}, block_scales(8),
        options=("--dtype", "bf16"),
    ),
}  # fmt: skip


def counts() -> Counter[str]:
    return Counter(outcome.kind for case in CASES.values() for outcome in case.expected.values())


def test_reliability_page_has_the_counts():
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    found = counts()
    expected = (
        f"a table of {len(CASES) - 1} unusual inputs and {len(COMMANDS)} commands",
        f"{found['right']} are correct results, {found['error']} are errors",
        f"{found['warning']} are warnings",
    )
    assert [each for each in expected if each not in " ".join(text.split())] == []


def test_every_case_has_an_outcome_for_every_command():
    assert all(set(case.expected) == set(COMMANDS) for case in CASES.values())
    outcomes = [outcome for case in CASES.values() for outcome in case.expected.values()]
    assert all(outcome.texts for outcome in outcomes if outcome.kind != "right")


# --- the inputs -----------------------------------------------------------------------------------------------------

FIELDS = {
    "vocab_size": 1999, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "num_local_experts": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Build the source and the split checkpoint of a case, once per case."""
    bases = cache(lambda model_type: write_base(tmp_path_factory.mktemp(model_type) / "source", model_type))
    return cache(lambda name: write_case(tmp_path_factory.mktemp("case"), CASES[name], bases))


#: A model whose dims are not multiples of tp, and its dims with padding.
ODD = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 90}
PADDED = {r"[qo]_proj": 128, r"[kv]_proj": 64, r"(gate|up|down)_proj": 96}
#: Numbers of query and KV heads for which 4 ranks pad each group; linear attention has a slope per head.
FEW = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "block_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def write_base(folder: Path, base: str) -> Path:
    """A model with the demo model's tokenizer; or a pipeline with two of them."""
    if base == "pipeline":
        for name in ("text_encoder", "transformer"):
            write_base(folder / name, "llama")
        index = {"text_encoder": ["transformers", "LlamaModel"], "transformer": ["diffusers", "FluxTransformer2DModel"]}
        (folder / "model_index.json").write_text(json.dumps(index))
        return folder
    torch.manual_seed(0)
    others = {"odd": ("llama", ODD), "minimax": (base, FEW), "narrow": ("mixtral", {"intermediate_size": 90})}
    model_type, odd = others.get(base, (base, {}))
    fields = {name: value for name, value in FIELDS.items() if model_type != "phi3" or name != "head_dim"} | odd
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3)
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def write_case(folder: Path, case: Case, bases: Callable[[str], Path]) -> tuple[Path, Path]:
    source, split = folder / "source", folder / "split"
    shutil.copytree(bases(case.base), source)
    if case.damage is None:
        case.change(source)
    else:
        shardconv.split(source, split, tp=case.tp, pp=case.pp, max_file_size=case.max_file_size)
        case.damage(source, split)
    return source, split


def split_of(case: Case, source: Path, split: Path) -> Path:
    """The split checkpoint of a case."""
    if not split.exists():
        options = [*options_of(case, source), "--layout", case.layout]
        result = call("split", source, *case.size, "-o", split, *options)
        if result.code:
            raise RuntimeError(result.err)  # not the command under test
    return split


def host_beside(split: Path) -> Path:
    """The folder with the other ranks of a split checkpoint, if two hosts made it."""
    return split.with_name("host")


def folders_of(case: Case, source: Path, place: Path) -> list[Path]:
    """The folders of the split checkpoint of a case."""
    split = split_of(case, source, place)
    host = host_beside(split)
    return [split, host] if host.exists() else [split]


def options_of(case: Case, source: Path) -> list[Any]:
    given = [one.replace("SOURCE", str(source)) for one in case.options]
    return [*given, *(["--rules", source.with_name("plan.toml")] if case.has_plan else [])]


# --- the commands ---------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The result of a command: its error or "", warnings, and a check that the result is correct."""

    error: str
    warnings: str
    check: Callable[[], None]


def of_result(result: Result, check: Callable[[], None]) -> Found:
    """The result of a command and its messages; with -q, stderr has warnings only."""
    message = f"{result.err}{result.out}" if result.code else ""
    return Found(message, result.err, check)


def plan(case: Case, source: Path, _: Path, __: Path, ___: Any) -> Found:
    more = options_of(case, source)
    page = [] if case.page is None else ["--html", source.with_name(case.page), "--overwrite"]

    def check() -> None:
        if page:
            parsed = Parsed(page[1].read_bytes())
            assert MARKUP in [name for name, _, _ in parsed.data["tensors"]["names"]]
        report = json.loads(call("plan", source, *case.size, "--json", *more).out)
        expected = {name: shard_shapes(case, name, tensor) for name, tensor in stored(source).items()}
        assert {one["name"]: [list(shape) for shape in one["shard_shapes"]] for one in report["tensors"]} == expected

    return of_result(call("plan", source, *case.size, "-q", *page, *more), check)


def prove_plan(case: Case, source: Path, _: Path, __: Path, ___: Any) -> Found:
    def check() -> None:
        """Do nothing: the proof compares, and test_prove.py tests that it finds errors."""

    result = call("plan", source, "--prove", "--tp", 2, *options_of(case, source))
    return of_result(result, check)._replace(warnings=result.err)


def split(case: Case, source: Path, _: Path, target: Path, __: Any) -> Found:
    def check() -> None:
        files = [load_file(target / NATIVE.rank_file(rank, TP)) for rank in range(TP)]
        found = expected_tensors(case, source)
        for rank, file in enumerate(files):
            assert set(file) == {name for name in found if case.pp == 1 or rank // case.tp in stages_of(name, found)}
        for name, tensor in found.items():
            check_shards(case, name, tensor, [file[name] for file in files if name in file][: case.tp])

    arguments = ["split", source, *case.size, "-o", target, "-q", *options_of(case, source)]
    with pytest.MonkeyPatch.context() as patch:
        if not case.has_locks:
            refuse_locks(patch)
        if case.while_split is not None:
            before_copying(patch, lambda: case.while_split(source))
        if case.interrupted is not None:
            patch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 4096)
            arguments += ["--resume", "--threads", 1]
            with failing_after(3):
                assert call(*arguments).code == 1
            case.interrupted(source, target.with_name(f".{target.name}.partial"))
        result = call(*arguments)
    return of_result(result, check)


def verify(case: Case, source: Path, place: Path, _: Path, __: Any) -> Found:
    folders = folders_of(case, source, place)
    return verified(call("verify", *folders), call("verify", *folders, "-q"))


def verify_against(case: Case, source: Path, place: Path, _: Path, __: Any) -> Found:
    arguments = ["verify", *folders_of(case, source, place), "--against", source]
    return verified(call(*arguments), call(*arguments, "-q"))


def verified(result: Result, quiet: Result) -> Found:
    def check() -> None:
        assert result.out.splitlines()[-1] == "correct"

    return of_result(result, check)._replace(warnings=quiet.err)


def merge(case: Case, source: Path, place: Path, target: Path, _: Any) -> Found:
    def check() -> None:
        if "--dtype" in case.options:
            found, converted = load_file(target / "model.safetensors"), expected_tensors(case, source)
            assert {name: as_bytes(tensor) for name, tensor in found.items()} == {
                name: as_bytes(tensor) for name, tensor in converted.items()
            }
            return
        expected = {name: data for name, data in contents(source).items() if name not in case.left_out}
        found = contents(target)
        if expected.pop("pytorch_model.bin", None):
            del found["model.safetensors"]
            assert {name: as_bytes(tensor) for name, tensor in stored(target).items()} == {
                name: as_bytes(tensor) for name, tensor in stored(source).items()
            }
        assert found == expected

    return of_result(call("merge", *folders_of(case, source, place), "-o", target, "-q"), check)


def reshard(case: Case, source: Path, place: Path, target: Path, _: Any) -> Found:
    def check() -> None:
        files = map(load_file, target.glob("rank-*.safetensors"))  # of one rank, or of one for each stage
        file, expected = dict(ChainMap(*files)), expected_tensors(case, source)
        assert set(file) == set(expected)
        for name, tensor in expected.items():
            found, padding = (
                (file[name][: len(tensor)], file[name][len(tensor) :]) if tensor.dim() else (file[name], None)
            )
            assert as_bytes(found) == as_bytes(tensor)
            assert padding is None or not padding.any()

    return of_result(call("reshard", *folders_of(case, source, place), "--tp", 1, "-o", target, "-q"), check)


def run(case: Case, source: Path, place: Path, _: Path, ranks: Any) -> Found:
    split = split_of(case, source, place)
    return ran(ranks("four", run_on_rank, split, None, model_options(case, split)), source)


def run_check(case: Case, source: Path, place: Path, _: Path, ranks: Any) -> Found:
    split = split_of(case, source, place)
    return ran(ranks("four", run_on_rank, split, source, model_options(case, split)), source)


def model_options(case: Case, split: Path) -> dict[str, Any]:
    """The options of run and load."""
    adapter = {name: split.with_name(one) for name, one in case.run_options.items() if name == "adapter"}
    return {**case.run_options, **adapter, **({"dequantize": True} if case.dequantize else {})}


def ran(found: list[Any], source: Path) -> Found:
    def check() -> None:
        assert {outputs for _, outputs, _ in found} == {(unsharded_text(source),)}

    messages = [message for message, _, _ in found]
    assert len({message == "" for message in messages}) == 1, messages  # all ranks, or none
    return Found("\n".join(messages).strip(), "\n".join(found[0][2]), check)


def run_on_rank(
    _: Any, place: Path, against: Path | None, more: Mapping[str, Any]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Returns the message of an error or of differences, the outputs, and the notes."""
    options = RunOptions(max_new_tokens=TOKENS, device="cpu", check=against, **more)
    try:
        check_run(open_loadable(place, tp=None, pp=options.pp, options={}), [PROMPT], options)
        report = run_rank(place, [PROMPT], options, lambda _: None)
    except ShardconvError as problem:
        return problem.with_options(), (), ()
    return "\n".join(report.differences or ()), report.outputs, report.notes


def unsharded_text(source: Path) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    made = transformers.AutoModelForCausalLM.from_pretrained(source)
    tokens = made.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def load(case: Case, source: Path, place: Path, _: Path, ranks: Any) -> Found:
    split = split_of(case, source, place)
    options = model_options(case, split) | ({"group": None} if case.pp > 1 else {})
    return loaded(ranks("four", load_on_rank, split, options), source)


def loaded(found: list[Any], source: Path) -> Found:
    """The result of loading on all ranks."""
    warned = "\n".join(found[0][2])

    def check() -> None:
        made = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        with torch.inference_mode():
            expected = made(IDS).logits
        for _, logits, _ in found:
            limit = 1e-4 * float(expected.nan_to_num().abs().max())
            torch.testing.assert_close(logits, expected, rtol=0, atol=limit, equal_nan=True)

    messages = [message for message, _, _ in found]
    assert len({message == "" for message in messages}) == 1, messages
    return Found("\n".join(messages).strip(), warned, check)


IDS = torch.arange(3, 12).view(1, -1)


def load_on_rank(axis: Any, place: Path, options: dict[str, Any]) -> tuple[str, torch.Tensor | None, list[str]]:
    """Returns the message of an error, the logits, and the warnings."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = shardconv.load(place, device="cpu", **{"group": axis, **options})
        with torch.inference_mode():
            return "", made(IDS).logits, [str(one.message) for one in warned]
    except (ShardconvError, RuntimeError) as problem:
        is_own = isinstance(problem, ShardconvError)
        return problem.with_options() if is_own else f"{type(problem).__name__}: {problem}", None, []


RUNNERS: Mapping[str, Callable[..., Found]] = dict(
    zip(COMMANDS, (plan, prove_plan, split, verify, verify_against, merge, reshard, run, run_check, load), strict=True)
)


# --- correct results, by torch and safetensors alone ----------------------------------------------------------------

#: Suffix of names to the sharded dim, for Llama and Mixtral; all other tensors are replicated.
DIMS = {
    r"((q|k|v|gate|up)_proj|w1|w3)\.(weight|bias|weight_scale_inv)": 0,
    r"(embed_tokens|lm_head)\.weight": 0,
    r"((o|down)_proj|w2)\.weight(_scale_inv)?": 1,
}


def stored(source: Path) -> dict[str, torch.Tensor]:
    pickled = source / "pytorch_model.bin"
    return torch.load(pickled, weights_only=True) if pickled.exists() else load_file(source / "model.safetensors")


def expected_tensors(case: Case, source: Path) -> dict[str, torch.Tensor]:
    """The tensors of a source, in the dtype of --dtype; its NaN are those of torch.tensor."""
    found = stored(source)
    if "--dtype" not in case.options:
        return found
    nan = torch.tensor(NAN, dtype=torch.bfloat16)
    return {name: torch.where(tensor.isnan(), nan, tensor.bfloat16()) for name, tensor in found.items()}


def as_bytes(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    return tensor.shape, tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def dim_of(name: str) -> int | None:
    return next((dim for end, dim in DIMS.items() if re.search(rf"(^|\.){end}$", name)), None)


def shard_shapes(case: Case, name: str, tensor: torch.Tensor) -> list[list[int]]:
    shape, dim = list(tensor.shape), dim_of(name)
    if "vllm" in case.options and name in {"model.embed_tokens.weight", "lm_head.weight"}:
        shape[0] = -(-shape[0] // 64) * 64
    if dim is not None:
        padded = [size for layer, size in PADDED.items() if "--pad" in case.options and re.search(layer, name)]
        shape[dim] = padded[0] // case.tp if padded else -(-shape[dim] // case.tp)
    return [shape] * case.tp


def stages_of(name: str, names: Container[str]) -> set[int]:
    """The stages of a tensor of a Llama with two layers, in two stages."""
    if name.startswith("model.embed_tokens."):
        return {0} if "lm_head.weight" in names else {0, 1}
    return {0 if name.startswith("model.layers.0.") else 1}


def check_shards(case: Case, name: str, tensor: torch.Tensor, shards: list[torch.Tensor]) -> None:
    assert [list(shard.shape) for shard in shards] == shard_shapes(case, name, tensor), name
    if (dim := dim_of(name)) is None:
        assert all(as_bytes(shard) == as_bytes(tensor) for shard in shards), name
    else:
        joined = torch.cat(shards, dim)
        assert as_bytes(joined.narrow(dim, 0, tensor.shape[dim])) == as_bytes(tensor), name
        assert not joined.narrow(dim, tensor.shape[dim], joined.shape[dim] - tensor.shape[dim]).any(), name


# --- the harness ----------------------------------------------------------------------------------------------------

#: Errors of other libraries, and unexpected errors.
FOREIGN = re.compile(r"Traceback|internal error|(?m:^(rank \d+: )?\w*(Error|Exception): )")


@pytest.fixture(autouse=True)
def _proofs_on_ranks(monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
    """Run proofs on existing processes, as the start of new ones takes seconds."""

    def proofs(folder: Path, source: Any, plans: Mapping[int, Any], request: Any, _: Any) -> tuple[Proof, ...]:
        made = []
        kind = source.config["architectures"][0]
        for tp, plan in plans.items():
            place = folder / SPLIT.format(tp=tp)
            split_by(source, place, plan, request)
            reference = folder / REFERENCE
            found = worst(ranks(LAYOUTS[tp], check, kind, folder / SMALL, place, request, reference))
            output, tokens, gradient, note = (None, None, None, found) if isinstance(found, str) else found[:4]
            fraction = sharded_fraction(source.specs, plan)
            made.append(Proof(tp, output, tokens, gradient, fraction, note))
        return tuple(made)

    monkeypatch.setattr(prove, "prove_all", proofs)


def pairs() -> list[Any]:
    """The pairs of case and command to run; ``run`` only in the matrix where ``run --check`` has the same outcome."""
    return [
        pytest.param(name, command, id=f"{name}-{command}", marks=MATRIX if repeats(case, command) else ())
        for name, case in CASES.items()
        for command, outcome in case.expected.items()
        if outcome.kind != "na"
    ]


def repeats(case: Case, command: str) -> bool:
    return command == "run" and case.expected["run"] == case.expected["run --check"]


@pytest.mark.parametrize(("name", "command"), pairs())
def test_outcome(inputs, ranks, tmp_path, name, command):
    case, (source, place) = CASES[name], inputs(name)
    outcome, target = case.expected[command], tmp_path / "target"
    found = RUNNERS[command](case, source, place, target, ranks)
    left = [path for path in tmp_path.iterdir() if case.interrupted is None or path.suffix != ".partial"]
    problem = wrong(outcome, found, left)
    assert not problem, f"expected {outcome.kind}: {problem}"
    if outcome.kind == "right":
        found.check()


#: Cases that run by default.
DEFAULT_SOURCES = {
    "unchanged", "config: fewer kv heads", "renamed tensor", "adapter next to the base, excluded by an option",
    "fp8 with one scale per tensor",
}  # fmt: skip
#: Options of split that load does not have.
ONLY_OF_SPLIT = {"--adapter", "--dtype", "--layout", "--ranks", "--resume"}
#: Cases that have an outcome of loading, without those of commands that write files.
OF_A_SOURCE = [
    name
    for name, case in CASES.items()
    if not (case.damage or case.while_split or case.interrupted or case.run_options or case.layout != "native")
    and not ONLY_OF_SPLIT & {*case.options}
    and (case.expected["split"].kind == "error" or case.expected["load"].kind != "na")
]


@pytest.mark.parametrize("name", cases(OF_A_SOURCE, lambda name: name in DEFAULT_SOURCES))
def test_outcome_of_loading_a_source(inputs, ranks, name):
    """It is that of the split if that fails, else that of loading the split checkpoint."""
    case, (source, _) = CASES[name], inputs(name)
    split_outcome = case.expected["split"]
    outcome = split_outcome if split_outcome.kind == "error" else case.expected["load"]
    given = split_command.make_context("split", [str(source), *map(str, [*case.size, *options_of(case, source)])])
    names = {*PlanOptions.__annotations__, "tp", "pp", "stages"}
    options = {name: value for name, value in given.params.items() if name in names}
    options |= {"dequantize": case.dequantize, **({"group": None} if case.pp > 1 else {})}
    found = loaded(ranks("four", load_on_rank, source, options), source)
    problem = wrong(outcome, found, [])
    assert not problem, f"expected {outcome.kind}: {problem}"
    if outcome.kind == "right":
        found.check()


def wrong(outcome: Outcome, found: Found, left: list[Path]) -> str:
    """Describe the difference of a result from the outcome; "" if there is none."""
    text = found.warnings if outcome.kind == "warning" else found.error
    if outcome.kind != "error":
        problem = f"failed: {found.error}" if found.error else ""
    elif not found.error:
        problem = "no error"
    elif FOREIGN.search(found.error):
        problem = f"not a message of shardconv:  {found.error}"
    else:
        problem = f"left behind: {left}" if left else ""
    missing = [each for each in outcome.texts if each not in text]
    return problem or (f"{missing} is not in the message: {text}" if missing else "")


if __name__ == "__main__":
    print(", ".join(f"{count} {kind}" for kind, count in counts().items()), "of", len(CASES) - 1, "unusual inputs")

"""Small checkpoints, written without torch, whose import takes time."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardconv.checkpoint.sources.source import Source

#: The trained model of the examples.
DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
#: Name to dtype and shape, in the order of the data.
Specs = dict[str, tuple[str, tuple[int, ...]]]

_ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


def safetensors_bytes(header: bytes | Mapping[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a file, valid or not; ``length`` replaces the length of the header."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entries(specs: Specs) -> dict[str, dict[str, Any]]:
    """Header entries of consecutive tensors."""
    result: dict[str, dict[str, Any]] = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * _ITEM_BYTES[dtype]
        result[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return result


def write_weights(path: Path, specs: Specs, *, seed: int = 0, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a file with random data."""
    described = entries(specs)
    size = max((entry["data_offsets"][1] for entry in described.values()), default=0)
    head = {} if metadata is None else {"__metadata__": metadata}
    path.write_bytes(safetensors_bytes({**head, **described}, np.random.default_rng(seed).bytes(size)))
    return path


def llama_config(
    *, layers: int = 2, hidden: int = 64, heads: int = 8, kv_heads: int = 2, intermediate: int = 96, vocab: int = 131
) -> dict[str, Any]:
    """A config; by default, 4 ranks shard, pad and replicate its tensors, and replicate KV heads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


def stored(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a source."""
    return {name: (spec.dtype, spec.shape) for name, spec in source.specs.items()}


def llama_specs(config: Mapping[str, Any], dtype: str = "BF16") -> Specs:
    """The tensors of a model with this config."""
    hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query, hidden),
            f"{layer}.self_attn.k_proj.weight": (key, hidden),
            f"{layer}.self_attn.v_proj.weight": (key, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return {name: (dtype, shape) for name, shape in shapes.items()}


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=2))
    return path


def write_index(folder: Path, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json") -> Path:
    """Write an index of files."""
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}, indent=2))
    return path


def part_names(count: int, stem: str = "model") -> list[str]:
    """Names of the files of a checkpoint, as Hugging Face libraries write them."""
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_checkpoint(
    folder: Path, *, parts: int = 1, config: Mapping[str, Any] | None = None, dtype: str = "BF16", seed: int = 0
) -> Path:
    """Write a Llama checkpoint in one file, or ``parts`` files with an index; with config and tokenizer."""
    config = llama_config() if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    specs = llama_specs(config, dtype)
    if parts == 1:
        write_weights(folder / "model.safetensors", specs, seed=seed, metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number, (part, names) in enumerate(zip(part_names(parts), deal(list(specs), parts), strict=True)):
        chosen = {name: specs[name] for name in names}
        write_weights(folder / part, chosen, seed=seed + number, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, part)
    write_index(folder, weight_map)
    return folder


def deal(names: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Names, in order, distributed over files."""
    per_part = -(-len(names) // parts)
    return [names[start : start + per_part] for start in range(0, len(names), per_part)]


def contents(folder: Path) -> dict[str, bytes]:
    """Name to bytes of every file under a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left(folder: Path) -> list[str]:
    """The relative names of everything under a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def with_other_rows(data: bytes) -> bytes:
    """A safetensors file with other values at the end of its largest tensor."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    stops = {
        info["data_offsets"][1] - info["data_offsets"][0]: info["data_offsets"][1]
        for name, info in header.items()
        if name != "__metadata__"
    }
    end = 8 + length + stops[max(stops)]
    return data[: end - 8] + bytes(255 - byte for byte in data[end - 8 : end]) + data[end:]

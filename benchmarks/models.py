"""Checkpoints for benchmarks: headers with the shapes of real models, and random or absent data."""

import argparse
import json
import os
import random
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

BITS = {"BF16": 16, "F16": 16, "F32": 32, "I32": 32, "F8_E4M3": 8}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 10, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256,
}  # fmt: skip

DEEPSEEK_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
#: gpt-oss with fewer layers and experts: its matrices of all experts are stored transposed.
GPT_OSS_CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 8, "num_experts_per_tok": 4, "vocab_size": 20480, "tie_word_embeddings": False,
}  # fmt: skip
#: Sizes of tensors of few bytes.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "vocab_size": 256, "quantization_config": None,
}  # fmt: skip
#: Kinds of DeepSeek-V3: as it is published, in bf16, and with as many tensors of few bytes, or as many as Kimi K2 has.
DEEPSEEK: Mapping[str, Mapping[str, Any]] = {
    "fp8": DEEPSEEK_CONFIG,
    "bf16": DEEPSEEK_CONFIG | {"quantization_config": None},
    "small": DEEPSEEK_CONFIG | _SMALL,
    "kimi": DEEPSEEK_CONFIG | _SMALL | {
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}  # fmt: skip

#: Quantization settings and number of layers by format, for 3.0 GB each, of which layers have the largest part.
QUANTIZED: Mapping[str, tuple[Mapping[str, object] | None, int]] = {
    "bf16": (None, 13),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, 50),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, 26),
}
_GROUP = 128
#: A script that saves the tensors of a safetensors file with torch.
TO_PYTORCH = """
import sys, torch
from safetensors.torch import load_file
torch.save(load_file(sys.argv[1]), sys.argv[2])
"""
#: A script that saves them with torch.distributed.checkpoint.
TO_DCP = """
import sys, torch.distributed.checkpoint
from safetensors.torch import load_file
torch.distributed.checkpoint.save(load_file(sys.argv[1]), checkpoint_id=sys.argv[2], no_dist=True)
"""
#: Builds Megatron-Core's model of a folder's config on the CPU, without values, and saves it in another folder.
TO_MEGATRON = """
import json, sys
from pathlib import Path
import torch
from megatron.core import dist_checkpointing
from tests.megatron import gpt
source, target = map(Path, sys.argv[1:])
gpt.replace_cuda()
target.mkdir()
rendezvous = f"file://{target.with_name('rendezvous')}"
torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
work = gpt.Work(gpt.Sizes(), source, source, target)
config = json.loads((source / "config.json").read_text())
model = gpt.build(config, work, params_dtype=torch.bfloat16, perform_initialization=False)
content = {"non_homogeneous_layers": True, "singleton_local_shards": False}
dist_checkpointing.save(model.sharded_state_dict(metadata=content), str(target), content_metadata=content)
"""


def write_quantized(folder: Path, form: str) -> int:
    """Write a checkpoint in a format of :data:`QUANTIZED`; returns the size of its file in bytes."""
    settings, layers = QUANTIZED[form]
    sizes = {"num_hidden_layers": layers, "vocab_size": 32000}
    config = LLAMA_CONFIG | sizes | ({} if settings is None else {"quantization_config": settings})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    known: dict[str, bytes] = {}
    for name, (dtype, shape) in llama_tensors(layers, vocab=32000).items():
        layer = name.removesuffix(".weight")
        if settings is None or not layer.endswith("_proj"):
            tensors[name] = dtype, shape
        elif form == "fp8":
            tensors[name] = "F8_E4M3", shape
            tensors[f"{name}_scale_inv"] = "F32", (shape[0] // _GROUP, shape[1] // _GROUP)
        else:
            rows, columns = shape
            tensors[f"{layer}.qweight"] = "I32", (columns // 8, rows)
            tensors[f"{layer}.qzeros"] = "I32", (columns // _GROUP, rows // 8)
            tensors[f"{layer}.scales"] = "F16", (columns // _GROUP, rows)
            tensors[f"{layer}.g_idx"] = "I32", (columns,)
            known[f"{layer}.g_idx"] = struct.pack(f"<{columns}i", *(at // _GROUP for at in range(columns)))
    return write_file(folder / "model.safetensors", tensors, known)


def write_adapter(folder: Path, rank: int = 448, layers: int = 10) -> int:
    """Write a LoRA adapter of all linear layers of the layers of Llama; returns the size of its file in bytes."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (_, shape) in llama_tensors(layers).items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = "F32", (rank, shape[1])
            tensors[f"{module}.lora_B.weight"] = "F32", (shape[0], rank)
    return write_file(folder / "adapter_model.safetensors", tensors)


def llama_tensors(layers: int = 10, *, vocab: int = 128256) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Llama's tensors, with the sizes of its 3B model and an untied head."""
    hidden, inner, kv = 3072, 8192, 1024
    tensors: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
        }
    tensors["model.norm.weight"] = (hidden,)
    return {name: ("BF16", shape) for name, shape in tensors.items()}


def deepseek_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of DeepSeek-V3 with the sizes of a config, in fp8 or bf16."""
    is_quantized = config["quantization_config"] is not None
    hidden, heads, vocab = (config[name] for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    q_rank, kv_rank, nope, rope = (
        config[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    layers, mtp_layers, experts = (
        config[name] for name in ("num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts")
    )
    embedding = ("BF16", (vocab, hidden))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": embedding}

    def linear(name: str, out_features: int, in_features: int) -> None:
        tensors[f"{name}.weight"] = ("F8_E4M3" if is_quantized else "BF16", (out_features, in_features))
        if is_quantized:
            tensors[f"{name}.weight_scale_inv"] = ("F32", (-(-out_features // 128), -(-in_features // 128)))

    def mlp(name: str, inner: int) -> None:
        linear(f"{name}.gate_proj", inner, hidden)
        linear(f"{name}.up_proj", inner, hidden)
        linear(f"{name}.down_proj", hidden, inner)

    for layer in range(layers + mtp_layers):
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        linear(f"{attention}.q_a_proj", q_rank, hidden)
        linear(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
        linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        linear(f"{attention}.kv_b_proj", heads * (nope + config["v_head_dim"]), kv_rank)
        linear(f"{attention}.o_proj", hidden, heads * config["v_head_dim"])
        for norm, size in (("q_a_layernorm", q_rank), ("kv_a_layernorm", kv_rank)):
            tensors[f"{attention}.{norm}.weight"] = ("BF16", (size,))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = ("BF16", (hidden,))
        if layer < config["first_k_dense_replace"]:
            mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        tensors[f"{at}.mlp.gate.weight"] = ("BF16", (experts, hidden))
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        mlp(f"{at}.mlp.shared_experts", config["moe_intermediate_size"])
        for expert in range(experts):
            mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
    for last in (f"model.layers.{layers + number}" for number in range(mtp_layers)):
        tensors |= {
            f"{last}.eh_proj.weight": ("BF16", (hidden, 2 * hidden)),
            f"{last}.enorm.weight": ("BF16", (hidden,)),
            f"{last}.hnorm.weight": ("BF16", (hidden,)),
            f"{last}.shared_head.norm.weight": ("BF16", (hidden,)),
            f"{last}.shared_head.head.weight": embedding,
            f"{last}.embed_tokens.weight": embedding,
        }
    return tensors | {"model.norm.weight": ("BF16", (hidden,)), "lm_head.weight": embedding}


def gpt_oss_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of gpt-oss with the sizes of :data:`GPT_OSS_CONFIG`."""
    config: Mapping[str, Any] = GPT_OSS_CONFIG
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            projection = f"{at}.self_attn.{name}_proj"
            shapes |= {f"{projection}.weight": (rows, hidden), f"{projection}.bias": (rows,)}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (hidden, heads), f"{at}.self_attn.o_proj.bias": (hidden,),
            f"{at}.self_attn.sinks": (config["num_attention_heads"],),
            f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.router.weight": (experts, hidden), f"{at}.mlp.router.bias": (experts,),
            f"{at}.mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            f"{at}.mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            f"{at}.mlp.experts.down_proj": (experts, inner, hidden),
            f"{at}.mlp.experts.down_proj_bias": (experts, hidden),
        }  # fmt: skip
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def write_file(
    path: Path, tensors: Tensors, known: Mapping[str, bytes] | None = None, *, is_sparse: bool = False
) -> int:
    """Write a safetensors file, with random bytes or (sparse) none on disk; returns its size in bytes.

    Args:
        path: the file.
        tensors: name to dtype and shape.
        known: the data of tensors that cannot be random.
        is_sparse: leave out the data.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    starts: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        starts[name] = start = end
        end += prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if is_sparse:
            os.truncate(path, 8 + len(raw) + end)
        else:
            file.writelines(_random_blocks(end))
        for name, data in (known or {}).items():
            file.seek(8 + len(raw) + starts[name])
            file.write(data)
    return 8 + len(raw) + end


def _random_blocks(num_bytes: int) -> Iterator[bytes]:
    """Yield random bytes that are normal numbers in dtypes of 16 and 32 bits: processors may multiply others slowly.

    Of the exponent of each number, the highest bit is 0 and the next one is 1.
    """
    rng = random.Random(0)
    while num_bytes:
        size = min(num_bytes, 2**24)
        random_bits, ones = (int.from_bytes((pair * size)[:size], "little") for pair in (b"\xff\x9f", b"\x00\x20"))
        yield (rng.getrandbits(8 * size) & random_bits | ones).to_bytes(size, "little")
        num_bytes -= size


def write_parts(folder: Path, tensors: Tensors, config: Mapping[str, object], num_parts: int) -> int:
    """Write a sparse checkpoint of several files with an index and a config; returns its size in bytes."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    total = 0
    for part in range(num_parts):
        mine = names[part * len(names) // num_parts : (part + 1) * len(names) // num_parts]
        file_name = f"model-{part + 1:05d}-of-{num_parts:05d}.safetensors"
        total += write_file(folder / file_name, {name: tensors[name] for name in mine}, is_sparse=True)
        weight_map |= dict.fromkeys(mine, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the llama-shaped source that most benchmarks read.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--sparse", action="store_true", help="no data on disk")
    parser.add_argument("--format", choices=QUANTIZED, help="write a folder in this format")
    parser.add_argument("--adapter", action="store_true", help="write a folder with an adapter of 1 GB")
    parser.add_argument("--deepseek", choices=DEEPSEEK, help="write a sparse folder with the tensors of DeepSeek-V3")
    parser.add_argument("--gpt-oss", action="store_true", help="write a folder with the tensors of gpt-oss")
    arguments = parser.parse_args()
    if arguments.gpt_oss:
        arguments.path.mkdir(parents=True)
        write_file(arguments.path / "model.safetensors", gpt_oss_tensors())
        (arguments.path / "config.json").write_text(json.dumps(GPT_OSS_CONFIG))
        return
    if arguments.deepseek:
        config = DEEPSEEK[arguments.deepseek]
        write_parts(arguments.path, deepseek_tensors(config), config, 163)
        return
    if arguments.format:
        write_quantized(arguments.path, arguments.format)
        return
    if arguments.adapter:
        write_adapter(arguments.path)
        return
    write_file(arguments.path, llama_tensors(arguments.layers), is_sparse=arguments.sparse)


if __name__ == "__main__":
    main()

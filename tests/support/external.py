"""Rank files of other tools for tests, and Meta's Llama, written with torch alone after their public descriptions."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

#: Name in a Hugging Face checkpoint to name in Meta's files.
_META = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
#: Module in a Hugging Face checkpoint to module and sharded dim in DeepSeek's files.
_DEEPSEEK = {
    "embed_tokens": ("embed", 0), "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0), "q_a_proj": ("wq_a", None), "q_a_layernorm": ("q_norm", None), "q_b_proj": ("wq_b", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None), "kv_a_layernorm": ("kv_norm", None), "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1), "gate": ("gate", None), "gate_proj": ("w1", 0), "down_proj": ("w2", 1), "up_proj": ("w3", 0),
    "norm": ("norm", None), "lm_head": ("head", 0),
}  # fmt: skip


def neighbors(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows such that those half a head apart become neighbors."""
    rows = [
        head + offset
        for head in range(0, len(weight), len(weight) // heads)
        for pair in range(len(weight) // heads // 2)
        for offset in (pair, pair + len(weight) // heads // 2)
    ]
    return weight[rows]


def meta_tensors(tensors: Tensors, heads: int, kv_heads: int) -> Tensors:
    """The tensors of a Llama under Meta's names and in Meta's order of rows."""
    found = {}
    for name, tensor in tensors.items():
        stem, end = name.rsplit(".", 1)
        for module, other in _META.items():
            stem = re.sub(rf"(^|(?<=\.)){re.escape(module)}(?=\.|$)", other, stem)
        if stem.endswith(("wq", "wk")):
            tensor = neighbors(tensor, heads if stem.endswith("wq") else kv_heads)  # noqa: PLW2901 - the same tensor
        found[f"{stem}.{end}"] = tensor
    return found


def meta_ranks(tensors: Tensors, tp: int, *, kv_heads: int, embedding_dim: int) -> list[Tensors]:
    """The tensors of each rank, of tensors as :func:`meta_tensors` returns them."""
    ranks: list[Tensors] = [{} for _ in range(tp)]
    for name, tensor in tensors.items():
        dim = embedding_dim if "tok_embeddings" in name else 1 if re.search(r"\.(wo|w2)\.", name) else 0
        replicas = max(tp // kv_heads, 1) if re.search(r"\.(wk|wv)\.", name) else 1
        shards = [tensor] * tp if "norm" in name else tensor.chunk(tp // replicas, dim)
        for rank in range(tp):
            ranks[rank][name] = shards[rank if "norm" in name else rank // replicas].clone()
    return ranks


def write_meta(folder: Path, ranks: Sequence[Tensors], params: dict[str, Any]) -> Path:
    """Write ``consolidated.NN.pth`` and params.json."""
    folder.mkdir(parents=True)
    for rank, tensors in enumerate(ranks):
        torch.save(tensors, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "tokenizer.model").write_text("tokens")
    return folder


def deepseek_ranks(tensors: Tensors, tp: int, layers: int, experts: int) -> list[Tensors]:
    """The tensors of each rank in DeepSeek's files, without those of MTP layers."""
    ranks: list[Tensors] = [{} for _ in range(tp)]
    for name, tensor in tensors.items():
        if f"model.layers.{layers}." in name:
            continue
        path = name.removeprefix("model.").split(".")
        path[-1] = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}.get(path[-1], path[-1])
        module, dim = _DEEPSEEK[path[-2]]
        path = [{"self_attn": "attn", "mlp": "ffn", path[-2]: module}.get(each, each) for each in path]
        for rank in range(tp):
            if "experts" in path:
                if int(path[-3]) // (experts // tp) == rank:
                    ranks[rank][".".join(path)] = tensor
            else:
                shard = tensor if dim is None else tensor.chunk(tp, dim)[rank]
                ranks[rank][".".join(path)] = shard.contiguous()
    return ranks


def write_deepseek(folder: Path, ranks: Sequence[Tensors], config: Path | None = None) -> Path:
    """Write ``model{rank}-mp{tp}.safetensors``; with a config, if it is given."""
    folder.mkdir(parents=True)
    for rank, tensors in enumerate(ranks):
        save_file(tensors, folder / f"model{rank}-mp{len(ranks)}.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    if config is not None:
        (folder / "config.json").write_bytes(config.read_bytes())
    return folder


def meta_logits(tensors: Tensors, params: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of Meta's Llama, with complex rotary embeddings of neighboring features, in float32."""
    heads, kv_heads, eps = params["n_heads"], params["n_kv_heads"], params["norm_eps"]
    size = params["dim"] // heads
    angles = torch.outer(
        torch.arange(tokens.shape[-1]), params["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    )
    rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
    mask = torch.full((tokens.shape[-1],) * 2, float("-inf")).triu(1)

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight(name)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * rotation).flatten(-2)

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = ((x @ weight(f"{name}.{each}").T).unflatten(-1, (-1, size)) for each in ("wq", "wk", "wv"))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / size**0.5 + mask
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ weight(f"{name}.wo").T

    x = weight("tok_embeddings")[tokens]
    for layer in range(params["n_layers"]):
        prefix = f"layers.{layer}"
        x = x + attention(norm(x, f"{prefix}.attention_norm"), f"{prefix}.attention")
        y = norm(x, f"{prefix}.ffn_norm")
        gate, up = (y @ weight(f"{prefix}.feed_forward.{name}").T for name in ("w1", "w3"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weight(f"{prefix}.feed_forward.w2").T
    return norm(x, "norm") @ weight("output").T

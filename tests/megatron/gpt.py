"""Megatron-Core's GPTModel on CPUs, for the config of a Hugging Face checkpoint: load, compute logits, change, save.

Megatron-Core needs CUDA in a few places, which are replaced here, and only here.
"""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec as mtp_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch.nn.functional import scaled_dot_product_attention, silu

#: What parameters are multiplied with in place of a training step: a bfloat16 number, so that results are exact.
FACTOR = 1.0625
#: Types whose experts begin after ``first_k_dense_replace`` layers, and whose routers have a bias and groups.
DEEPSEEK, WITH_BIAS = {"deepseek_v2", "deepseek_v3", "glm4_moe"}, {"deepseek_v3", "glm4_moe"}
WITH_NORMS = {"qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"}


class Sizes(NamedTuple):
    """Sizes of the parallel groups."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.ep


class Work(NamedTuple):
    """What the processes do: the checkpoint that they load, its source, and where they write results."""

    sizes: Sizes
    source: Path
    folder: Path
    results: Path
    with_mtp: bool = False


@contextmanager
def fork(*_: Any, **__: Any):
    yield


class Attention(torch.nn.Module):
    """torch's attention in place of the local one, which does not take the sizes of latent attention."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_: Any, **__: Any) -> torch.Tensor:
        """Shapes are [length, batch, heads, features]."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def replace_cuda() -> None:
    """Replace what Megatron-Core needs of CUDA and of Transformer Engine."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None)
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    CudaRNGStatesTracker.fork = fork
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def rotary(config: dict[str, Any], name: str, default: float) -> float:
    """A parameter of rotary embeddings."""
    return (config.get("rope_parameters") or {}).get(name, config.get(name, default))


def transformer_config(config: dict[str, Any], sizes: Sizes, *, with_mtp: bool) -> TransformerConfig:
    """The config of Megatron-Core for one of transformers."""
    kind, heads, layers = config["model_type"], config["num_attention_heads"], config["num_hidden_layers"]
    experts = next(
        (config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config), 0
    )
    has_experts = kind not in {"llama", "mistral", "qwen2", "qwen3"}
    fields: dict[str, Any] = {
        "num_layers": layers, "hidden_size": config["hidden_size"], "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads, "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads, "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"], "gated_linear_unit": True, "activation_func": silu,
        "add_bias_linear": bool(config.get("mlp_bias")),
        "add_qkv_bias": kind in {"qwen2", "qwen2_moe"} or bool(config.get("attention_bias")),
        "qk_layernorm": kind in WITH_NORMS or bool(config.get("use_qk_norm")),
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep, "expert_tensor_parallel_size": sizes.tp,
        "use_cpu_initialization": True, "pipeline_dtype": torch.float32, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
        "mtp_num_layers": 1 if with_mtp else None,
    }  # fmt: skip
    if has_experts:
        first = config["first_k_dense_replace"] if kind in DEEPSEEK else 0
        width = config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
        shared = config["shared_expert_intermediate_size"] if kind == "qwen2_moe" else width * 2
        fields |= {
            "num_moe_experts": experts, "moe_router_topk": config["num_experts_per_tok"], "moe_ffn_hidden_size": width,
            "moe_layer_freq": [int(layer >= first) for layer in range(layers)], "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": shared if kind in {*DEEPSEEK, "qwen2_moe"} else None,
            "moe_shared_expert_gate": kind == "qwen2_moe", "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none", "moe_router_pre_softmax": kind in {"deepseek_v2", "qwen2_moe"},
        }  # fmt: skip
    if kind in WITH_BIAS:
        fields |= {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            "moe_router_num_groups": config["n_group"], "moe_router_group_topk": config["topk_group"],
        }  # fmt: skip
    if "kv_lora_rank" not in config or kind == "glm4_moe":
        return TransformerConfig(**fields)
    return MLATransformerConfig(
        **fields, multi_latent_attention=True, q_lora_rank=config["q_lora_rank"], kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"], qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"], rope_type="rope", rotary_base=rotary(config, "rope_theta", 10000.0),
    )  # fmt: skip


def build(config: dict[str, Any], work: Work) -> GPTModel:
    """The part of GPTModel of this process."""
    sizes = work.sizes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp, pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=sizes.ep, expert_tensor_parallel_size=sizes.tp,
    )  # fmt: skip
    made = transformer_config(config, sizes, with_mtp=work.with_mtp)
    if made.num_moe_experts:
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=made.qk_layernorm, normalization="RMSNorm")
    if made.multi_latent_attention:
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        made, spec, vocab_size=-(-config["vocab_size"] // (16 * sizes.tp)) * 16 * sizes.tp, max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope", rotary_base=int(rotary(config, "rope_theta", 10000.0)),
        rotary_percent=rotary(config, "partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        mtp_block_spec=mtp_spec(made, spec, use_transformer_engine=False) if work.with_mtp else None,
    )  # fmt: skip


def logits(model: GPTModel, ids: torch.Tensor, vocabulary: int) -> torch.Tensor | None:
    """The logits of all ranks of the last stage; None on the others."""
    length = ids.shape[1]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage:
        received = torch.empty(length, ids.shape[0], model.config.hidden_size)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with patch.object(model, "mtp_process", False), patch.object(model.config, "mtp_num_layers", None):  # needs labels
        output = model(ids, torch.arange(length)[None].expand_as(ids), mask).contiguous()
    if stage < parallel_state.get_pipeline_model_parallel_world_size() - 1:
        dist.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, output, group=group)
    return torch.cat(parts, -1)[..., :vocabulary]


def serve(rank: int, work: Work) -> None:
    """Load as Megatron-LM does, write the logits, change all parameters, write the logits again, and save."""
    replace_cuda()
    torch.set_num_threads(1)
    world = work.sizes.world
    rendezvous = f"file://{work.results / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    config = json.loads((work.source / "config.json").read_text())
    model = build(config, work).eval()
    content = dist_checkpointing.load_content_metadata(str(work.folder))
    loaded = dist_checkpointing.load(model.sharded_state_dict(metadata=content), str(work.folder))
    names = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in loaded.items() if name in names})
    ids = torch.arange(16)[None] * 7 % config["vocab_size"]
    with torch.no_grad():
        before = logits(model, ids, config["vocab_size"])
        for parameter in model.parameters():
            parameter.mul_(FACTOR)
        after = logits(model, ids, config["vocab_size"])
    saved = work.results / "run" / "iter_0000001"
    saved.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=content), str(saved), content_metadata=content)
    if rank == world - 1:
        torch.save({"ids": ids, "before": before, "after": after}, work.results / "logits.pt")
        (saved.parent / "latest_checkpointed_iteration.txt").write_text("1")
    dist.barrier()
    dist.destroy_process_group()

"""Megatron-Core's GPTModel on CPUs, for the config of a Hugging Face checkpoint: load, compute logits, train, save.

Megatron-Core needs CUDA in a few places, which are replaced here, and only here. Programs that train Gemma with it add
its norms, and those behind projections.
"""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec as mtp_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention, transformer_block
from megatron.core.transformer.moe import moe_utils
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

#: The largest change of an element by the training step.
STEP = 0.01
#: Types whose experts begin after ``first_k_dense_replace`` layers, and whose routers have a bias and groups.
WITH_BIAS = {"deepseek_v3", "glm4_moe", "kimi_k2"}
DEEPSEEK = {"deepseek_v2", *WITH_BIAS}
GEMMA = {"gemma", "gemma2", "gemma3_text"}
DENSE = {"llama", "mistral", "qwen2", "qwen3", "olmo", *GEMMA}
WITH_NORMS = {"gemma3_text", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"}


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
    """The task of the processes: the checkpoint that they load, its source, and the folder of results."""

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


class GemmaNorm(torch.nn.Module):
    """A norm whose weight is added to one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), config.layernorm_epsilon

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features are in the last dim."""
        return rms_norm(features, self.weight.shape, 1 + self.weight, self.eps)


class NormedProjection(RowParallelLinear):
    """A row parallel layer with a norm behind it."""

    def __init__(self, *args: Any, config: TransformerConfig, **options: Any) -> None:
        super().__init__(*args, config=config, **options)
        self.post_layernorm = GemmaNorm(config, config.hidden_size)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Features are this rank's; the result is that of all ranks."""
        return self.post_layernorm(super().forward(features)[0]), None


def use_gemma_modules(layer: Any, kind: str) -> None:
    """Replace the norms of a layer's spec, and projections by those with norms behind them."""
    transformer_block.LayerNormImpl = GemmaNorm
    parts = layer.submodules
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = GemmaNorm
    if kind == "gemma3_text":
        attention.q_layernorm = attention.k_layernorm = GemmaNorm
    if kind != "gemma":
        attention.linear_proj = mlp.linear_fc2 = NormedProjection


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
    """A parameter of rotary embeddings, which all layers have."""
    found = config.get("rope_parameters") or {}
    return found.get("full_attention", found).get(name, config.get(name, default))


def transformer_config(config: dict[str, Any], sizes: Sizes, *, with_mtp: bool, **further: Any) -> TransformerConfig:
    """The config of Megatron-Core for one of transformers, with further fields."""
    kind, heads, layers = config["model_type"], config["num_attention_heads"], config["num_hidden_layers"]
    experts = next(
        (config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config), 0
    )
    normalization, epsilon = ("LayerNorm", 1e-5) if kind == "olmo" else ("RMSNorm", config.get("rms_norm_eps", 1e-6))
    fields: dict[str, Any] = {
        "num_layers": layers, "hidden_size": config["hidden_size"], "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads, "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads, "normalization": normalization,
        "layernorm_epsilon": epsilon, "gated_linear_unit": True, "activation_func": silu,
        "add_bias_linear": kind == "gpt_oss" or bool(config.get("mlp_bias")),
        "add_qkv_bias": kind in {"qwen2", "qwen2_moe"} or bool(config.get("attention_bias")),
        "qk_layernorm": kind in WITH_NORMS or bool(config.get("use_qk_norm")),
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep, "expert_tensor_parallel_size": sizes.tp,
        "use_cpu_initialization": True, "pipeline_dtype": torch.float32, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
        "mtp_num_layers": 1 if with_mtp else None, **further,
    }  # fmt: skip
    if kind not in DENSE:
        first = config["first_k_dense_replace"] if kind in DEEPSEEK else 0
        width = config["intermediate_size" if kind in {"gpt_oss", "mixtral"} else "moe_intermediate_size"]
        shared = config["shared_expert_intermediate_size"] if kind == "qwen2_moe" else width * 2
        fields |= {
            "num_moe_experts": experts, "moe_router_topk": config["num_experts_per_tok"], "moe_ffn_hidden_size": width,
            "moe_layer_freq": [int(layer >= first) for layer in range(layers)], "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": shared if kind in {*DEEPSEEK, "qwen2_moe"} else None,
            "moe_shared_expert_gate": kind == "qwen2_moe", "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none", "moe_router_pre_softmax": kind in {"deepseek_v2", "qwen2_moe"},
        }  # fmt: skip
    if kind in GEMMA:
        scale = config.get("query_pre_attn_scalar", fields["kv_channels"])
        fields |= {"activation_func": partial(gelu, approximate="tanh"), "softmax_scale": scale**-0.5}
    if kind == "gpt_oss":
        fields |= {
            "softmax_type": "learnable", "activation_func": quick_gelu, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0, "expert_tensor_parallel_size": 1,
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


def build(config: dict[str, Any], work: Work, **fields: Any) -> GPTModel:
    """The part of GPTModel of this process, with further fields of its config."""
    sizes = work.sizes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp, pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=1 if config["model_type"] == "gpt_oss" else sizes.tp,
    )  # fmt: skip
    made = transformer_config(config, sizes, with_mtp=work.with_mtp, **fields)
    if made.num_moe_experts:
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=made.normalization)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=made.qk_layernorm, normalization=made.normalization)
    if config["model_type"] in GEMMA:
        use_gemma_modules(spec, config["model_type"])
    if made.multi_latent_attention:
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(
        made, spec, vocab_size=-(-config["vocab_size"] // (16 * sizes.tp)) * 16 * sizes.tp, max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope", rotary_base=int(rotary(config, "rope_theta", 10000.0)),
        rotary_percent=rotary(config, "partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        mtp_block_spec=mtp_spec(made, spec, use_transformer_engine=False) if work.with_mtp else None,
    )  # fmt: skip
    adapt(model, config)
    return model


def adapt(model: GPTModel, config: dict[str, Any]) -> None:
    """Change what the model of this type needs, and GPTModel does not have."""
    if config["model_type"] in GEMMA and model.pre_process:
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output * config["hidden_size"] ** 0.5)
    if config["model_type"] == "gpt_oss":  # biases are added in place to what the projection returns
        for name, module in model.named_modules():
            if name.endswith(".linear_fc2"):
                module.register_forward_hook(lambda _module, _inputs, output: (output[0].clone(), output[1]))
    if config["model_type"] == "olmo":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" not in name)


def outputs(model: GPTModel, ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The hidden states that a stage receives, which need gradients, and those that it computes and sends on."""
    length = ids.shape[1]
    received = None
    if stage := parallel_state.get_pipeline_model_parallel_rank():
        received = torch.empty(length, ids.shape[0], model.config.hidden_size)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received.requires_grad_())
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with patch.object(model, "mtp_process", False), patch.object(model.config, "mtp_num_layers", None):  # needs labels
        output = model(ids, torch.arange(length)[None].expand_as(ids), mask).contiguous()
    if stage < parallel_state.get_pipeline_model_parallel_world_size() - 1:
        dist.send(output.detach(), parallel_state.get_pipeline_model_parallel_next_rank())
    return received, output


@torch.no_grad()
def logits(model: GPTModel, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The logits of all ranks of the last stage, and on other stages the hidden states."""
    group = parallel_state.get_tensor_model_parallel_group()
    output = outputs(model, ids)[1]
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, output, group=group)
    return torch.cat(parts, -1)[..., :vocabulary]


def train(model: GPTModel, ids: torch.Tensor) -> None:
    """A step along the gradients of the mean of all squared logits, scaled to the same length for each parameter.

    Parameters without a gradient, as of experts without tokens, are shifted.
    """
    received, output = outputs(model, ids)
    if parallel_state.is_pipeline_last_stage():
        output.square().mean().backward()
    else:
        gradient = torch.empty_like(output)
        dist.recv(gradient, parallel_state.get_pipeline_model_parallel_next_rank())
        output.backward(gradient)
    if received is not None:
        dist.send(received.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    if model.share_embeddings_and_output_weights and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        shared = model.shared_embedding_or_output_weight()
        dist.all_reduce(shared.grad, group=parallel_state.get_embedding_group())
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for group in replicas(parameter):
                dist.all_reduce(gradient, group=group)
            step = gradient if gradient.any() else torch.ones_like(gradient)  # of experts without tokens
            parameter.sub_(step * (STEP / step.abs().max()))


def replicas(parameter: torch.nn.Parameter) -> list[dist.ProcessGroup]:
    """The groups in which ranks hold the same values of a parameter."""
    is_expert = not getattr(parameter, "allreduce", True)
    data = parallel_state.get_expert_data_parallel_group() if is_expert else parallel_state.get_data_parallel_group()
    is_sharded = getattr(parameter, "tensor_model_parallel", False)
    return [data] if is_sharded else [data, parallel_state.get_tensor_model_parallel_group()]


def serve(rank: int, work: Work) -> None:
    """Load as Megatron-LM does, write the logits, train one step, write the logits again, and save."""
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
    before = logits(model, ids, config["vocab_size"])
    train(model, ids)
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

"""Serving engines whose boundaries a plan can follow, so that each rank's file has the tensors that the engine reads.

Data on how the sharding of an engine differs from the sharding of shardconv's runtime. Engines are not imported.
"""

from collections.abc import Mapping

from msgspec import Struct

from shardconv.plan.families.config_fields import lookup
from shardconv.plan.families.rule import Rule
from shardconv.support.errors import UsageError

#: Config field with the numbers of the layers of an image encoder whose features are added to the text layers' outputs.
DEEPSTACK = "vision_config.deepstack_visual_indexes"
#: Prefix of the origin of an engine's rules.
ENGINE = "engine"


class Engine(Struct, frozen=True):
    """The boundaries of an engine.

    Attributes:
        name: the engine's name in ``--for``.
        vocab_multiple: the vocabulary is padded to a multiple of this before it is sharded. vLLM:
            ``DEFAULT_VOCAB_PADDING_SIZE`` in ``vllm/model_executor/layers/vocab_parallel_embedding.py``.
        replicated: model type to patterns of the tensors that the engine replicates and shardconv's own runtime shards.
            Rank files have the full tensors, and shardconv's own runtime shards them when it loads.
        in_all_stages: model types whose embedding, norm and head the engine has on every pipeline stage, also where it
            does not compute with them. An engine does not start without them.
        deepstack: model types whose engine adds features of images to the outputs of the first layers, all on the
            first pipeline stage; to the number of these layers if the config does not have :data:`DEEPSTACK`. vLLM:
            ``__init__`` in ``vllm/model_executor/models/qwen3_vl.py``.
    """

    name: str
    vocab_multiple: int = 1
    replicated: Mapping[str, tuple[str, ...]] = {}
    in_all_stages: frozenset[str] = frozenset()
    deepstack: Mapping[str, int] = {}

    def layers_of_first_stage(self, config: Mapping[str, object] | None) -> int:
        """The least number of layers of the first of several pipeline stages, by the config of a composite model."""
        default = self.deepstack.get(str((config or {}).get("model_type")), 0)
        indexes = lookup(config or {}, DEEPSTACK)
        return len(indexes) if default and isinstance(indexes, list | tuple) else default

    def rules(self, model_type: object) -> tuple[Rule, ...]:
        """The rules for a model type, tried before the rules of its family; ``model_type`` is any JSON value."""
        patterns = self.replicated.get(model_type, ()) if isinstance(model_type, str) else ()
        return tuple(Rule(pattern, "replicate", origin=f"{ENGINE} {self.name}") for pattern in patterns)


#: Norms over all heads, whose weights vLLM replicates.
_NORMS_OVER_HEADS = ("**.self_attn.{q_norm,k_norm}",)
_PER_LAYER = "**.per_layer_projection"

_VLLM = Engine(
    "vllm",
    vocab_multiple=64,
    replicated={
        **dict.fromkeys(("olmo2", "olmo3", "olmoe"), _NORMS_OVER_HEADS),
        "falcon_h1": ("**.mamba.{in_proj,out_proj}",),  # shardconv gathers their outputs
        "gemma3n_text": (_PER_LAYER, "**.self_attn.{k_proj,v_proj,o_proj}", "**.mlp.down_proj"),  # as above
        "gemma4_text": (_PER_LAYER,),
    },
    in_all_stages=frozenset({
        "cohere", "cohere2", "cohere2_moe", "gemma", "gemma2", "gemma3_text", "gpt_oss", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "hy_v3", "jamba", "minicpm3", "mixtral", "olmo_hybrid", "olmoe",
        "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
        "stablelm",
    }),
    deepstack={"cohere_compass": 3, "qwen3_vl": 3, "qwen3_vl_moe": 3},
)  # fmt: skip

#: SGLang has the full embedding of Gemma 3 on each rank.
_SGLANG = Engine(
    "sglang", vocab_multiple=64, replicated={"gemma3_text": ("**.embed_tokens",), "olmo2": _NORMS_OVER_HEADS}
)

#: The engines, by name.
ENGINES = {engine.name: engine for engine in (_VLLM, _SGLANG)}
#: The engine whose installed version split checkpoints can be compared with.
CHECKED = _VLLM.name
#: The boundaries of shardconv's own runtime.
SHARDCONV = Engine("shardconv")


def engine_named(name: str | None) -> Engine:
    """The engine of this name; shardconv's own runtime for None.

    Raises:
        UsageError: if the engine is unknown.
    """
    known = {**ENGINES, SHARDCONV.name: SHARDCONV}
    if name is not None and (not isinstance(name, str) or name not in known):
        raise UsageError(f"engine {name!r} is not supported (expected {', '.join(known)})")
    return SHARDCONV if name is None else known[name]

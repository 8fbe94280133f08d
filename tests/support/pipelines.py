"""Small pipelines, as diffusers writes them, without diffusers: their models are Llama models."""

import json
from pathlib import Path

from tests.support.checkpoints import llama_config, write_checkpoint, write_weights

#: Name to library and class of each component; the last one is an optional component that a pipeline does not have.
COMPONENTS = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "LlamaModel"],
    "tokenizer": ["transformers", "LlamaTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
}
#: The components that are sharded.
SHARDED = ("text_encoder", "transformer")


def write_pipeline(folder: Path, *, seed: int = 0, kv_heads: int = 2) -> Path:
    """Write a pipeline; its text encoder has two files with an index."""
    write_checkpoint(folder / "text_encoder", parts=2, seed=seed)
    write_checkpoint(folder / "transformer", config=llama_config(layers=1, kv_heads=kv_heads), seed=seed + 10)
    write_index(folder, COMPONENTS)
    texts = {
        "scheduler/scheduler_config.json": '{"shift": 3.0}',
        "tokenizer/tokenizer.json": '{"version": "1.0"}',
        "vae/config.json": '{"_class_name": "AutoencoderKL"}',
        "README.md": "A pipeline.",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    write_weights(folder / "vae" / "diffusion_pytorch_model.safetensors", {"conv.weight": ("F16", (4, 4))})
    return folder


def write_index(folder: Path, components: dict[str, object]) -> None:
    """Write model_index.json."""
    index = {"_class_name": "FluxPipeline", "_diffusers_version": "0.42.1", **components, "requires_aesthetics": False}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")

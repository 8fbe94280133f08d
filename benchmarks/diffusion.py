"""One rank of the benchmark of diffusion transformers: a step of a FLUX-like one, as diffusers' tensor parallelism.

diffusers asks for an accelerator; its checks for one are patched here, so that it runs on CPUs.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, TensorParallelConfig
from diffusers.hooks import tensor_parallel
from transformers import T5Config, T5EncoderModel

import shardconv
from benchmarks.runner import Watch, own_bytes, read_bytes

#: A transformer of about 1.1 GB in bf16: two blocks of two streams, four of one.
CONFIG = {
    "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 128, "num_attention_heads": 16,
    "joint_attention_dim": 1024, "pooled_projection_dim": 768,
}  # fmt: skip
TOKENS, TEXT_TOKENS = 512, 64


def write_model(folder: Path) -> None:
    """Write the model with diffusers."""
    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(folder)


def write_pipeline(folder: Path) -> None:
    """Write a pipeline of 3 GB: a transformer of twice the depth, and a text encoder."""
    torch.set_default_dtype(torch.bfloat16)
    depth = {name: 2 * CONFIG[name] for name in ("num_layers", "num_single_layers")}
    encoder = T5Config(d_model=2048, d_kv=64, d_ff=5120, num_layers=10, num_heads=32)
    components = {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "text_encoder_2": T5EncoderModel(encoder),
        "transformer": FluxTransformer2DModel(**CONFIG | depth),
    }
    index: dict[str, object] = {"_class_name": "FluxPipeline", "_diffusers_version": diffusers.__version__}
    for name, component in components.items():
        component.save_pretrained(folder / name)
        index[name] = [type(component).__module__.partition(".")[0], type(component).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))


def load(kind: str, path: str) -> Any:  # noqa: ANN401 - a model of diffusers
    """Load the model: a split checkpoint (``ours``), or with diffusers (``theirs``)."""
    if kind == "ours":
        return shardconv.load(path, device="cpu", verify=False)  # diffusers does not verify
    patches: list[tuple[Any, str, Any]] = [
        (torch._C, "_get_accelerator", lambda: torch.device("cpu")),  # noqa: SLF001 - diffusers calls it
        (torch.accelerator, "device_count", lambda: 1),
        (tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)),
    ]
    for target, name, value in patches:
        patch.object(target, name, value).start()
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    return FluxTransformer2DModel.from_pretrained(path, parallel_config=config, torch_dtype=torch.bfloat16).eval()


def inputs() -> dict[str, torch.Tensor]:
    """The inputs of a step."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "hidden_states": random(1, TOKENS, 64), "encoder_hidden_states": random(1, TEXT_TOKENS, 1024),
        "pooled_projections": random(1, 768), "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_ids": torch.arange(TOKENS)[:, None].expand(-1, 3).float(), "txt_ids": torch.zeros(TEXT_TOKENS, 3),
    }  # fmt: skip


def local_bytes(model: torch.nn.Module) -> int:
    """Bytes of this rank's parameters."""
    local = (one.to_local() if hasattr(one, "to_local") else one for one in model.parameters())
    return sum(one.numel() * one.element_size() for one in local)


def main(kind: str, path: str, rank: int, ranks: int, rendezvous: str) -> None:
    """Load the model and compute two steps; print the duration of each, and the bytes that a rank reads and holds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    dist.barrier()
    memory, read = own_bytes(), read_bytes()
    with Watch(path) as watch:
        began = time.perf_counter()
        model = load(kind, path)
        dist.barrier()
        load_seconds = time.perf_counter() - began
        read = read_bytes() - read
    times = []
    with torch.inference_mode():
        for _ in range(3):
            began = time.perf_counter()
            output = model(**inputs(), return_dict=False)[0]
            times.append(time.perf_counter() - began)
    report = {
        "load": load_seconds,
        "first": times[0],
        "step": min(times[1:]),
        "memory": watch.own_bytes - memory,
        "bytes": watch.mapped_bytes + read,
        "parameters": local_bytes(model),
        "output": output.float().flatten()[:: output.numel() // 64].tolist(),
    }
    print(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write-model", path]:
            write_model(Path(path))
        case ["write-pipeline", path]:
            write_pipeline(Path(path))
        case [kind, path, rank, ranks, rendezvous]:
            main(kind, path, int(rank), int(ranks), rendezvous)

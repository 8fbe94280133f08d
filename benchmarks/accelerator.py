"""Loading a model onto a GPU, compared with transformers and safetensors.

Each round is a process of its own, whose imports and first use of the device are not timed. It loads the model in every
way, in an order that alternates from round to round.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.run import WRITE

#: A llama-shaped model of 4.8 GB in bf16.
CONFIG = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 12,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
#: Tokens that all kinds generate alike; later ones differ from run to run, as kernels on a GPU sum in any order.
PROMPT, TOKENS = 512, 12
#: Kinds of loading, with their names in the table; the ratios are to the first.
KINDS = {
    "transformers": "transformers, device_map",
    "safetensors": "safetensors, load_file: tensors without a model",
    "split": "shardconv, split",
    "unverified": "shardconv, split, without verification",
    "source": "shardconv, source",
}


def write_model(folder: Path) -> None:
    """Write the model with transformers, initialized on the GPU."""
    draw = WRITE.replace(
        "torch.manual_seed(0)", "torch.set_default_device('cuda'); torch.set_default_dtype(torch.bfloat16)"
    )
    subprocess.run([sys.executable, "-c", draw, str(folder), json.dumps(CONFIG)], check=True, capture_output=True)


def measure(source: Path, split: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Kind to its figures.

    Returns:
        ``load``, the median of the seconds over the rounds, ``fastest``, ``memory``, the peak memory of the device in
        bytes, and ``model``, the bytes of the values.
    """
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        order = list(KINDS)[:: -1 if number % 2 else 1]
        command = [sys.executable, "-m", "benchmarks.accelerator", str(source), str(split), *order]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        for kind, figures in json.loads(output.splitlines()[-1]).items():
            found[kind].append(figures)
    return {
        kind: {
            "fastest": min(one["load"] for one in of_kind),
            **{name: median(one[name] for one in of_kind) for name in ("load", "memory", "model")},
        }
        for kind, of_kind in found.items()
    }


def _loaders(source: str, split: str) -> dict[str, Callable[[], Any]]:
    from safetensors.torch import load_file  # noqa: PLC0415 - in the process that loads
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    import shardconv  # noqa: PLC0415

    (file,) = Path(split).glob("*.safetensors")
    return {
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(source, device_map="cuda", dtype="auto").eval(),
        "safetensors": lambda: load_file(file, device="cuda"),
        "split": lambda: shardconv.load(split),
        "unverified": lambda: shardconv.load(split, verify=False),
        "source": lambda: shardconv.load(source, tp=1),
    }


def _figures(load: Callable[[], Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    gc.collect()
    torch.accelerator.empty_cache()
    torch._C._host_emptyCache()  # noqa: SLF001 - memory that another kind has pinned
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    loaded = load()
    torch.accelerator.synchronize()
    seconds, memory = time.perf_counter() - began, torch.accelerator.max_memory_allocated()
    is_model = isinstance(loaded, torch.nn.Module)
    values = {*loaded.parameters(), *loaded.buffers()} if is_model else loaded.values()
    figures = {"load": seconds, "memory": memory, "model": sum(value.nbytes for value in values)}
    if is_model:
        ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).cuda()
        tokens = loaded.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        figures["tokens"] = tokens[0, PROMPT:].tolist()
    return figures


def main(source: str, split: str, order: list[str]) -> None:
    """Load the model in the ways of ``order``, and print their figures."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers.models.llama import modeling_llama  # noqa: F401, PLC0415 - imported before anything is timed

    import shardconv.runtime  # noqa: F401, PLC0415

    transformers.logging.disable_progress_bar()
    torch.zeros(1, device="cuda")
    loaders = _loaders(source, split)
    found = {kind: _figures(loaders[kind]) for kind in order}
    if len({tuple(figures.pop("tokens")) for figures in found.values() if "tokens" in figures}) > 1:
        raise RuntimeError("the generated tokens differ")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

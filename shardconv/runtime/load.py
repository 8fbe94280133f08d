"""Load checkpoints: each rank builds the model on the meta device, converts it, and loads its own shards.

Owns the order of these steps. The model class is from transformers, as is the mapping of names on disk to names in
memory; the conversion takes place after the model is built and before its tensors are loaded. Meanwhile the rank's
local files are verified. A caller may build a module of another class: its constructor also computes the values of
buffers that are not stored.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardconv.checkpoint.adapters.adapter import SplitAdapter
from shardconv.checkpoint.operations.pipeline import on_pipelines
from shardconv.checkpoint.sources.planning import PlanOptions, StrPath
from shardconv.checkpoint.split.loadable import Loadable, open_loadable, placements_in_memory, runnable_plan
from shardconv.checkpoint.split.manifest_file import comparable
from shardconv.checkpoint.split.rank_reader import RankReader
from shardconv.convert.converted_model import ConvertedModel, extend_model_class
from shardconv.convert.model import convert_with_request
from shardconv.distributed import Axis, GroupLike
from shardconv.distributed.agreement import attempt, check_same, run_on_all
from shardconv.distributed.devices import Device
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, remote_versions
from shardconv.files.paths import SourcePath, local_path, open_path
from shardconv.hf.build import from_config
from shardconv.hf.classes import ModelClass
from shardconv.hf.diffusion import DiffusersConfig
from shardconv.hf.weights import known_tensors, load_shards
from shardconv.layers import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.experts import local_experts
from shardconv.plan.plan import Plan
from shardconv.runtime.device import as_torch_dtype, check_room, move, num_bytes
from shardconv.runtime.model_stage import check_runs, connect_stage, keep_stage, needed_tensors, refuse_parts
from shardconv.runtime.pipeline import load_pipeline
from shardconv.runtime.rank_adapter import RankAdapter
from shardconv.runtime.rank_tensors import DTYPES, Dequantizer, read_tensors, refuse_quantized
from shardconv.runtime.ranks import Ranks, connect_ranks, find_model_class
from shardconv.support import Progress
from shardconv.support.arguments import checked
from shardconv.support.errors import PlanWarning, RunError, UsageError, option


@checked
@on_pipelines(load_pipeline)
def load(
    path: SourcePath,
    *,
    tp: int | None = None,
    pp: int | None = None,
    stages: str | Sequence[int] = (),
    device: Device = None,
    dtype: torch.dtype | str | None = None,
    model: Callable[[], nn.Module] | None = None,
    group: GroupLike = None,
    verify: bool = True,
    dequantize: bool = False,
    adapter: StrPath | None = None,
    unused: Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    component: str | None = None,
    **options: Unpack[PlanOptions],
) -> Any:  # a model of transformers or diffusers, the module of ``model``, or a pipeline of diffusers
    """Load a split checkpoint or a source; each rank calls this, and reads its own shards only.

    Initializes torch.distributed under ``torchrun``, with one rank per process. Files are mapped into memory and must
    not be changed meanwhile. On a CPU the values are views of the files. Shards of a source that are not one range of
    its file, such as shards of row parallel weights, are copies.

    Args:
        path: the split checkpoint; or with ``tp`` a source: a ``.safetensors`` file, an index file, or a folder; or the
            URL of one. Each rank plans a source as :func:`~shardconv.split` does.
        tp: tensor parallel size; required for a source.
        pp: number of pipeline stages of a source, as in :func:`~shardconv.split`. Each rank has the layers of its
            stage; the model sends hidden states from stage to stage, and returns the logits on all ranks, without
            gradients.
        stages: number of layers of each stage of a source.
        device: the device of the model; by default an accelerator (CUDA or XPU) where there is one, else the CPU.
            Without an index, each rank of a host gets the device with its local rank as the index.
        dtype: dtype of floating-point values, of torch or "bf16", "fp16" or "fp32"; by default as they are stored.
        model: a class, or a function without arguments, that builds the module on the meta device; its parameters have
            the names of the checkpoint. Buffers that are not stored have the values that it gives them. By default the
            class of transformers that the config names.
        group: the ranks; by default the current tensor axis, else all processes.
        verify: check the rank's file against its checksums while it is read. Without it, damaged or exchanged files are
            loaded as they are. A source does not have checksums.
        dequantize: load quantized layers as unquantized ones, with weights in ``dtype``, by default the config's dtype.
            They need memory on a CPU, too. Activations and KV caches are not quantized. Without it, quantized layers
            need a ``model`` that has the stored tensors.
        adapter: a split LoRA adapter to apply: its folder, or its name among the adapters of the split checkpoint; of a
            pipeline, its name among the adapters of the components.
        unused: patterns of tensors that the model need not use, such as ``*.pooler.*``. MTP layers, constants of old
            checkpoints, poolers and heads of pretraining need no pattern.
        trust_remote_code: run code of the checkpoint for its model.
        progress: called with bytes done and total bytes, of verification, reading of a source, dequantization and
            copies to the device.
        component: of a pipeline, the component to load; None for the pipeline, whose other components diffusers loads.
        options: how a source is read and planned, see :class:`~shardconv.checkpoint.sources.planning.PlanOptions`.

    Returns:
        The converted model, in eval mode; it returns full logits on every rank. Of a pipeline, a ``DiffusionPipeline``
        with the converted models.

    Raises:
        RunError: if there are not as many processes as ranks, the model cannot be built, its parameters do not match
            the tensors, the checkpoints differ between ranks, or the checkpoint is quantized and ``dequantize`` is not
            set, or the reverse; on all ranks.
        SplitCheckpointError: if the checkpoint or the rank's file cannot be used; on all ranks.
        SourceError: if the source cannot be read, or changes while it is loaded; on all ranks.
        PlanError: if no plan of the source is known to be correct; on all ranks.
        UsageError: if ``options``, or other sizes than its own, are given for a split checkpoint, the dtype is unknown,
            ``model`` is a module, or ranks cannot use the device; on all ranks.

    Warns:
        PlanWarning: if the plan is based on assumptions, or on rules of a plan file; on the first rank.

    Example:
        >>> model = shardconv.load("llama-tp2")  # doctest: +SKIP
        >>> model = shardconv.load("llama", tp=2)  # doctest: +SKIP
    """
    if component is not None:
        raise UsageError(f"{path}: {option(component=component)} only applies to pipelines: remove it")
    dtype = as_torch_dtype(dtype)
    if model is not None:
        check_builder(model)
    find = partial(_open, path, tp, pp, stages, options)
    checkpoint, found_device, ranks = connect_ranks(find, device, group)
    place, manifest, on_all = checkpoint.path, checkpoint.manifest, partial(run_on_all, ranks.all)
    plan = on_all(partial(runnable_plan, manifest, place, ranks.all.rank, dequantize=dequantize))
    on_all(partial(_refuse_with_stages, place, plan, model))
    build = on_all(partial(_builder, checkpoint, plan, model, unused, is_trusted=trust_remote_code))
    dequantizer = applied = None
    if dequantize:
        dequantizer = on_all(partial(Dequantizer.of_rank, manifest, place, plan, ranks.all.rank, dtype))
    elif model is None or dtype is not None:  # a module of the caller may take the stored values
        on_all(partial(refuse_quantized, manifest, place))
    if adapter is not None:
        applied = _open_adapter(adapter, checkpoint, ranks.all, dtype, verify=verify)
    loading = _Loading(checkpoint, plan, ranks, found_device, dtype, dequantizer, applied)
    with ExitStack() as opened:
        reader = on_all(lambda: opened.enter_context(loading.open(verify=verify)))
        loaded = on_all(partial(loading.fill, build, reader, loading.steps(progress, verify=verify)))
    if plan.assumed and ranks.all.rank == 0:
        warnings.warn(f"{place!s}: {'; '.join(plan.assumed)}", PlanWarning, stacklevel=2)
    for module in loaded.modules():
        if isinstance(module, ParallelModule):
            module.describe_parameters()
    return loaded.eval()


def _open(
    path: SourcePath | Loadable, tp: int | None, pp: int | None, stages: str | Sequence[int], options: PlanOptions
) -> Loadable:
    """Open a checkpoint; a component of a pipeline is open."""
    if isinstance(path, Loadable):
        return path
    return open_loadable(open_path(path), tp=tp, pp=pp, stages=stages, options=options)


def _refuse_with_stages(path: AnyPath, plan: Plan, model: object) -> None:
    """Refuse a module of the caller in pipeline stages."""
    if model is not None and plan.stages is not None:
        raise UsageError(
            f"{path}: model= is not supported with pipeline stages: remove it, or make a checkpoint without "
            f"them (shardconv reshard {path} --tp N --pp 1)"
        )


#: Reads the tensors that the model of this rank has in memory; called after the conversion.
_Read = Callable[[], dict[str, Tensor]]
#: Builds a model with the tensors of this rank.
_Build = Callable[["_Loading", _Read], nn.Module]


def _builder(
    checkpoint: Loadable, plan: Plan, model: Callable[[], nn.Module] | None, unused: Sequence[str], *, is_trusted: bool
) -> _Build:
    """The function that builds the module of the caller, or a model of the class that the config names."""
    if model is not None:
        return partial(_Loading.build_from, make=model)
    kind = find_model_class(checkpoint, is_trusted=is_trusted)
    if plan.stages is not None:
        check_runs(kind, plan)
    return partial(_Loading.build_of, kind=kind, unused=unused)


def _open_adapter(
    adapter: StrPath, base: Loadable, axis: Axis, dtype: torch.dtype | None, *, verify: bool
) -> RankAdapter:
    """Open an adapter, which has to be the same on all ranks."""
    opened = run_on_all(axis, partial(SplitAdapter.open, local_path(adapter), base.path, base.manifest))
    remote = run_on_all(axis, partial(remote_versions, opened.manifest.rank_paths(opened.folder)))
    check_same(opened.folder, axis, {"adapters": comparable(opened.manifest.shared), REMOTE_VERSIONS: remote})
    stage, rank = divmod(axis.rank, base.manifest.plan.ranks_per_stage)
    per_stage = opened.manifest.plan.ranks_per_stage  # data groups of the base model have equal shards
    own = stage * per_stage + rank % per_stage
    return run_on_all(axis, partial(RankAdapter.read, opened, own, dtype, verify=verify))


#: Step of :func:`load` to the callback for its progress; a step that is not taken, or not reported, is not there.
_Steps = Mapping[str, Progress]


def _report_step(progress: Progress, at: int, count: int, total: int, done: int, of_step: int) -> None:
    """Report ``done`` of the bytes ``of_step`` as a part of step ``at`` of ``count`` steps of ``total`` bytes each."""
    progress(at * total + (done * total // of_step if of_step else total), count * total)


@dataclass(frozen=True, slots=True)
class _Loading:
    """The steps of :func:`load` on one rank.

    Attributes:
        checkpoint: the checkpoint.
        plan: its plan.
        ranks: the ranks.
        device: the device of this rank.
        dtype: dtype of floating-point values; None as they are stored.
        dequantizer: of the rank; None if nothing is dequantized.
        adapter: the shards of the adapter; None without one.
    """

    checkpoint: Loadable
    plan: Plan
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype | None
    dequantizer: Dequantizer | None
    adapter: RankAdapter | None

    def steps(self, progress: Progress | None, *, verify: bool) -> _Steps:
        """The steps whose progress is reported, each as an equal part of the whole.

        Args:
            progress: ``progress`` of :func:`load`.
            verify: whether the rank's file is verified. Otherwise it is mapped, and only a source is read.
        """
        if progress is None:
            return {}
        manifest = self.checkpoint.manifest
        total = manifest.rank_layout.rank_bytes[manifest.ranks.index(self.ranks.all.rank)]
        taken = {
            "read": verify or self.checkpoint.source is not None,
            "dequantize": self.dequantizer is not None,
            "move": self.device.type != "cpu",
        }
        names = [name for name, is_taken in taken.items() if is_taken]
        return {name: partial(_report_step, progress, at, len(names), total) for at, name in enumerate(names)}

    def open(self, *, verify: bool) -> RankReader:
        """Open the rank's files; with ``verify``, start to verify them in background threads."""
        names = self._needed(self.checkpoint.manifest.plan.tensors)
        if self.adapter is not None:
            names |= self.adapter.replaced(self.checkpoint.manifest.plan)
        self._check_room(names)
        return self.checkpoint.reader(self.ranks.all.rank, verify=verify, names=names)

    def read_tensors(self, reader: RankReader, steps: _Steps) -> dict[str, Tensor]:
        """Wait for the verification of the rank's file, and return the tensors that the model has in memory."""
        manifest, rank = self.checkpoint.manifest, self.ranks.all.rank % self.plan.ranks_per_stage
        tensors = read_tensors(reader, steps.get("read"))
        if self.dequantizer is not None:
            tensors = self.dequantizer.dequantize(tensors, steps.get("dequantize"))
        is_dequantized = self.dequantizer is not None
        in_memory = placements_in_memory(manifest, self.plan, dequantize=is_dequantized)
        for name in in_memory.keys() & tensors.keys():
            tensors[name] = take_shard(tensors[name], in_memory[name], rank)
        if self.adapter is not None:
            tensors = self.adapter.replace(tensors, self.plan.rules)
        needed = self._needed(tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if name in needed}
        placements = {name: planned.placement for name, planned in self.plan.tensors.items()}
        return local_experts(tensors, placements, rank)

    def _needed(self, names: Iterable[str]) -> frozenset[str]:
        """The names of the tensors that the model has on this stage."""
        pipeline = self.ranks.pipeline
        return frozenset(names) if pipeline is None else needed_tensors(names, self.plan, pipeline.rank)

    def _check_room(self, names: Collection[str]) -> None:
        """Check that the values of stored tensors fit, before they are read."""
        manifest, rank = self.checkpoint.manifest, self.ranks.all.rank
        stored = {name: spec for name, spec in manifest.tensors.items() if name in names}
        values, dtype = [*manifest.plan.shards(stored, rank).values()], self.dtype
        copied = self.checkpoint.copied_bytes(rank, names)
        if self.dequantizer is not None:
            weights = self.dequantizer.weights
            values, dtype = [weights[name] for name in self._needed(weights)], self.dequantizer.dtype
            copied = sum(num_bytes(value, dtype) for value in values)
        fetched = self.checkpoint.fetched_bytes(rank)
        check_room(self.device, values, dtype, manifest.tp, copied=copied, fetched=fetched)

    def fill(self, build: _Build, reader: RankReader, steps: _Steps) -> nn.Module:
        """Build the model with the tensors, and move it to the device."""

        def read() -> dict[str, Tensor]:
            results, problem = attempt(partial(self.read_tensors, reader, steps))
            if problem is not None:  # not an error of the model's class
                raise problem
            return results[0]

        model = build(self, read)
        if self.adapter is not None:
            self.adapter.attach(model, self.ranks.tensor, self.plan.rules)
        if self.ranks.pipeline is not None:
            connect_stage(model, self.plan, self.ranks.pipeline)
        if self.device.type != "cpu":
            move(model, self.device, steps.get("move"))
        reader.finish()  # copies to other dtypes and devices read mapped files until here
        return model

    def build_from(self, read: _Read, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the module of the caller, convert it, and load the tensors into it."""
        return build_by_caller(make, self._convert, read, self.dtype)

    def build_of(self, read: _Read, kind: ModelClass, unused: Sequence[str]) -> nn.Module:
        """Build a model of a class of transformers or diffusers, convert it, and load the tensors into it."""
        folder = self.checkpoint.folder
        if isinstance(kind.config, DiffusersConfig):
            make = partial(from_config, *kind)
            with torch.device("meta"):
                built = self._convert(make())
            return fill(built, make, known_tensors(built, read(), folder, dtype=self.dtype, unused=unused))
        dtype = self.dtype or ("auto" if getattr(kind.config, "dtype", None) else self._stored_dtype())
        model: nn.Module = load_shards(kind, read, self._convert, folder, dtype=dtype, unused=unused)
        extend_model_class(model, self.ranks.tensor, self.ranks.all)
        if isinstance(model, ConvertedModel) and self.ranks.pipeline is not None:
            model.pipeline = self.ranks.pipeline
            refuse_parts(model)
        return model

    def _stored_dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor, for a config without a dtype."""
        if self.dequantizer is not None:
            return self.dequantizer.dtype
        found = (DTYPES[spec.dtype] for spec in self.checkpoint.manifest.tensors.values() if spec.dtype in DTYPES)
        usual = (dtype for dtype in found if dtype.is_floating_point and dtype.itemsize > 1)
        return next(usual, torch.get_default_dtype())

    def _convert(self, model: nn.Module) -> nn.Module:
        if self.ranks.pipeline is not None:
            keep_stage(model, self.plan, self.ranks.pipeline.rank)
        config = self.checkpoint.manifest.config or {}
        tensor, groups = self.ranks.tensor, self.ranks.groups
        return convert_with_request(model, config, self.plan, tensor, groups=groups, has_values=False)


# --- modules of the caller --------------------------------------------------------------------------------------------


def check_builder(model: object) -> None:
    """Check that ``model``, which can be called, builds a module.

    Raises:
        UsageError: if it is a module itself.
    """
    kind = type(model).__name__
    if isinstance(model, nn.Module):
        raise UsageError(
            f"model is an instance of {kind} (expected its class, or a function that builds it): pass model={kind}, or "
            f"model=lambda: {kind}(...) with its arguments"
        )


def build_by_caller(
    make: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    read: _Read,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Build, convert and fill the caller's module.

    Args:
        make: builds the module.
        convert: converts it in place, and returns it.
        read: returns the stored tensors, by name.
        dtype: dtype of floating-point values; None as they are stored.

    Raises:
        RunError: if a parameter or buffer does not have values.
    """
    with torch.device("meta"):
        model = convert(make())
    tensors = read()
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return fill(model, make, tensors)


def fill(model: nn.Module, make: Callable[[], nn.Module], tensors: dict[str, Tensor]) -> nn.Module:
    """Fill a converted module on the meta device.

    Args:
        model: the module.
        make: builds the module before its conversion.
        tensors: the stored tensors, by name.

    Raises:
        RunError: if a parameter or buffer does not have values.
    """
    model.load_state_dict(tensors, assign=True)
    if any(one.tensor.is_meta for one in _computed(model)):
        _fill_computed(model, make)
    values = (*model.named_parameters(), *((one.name, one.tensor) for one in _computed(model)))
    if missing := [name for name, tensor in values if tensor.is_meta]:
        raise RunError(
            f"{', '.join(missing[:3])}: is not in any file, and __init__ does not compute the same values each time: "
            f"compute it from constants, or save it with the checkpoint"
        )
    return model


def _fill_computed(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Replace tensors on the meta device that are not stored: build their modules on the CPU, and use their tensors.

    A value that depends on the state of a random generator stays on the meta device: the checkpoint had another one.
    """
    first, second = ({one.name: one.tensor for one in _computed(_build_on_cpu(make, seed))} for seed in (0, 1))
    for name, holder, key, tensor in list(_computed(model)):
        value, other = first.get(name), second.get(name)
        if not tensor.is_meta or value is None or other is None or value.is_meta or value.shape != tensor.shape:
            continue
        if torch.equal(value, other):
            holder[key] = value


def _build_on_cpu(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module on the CPU, of which each parameter is moved to the meta device as soon as it is assigned."""
    thread = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:  # torch calls it in all threads
            return None  # it stays as it is
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type] # torch: None only
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            return make()
    finally:
        hook.remove()


class _Computed(NamedTuple):
    """A tensor that a constructor computes.

    Attributes:
        name: its name in the model.
        holder: the buffers, attributes or list that hold it.
        key: where it is in them.
        tensor: the tensor.
    """

    name: str
    holder: Any
    key: Any
    tensor: Tensor


def _computed(model: nn.Module) -> Iterator[_Computed]:
    """Each buffer, and each other tensor that is not a parameter, also in a list, of all modules."""
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        for holder in (module._buffers, vars(module)):  # noqa: SLF001 - buffers of torch
            for key, value in holder.items():
                listed = [(value, at, one) for at, one in enumerate(value)] if isinstance(value, list) else []
                for where, at, one in [(holder, key, value), *listed]:
                    if isinstance(one, Tensor) and not isinstance(one, nn.Parameter):
                        yield _Computed(f"{start}{key}" if where is holder else f"{start}{key}.{at}", where, at, one)

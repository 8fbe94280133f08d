"""Read a folder that vLLM wrote with save_sharded_state as a split checkpoint, without a manifest.

vLLM does not store the tensor parallel size or the names and shapes of the full tensors. They are derived from the rank
files, and checked: the rank files that shardconv would write for them must have the same tensors.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Shards
from shardconv.checkpoint.engine.geometry import geometry
from shardconv.checkpoint.engine.layout import MANIFEST_NAME, ExplicitFiles, Layout, in_file_order, lay_out_ranks
from shardconv.checkpoint.sources.quantization_files import config_with_quantization
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.vllm_files import SavedFiles, is_saved_by_vllm, read_saved_files
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.files.checksums import checksum_file
from shardconv.files.containers.safetensors import FLOAT_NAMES, build_header, num_bytes
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import InputFiles
from shardconv.layouts.backward import check_pairs, full_tensors
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.layout import FileLayout
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolver import Resolver
from shardconv.support.errors import IntegrityError, PlanError, SourceError, SplitCheckpointError

_ENGINE = "vllm"
#: Name and metadata of the only source file.
_FILE, _METADATA = "model.safetensors", {"format": "pt"}
#: The remedies in messages about plans, which only apply to sources.
_ADVICE = re.compile(r"(\. |[:;] (or )?(pass|use|add|give|remove|name) ).*", re.DOTALL)
_OTHER_MODEL = (
    "rank files are missing, or config.json belongs to another model: save the folder again with vLLM, or use the "
    "checkpoint that vLLM was started with"
)


def read_split(folder: AnyPath) -> Manifest:
    """Read the manifest of a split checkpoint, or derive it from the files of a folder that vLLM saved.

    Raises:
        SplitCheckpointError: if the folder is neither, or its manifest or files cannot be used.
    """
    if (folder / MANIFEST_NAME).exists() or not is_saved_by_vllm(folder):
        return read_manifest(folder)
    try:
        return _manifest(folder, read_saved_files(folder))
    except SourceError as error:
        raise SplitCheckpointError(str(error)) from error
    except PlanError as error:
        reason = _ADVICE.sub("", str(error))
        raise SplitCheckpointError(
            f"{folder}: was saved by vLLM, and its full tensors cannot be derived: {reason}. Only dense unquantized "
            f"models are supported: for others, use the checkpoint that vLLM was started with"
        ) from error


def _manifest(folder: AnyPath, saved: SavedFiles) -> Manifest:
    """The manifest that :func:`shardconv.split` would write, except for the order of tensors in the rank files."""
    as_source = Source(folder, is_folder=True, files=(), config=saved.config, auxiliary_files=saved.auxiliary_files)
    config, request, tp = config_with_quantization(as_source) or {}, PlanRequest(engine=_ENGINE), len(saved.ranks)
    rank_tensors = {name: stored.spec for name, stored in saved.ranks[0].items()}
    full = full_tensors(_ENGINE, rank_tensors, tp, config, request)
    resolver, assumed = resolve(full, config, request)
    layout = choose_layout(_ENGINE, full, config)
    plan = _plan(folder, resolver, tp, assumed)
    check_pairs(plan, full)
    tensors = in_file_order(full)
    layout.check(tensors, plan)
    _check_tensors(folder, rank_tensors, tensors, plan, layout)
    _check_constants(folder, saved, layout)
    return Manifest(
        plan=plan,
        request=request,
        config=saved.config,
        source_name=folder.resolve().name,
        is_folder=True,
        source_files=(
            (_FILE, build_header(((name, spec.dtype, spec.shape) for name, spec in tensors.items()), _METADATA)),
        ),
        index=None,
        metadata=_METADATA,
        auxiliary_files={name: checksum_file(path) for name, path in saved.auxiliary_files.items()},
        stripe_bytes=STRIPE_BYTES,
        ranks=tuple(range(tp)),
        layout=layout,
        explicit_files=ExplicitFiles(
            saved.names,
            Layout(saved.headers, tuple(_shards(saved, tensors, plan, layout))),
            tuple(_notes(saved, tensors)),
        ),
    )


def _plan(folder: AnyPath, resolver: Resolver, tp: int, assumed: tuple[str, ...]) -> Plan:
    try:
        return resolver.plan(tp, assumed=assumed)
    except PlanError as error:
        reason = _ADVICE.sub("", str(error))
        raise SplitCheckpointError(
            f"{folder}: has files of {tp} ranks, but its model cannot be sharded for tp {tp} ({reason}): {_OTHER_MODEL}"
        ) from error


def _check_tensors(
    folder: AnyPath,
    rank_tensors: Mapping[str, TensorSpec],
    tensors: Mapping[str, TensorSpec],
    plan: Plan,
    layout: FileLayout,
) -> None:
    """Check that ranks have the tensors of the layout; constants may be missing, as no source tensor is in them."""
    constants = {constant.name for constant in layout.constants}
    for header in lay_out_ranks(tensors, plan, {}, layout=layout).headers:
        expected = {name: TensorSpec(info.dtype, info.shape) for name, info in header.tensors.items()}
        for name in [*rank_tensors, *(expected.keys() - constants)]:
            got, spec = rank_tensors.get(name), expected.get(name)
            if got != spec:
                raise SplitCheckpointError(
                    f"{folder}: {name} is {_describe(got)} on each rank (expected {_describe(spec)} by config.json for "
                    f"{plan.tp} ranks): {_OTHER_MODEL}"
                )


def _describe(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_constants(folder: AnyPath, saved: SavedFiles, layout: FileLayout) -> None:
    """Check the values of constants, because they are not in the full tensors."""
    paths = [folder / name for name in saved.names]
    prefixes, sizes = [header.prefix for header in saved.headers], [header.file_bytes for header in saved.headers]
    with InputFiles(paths, prefixes, sizes) as inputs:
        for constant, rank in product(layout.constants, saved.ranks):
            if (stored := rank.get(constant.name)) is None:
                continue
            data = memoryview(bytearray(len(constant.data)))
            inputs.read(stored.file, data, stored.offset)
            if data != constant.data:
                raise IntegrityError(
                    f"{paths[stored.file]}: {constant.name} has other values (expected the constant "
                    f"{constant.value:g}): use the checkpoint that vLLM was started with"
                )


def _shards(saved: SavedFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout) -> Iterator[Shards]:
    """The positions of the shards of each tensor in the rank files of vLLM."""
    positions: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for file_tensor in layout.file_tensors(tensors):
        for rank, rank_tensors in enumerate(saved.ranks):
            stored = rank_tensors[file_tensor.name]
            offset = stored.offset
            for name in file_tensor.members:
                positions[name].append((stored.file, offset))
                shape = plan.placement(name).shard_shape(tensors[name].shape, rank)
                offset += num_bytes(tensors[name].dtype, shape)
    for name, spec in tensors.items():
        files, offsets = zip(*positions[name], strict=True)
        yield Shards(geometry(plan.placement(name), spec.dtype, spec.shape), files, offsets)


def _notes(saved: SavedFiles, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    yield "not compared with a source: vLLM saved these rank files without names or checksums of its files"
    config_dtype = saved.config.get("dtype", saved.config.get("torch_dtype"))
    dtypes = sorted({spec.dtype for spec in tensors.values()})
    if config_dtype in FLOAT_NAMES.values() and [FLOAT_NAMES.get(dtype) for dtype in dtypes] != [config_dtype]:
        yield f"tensors are {', '.join(dtypes)}, but config.json has {config_dtype}: vLLM may have converted them"
    yield from (f"{name} is left out: {why}" for name, why in saved.left_out.items())

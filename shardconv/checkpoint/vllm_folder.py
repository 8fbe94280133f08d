"""A folder that vLLM wrote with save_sharded_state, read as a split checkpoint without a manifest.

Owns what follows from its files: vLLM stores neither a tensor parallel size nor the names and shapes of the full
tensors. They are derived, and the rank files that shardconv would write of them must have the tensors that were found.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from shardconv.checkpoint.copy import STRIPE_BYTES, Shards
from shardconv.checkpoint.fileio import InputFiles
from shardconv.checkpoint.geometry import geometry
from shardconv.checkpoint.header import build_header, num_bytes
from shardconv.checkpoint.layout import MANIFEST_NAME, FoundFiles, Layout, in_order, lay_out_ranks
from shardconv.checkpoint.manifest import Manifest, read_manifest
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.vllm_files import SavedFiles, is_saved_by_vllm, read_saved_files
from shardconv.checkpoint.write import checksum_file
from shardconv.errors import IntegrityError, PlanError, SourceError, SplitCheckpointError
from shardconv.layouts.backward import check_pairs, full_tensors
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.layout import FileLayout
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, resolve

_ENGINE = "vllm"
#: The name of the only weight file of the checkpoint, and what that says of itself.
_FILE, _METADATA = "model.safetensors", {"format": "pt"}
#: What a config calls dtypes.
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: What messages about plans advise, which is for sources.
_ADVICE = re.compile(r"(\. |[:;] (or )?(pass|use|add|give|remove|name) ).*", re.DOTALL)
_OTHER_MODEL = (
    "files of ranks are missing, or config.json is of another model: save it again with vLLM, or use the checkpoint "
    "that vLLM was started with"
)


def read_split(folder: Path) -> Manifest:
    """The manifest of a split checkpoint; of a folder that vLLM saved, one that is made from its files.

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
            f"{folder}: was saved by vLLM, and its full tensors are not known: {reason}. Only dense unquantized models "
            f"are supported: for others, use the checkpoint that vLLM was started with"
        ) from error


def _manifest(folder: Path, saved: SavedFiles) -> Manifest:
    """The manifest that :func:`shardconv.split` would write, but for the order of tensors in the rank files."""
    as_source = Source(folder, is_folder=True, parts=(), config=saved.config, side_files=saved.side_files)
    config, request, tp = with_settings(as_source) or {}, PlanRequest(engine=_ENGINE), len(saved.ranks)
    found = {name: stored.spec for name, stored in saved.ranks[0].items()}
    full = full_tensors(_ENGINE, found, tp, config, request)
    resolver, assumed = resolve(full, config, request)
    layout = choose_layout(_ENGINE, full, config)
    try:
        plan = resolver.plan(tp, assumed=assumed)
    except PlanError as error:
        reason = _ADVICE.sub("", str(error))
        raise SplitCheckpointError(
            f"{folder}: has files of {tp} ranks, for which its model cannot be sharded ({reason}): {_OTHER_MODEL}"
        ) from error
    check_pairs(plan, full)
    tensors = in_order(full)
    layout.check(tensors, plan)
    _check_tensors(folder, found, tensors, plan, layout)
    _check_constants(folder, saved, layout)
    return Manifest(
        plan=plan,
        request=request,
        config=saved.config,
        source_name=folder.resolve().name,
        is_folder=True,
        parts=((_FILE, build_header(((name, *spec) for name, spec in tensors.items()), _METADATA)),),
        index=None,
        metadata=_METADATA,
        side_files={name: checksum_file(path) for name, path in saved.side_files.items()},
        stripe_bytes=STRIPE_BYTES,
        layout=layout,
        found=FoundFiles(
            saved.names,
            Layout(saved.headers, tuple(_shards(saved, tensors, plan, layout))),
            tuple(_notes(saved, tensors)),
        ),
    )


def _check_tensors(
    folder: Path, found: Mapping[str, TensorSpec], tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout
) -> None:
    """Check that ranks have the tensors of the layout; constants may be missing, which have nothing of the source."""
    constants = {constant.name for constant in layout.constants}
    for header in lay_out_ranks(tensors, plan, {}, layout=layout).headers:
        expected = {name: TensorSpec(info.dtype, info.shape) for name, info in header.tensors.items()}
        for name in [*found, *(expected.keys() - constants)]:
            if (got := found.get(name)) != (wanted := expected.get(name)):
                raise SplitCheckpointError(
                    f"{folder}: {name} is {_described(got)} on each rank (expected {_described(wanted)} by config.json "
                    f"for {plan.tp} ranks): {_OTHER_MODEL}"
                )


def _described(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_constants(folder: Path, saved: SavedFiles, layout: FileLayout) -> None:
    """Check the values of constants: the full tensors have none of them."""
    paths = [folder / name for name in saved.names]
    heads, sizes = [header.head for header in saved.headers], [header.file_bytes for header in saved.headers]
    with InputFiles(paths, heads, sizes) as inputs:
        for constant, rank in product(layout.constants, saved.ranks):
            if (stored := rank.get(constant.name)) is None:
                continue
            data = memoryview(bytearray(len(constant.data)))
            inputs.read(stored.file, data, stored.offset)
            if data != constant.data:
                raise IntegrityError(
                    f"{paths[stored.file]}: {constant.name} is not {constant.value:g}, and full tensors have no place "
                    f"for it: use the checkpoint that vLLM was started with"
                )


def _shards(saved: SavedFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout) -> Iterator[Shards]:
    """Where the shards of each tensor are in the files that were found."""
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for one in layout.file_tensors(tensors):
        for rank, stored in enumerate(saved.ranks):
            at = stored[one.name].offset
            for name in one.members:
                places[name].append((stored[one.name].file, at))
                shape = plan.placement(name).shard_shape(tensors[name].shape, rank)
                at += num_bytes(tensors[name].dtype, shape)
    for name, spec in tensors.items():
        files, offsets = zip(*places[name], strict=True)
        yield Shards(geometry(plan.placement(name), spec.dtype, spec.shape), files, offsets)


def _notes(saved: SavedFiles, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    yield "not compared with a source: vLLM saved these rank files without names or checksums of its files"
    named = saved.config.get("dtype", saved.config.get("torch_dtype"))
    found = sorted({spec.dtype for spec in tensors.values()})
    if named in _DTYPES and found != [_DTYPES[named]]:
        yield f"tensors have dtype {', '.join(found)}, and config.json has {named}: vLLM may have converted them"
    yield from (f"{name} is left out: {why}" for name, why in saved.left_out.items())

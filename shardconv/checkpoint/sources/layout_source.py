"""A source from rank files of other tools: full tensors under the names of a Hugging Face checkpoint, by their layout.

Most layouts name the dim that ranks shard. For rank files of an engine, the dims follow from the plan of its model:
the tensors of every rank must equal a split by this plan.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.engine.layout import divide, in_file_order, lay_out_ranks
from shardconv.checkpoint.sources.dcp_files import read_dcp
from shardconv.checkpoint.sources.folder_files import SourceFolder, ignore_options
from shardconv.checkpoint.sources.layout_files import (
    RankFiles,
    RankFileTensor,
    is_hugging_face_index,
    rank_files,
    read_rank_files,
    refuse_missing,
)
from shardconv.checkpoint.sources.megatron_source import read_megatron
from shardconv.checkpoint.sources.meta_params import PARAMS_NAME, complete_config, known_config
from shardconv.checkpoint.sources.source import Source, SourceFile, StoredTensors
from shardconv.checkpoint.sources.transforms import UNTIE, Concatenation, Transform, WithCopies, rotary_rows
from shardconv.files.containers.safetensors import FLOAT_NAMES, Header, build_header, build_index, num_bytes
from shardconv.files.folder import AnyPath, Compressed, read_json
from shardconv.files.weight_formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    is_trainer_state,
    is_weights,
    refuse_sharded_state,
)
from shardconv.formats.settings import with_quantization
from shardconv.layouts import DCP, MEGATRON, SOURCE_LAYOUTS
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.full_shapes import FullTensor, check_layers, check_pairs, full_tensor, num_ranks, planned_tensors
from shardconv.layouts.layout import FileLayout
from shardconv.layouts.layout_file import LayoutFile, layout_head
from shardconv.layouts.relation import Related, find_target
from shardconv.layouts.row_tensors import check_needed, find_copies
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.support.errors import IntegrityError, PlanError, SourceError, option
from shardconv.support.formatting import counted

#: Name and metadata of the file that a merge writes, and its maximum bytes, which transformers has by default, too.
_FILE, _METADATA, _MAX_FILE_BYTES = "model.safetensors", {"format": "pt"}, 50 * 10**9


def open_layout(
    folder: SourceFolder, layout: LayoutFile, config: dict[str, object] | None, *, is_asked: bool
) -> Source:
    """Open rank files of another tool.

    Args:
        folder: the folder.
        layout: of the files.
        config: the config that the user passed, or None.
        is_asked: whether the user asked for the layout.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or a tensor is unknown or does not fit.
    """
    weights = [f"{folder.inner}{name}" for name in rank_files(layout, folder.inner_names)]
    if layout.engine is not None:
        refuse_sharded_state(folder.path, {*folder.names} - {*weights})
    left_out = _left_out(folder, weights, layout, is_asked=is_asked)
    auxiliary_files = folder.auxiliary([*weights, *left_out])
    if config is None and CONFIG_NAME in auxiliary_files:
        config = read_json(auxiliary_files[CONFIG_NAME])
    if layout.key in {DCP, MEGATRON}:
        specs, stored, missing, *assumed = read_dcp(folder) if layout.key == DCP else read_megatron(folder, config)
        read = _Read(specs, stored, len(stored.files), config, missing, *assumed)
    else:
        read = _read_ranks(folder, layout, weights, config, auxiliary_files)
    beside = f"{folder.inner}{layout.beside}"
    if auxiliary_files.pop(beside, None) is not None:
        is_params = layout.beside == PARAMS_NAME
        left_out[beside] = "its values are in config.json" if is_params else f"describes the files of {layout.title}"
    without = f", without {', '.join(read.missing)}" if read.missing else ""
    files = _files(in_file_order(dict(sorted(read.specs.items()))))
    return Source(
        folder.path,
        is_folder=True,
        files=tuple(SourceFile(name, folder.path / name, header) for name, header in files),
        index=(f"{_FILE}.index.json", Compressed(build_index(files).encode())) if len(files) > 1 else None,
        converted_from=read.stored,
        config=read.config,
        auxiliary_files=auxiliary_files,
        left_out=left_out,
        ignore=folder.ignore,
        layout=layout.key,
        num_ranks=read.num_ranks,
        made_files={} if read.config is config else {CONFIG_NAME: json.dumps(read.config, indent=2) + "\n"},
        assumed=read.assumed,
        derived=(f"converted from {counted(len(read.stored.files), 'file')} of {layout.title}{without}",),
    )


def _files(specs: Mapping[str, TensorSpec]) -> list[tuple[str, Header]]:
    """Name and header of each file that a merge writes."""
    parts = divide(((item, num_bytes(*item[1][:2])) for item in specs.items()), _MAX_FILE_BYTES)
    stem, suffix = _FILE.split(".")
    numbered = [f"{stem}-{number:05}-of-{len(parts):05}.{suffix}" for number in range(1, len(parts) + 1)]
    names = numbered if len(parts) > 1 else [_FILE]
    return [(name, build_header(part, _METADATA)) for name, part in zip(names, parts, strict=True)]


class _Read(NamedTuple):
    """Contents of the files: full tensors, their config, the contents that are missing, and assumptions."""

    specs: dict[str, TensorSpec]
    stored: StoredTensors
    num_ranks: int
    config: dict[str, object] | None
    missing: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def _read_ranks(
    folder: SourceFolder,
    layout: LayoutFile,
    weights: Sequence[str],
    config: dict[str, object] | None,
    auxiliary_files: Mapping[str, AnyPath],
) -> _Read:
    """Read the tensors of files that rules describe."""
    params = read_json(auxiliary_files[PARAMS_NAME]) if PARAMS_NAME in auxiliary_files else None
    if config is None and params is None and (layout.beside is not None or layout.engine is not None):
        needed = PARAMS_NAME if layout.beside == PARAMS_NAME else CONFIG_NAME
        raise SourceError(
            f"{folder.path}: does not have {needed}, which has the sizes of the model: copy it into the folder, or "
            f"pass the model's config.json ({option('config')})"
        )
    found = read_rank_files(folder, layout, weights)
    if layout.engine is not None:
        known = with_quantization(config, auxiliary_files, {}) or {}
    else:
        known = known_config(folder.path, params, config)
    specs, stored = read_full_tensors(folder.path, layout, found, known)
    made, assumed = config, _dtype_note(layout, config or {}, specs)
    if config is None and params is not None:
        made, assumed = complete_config(folder.path / PARAMS_NAME, params, specs)
    return _Read(specs, stored, len(found.ranks), made, layout.missing, assumed)


def _dtype_note(layout: LayoutFile, config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """A note on tensors of another dtype than the config has, which an engine may have converted."""
    config_dtype = config.get("dtype", config.get("torch_dtype"))
    dtypes = sorted({spec.dtype for spec in specs.values()})
    found = [FLOAT_NAMES.get(dtype) for dtype in dtypes]
    if layout.engine is None or config_dtype not in FLOAT_NAMES.values() or found == [config_dtype]:
        return ()
    return (f"tensors are {', '.join(dtypes)}, but config.json has {config_dtype}: they may have been converted",)


def _left_out(folder: SourceFolder, weights: Collection[str], layout: LayoutFile, *, is_asked: bool) -> dict[str, str]:
    """Name to reason of all other files with weights."""
    of_layout = [
        name
        for name in folder.kept
        if name not in weights
        and name.startswith(folder.inner)
        and re.fullmatch(layout.others, name.removeprefix(folder.inner))
    ]
    others = [name for name in folder.kept if (is_weights(name) or name in ADAPTER_FILES) and name not in weights]
    reasons = dict.fromkeys(of_layout, f"of {layout.title}, without weights")
    reasons |= {name: "trainer state" for name in others if is_trainer_state(name)}
    indexes = [name for name in others if name.endswith(".index.json")]
    reasons |= {name: f"index of {layout.title}" for name in indexes if not is_hugging_face_index(name)}
    if layout.engine is not None:
        reasons |= dict.fromkeys(indexes, "index of another checkpoint")
    if not is_asked and (unknown := [name for name in others if name not in reasons]):
        _refuse_incomplete(folder, [*weights, *unknown])
        raise SourceError(
            f"{folder.path}: holds weights or an adapter besides the files of {layout.title}: "
            f"{', '.join(unknown[:5])}: pass {ignore_options(unknown, folder.kept.keys() - {*unknown})}, or "
            f"{option(source_layout=layout.key)} to use those files only"
        )
    return folder.left_out | dict.fromkeys(others, f"not a file of --from {layout.key}") | reasons


def _refuse_incomplete(folder: SourceFolder, names: Sequence[str]) -> None:
    """Refuse files of a layout without the file that has to be beside them, which have the names of another layout."""
    for layout in map(layout_head, SOURCE_LAYOUTS):
        pattern, needed = re.compile(f"(?:{layout.files})|(?:{layout.others})"), layout.beside and layout.others
        if needed and all(pattern.fullmatch(name.removeprefix(folder.inner)) for name in names):
            raise SourceError(
                f"{folder.path}: holds files of {layout.title}, without {folder.inner}{layout.beside}: copy it into "
                f"the folder, or pass {option(source_layout=layout.key)}"
            )


# --- full tensors -----------------------------------------------------------------------------------------------------

#: Name to dtype and shape of each full tensor, and where they are stored.
FullTensors = tuple[dict[str, TensorSpec], StoredTensors]
_AGAIN = "copy the folder again"
_OTHERS = f"{_AGAIN}, or pass the checkpoint that the ranks have shards of"
_OTHER_MODEL = (
    "rank files are missing, or config.json belongs to another model: save the folder again, or use the checkpoint "
    "that the engine was started with"
)


def read_full_tensors(
    folder: AnyPath, layout: LayoutFile, found: RankFiles, config: Mapping[str, object]
) -> FullTensors:
    """Assemble the full tensors.

    Args:
        folder: the folder, for messages.
        layout: of its rank files.
        found: the rank files.
        config: the config that their shapes must fit.

    Raises:
        SourceError: if a tensor is unknown, missing on a rank, or does not fit the config.
        IntegrityError: if a constant has another value.
    """
    if layout.engine is not None:
        return _by_plan(folder, layout, found, config)
    rules = layout.all_rules
    names = [name for name in _names(found) if not rules.is_without_source(name)]
    related = {name: one for name in names if (one := find_target(rules.rules, name)) is not None}
    _check_even(folder, related, found)
    _check_ranks(folder, layout, related, found, config)
    specs: dict[str, TensorSpec] = {}
    shards: dict[str, Shards] = {}
    transforms: dict[str, Transform] = {}
    for name in names:
        if name not in related:
            raise SourceError(
                f"{folder}: tensor {name} is unknown in {layout.title}: only models that this layout describes are "
                f"supported"
            )
        (source,), held = related[name].sources, _shards_of(folder, name, found, related[name])
        if source in specs:
            raise SourceError(f"{folder}: two tensors are {source} (got {name} as the second, expected one)")
        full = _full_tensor(folder, name, related[name], held, config)
        spec = specs[source] = TensorSpec(held[0].spec.dtype, full.shape)
        try:
            whole = unsharded(num_bytes(*spec[:2])) if len(held) == 1 else geometry(full.placement, *spec[:2])
        except ValueError as error:
            raise SourceError(f"{folder}: {name} cannot be merged: {error}: {_AGAIN}") from error
        stored = name if full.rotary_heads else source
        shards[stored] = Shards(whole, tuple(one.file for one in held), tuple(one.offset for one in held))
        if full.rotary_heads:
            transforms[source] = rotary_rows(name, spec, spec.shape[0] // full.rotary_heads)
    try:
        check_needed(rules, {one.target for one in related.values()}, check_layers(specs, config))
    except PlanError as error:
        raise SourceError(f"{folder}: {error.problem}: {_AGAIN}") from error
    copies = find_copies(rules, specs) if config.get("tie_word_embeddings") is True else {}
    for copy, original in copies.items():
        spec = specs[original]
        if (head := specs.pop(copy)) != spec:
            raise SourceError(
                f"{folder}: {copy} is {_describe(head)} (expected {_describe(spec)}, a copy of {original}): {UNTIE}"
            )
        transforms[original] = WithCopies(Concatenation.of_tensor(original, spec), original, (copy,), UNTIE)
    return specs, StoredTensors(found.files, shards).with_layer(transforms)


def _names(found: RankFiles) -> list[str]:
    return list(dict.fromkeys(name for rank in found.ranks for name in rank))


def _full_tensor(
    folder: AnyPath, name: str, related: Related, shards: Sequence[RankFileTensor], config: Mapping[str, object]
) -> FullTensor:
    try:
        return full_tensor(related.rule.options, [shard.spec.shape for shard in shards], config)
    except PlanError as error:
        raise SourceError(
            f"{folder}: {name}: {error.message}: files of a rank are missing, or the config belongs to another model"
        ) from error


def _shards_of(folder: AnyPath, name: str, found: RankFiles, related: Related | None = None) -> list[RankFileTensor]:
    """The shards of a tensor by rank, all of the same dtype; every rank has one unless a rule says otherwise."""
    shards = [rank[name] for rank in found.ranks if name in rank]
    on_all = related is None or not related.rule.options.on_one_rank
    if len(shards) < len(found.ranks) and on_all:
        missing = next(rank for rank, held in enumerate(found.ranks) if name not in held)
        raise SourceError(f"{folder}: rank {missing} does not have {name}, which other ranks have: {_OTHERS}")
    dtypes = sorted({shard.spec.dtype for shard in shards})
    if len(dtypes) > 1:
        raise SourceError(
            f"{folder}: {name} has several dtypes (got {', '.join(dtypes)}, expected the same on all ranks)"
        )
    return shards


def _check_even(folder: AnyPath, related: Mapping[str, Related], found: RankFiles) -> None:
    """Check that each tensor of one rank is on no other, and that ranks have equal numbers of them."""
    single = [
        [name for name in rank if name in related and related[name].rule.options.on_one_rank] for rank in found.ranks
    ]
    counts = Counter(name for names in single for name in names)
    if (name := next((name for name, count in counts.items() if count > 1), None)) is not None:
        raise SourceError(f"{folder}: {name} is on {counts[name]} ranks (expected one): {_AGAIN}")
    if len({len(names) for names in single}) > 1:
        numbers = ", ".join(str(len(names)) for names in single)
        raise SourceError(
            f"{folder}: ranks have different numbers of experts' tensors (got {numbers}, "
            f"expected equal numbers): {_AGAIN}"
        )


def _check_ranks(
    folder: AnyPath, layout: LayoutFile, related: Mapping[str, Related], found: RankFiles, config: Mapping[str, object]
) -> None:
    """Check the number of files where their names do not have it: the last ones may be missing."""
    for name, one in related.items():
        if (shard := found.ranks[0].get(name)) is None:
            continue
        try:
            expected = num_ranks(one.rule.options, shard.spec.shape, config)
        except PlanError as error:
            raise SourceError(f"{folder}: {name}: {error.message}: correct the config") from error
        if expected is not None:
            refuse_missing(folder, layout, [file.path.name for file in found.files], range(len(found.ranks), expected))
            return


# --- rank files of an engine ----------------------------------------------------------------------------------------


def _by_plan(folder: AnyPath, layout: LayoutFile, found: RankFiles, config: Mapping[str, object]) -> FullTensors:
    """The full tensors of which a split in this layout has the same rank files, except for the order of tensors."""
    for name in _names(found):
        _shards_of(folder, name, found)
    tp, request = len(found.ranks), PlanRequest(engine=layout.engine)
    rank_tensors = {name: stored.spec for name, stored in found.ranks[0].items()}
    try:
        full = planned_tensors(layout.key, rank_tensors, tp, config, request)
        planner = planner_for(full, config, request)
        file_layout = choose_layout(layout.key, full, config)
        try:
            plan = planner.plan(tp)
        except PlanError as error:
            raise SourceError(
                f"{folder}: has files of {tp} ranks, but its model cannot be sharded for tp {tp} ({error.problem}): "
                f"{_OTHER_MODEL}"
            ) from error
        check_pairs(plan, full)
        tensors = in_file_order(full)
        file_layout.check(tensors, plan)
    except PlanError as error:
        raise SourceError(
            f"{folder}: was saved by {layout.engine}, and its full tensors cannot be derived: {error.problem}. Only "
            f"dense unquantized models are supported: for others, use the checkpoint that the engine was started with"
        ) from error
    _check_tensors(folder, found, tensors, plan, file_layout)
    stored = StoredTensors(found.files, dict(_planned_shards(found, tensors, plan, file_layout)))
    _check_constants(found, stored, file_layout)
    return tensors, stored


def _check_tensors(
    folder: AnyPath, found: RankFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout
) -> None:
    """Check that ranks have the tensors of the layout; constants may be missing, as no source tensor is in them."""
    constants = {constant.name for constant in layout.constants}
    for rank, header in enumerate(lay_out_ranks(tensors, plan, {}, layout=layout).headers):
        expected, held = header.specs, {name: stored.spec for name, stored in found.ranks[rank].items()}
        for name in [*held, *(expected.keys() - constants)]:
            if held.get(name) != expected.get(name):
                raise SourceError(
                    f"{folder}: {name} is {_describe(held.get(name))} on rank {rank} (expected "
                    f"{_describe(expected.get(name))} by config.json for {plan.tp} ranks): {_OTHER_MODEL}"
                )


def _describe(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_constants(found: RankFiles, stored: StoredTensors, layout: FileLayout) -> None:
    """Check the values of constants, because they are not in the full tensors."""
    with stored.open() as inputs:
        for constant, rank in product(layout.constants, found.ranks):
            if (held := rank.get(constant.name)) is None:
                continue
            data = memoryview(bytearray(len(constant.data)))
            inputs.read(held.file, data, held.offset)
            if data != constant.data:
                raise IntegrityError(
                    f"{found.files[held.file].path}: {constant.name} has other values (expected the constant "
                    f"{constant.value:g}): use the checkpoint that the engine was started with"
                )


def _planned_shards(
    found: RankFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout
) -> Iterator[tuple[str, Shards]]:
    """Each tensor with the positions of its shards, which are one behind the other in a file tensor."""
    for file_tensor in layout.file_tensors(tensors):
        stored = [rank[file_tensor.name] for rank in found.ranks]
        files, offsets = [one.file for one in stored], [one.offset for one in stored]
        for name in file_tensor.members:
            placement, (dtype, shape, *_) = plan.placement(name), tensors[name]
            yield name, Shards(geometry(placement, dtype, shape), tuple(files), tuple(offsets))
            sizes = [num_bytes(dtype, placement.shard_shape(shape, rank)) for rank in range(plan.tp)]
            offsets = [offset + size for offset, size in zip(offsets, sizes, strict=True)]

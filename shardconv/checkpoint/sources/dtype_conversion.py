"""Conversion of the floating-point tensors of a source to another dtype, while they are read.

Converts names, headers, index and config; ``rounding`` converts the elements.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import ReadTensor, Scratch
from shardconv.checkpoint.engine.layout import in_file_order
from shardconv.checkpoint.sources.source import Source, SourceFile
from shardconv.checkpoint.sources.source_files import with_total_size
from shardconv.checkpoint.sources.transforms import TensorRange
from shardconv.files.containers.safetensors import (
    DTYPE_BITS,
    FLOAT_NAMES,
    TARGET_DTYPES,
    Header,
    build_header,
    target_dtype,
)
from shardconv.files.fileio import Bytes
from shardconv.files.folder import Compressed
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError, option

#: The keys of dtypes in configs.
_CONFIG_KEYS = ("dtype", "torch_dtype")
#: Prefixes of the dtypes that only quantized checkpoints have.
_QUANTIZED = ("F8_", "F6_", "F4")


def with_dtype(source: Source, dtype: str) -> Source:
    """The source with its floating-point tensors in another dtype, and with that dtype in its config.

    Integers, booleans and complex numbers are not converted. Nor are tensors that are wider than the dtype of most
    elements: a model that has some tensors in higher precision needs it.

    Args:
        source: the source.
        dtype: one of :data:`~shardconv.files.containers.safetensors.TARGET_DTYPES`.

    Raises:
        UsageError: if the dtype is unknown.
        PlanError: if the source is quantized.
    """
    target = target_dtype(dtype)
    _refuse_quantized(source, dtype)
    main = _main_dtype(source.specs)
    others = {name: spec.dtype for name, spec in source.specs.items() if spec.dtype in {*FLOAT_NAMES} - {target}}
    kept = [name for name, stored in others.items() if DTYPE_BITS[stored] > DTYPE_BITS[main]]
    converted = others.keys() - kept
    config, texts = _config_texts(source, FLOAT_NAMES[target])
    source = replace(source, config=config, made_files={**source.made_files, **texts}, dtype=dtype)
    if not converted:
        return source
    transforms = {
        name: DtypeConversion(name, others[name], target, _unit(source, name, others[name], target))
        for name in sorted(converted)
    }
    files = tuple(_with_header(file, converted, target) for file in source.files)
    index, total = source.index, sum(file.header.data_bytes for file in files)
    return replace(
        source,
        files=files,
        index=index and (index[0], Compressed(with_total_size(index[1].raw(), total).encode())),
        converted_from=source.stored.with_layer(transforms),
        derived=(*source.derived, _describe(source.specs, dtype, kept)),
    )


def _unit(source: Source, name: str, stored_dtype: str, dtype: str) -> int:
    """The unit of a conversion: an element, or the unit of the transform that computes the elements."""
    transform = source.stored.transform_of(name)
    inner = transform.unit if transform is not None else 0
    return inner * DTYPE_BITS[dtype] // DTYPE_BITS[stored_dtype] or DTYPE_BITS[dtype] // 8


def _refuse_quantized(source: Source, dtype: str) -> None:
    name = next((name for name, spec in source.specs.items() if spec.dtype.startswith(_QUANTIZED)), None)
    if name is None and not source.has_quantization:
        return
    raise PlanError(
        f"{name or source.path}: is quantized, and scales and packed values cannot be converted to {dtype}: split the "
        f"unquantized checkpoint, or leave out {option('dtype')} and load the split checkpoint with "
        f"{option(dequantize=True)}"
    )


def _main_dtype(specs: Mapping[str, TensorSpec]) -> str:
    """The floating-point dtype of most elements; F64 without any."""
    counts: Counter[str] = Counter()
    for spec in specs.values():
        if spec.dtype in FLOAT_NAMES:
            counts[spec.dtype] += prod(spec.shape)
    return max(counts, key=counts.__getitem__, default="F64")


def _describe(specs: Mapping[str, TensorSpec], dtype: str, kept: Sequence[str]) -> str:
    if not kept:
        return f"converted to {dtype}"
    dtypes = "/".join(dict.fromkeys(specs[name].dtype for name in kept))
    others = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return f"converted to {dtype}, except tensors that the source keeps in {dtypes} ({kept[0]}{others})"


def _with_header(file: SourceFile, converted: set[str], dtype: str) -> SourceFile:
    """The file as a merge writes it; its tensors stay aligned to their dtypes."""
    header: Header = file.header
    specs = {
        name: TensorSpec(dtype if name in converted else spec.dtype, spec.shape) for name, spec in header.specs.items()
    }
    return replace(file, header=build_header(in_file_order(specs).items(), header.metadata))


def _config_texts(source: Source, dtype: str) -> tuple[dict[str, object] | None, dict[str, str]]:
    """The config with another dtype, and its text by its name; no text if it stays unchanged."""
    config = copy.deepcopy(source.config)
    if config is None or not _change_dtype(config, dtype):
        return source.config, {}
    return config, {CONFIG_NAME: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _change_dtype(config: dict[str, object], dtype: str) -> bool:
    """Change the dtypes of a model and its submodels, in place; whether there are others."""
    is_changed = False
    for key, value in config.items():
        if isinstance(value, dict):
            is_changed |= _change_dtype(value, dtype)
        elif key in _CONFIG_KEYS and str(value).removeprefix("torch.") in {*FLOAT_NAMES.values()} - {dtype}:
            config[key] = dtype
            is_changed = True
    return is_changed


class DtypeConversion(Struct, frozen=True):
    """The transform of one tensor.

    Attributes:
        name: of the tensor.
        stored_dtype: its dtype in safetensors before the conversion.
        dtype: its dtype after the conversion.
        unit: see :class:`~shardconv.checkpoint.sources.transforms.Transform`; a multiple of an element.
    """

    name: str
    stored_dtype: str
    dtype: str
    unit: int

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill a block with the bytes of the converted tensor from ``start`` on.

        Raises:
            SourceError: if a finite element is too large for the dtype.
        """
        stored_size, size = DTYPE_BITS[self.stored_dtype] // 8, DTYPE_BITS[self.dtype] // 8
        step = max(scratch.block_bytes * size // max(stored_size, size) // self.unit, 1) * self.unit
        for at in range(0, len(block), step):
            converted, first = block[at : at + step], (start + at) // size
            data = scratch.take("conversion", len(converted) // size * stored_size)
            read(self.name, first * stored_size, data)
            try:
                engine.arrays.round_to(data, self.stored_dtype, converted, self.dtype)
            except OverflowError as error:
                index, value = error.args
                raise SourceError(self._overflow(first + index, value)) from error

    def reads(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield the range that is read to fill these bytes."""
        stored_bits, bits = DTYPE_BITS[self.stored_dtype], DTYPE_BITS[self.dtype]
        yield self.name, start * stored_bits // bits, stop * stored_bits // bits

    def _overflow(self, index: int, value: float) -> str:
        dtype = next(name for name, target in TARGET_DTYPES.items() if target == self.dtype)
        wider = {"fp16": f"{option(dtype='bf16')} or {option(dtype='fp32')}", "bf16": option(dtype="fp32")}.get(dtype)
        remedy = f"pass {wider}" if wider else f"leave out {option('dtype')}"
        return f"{self.name}: element {index} is {value:g}, which is too large for {dtype}: {remedy}"

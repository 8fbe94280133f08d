"""Quantization settings: the format of a checkpoint, and the sizes of its groups, blocks and words.

Settings are ``quantization_config`` of config.json, or of a file beside it. Settings that are not understood are
refused: a layer that is read with other sizes has wrong values.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from shardconv.files.folder import AnyPath, read_json
from shardconv.formats.format import WORD_BITS, Block, Scheme, Settings, check_pattern, formats
from shardconv.formats.torchao import FORMATS, read_metadata
from shardconv.plan.quantization import METADATA_KEY, SETTINGS_FILES, SETTINGS_KEY
from shardconv.support.errors import PlanError, option

_Value = TypeVar("_Value", int, str)
#: Keys of the format in the settings of different methods, of which the first counts, and of the bits of a weight.
_FORMATS = ("format", "checkpoint_format", "quant_algo", "fmt", "version")
_BITS = ("bits", "w_bit", "num_bits")


def read_settings(table: Mapping[str, object]) -> Settings:
    """Read quantization settings.

    Raises:
        PlanError: if the method, or a value of a setting, is not supported.
    """
    method = str(table.get("quant_method", ""))
    if not method and "config_groups" in table:
        method = "compressed-tensors"
    reader = _READERS.get(method.lower())
    if reader is None:
        reason = _REFUSED.get(method.lower(), "its format is unknown")
        raise PlanError(
            f"quantization {method!r:.60} is not supported, as {reason} (expected quant_method {', '.join(_READERS)}): "
            "split the unquantized checkpoint, or ignore a file with settings that do not apply "
            f"({option(ignore=['FILE'])})"
        )
    ignored = [name for key in _IGNORED for name in _list_of_names(table, key)]
    patterns = tuple(name for name in ignored if name.startswith("re:") or "*" in name)
    return Settings(method, tuple(reader(table)), frozenset(ignored) - frozenset(patterns), patterns)


#: The keys under which methods list layers that are not quantized.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _gptq(table: Mapping[str, object]) -> Iterator[Scheme]:
    bits = _one_of(table, "bits", (2, 3, 4, 8))
    version = _one_of(table, "checkpoint_format", ("gptq", "gptq_v2", ""), table.get("format", "")) or "gptq"
    has_act_order = table.get("desc_act") is True and _group_block(table)[0] > 0
    dynamic = table.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(pattern).startswith("-:") for pattern in dynamic):
        # entries with -: are unquantized layers, which the tensors show
        raise PlanError("GPTQ with settings per layer (dynamic) is not supported: split the unquantized checkpoint")
    blocks = {"word": _word_block(bits), "group": _group_block(table)}
    yield Scheme(formats()[version], blocks, is_symmetric=False, has_act_order=has_act_order)


def _awq(table: Mapping[str, object]) -> Iterator[Scheme]:
    bits = _one_of({"bits": table.get("bits", table.get("w_bit"))}, "bits", (4,))
    version = str(table.get("version", table.get("format", "gemm"))).lower()
    if version != "gemm":
        raise PlanError(f"AWQ version {version!r:.40} is not supported (expected gemm): split the unquantized one")
    group = _group_block({"group_size": table.get("group_size", table.get("q_group_size", 128))})
    yield Scheme(formats()["awq"], {"word": _word_block(bits), "group": group}, is_symmetric=False)


def _compressed_tensors(table: Mapping[str, object]) -> Iterator[Scheme]:
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError(f"compressed-tensors: config_groups is missing: pass {option(config='FILE')} with it")
    if (sparsity := _format_of(table, "sparsity_config")) != "dense":
        raise PlanError(
            f"compressed-tensors: sparsity_config with format {sparsity!r:.40} is not supported: only values that are "
            f"not zero are stored, so the features of a rank are not at known positions: save the checkpoint without "
            f"sparse compression, or split the unquantized one"
        )
    if _format_of(table, "transform_config") != "dense":
        raise PlanError(
            "compressed-tensors: transform_config is not supported: a rotation over all features of a layer differs "
            "from a shard's: split a checkpoint that was quantized without transforms"
        )
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise PlanError(f"compressed-tensors: config_groups.{name} is not a table (got {group!r:.40})")
        yield _scheme_of_group(str(name), group, str(table.get("format", "")))


def _format_of(table: Mapping[str, object], key: str) -> str:
    """The format in a section of the settings; ``dense`` if the section is missing or empty."""
    section = table.get(key)
    return str(section.get("format", "")) if isinstance(section, Mapping) and section else "dense"


def _scheme_of_group(name: str, group: Mapping[str, object], default: str) -> Scheme:
    weights = group.get("weights")
    kind = str(group.get("format") or default)
    if not isinstance(weights, Mapping):
        raise PlanError(f"compressed-tensors: config_groups.{name} does not have weights: this is not supported")
    if kind not in _COMPRESSED:
        raise PlanError(f"compressed-tensors: format {kind!r:.40} is not supported (expected {', '.join(_COMPRESSED)})")
    strategy = {"tensor_group": "group"}.get(str(weights.get("strategy")), str(weights.get("strategy")))
    blocks: dict[str, Block] = {"pair": (2, 1)}
    if kind == "pack-quantized":
        blocks["word"] = _word_block(_one_of(weights, "num_bits", (1, 2, 3, 4, 5, 6, 7, 8)))
    if strategy == "group":
        if type(size := weights.get("group_size")) is not int or size < 1:
            raise _invalid("group_size", size, "a positive integer")
        blocks["group"] = (size, 1)
    elif strategy == "block":
        blocks |= _rows_and_columns(weights, "block_structure")
    elif strategy not in ("tensor", "channel"):
        raise PlanError(f"compressed-tensors: strategy {strategy!r:.40} of config_groups.{name} is not supported")
    has_act_order = strategy == "group" and str(weights.get("actorder")).lower() in ("true", "group", "dynamic")
    if has_act_order and kind != "pack-quantized":
        raise PlanError(f"compressed-tensors: actorder with format {kind} is not supported: quantize without it")
    is_symmetric, targets = weights.get("symmetric", True) is not False, tuple(_list_of_names(group, "targets"))
    return Scheme(formats()[kind], blocks, strategy, is_symmetric, has_act_order, targets)


_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized",
)  # fmt: skip


def _fp8(table: Mapping[str, object]) -> Iterator[Scheme]:
    if (dtype := table.get("expert_dtype", "fp8")) != "fp8":
        raise PlanError(f"FP8 with experts of {dtype!r:.20} is not supported: split the unquantized checkpoint")
    has_blocks = table.get("weight_block_size") is not None
    blocks = _rows_and_columns(table, "weight_block_size") if has_blocks else {}
    yield Scheme(formats()["fp8"], blocks)
    yield Scheme(formats()["autofp8"], blocks)


def _modelopt(table: Mapping[str, object]) -> Iterator[Scheme]:
    algorithm = str(table.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        yield Scheme(formats()["modelopt_fp8"])
    elif algorithm == "NVFP4":
        yield Scheme(formats()["modelopt_nvfp4"], {"pair": (2, 1), "group": _group_block({"group_size": 16, **table})})
    else:
        raise PlanError(f"ModelOpt's {algorithm!r:.40} is not supported (expected FP8 or NVFP4)")


def _bitsandbytes(table: Mapping[str, object]) -> Iterator[Scheme]:
    if table.get("load_in_8bit") is not True:
        raise PlanError(
            "bitsandbytes with 4 bits is not supported: its values are one flat sequence of blocks of 64 with one "
            "scale, and the scales are quantized in blocks of 256, so a shard of input features would have parts of "
            "blocks of 64 x 256 = 16384 values: split the unquantized checkpoint and quantize it when it is loaded"
        )
    yield Scheme(formats()["bitsandbytes_int8"])


def _torchao(table: Mapping[str, object]) -> Iterator[Scheme]:
    metadata = table.get(METADATA_KEY) or {}
    assert isinstance(metadata, Mapping)
    entries = read_metadata(metadata)
    names = {FORMATS[entry.kind] for entry in entries.values()} or {"torchao"}
    if len(names) > 1:
        kinds = ", ".join(sorted({entry.kind for entry in entries.values()}))
        raise PlanError(f"torchao: {kinds} in one checkpoint are not supported: split the unquantized checkpoint")
    sizes = {name: entry.block_size for name, entry in entries.items()}
    yield Scheme(formats()[names.pop()], {"pair": (2, 1)}, block_sizes=sizes)


def _quanto(table: Mapping[str, object]) -> Iterator[Scheme]:
    layers = [layer for layer in table.values() if isinstance(layer, Mapping)]
    kinds = {str(one.get("weights", one.get("weights_dtype"))).removeprefix("q") for one in layers or [table]}
    if packed := sorted(kind for kind in kinds if not kind.startswith(("int8", "float8"))):
        raise PlanError(
            f"Quanto with weights of {packed[0]!r:.20} is not supported (expected int8, float8): a byte holds rows of "
            f"the weight that are half or a quarter of its groups apart, so a shard has parts of bytes: split the "
            f"unquantized checkpoint"
        )
    yield Scheme(formats()["quanto"])


_READERS: dict[str, Callable[[Mapping[str, object]], Iterable[Scheme]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: [Scheme(formats()["fbgemm_fp8"])],
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda _: [Scheme(formats()["mxfp4"], {"group": (32, 1)})],
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "quanto": _quanto,
}

#: Methods that are known and refused, with the reason.
_REFUSED = {
    "hqq": "with 4 bits, a byte has elements of groups g and g + n / 2 of n groups, so shards would have half bytes",
    "eetq": "its weights are interleaved for the kernels of one GPU architecture, which the checkpoint does not name",
    "aqlm": "its codebooks are shared by all rows",
    "bitnet": "its weights are packed over the rows of the full weight",
    "auto-round": "its packing depends on a backend that the checkpoint does not name",
}


# --- values of settings ---------------------------------------------------------------------------------------------


def _word_block(bits: int) -> Block:
    """Elements and entries of the smallest number of full words of 32 bits."""
    return (WORD_BITS // bits, 1) if WORD_BITS % bits == 0 else (WORD_BITS, bits)


def _group_block(table: Mapping[str, object]) -> Block:
    """Elements of a group with one scale; 0 for one group over all input features."""
    size = table.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise _invalid("group_size", size, "a positive integer or -1")
    return (max(size, 0), 1)


def _rows_and_columns(table: Mapping[str, object], key: str) -> dict[str, Block]:
    """The rows and columns of a block with one scale, as a list or a text such as ``128x128``."""
    value = table.get(key)
    sizes = re.split("[x, ]+", value) if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise _invalid(key, value, "rows and columns")
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes)
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise _invalid(key, value, "two positive integers")
    return {"rows": (rows, 1), "columns": (columns, 1)}


def _one_of(table: Mapping[str, object], key: str, choices: Sequence[_Value], default: object = None) -> _Value:
    """One of some integers or texts."""
    value = table.get(key, default)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise _invalid(key, value, f"one of {', '.join(map(str, filter(None, choices)))}")


def _list_of_names(table: Mapping[str, object], key: str) -> list[str]:
    """A list of names and patterns; empty if the settings do not have it."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(key, value, "a list of names")
    for name in value:
        if name.startswith("re:"):
            check_pattern(name.removeprefix("re:"), key)
    return value


def _invalid(key: str, value: object, expected: str) -> PlanError:
    return PlanError(
        f"quantization_config: {key} is {value!r:.60} (expected {expected}): pass {option(config='FILE')} with the "
        "quantization_config of this checkpoint"
    )


# --- the place of settings -------------------------------------------------------------------------------------------
#
# They may be outside of the main section of config.json: in the config of a submodel, in other files, in metadata.

#: The keys of the text model in the config of a composite model, where transformers looks for settings, too.
_TEXT_MODELS = ("text_config", "decoder", "generator")


def with_quantization(
    given: Mapping[str, object] | None, auxiliary_files: Mapping[str, AnyPath], metadata: Mapping[str, str]
) -> Mapping[str, object] | None:
    """Add quantization settings of its text model or of another file to a config without any.

    Args:
        given: the config.
        auxiliary_files: name to path of the files beside it.
        metadata: of the files with tensors.

    Raises:
        SourceError: if the file cannot be read.
    """
    config = given or {}
    sections = [config, *(config.get(key) for key in _TEXT_MODELS)]
    tables = (section.get(SETTINGS_KEY) for section in sections if isinstance(section, Mapping))
    if (table := next((table for table in tables if table is not None), None)) is not None:
        if isinstance(table, Mapping) and table.get("quant_method") == "torchao":
            table = {**table, METADATA_KEY: metadata}
        return {**config, SETTINGS_KEY: table}
    for name in SETTINGS_FILES:
        path = auxiliary_files.get(name)
        if path is not None and (settings := _settings_in(name, read_json(path))) is not None:
            return {**config, SETTINGS_KEY: settings}
    return given


def _settings_in(name: str, table: Mapping[str, object]) -> Mapping[str, object] | None:
    """The quantization settings in a file; None if there are none."""
    if name == "hf_quant_config.json":
        section = table.get("quantization")
        has_algorithm = isinstance(section, Mapping) and (
            section.get("quant_algo") or section.get("kv_cache_quant_algo")
        )
        return {**section, "quant_method": "modelopt"} if isinstance(section, Mapping) and has_algorithm else None
    if name == "quanto_qmap.json":
        return {**table, "quant_method": "quanto"}
    known = {"w_bit": "awq", "bits": "gptq"}
    method = table.get("quant_method") or next((known[key] for key in known if key in table), None)
    return None if method is None else {**table, "quant_method": method}


# --- description ----------------------------------------------------------------------------------------------------


def describe_settings(config: Mapping[str, object] | None) -> str:
    """The method, formats and bits of quantized weights, such as ``compressed-tensors pack-quantized, 4 bits``.

    Args:
        config: the contents of config.json, with ``quantization_config``; None without a config.

    Returns:
        The description; "" without quantization settings.
    """
    table = (config or {}).get(SETTINGS_KEY)
    if not isinstance(table, Mapping):
        return ""
    method = str(table.get("quant_method") or "compressed-tensors")
    tables = [*_sections(table)] or [table]
    formats = _values(tables, _FORMATS[:1]) or _values([table], _FORMATS)[:1]
    bits = ", ".join(f"{value} bits" for value in _values(tables, _BITS))
    named = " ".join([method, ", ".join(kind for kind in formats if kind != method)]).rstrip()
    return f"{named}, {bits}" if bits else named


def _sections(table: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the settings of each group of layers, and of their weights."""
    groups = table.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group
            if isinstance(weights := group.get("weights"), Mapping):
                yield weights


def _values(tables: list[Mapping[str, object]], keys: tuple[str, ...]) -> list[str]:
    """The different values of keys, in order."""
    return [*dict.fromkeys(str(table[key]) for key in keys for table in tables if table.get(key))]

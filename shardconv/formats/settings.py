"""Quantization settings: which format a checkpoint has, and the sizes of its groups, blocks and words.

Settings are ``quantization_config`` of config.json, or of a file beside it (``checkpoint/quantization_files.py``).
Settings that are not understood are refused: a layer that is read with other sizes has wrong values.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from time import monotonic

from shardconv.errors import PlanError
from shardconv.formats.format import Format, formats
from shardconv.formats.torchao import FORMATS, read_metadata
from shardconv.plan.quantization import METADATA_KEY

#: Elements and entries of a block.
Block = tuple[int, int]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of some layers, with its sizes.

    Attributes:
        format: the format.
        blocks: name of a block in ``formats.toml`` to its elements and entries; a group of 0 elements is a whole row.
        strategy: of the scales, a key of :data:`~shardconv.formats.format.SCALE_DIMS`; "" if shapes show it.
        is_symmetric: whether the quantization is symmetric: without zero points.
        has_act_order: whether groups are in the order of activations: not of consecutive input features.
        targets: names or patterns (``re:``) of layers, or ``Linear`` for all.
        block_sizes: name of a logical matrix to the elements of a block with one scale, for each dim, where every
            matrix has its own; a block of the size of a dim is one block whatever the size of the shard.
    """

    format: Format
    blocks: Mapping[str, Block] = field(default_factory=dict)
    strategy: str = ""
    is_symmetric: bool = True
    has_act_order: bool = False
    targets: tuple[str, ...] = ("Linear",)
    block_sizes: Mapping[str, tuple[int, ...]] | None = None

    def layer(self, name: str) -> str:
        """The name of the layer whose values a tensor of this name holds."""
        return name.removesuffix(self.format.suffix).removesuffix(".weight").rstrip("._")

    def rank(self, layer: str, deadline: float) -> tuple[int, str] | None:
        """How closely the targets name a layer, as ``match_targets`` of compressed-tensors sorts them.

        Args:
            layer: name of the layer.
            deadline: that of the settings.

        Returns:
            The kind of the closest target, 0 for a name, 1 for a pattern and 2 for a class, and the target; None if no
            target names the layer.
        """
        found = [target for target in self.targets if target == "Linear" or matches(target, layer, deadline)]
        kinds = [2 if target == "Linear" else int(target.startswith("re:")) for target in found]
        return min(zip(kinds, found, strict=True), default=None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The quantization settings of a checkpoint.

    Attributes:
        method: ``quant_method``.
        schemes: the formats of its layers. The one whose targets name a layer most closely counts; among equals that of
            which the fewest tensors are missing, and then the first.
        ignored: names of layers that are not quantized, or parts of names between dots.
        ignored_patterns: patterns of such layers.
        deadline: when the patterns must have been matched, on the clock of :func:`time.monotonic`.
    """

    method: str
    schemes: tuple[Scheme, ...]
    ignored: frozenset[str] = frozenset()
    ignored_patterns: tuple[str, ...] = ()
    deadline: float = field(default_factory=lambda: monotonic() + _MAX_SECONDS)

    def ignoring(self, layer: str) -> str | None:
        """The name or pattern that leaves a layer unquantized; None if there is none."""
        parts = layer.split(".")
        ends = range(1, len(parts) + 1) if self.ignored else ()
        paths = (".".join(parts[first:last]) for last in ends for first in range(last))
        found = next((path for path in paths if path in self.ignored), None)  # lists can have hundreds of names
        return found or next(
            (pattern for pattern in self.ignored_patterns if matches(pattern, layer, self.deadline)), None
        )


def matches(target: str, layer: str, deadline: float) -> bool:
    """Whether a name or pattern of settings matches a layer; ``re:`` begins a regular expression.

    Other names match the layer itself, modules in it, and the end of its name, as the libraries compare them.

    Raises:
        PlanError: if patterns take too long to match.
    """
    if target.startswith("re:"):
        if len(layer) > _MAX_NAME:
            raise PlanError(f"{layer:.60}...: has {len(layer)} characters (expected at most {_MAX_NAME} for patterns)")
        found = re.match(target.removeprefix("re:"), layer) is not None
        if monotonic() > deadline:
            raise PlanError(
                f"quantization_config: its patterns take more than {_MAX_SECONDS} seconds to match ({target!r:.60}): "
                f"pass --config FILE with simpler patterns"
            )
        return found
    if "*" in target:  # ModelOpt's patterns
        return fnmatchcase(layer, target)
    return target == layer or layer.endswith(f".{target}") or f".{target}." in f".{layer}."


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
        reason = _REFUSED.get(method.lower(), "its format is not known")
        raise PlanError(
            f"quantization {method!r:.60} is not supported: {reason} (expected quant_method {', '.join(_READERS)}). "
            f"Split the unquantized checkpoint, or ignore a file with settings that do not apply (--ignore FILE)"
        )
    ignored = [name for key in _IGNORED for name in _names(table, key)]
    patterns = tuple(name for name in ignored if name.startswith("re:") or "*" in name)
    return Settings(method, tuple(reader(table)), frozenset(ignored) - frozenset(patterns), patterns)


#: The keys under which methods list layers that are not quantized.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _gptq(table: Mapping[str, object]) -> Iterator[Scheme]:
    bits = _choice(table, "bits", (2, 3, 4, 8))
    _choice(table, "checkpoint_format", ("gptq", "gptq_v2", ""), table.get("format", ""))
    version = str(table.get("checkpoint_format", table.get("format")) or "gptq")
    has_act_order = table.get("desc_act") is True and _group(table)[0] > 0
    dynamic = table.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(pattern).startswith("-:") for pattern in dynamic):
        # those with -: are layers without quantization, which the tensors show
        raise PlanError("GPTQ with settings per layer (dynamic) is not supported: split the unquantized checkpoint")
    blocks = {"word": _word(bits), "group": _group(table)}
    yield Scheme(formats()[version], blocks, is_symmetric=False, has_act_order=has_act_order)


def _awq(table: Mapping[str, object]) -> Iterator[Scheme]:
    bits = _choice({"bits": table.get("bits", table.get("w_bit"))}, "bits", (4,))
    version = str(table.get("version", table.get("format", "gemm"))).lower()
    if version != "gemm":
        raise PlanError(f"AWQ version {version!r:.40} is not supported (expected gemm): split the unquantized one")
    group = _group({"group_size": table.get("group_size", table.get("q_group_size", 128))})
    yield Scheme(formats()["awq"], {"word": _word(bits), "group": group}, is_symmetric=False)


def _compressed_tensors(table: Mapping[str, object]) -> Iterator[Scheme]:
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError("compressed-tensors: config_groups is missing: pass --config FILE with it")
    if (sparsity := _format_of(table, "sparsity_config")) != "dense":
        raise PlanError(
            f"compressed-tensors: sparsity_config with format {sparsity!r:.40} is not supported: only values that are "
            f"not zero are stored, so the features of a rank are not at known positions: save the checkpoint without "
            f"sparse compression, or split the unquantized one"
        )
    if _format_of(table, "transform_config") != "dense":
        raise PlanError(
            "compressed-tensors: transform_config is not supported: a rotation over all features of a layer differs "
            "from that of a shard: split a checkpoint that was quantized without transforms"
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
        blocks["word"] = _word(_choice(weights, "num_bits", (1, 2, 3, 4, 5, 6, 7, 8)))
    if strategy == "group":
        blocks["group"] = (_positive(weights, "group_size"), 1)
    elif strategy == "block":
        blocks |= _rows_and_columns(weights, "block_structure")
    elif strategy not in ("tensor", "channel"):
        raise PlanError(f"compressed-tensors: strategy {strategy!r:.40} of config_groups.{name} is not supported")
    has_act_order = strategy == "group" and str(weights.get("actorder")).lower() in ("true", "group", "dynamic")
    if has_act_order and kind != "pack-quantized":
        raise PlanError(f"compressed-tensors: actorder with format {kind} is not supported: quantize without it")
    is_symmetric, targets = weights.get("symmetric", True) is not False, tuple(_names(group, "targets"))
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
        yield Scheme(formats()["modelopt_nvfp4"], {"pair": (2, 1), "group": _group({"group_size": 16, **table})})
    else:
        raise PlanError(f"ModelOpt's {algorithm!r:.40} is not supported (expected FP8 or NVFP4)")


def _mxfp4(_table: Mapping[str, object]) -> Iterator[Scheme]:
    yield Scheme(formats()["mxfp4"], {"group": (32, 1)})


def _fbgemm(_table: Mapping[str, object]) -> Iterator[Scheme]:
    yield Scheme(formats()["fbgemm_fp8"])


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
    kinds = {str(layer.get("weights")).removeprefix("q") for layer in layers or [table]}
    if packed := sorted(kind for kind in kinds if not kind.startswith(("int8", "float8"))):
        raise PlanError(
            f"Quanto with weights of {packed[0]!r:.20} is not supported (expected int8, float8): a byte holds rows of "
            f"the weight that are half or a quarter of its groups apart, so a shard has parts of bytes: split the "
            f"unquantized checkpoint"
        )
    yield Scheme(formats()["quanto"])


_READERS: dict[str, Callable[[Mapping[str, object]], Iterator[Scheme]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "quanto": _quanto,
}

#: Methods that are known and refused, with the reason.
_REFUSED = {
    "hqq": "a byte of 4 bits holds groups g and g + n / 2 of all n groups of a weight, so a shard has halves of bytes",
    "eetq": "its weights are interleaved for the kernels of one GPU architecture, which the checkpoint does not name",
    "aqlm": "its codebooks are shared by all rows",
    "bitnet": "its weights are packed over the rows of the full weight",
    "auto-round": "its packing depends on a backend that the checkpoint does not name",
}


def _word(bits: int) -> Block:
    """Elements and entries of the smallest number of full words of 32 bits."""
    return (_WORD_BITS // bits, 1) if _WORD_BITS % bits == 0 else (_WORD_BITS, bits)


def _group(table: Mapping[str, object]) -> Block:
    """Elements of a group with one scale; 0 for one group over all input features."""
    size = table.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise PlanError(f"group_size is {size!r:.40} (expected a positive integer or -1)")
    return (max(size, 0), 1)


def _rows_and_columns(table: Mapping[str, object], key: str) -> dict[str, Block]:
    value = table.get(key)
    sizes = re.split("[x, ]+", value) if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise PlanError(f"{key} is {value!r:.40} (expected rows and columns): pass --config FILE with it")
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes)
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise PlanError(f"{key} is {value!r:.40} (expected two positive integers): pass --config FILE with it")
    return {"rows": (rows, 1), "columns": (columns, 1)}


def _positive(table: Mapping[str, object], key: str) -> int:
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise PlanError(f"quantization_config: {key} is {value!r:.40} (expected a positive integer)")
    return value


def _choice(table: Mapping[str, object], key: str, choices: tuple[int | str, ...], default: object = None) -> int:
    value = table.get(key, default)
    if value not in choices or isinstance(value, bool):
        raise PlanError(f"quantization_config: {key} is {value!r:.40} (expected {', '.join(map(str, choices))})")
    return value if isinstance(value, int) else 0


def _names(table: Mapping[str, object], key: str) -> list[str]:
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"quantization_config: {key} is {value!r:.60} (expected a list of names)")
    for name in value:
        if name.startswith("re:"):
            _check_pattern(name.removeprefix("re:"), key)
    return value


#: The most repetitions in a pattern, and characters in a name that it is compared with. Each repetition may match at
#: every character, so a match takes time that grows with their power: about 3 seconds at most.
_MAX_REPETITIONS, _MAX_NAME = 5, 128
#: Seconds for all matches.
_MAX_SECONDS = 60
#: A repetition of an element of a pattern, with the parenthesis that may be before it.
_REPETITION = re.compile(r"(\)?)(?:[*+?]|\{\d*,?\d*\})[?+]?")


def _check_pattern(pattern: str, key: str) -> None:
    """Refuse a pattern that is not valid, or that takes too long to match: settings are not trusted.

    A repeated group with a repetition or an alternative in it matches in exponentially many ways.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"quantization_config: {key}: {pattern!r:.60} is not a regular expression: {error}") from error
    simple = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))  # a class or an escape is one character
    groups, repetitions, at = [False], 0, 0  # whether each open group has a repetition or an alternative
    while at < len(simple):
        found = _REPETITION.match(simple, at)
        if simple[at] == "(":
            groups.append(False)
            at += 2 if simple[at + 1 : at + 2] == "?" else 1
            continue
        is_group = simple[at] == ")"
        is_choice = groups.pop() if is_group and len(groups) > 1 else False
        if found:
            repetitions += 1
            if is_choice or repetitions > _MAX_REPETITIONS:
                raise PlanError(
                    f"quantization_config: {key}: the pattern {pattern!r:.60} may take too long to match (expected at "
                    f"most {_MAX_REPETITIONS} repetitions, and none of a group with repetitions or alternatives): "
                    f"write the names of the layers, or pass --config FILE with simpler patterns"
                )
        groups[-1] = groups[-1] or is_choice or found is not None or simple[at] == "|"
        at = found.end() if found else at + 1

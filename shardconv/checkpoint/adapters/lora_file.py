"""LoRA files with the names of diffusers, Kohya's scripts and ComfyUI, which may have layers of several components.

The layers of a component become an adapter of PEFT on the base model, whose tensors are read from the file. A layer
that is fused in the original checkpoint becomes several layers, which share A and have rows of B. ``lora_names.toml``
has the names.
"""

import json
import struct
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from shardconv.checkpoint.adapters.adapter_settings import Adapter, parse_settings
from shardconv.checkpoint.engine.layout import in_file_order
from shardconv.checkpoint.sources.diffusers_classes import LOAD_IP_ADAPTER
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.source import Source, SourceFile
from shardconv.checkpoint.sources.stored_tensors import read_values
from shardconv.checkpoint.sources.transforms import Concatenation, Rows
from shardconv.files.containers.safetensors import build_header, num_bytes
from shardconv.files.folder import AnyPath
from shardconv.files.weight_formats import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DIFFUSERS_LORA
from shardconv.layouts.relation import LayoutRule, RuleTable, find_target, parse_rules
from shardconv.plan.adapter_plan import BIAS, MAGNITUDE, PREFIX, SUFFIXES, A, in_base, other_names
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import PlanError, SourceError
from shardconv.support.structs import Data, convert

#: The use of a tensor with the factor of a layer, times its rank.
_ALPHA = "alpha"
#: The metadata with settings of PEFT, whose names begin with names of components.
_METADATA = "lora_adapter_metadata"
#: Formats of scalars.
_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


class _Original(Data, frozen=True):
    """The layers of original checkpoints of some classes of diffusers."""

    classes: tuple[str, ...]
    layers: dict[str, Annotated[tuple[str, ...], Meta(min_length=1)]]
    swapped: tuple[str, ...] = ()

    def rules(self, *, is_flat: bool) -> Iterator[LayoutRule]:
        """Yield the rules from original names, with underscores instead of dots if ``is_flat``."""
        for name, layers in self.layers.items():
            for rule in parse_rules(name, RuleTable(layers)):
                target = replace(rule.target, text=rule.target.text.replace(".", "_")) if is_flat else rule.target
                yield replace(rule, target=target)


class _Names(Data, frozen=True):
    """The content of ``lora_names.toml``."""

    ip_adapters: tuple[str, ...]
    components: dict[str, str]
    uses: dict[str, str]
    original: tuple[_Original, ...]


@cache
def _names() -> _Names:
    return convert(tomllib.loads(Path(__file__).with_name("lora_names.toml").read_text("utf-8")), _Names)


class _Layer(NamedTuple):
    """A layer of a component, as a file names it; ``is_flat`` if the file has underscores instead of dots."""

    name: str
    is_flat: bool


class LoraFile(Struct, frozen=True):
    """A LoRA file.

    Attributes:
        source: the file.
        components: name of a component ("" if the file does not name it) to the uses and names of its layers' tensors.
    """

    source: Source
    components: Mapping[str, Mapping[_Layer, Mapping[str, str]]] = {}

    @classmethod
    def open(cls, path: AnyPath, *, follow_links: bool = False) -> "LoraFile":
        """Open a file, or a folder in which diffusers saved one.

        Raises:
            SourceError: if it cannot be read.
            PlanError: if the name of a tensor is unknown.
        """
        is_folder = path.is_dir()
        opened = open_source(path / DIFFUSERS_LORA if is_folder else path, follow_links=follow_links)
        source = replace(opened, path=path, is_folder=is_folder, config=None, auxiliary_files={})
        found: dict[str, dict[_Layer, dict[str, str]]] = {}
        for name in source.specs:
            component, layer, use = _parse(name, path)
            uses = found.setdefault(component, {}).setdefault(layer, {})
            if (other := uses.setdefault(use, name)) != name:
                raise PlanError(f"{path}: {name} and {other} are the same tensor of a layer: remove one of them")
        return cls(source, found)

    def parts(self) -> "Mapping[str, LoraFile]":
        """Component of a pipeline to the file with its layers only; "" for layers without one."""
        return {name: LoraFile(self.source, {name: layers}) for name, layers in self.components.items()}

    def on(self, base: Mapping[str, TensorSpec] | None, rules: RuleSet, class_name: str | None) -> Adapter:
        """The adapter of PEFT for a base model; see :meth:`Adapter.on`.

        Raises:
            PlanError: if layers are of several components, or are not in the base model.
        """
        path = self.source.path
        if base is None:
            raise PlanError(f"{path}: names of its layers are compared with the weights of the base model: pass these")
        if len(self.components) > 1:
            named = ", ".join(component or "an unnamed component" for component in sorted(self.components))
            raise PlanError(f"{path}: has layers of {named}, and this is one model: pass the pipeline")
        ((component, layers),) = self.components.items()
        names = _BaseNames(base, rules, class_name)
        specs, transforms, alphas = dict[str, TensorSpec](), dict[str, Concatenation](), dict[str, str]()
        for layer, tensors in layers.items():
            modules, first = names.modules(layer), next(iter(tensors.values()))
            if A not in tensors:
                raise PlanError(f"{path}: {first}: its layer {layer.name} does not have A: save the adapter again")
            if not modules:
                raise PlanError(
                    f"{path}: {first}: {class_name} does not have a layer {layer.name}: {fuse_in_diffusers(path)}"
                )
            alphas |= {module: tensors[_ALPHA] for module in modules if _ALPHA in tensors}
            swapped = {one for one in modules if names.is_swapped(layer, one)}
            for use, stored in tensors.items():
                if use != _ALPHA:
                    rows_of = {one: names.rows(one) for one in modules}
                    for module, spec, rows in self._pieces(use, stored, rows_of, swapped):
                        name = f"{PREFIX}{module}{SUFFIXES[use]}"
                        if name in specs:
                            raise PlanError(f"{path}: {stored}: is a second tensor of {module}: remove one of them")
                        specs[name], transforms[name] = spec, rows
        settings = json.dumps(self._settings(component, specs, alphas), indent=2) + "\n"
        ordered = in_file_order(dict(sorted(specs.items())))
        header = build_header(ordered.items(), {"format": "pt"})
        source = replace(
            self.source,
            files=(SourceFile(ADAPTER_WEIGHTS[0], path, header),),
            converted_from=self.source.stored.with_layer(transforms),
            made_files={ADAPTER_CONFIG: settings},
            derived=(*self.source.derived, f"the layers of {path.name} have the names of PEFT"),
        )
        return Adapter(source, parse_settings(path, json.loads(settings)))

    def _pieces(
        self, use: str, stored: str, rows_of: Mapping[str, int], swapped: Collection[str]
    ) -> Iterator[tuple[str, TensorSpec, Concatenation]]:
        """Yield the tensors of the modules that a layer consists of, which have rows of its tensor, or A as a whole.

        The two halves of the rows of ``swapped`` modules are in the other order.
        """
        dtype, shape, _ = self.source.specs[stored]
        starts = [0, *accumulate(rows_of.values())]
        if len(rows_of) > 1 and use != A and shape[:1] != (starts[-1],):
            raise PlanError(
                f"{self.source.path}: {stored}: has shape {list(shape)} (expected {starts[-1]} rows, as "
                f"{', '.join(rows_of)} have together): pass the base model that it was trained on"
            )
        for module, (start, stop) in zip(rows_of, pairwise(starts), strict=True):
            own = shape if use == A or len(rows_of) == 1 else (stop - start, *shape[1:])
            unit, offset = num_bytes(dtype, own[1:]), 0 if own == shape else start
            size = num_bytes(dtype, own)
            half = size // 2 if module in swapped and use != A else 0
            parts = (Rows(stored, 0, size - half, offset * unit + half), Rows(stored, size - half, size, offset * unit))
            yield module, TensorSpec(dtype, own), Concatenation.of_rows(parts[: 1 + bool(half)], unit)

    def _settings(
        self, component: str, specs: Mapping[str, TensorSpec], alphas: Mapping[str, str]
    ) -> dict[str, object]:
        """The ``adapter_config.json`` of a component, from the metadata or else from the tensors."""
        path = self.source.path
        start = f"{component}." if component else ""
        if stated := _metadata(self.source):
            if alphas:
                raise PlanError(f"{path}: has both {_METADATA} and {next(iter(alphas.values()))}: remove one of them")
            return {key.removeprefix(start): value for key, value in stated.items() if key.startswith(start)}
        end = SUFFIXES[A]
        of_a = {name[len(PREFIX) : -len(end)]: spec.shape for name, spec in specs.items() if name.endswith(end)}
        ranks = {module: sum(shape[:1]) for module, shape in of_a.items()}
        scalars = {name: self.source.specs[name] for name in alphas.values()}
        values = read_values(self.source.stored, scalars)
        found = {name: _scalar(path, name, scalars[name], bytes(value)) for name, value in values}
        factors = {module: found[alphas[module]] if module in alphas else rank for module, rank in ranks.items()}
        rank, alpha = _most_common(ranks), _most_common(factors)
        return {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {f"^{module}": value for module, value in ranks.items() if value != rank},
            "alpha_pattern": {f"^{module}": value for module, value in factors.items() if value != alpha},
            "target_modules": [*ranks],
            "lora_bias": any(name.endswith(SUFFIXES[BIAS]) for name in specs),
            "use_dora": any(name.endswith(SUFFIXES[MAGNITUDE]) for name in specs),
        }


class _BaseNames:
    """The names of the layers of a base model."""

    def __init__(self, tensors: Mapping[str, TensorSpec], rules: RuleSet, class_name: str | None) -> None:
        self._tensors, self._rules = tensors, rules
        weights = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        self._flat = {other.replace(".", "_"): name for name in weights for other in other_names(name, rules)}
        originals = [one for one in _names().original if class_name in one.classes]
        self._swapped = tuple(end for one in originals for end in one.swapped)
        self._original = {
            is_flat: [rule for one in originals for rule in one.rules(is_flat=is_flat)] for is_flat in (False, True)
        }

    def modules(self, layer: _Layer) -> tuple[str, ...]:
        """The modules in a layer of a file; none if one of them is not in the base model."""
        if (found := self._own(layer)) is not None:
            return (found,)
        related = find_target(self._original[layer.is_flat], layer.name)
        names = () if related is None else tuple(related.sources)
        return names if all(map(self._module, names)) else ()

    def is_swapped(self, layer: _Layer, module: str) -> bool:
        """Whether the halves of the rows of an original layer are in the other order in its module."""
        shape = self._tensors[f"{module}.weight"].shape
        return self._own(layer) is None and module.endswith(self._swapped) and shape[0] == 2 * shape[-1]

    def _own(self, layer: _Layer) -> str | None:
        """The module with the name of a layer."""
        return self._flat.get(layer.name) if layer.is_flat else self._module(layer.name)

    def _module(self, name: str) -> str | None:
        found = in_base(f"{name}.weight", self._tensors, self._rules)
        return None if found is None else found.removesuffix(".weight")

    def rows(self, module: str) -> int:
        """The rows of the weight of a module."""
        return self._tensors[f"{module}.weight"].shape[0]


def _parse(name: str, path: AnyPath) -> tuple[str, _Layer, str]:
    """The component of a tensor, "" without one, its layer and its use."""
    start = next((one for one in _names().components if name.startswith(one)), "")
    end = next((one for one in _names().uses if name.endswith(one)), None)
    if any(text in f".{name}" for text in _names().ip_adapters):
        raise PlanError(
            f"{path}: {name}: is a tensor of an IP adapter, which is not split: split the pipeline without it, and "
            f"{LOAD_IP_ADAPTER}"
        )
    if end is None:
        raise PlanError(
            f"{path}: {name}: is not a tensor of a LoRA adapter that is supported (expected A and B of linear layers): "
            f"{fuse_in_diffusers(path)}"
        )
    layer = _Layer(name[len(start) : -len(end)], start.endswith("_"))
    return _names().components.get(start, ""), layer, _names().uses[end]


def fuse_in_diffusers(path: AnyPath) -> str:
    """Instructions to fuse a LoRA file into a pipeline, in Python."""
    return (
        "fuse it into the pipeline in Python, and split the result:\nfrom diffusers import DiffusionPipeline\n"
        f"pipeline = DiffusionPipeline.from_pretrained(PIPELINE)\npipeline.load_lora_weights({str(path)!r})\n"
        "pipeline.fuse_lora(); pipeline.unload_lora_weights(); pipeline.save_pretrained('fused')"
    )


def _metadata(source: Source) -> dict[str, object]:
    """The settings of PEFT in the metadata of a file; none if it does not have any."""
    try:
        found = json.loads(source.metadata.get(_METADATA, "{}"))
    except ValueError as error:
        raise SourceError(f"{source.path}: {_METADATA} is not JSON: {error}: save the adapter again") from error
    if not isinstance(found, dict):
        raise SourceError(f"{source.path}: {_METADATA} is {found!r:.40} (expected an object): save the adapter again")
    return found


def _scalar(path: AnyPath, name: str, spec: TensorSpec, data: bytes) -> float:
    """The value of a scalar."""
    dtype, data = ("F32", b"\0\0" + data) if spec.dtype == "BF16" else (spec.dtype, data)
    if dtype not in _SCALARS or len(data) != struct.calcsize(_SCALARS[dtype]):
        raise PlanError(f"{path}: {name}: is {spec.dtype} {list(spec.shape)} (expected one number): save it again")
    value: float = struct.unpack(_SCALARS[dtype], data)[0]
    return value


def _most_common(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]

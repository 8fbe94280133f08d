"""Map the names of tensors on disk to the names of a model in memory, as transformers does when it loads.

Also maps them back, as when it saves. Nothing is read and no memory is taken for values: transformers itself loads
tensors on the meta device.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.build import build_on_meta
from shardconv.hf.diffusion import DiffusersConfig
from shardconv.hf.package import import_transformers, isolated
from shardconv.layers.runtime_classes import new_class
from shardconv.plan.unused import known_unused

#: Maximum number of tensors of each kind in a message.
_SHOWN = 3


class ModelCheck(Struct, frozen=True):
    """Differences between a checkpoint and the model that its config names.

    Attributes:
        model: the class of the model.
        unused: names on disk of tensors that the model does not have.
        missing: names in memory of tensors that the model has and the checkpoint does not.
        mismatched: names in memory of tensors of another shape, each with its shape in the checkpoint and in the model.
        failed: names in memory of tensors that transformers cannot make from the checkpoint's, each with the reason.
        ignored: names on disk of tensors that the model does not have and does not need: MTP layers, constants that old
            versions stored, and tensors that its class ignores.
    """

    model: str
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    failed: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    @property
    def is_match(self) -> bool:
        """Whether names and shapes match the model, except for tensors that it does not need."""
        return not (self.unused or self.missing or self.mismatched or self.failed)

    def differences(self) -> str:
        """The differences as text: a count and the first tensors of each kind."""
        shapes = (f"{name} (got {list(got)}, expected {list(expected)})" for name, got, expected in self.mismatched)
        kinds = {
            "unused": self.unused,
            "missing": self.missing,
            "of another shape": tuple(shapes),
            "not loadable": tuple(f"{name} ({reason})" for name, reason in self.failed),
        }
        return "; ".join(_listed(kind, found) for kind, found in kinds.items() if found)


def _listed(kind: str, found: tuple[str, ...]) -> str:
    more = ", ..." if len(found) > _SHOWN else ""
    return f"{len(found)} {kind}: {', '.join(found[:_SHOWN])}{more}"


class DiskTensors(NamedTuple):
    """The tensors that ``save_pretrained`` writes for an unquantized model.

    Attributes:
        tensors: name on disk to tensor; of tied tensors only the first.
        matrices: names of the weights that quantization changes by default: of linear layers, without the output head,
            and of experts.
    """

    tensors: Mapping[str, Tensor]
    matrices: frozenset[str]


def disk_tensors(model: PretrainedModel) -> DiskTensors:
    """The tensors that ``save_pretrained`` writes for an unquantized model, which may be on the meta device."""
    state = model.state_dict(keep_vars=True)
    if isinstance(model.config, Mapping):  # of diffusers
        return DiskTensors(state, frozenset())
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    skipped = set(import_transformers("quantizers.base").get_keys_to_not_convert(model))
    others, matrices = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in state.items():
        if first[id(tensor)] == name:
            (matrices if _is_matrix(model, name, tensor, skipped) else others)[name] = tensor
    revert = import_transformers("core_model_loading").revert_weight_conversion
    on_disk = revert(model, matrices)
    return DiskTensors({**revert(model, others), **on_disk}, frozenset(on_disk))


def _is_matrix(model: PretrainedModel, name: str, tensor: Tensor, skipped: Collection[str]) -> bool:
    """Whether a tensor in memory is the weight of a linear layer, or the weights of packed experts."""
    path, _, attribute = name.rpartition(".")
    if isinstance(model.get_submodule(path), nn.Linear):
        return attribute == "weight" and path not in skipped
    return path.endswith(".experts") and tensor.dim() > 2


def _match_equal_names(
    kind: type[PretrainedModel], config: DiffusersConfig, shapes: Mapping[str, tuple[int, ...]]
) -> ModelCheck:
    """:func:`match_names` for a model of diffusers, whose tensors have the same names on disk and in memory."""
    with isolated():
        in_model = {name: tuple(value.shape) for name, value in build_on_meta(kind, config).state_dict().items()}
    return ModelCheck(
        model=kind.__name__,
        unused=tuple(sorted(shapes.keys() - in_model.keys())),
        missing=tuple(sorted(in_model.keys() - shapes.keys())),
        mismatched=tuple(
            (name, shapes[name], in_model[name])
            for name in sorted(shapes.keys() & in_model.keys())
            if shapes[name] != in_model[name]
        ),
        failed=(),
        ignored=(),
    )


def match_names(kind: type[PretrainedModel], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelCheck:
    """Load tensors without values into a model class, and report the names and shapes that do not match.

    Args:
        kind: a model class of transformers.
        config: its config.
        shapes: name on disk to shape of every tensor.

    Raises:
        Exception: if transformers cannot build or load the model; of any class.
    """
    if isinstance(config, DiffusersConfig):
        return _match_equal_names(kind, config, shapes)
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    loaded = _Loaded()
    with isolated():
        _recording(kind, loaded).from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    in_memory = {name: loaded.rename(name) for name in shapes}
    sources: dict[str, list[str]] = {}
    for name, (target, _) in in_memory.items():
        sources.setdefault(target, []).append(name)
    converted = {target for target, converter in in_memory.values() if converter is not None}
    failed = {name: text.strip().splitlines()[-1] for name, text in loaded.failed.items()}
    failed |= {
        target: f"stored as {' and as '.join(sorted(found))}"
        for target, found in sources.items()
        if len(found) > 1 and target not in converted | loaded.unexpected
    }
    unused = _on_disk(loaded.info.unexpected_keys, sources)
    needless = known_unused(shapes)
    return ModelCheck(
        model=kind.__name__,
        unused=tuple(sorted(unused - needless)),
        missing=tuple(sorted(loaded.info.missing_keys - failed.keys())),
        mismatched=tuple(
            sorted((name, tuple(got), tuple(expected)) for name, got, expected in loaded.info.mismatched_keys)
        ),
        failed=tuple(sorted(failed.items())),
        ignored=tuple(sorted((unused | _on_disk(loaded.unexpected, sources)) - (unused - needless))),
    )


class _Loaded:
    """The result of a load by transformers, set by :func:`_recording`.

    Attributes:
        info: transformers' ``LoadStateDictInfo``.
        failed: its conversion errors.
        unexpected: names in memory of tensors that the model does not have, including tensors that its class ignores.
        rename: name on disk to name in memory, and the converter if transformers makes the tensor from several.
    """

    info: Any
    failed: Mapping[str, str]
    unexpected: frozenset[str]
    rename: Callable[[str], tuple[str, object]]


def _on_disk(names: Iterable[str], sources: Mapping[str, list[str]]) -> frozenset[str]:
    """The names on disk of tensors by their names in memory."""
    return frozenset(source for name in names for source in sources.get(name, [name]))


def _recording(kind: type[PretrainedModel], loaded: _Loaded) -> type[PretrainedModel]:
    """A subclass of a model class that keeps all tensors on the meta device and records the loading report."""
    loading = import_transformers("core_model_loading")

    def load(
        model: PretrainedModel, state_dict: dict[str, Tensor], files: object, settings: Any, *arguments: object
    ) -> tuple[Any, object]:
        mapping = copy.deepcopy(settings.weight_mapping or [])
        renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
        for converter in converters:
            if getattr(converter, "force_cpu", False):
                converter.force_cpu = False  # for tensors too large for a device; these take no memory
        settings = replace(settings, device_map={"": "meta"}, weight_mapping=mapping)
        known = model.state_dict()
        info, offloaded = kind._load_pretrained_model(model, state_dict, files, settings, *arguments)  # noqa: SLF001
        loaded.info, loaded.unexpected = info, frozenset(info.unexpected_keys)
        loaded.failed = dict(info.conversion_errors)
        info.conversion_errors.clear()  # would be raised as one error without names
        loaded.rename = lambda name: loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        return info, offloaded

    def skip(*_: object) -> None:
        """Tensors on the meta device need no values."""

    skipped = dict.fromkeys(("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys"), skip)
    recording: type[PretrainedModel] = new_class(
        kind, (kind,), {"_load_pretrained_model": staticmethod(load), **skipped}
    )
    return recording

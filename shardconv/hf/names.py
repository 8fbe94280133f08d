"""Map the names of a checkpoint's tensors on disk to those of a model in memory, as transformers does when it loads.

Also the reverse, as when it saves. Nothing is read and no memory is taken for values: transformers itself loads
tensors on the meta device.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.package import import_transformers, isolated
from shardconv.layers.runtime_classes import new_class

#: Name on disk to name in memory, and the converter if transformers makes the tensor from several.
Rename = Callable[[str], tuple[str, object]]


class NameMatch(NamedTuple):
    """How the tensors of a checkpoint match those of a model class.

    Attributes:
        unused: names on disk of tensors that the model does not use.
        ignored: names on disk of tensors that the model does not have and its class ignores.
        missing: names in memory of tensors that the model has and the checkpoint does not.
        mismatched: names in memory of tensors of another shape, each with its shape in the checkpoint and in the model.
        failed: names in memory of tensors that transformers cannot make of those in the checkpoint, each with the
            reason.
    """

    unused: frozenset[str]
    ignored: frozenset[str]
    missing: frozenset[str]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    failed: Mapping[str, str]


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


def match_names(kind: type[PretrainedModel], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> NameMatch:
    """Load tensors without values into a model class, and report the names and shapes that do not match.

    Args:
        kind: a model class of transformers.
        config: its config.
        shapes: name on disk to shape of every tensor.

    Raises:
        Exception: if transformers cannot build or load the model; of any class.
    """
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    loaded = _Loaded()
    with isolated():
        _recording(kind, loaded).from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    return _match(loaded, shapes)


@dataclass
class _Loaded:
    """The result of a load by transformers, filled by :func:`_recording`.

    Attributes:
        info: transformers' ``LoadStateDictInfo``.
        failed: its conversion errors.
        unexpected: names in memory of tensors that the model does not have, those that its class ignores included.
        rename: maps names.
    """

    info: Any = None
    failed: Mapping[str, str] | None = None
    unexpected: frozenset[str] = frozenset()
    rename: Rename | None = None


def _match(loaded: _Loaded, names: Iterable[str]) -> NameMatch:
    assert loaded.rename is not None
    assert loaded.failed is not None
    in_memory = {name: loaded.rename(name) for name in names}
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
    return NameMatch(
        unused=unused,
        ignored=_on_disk(loaded.unexpected, sources) - unused,
        missing=frozenset(loaded.info.missing_keys - failed.keys()),
        mismatched=tuple(
            sorted((name, tuple(got), tuple(expected)) for name, got, expected in loaded.info.mismatched_keys)
        ),
        failed=failed,
    )


def _on_disk(names: Iterable[str], sources: Mapping[str, list[str]]) -> frozenset[str]:
    """The names on disk of tensors by their names in memory."""
    return frozenset(source for name in names for source in sources.get(name, [name]))


def _recording(kind: type[PretrainedModel], loaded: _Loaded) -> type[PretrainedModel]:
    """A subclass of a model class that keeps all tensors on the meta device and records what was loaded."""
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

"""Compare the names and shapes of a checkpoint with those of the model that its config names.

Owns the comparison. transformers itself maps names on disk to names in memory and ties weights, with tensors on the
meta device: nothing is read but headers and config, and no memory is taken for values.
"""

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.planning import StrPath, as_names
from shardconv.checkpoint.source import open_source
from shardconv.errors import PlanError, RunError, SourceError
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SCALE
from shardconv.plan.unused import known_unused

#: How many tensors of each kind a message names.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """How a checkpoint differs from the model that its config names.

    Attributes:
        model: the class of the model.
        unused: names on disk of tensors that the model does not have.
        missing: names in memory of tensors that the model has and the checkpoint does not.
        mismatched: names in memory of tensors of another shape, each with its shape in the checkpoint and in the model.
        failed: names in memory of tensors that transformers cannot make of those in the checkpoint, each with the
            reason.
        ignored: names on disk of tensors that the model does not have and does not need: MTP layers, constants that old
            versions stored, and those that its class ignores.
    """

    model: str
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    failed: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether names and shapes are the model's, apart from those that it does not need."""
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


def check_source(
    src: StrPath, *, config: StrPath | None = None, follow_links: bool = False, ignore: Sequence[str] = ()
) -> ModelCheck:
    """Check that a checkpoint has the tensors of the model that its config names.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: patterns of files of the folder to leave out.

    Returns:
        The comparison, without differences.

    Raises:
        SourceError: if the checkpoint cannot be read, or tensors are unused, missing or of another shape.
        RunError: if transformers does not have the model class.

    Example:
        >>> shardconv.check_source("llama").model  # doctest: +SKIP
        'LlamaForCausalLM'
    """
    beside = None if config is None else local_path(config)
    source = open_source(local_path(src), config=beside, follow_links=follow_links, ignore=as_names(ignore))
    return require_model(source.config or {}, source.specs, str(src))


def require_model(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], path: str) -> ModelCheck:
    """:func:`check_model`, where differences are an error that names the checkpoint by ``path``.

    Raises:
        SourceError: if there are differences.
        RunError: as :func:`check_model`.
    """
    found = check_model(config, specs)
    if not found.is_right:
        raise SourceError(
            f"{path}: its tensors are not those of {found.model} by its config ({found.differences()}): give the "
            f"config.json of this checkpoint with --config FILE, or download the checkpoint again; to shard the "
            f"tensors as they are, omit --check-model (for a proof: --no-check-model)"
        )
    return found


def require_padded(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Check that transformers takes the config of a padded checkpoint, and that its model has the padded tensors.

    Raises:
        PlanError: if not.
    """
    remedy = (
        "use shardconv split --pad, whose rank files keep the true sizes, or --no-check-model for an engine that takes "
        "this config"
    )
    try:
        found = check_model(config, specs)
    except RunError as error:
        raise PlanError(f"the config of the padded checkpoint: {error}: {remedy}") from error
    if not found.is_right:
        raise PlanError(
            f"the config of the padded checkpoint: {found.model} does not have the padded tensors by it "
            f"({found.differences()}): {remedy}"
        )


def check_model(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> ModelCheck:
    """Compare tensors with those of the model class that a config names.

    Args:
        config: the content of ``config.json``.
        specs: name to dtype and shape of every tensor.

    Raises:
        RunError: if transformers does not have the class, or cannot build the model.
    """
    kind, made = model_class(config)
    from shardconv.proof.alone import alone  # noqa: PLC0415 - imports transformers

    names = _without_block_scales(config, specs)
    with torch.device("meta"):
        tensors = {name: torch.empty(specs[name].shape) for name in names}
    loaded = _Loaded()
    try:
        with alone():
            _recording(kind, loaded).from_pretrained(
                None, config=made, state_dict=tensors, dtype=torch.float32, ignore_mismatched_sizes=True
            )
    except Exception as error:
        raise RunError(
            f"transformers cannot build {kind.__name__} by this config, so its tensors cannot be compared with it: "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded.report(kind, names)


def model_class(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of transformers that a config names, and the config as transformers reads it, without quantization.

    Raises:
        RunError: if there is none, or transformers refuses the config.
    """
    transformers = import_transformers()
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else None
    kind = getattr(transformers, str(name), None)
    model_type = config.get("model_type")
    if not hasattr(kind, "config_class") or model_type not in transformers.CONFIG_MAPPING:
        raise RunError(
            f"transformers {transformers.__version__} does not have the model of config.json (got model_type "
            f"{model_type!r} and architecture {name!r}): give a config that names one with --config FILE"
        )
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    with TemporaryDirectory(prefix="shardconv-") as folder:  # a file: infinite numbers are decoded only from files
        Path(folder, CONFIG_NAME).write_text(json.dumps(given), "utf-8")
        config_class = transformers.CONFIG_MAPPING[model_type]
        try:
            return kind, config_class.from_pretrained(folder)
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")  # which may be of several lines
            raise RunError(
                f"{config_class.__name__} of transformers {transformers.__version__} refuses config.json: {problem}"
            ) from error


def import_transformers() -> Any:
    """The package transformers, which is optional.

    Raises:
        RunError: if it is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise RunError("transformers is needed to build the model: pip install 'shardconv[transformers]'") from error
    return transformers


def _without_block_scales(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> list[str]:
    """All names, except those of the scales of fp8 weights where the config says that weights are quantized so."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "fp8":
        return list(specs)
    end = SCALE.removeprefix(".weight")
    return [name for name in specs if not (name.endswith(end) and name.removesuffix(end) in specs)]


class _Loaded:
    """The result of a load by transformers; filled by :func:`_recording`."""

    info: Any = None  # transformers' LoadStateDictInfo
    failed: Mapping[str, str] = {}
    unexpected: frozenset[str] = frozenset()  # before the class's own exceptions are removed
    rename: Callable[[str], tuple[str, str | None]]  # name on disk to name in memory, and the converter if there is one

    def report(self, kind: Any, names: Collection[str]) -> ModelCheck:
        """The comparison, with the names on disk where the model does not have a tensor."""
        in_memory = {name: self.rename(name) for name in names}
        sources: dict[str, list[str]] = {}
        for name, (target, _) in in_memory.items():
            sources.setdefault(target, []).append(name)
        converted = {target for target, converter in in_memory.values() if converter is not None}
        failed = {name: text.strip().splitlines()[-1] for name, text in self.failed.items()}
        failed |= {
            target: f"stored as {' and as '.join(sorted(found))}"
            for target, found in sources.items()
            if len(found) > 1 and target not in converted | self.unexpected
        }
        without = _on_disk(self.unexpected, sources)
        unused = _on_disk(self.info.unexpected_keys, sources) - known_unused(names)
        return ModelCheck(
            model=kind.__name__,
            unused=tuple(sorted(unused)),
            missing=tuple(sorted(self.info.missing_keys - failed.keys())),
            mismatched=tuple(
                sorted((name, tuple(got), tuple(expected)) for name, got, expected in self.info.mismatched_keys)
            ),
            failed=tuple(sorted(failed.items())),
            ignored=tuple(sorted(without - unused)),
        )


def _on_disk(names: Iterable[str], sources: Mapping[str, list[str]]) -> set[str]:
    return {source for name in names for source in sources.get(name, [name])}


def _recording(kind: Any, loaded: _Loaded) -> Any:
    """A subclass of a model class that keeps all tensors on the meta device and records what was loaded."""
    from transformers.core_model_loading import (  # noqa: PLC0415 - an extra
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    def load(model: Any, state_dict: dict[str, Tensor], files: Any, settings: Any, *arguments: Any) -> Any:
        mapping = copy.deepcopy(settings.weight_mapping or [])
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        for converter in converters:
            if getattr(converter, "force_cpu", False):
                converter.force_cpu = False  # for tensors too large for a device; these take no memory
        settings = replace(settings, device_map={"": "meta"}, weight_mapping=mapping)
        known = model.state_dict()
        info, offloaded = kind._load_pretrained_model(model, state_dict, files, settings, *arguments)  # noqa: SLF001
        loaded.info, loaded.unexpected = info, frozenset(info.unexpected_keys)
        loaded.failed = dict(info.conversion_errors)
        info.conversion_errors.clear()  # would be raised as one error without names
        loaded.rename = lambda name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        return info, offloaded

    def skip(*_: Any) -> None:
        """Tensors on the meta device need no values."""

    skipped = dict.fromkeys(("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys"), skip)
    own = {"__module__": kind.__module__, "_load_pretrained_model": staticmethod(load), **skipped}
    return type(kind.__name__, (kind,), own)

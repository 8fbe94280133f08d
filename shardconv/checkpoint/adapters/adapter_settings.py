"""A LoRA adapter of PEFT, and its settings as its ``adapter_config.json`` has them.

Only settings whose meaning is known are accepted. PEFT's other kinds of adapters, and variants of LoRA that compute
something else, are refused by name.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

from msgspec import Meta, Struct
from msgspec.structs import fields

from shardconv.checkpoint.sources.source import Source
from shardconv.files.folder import AnyPath, read_json
from shardconv.files.weight_formats import ADAPTER_CONFIG, merge_adapter
from shardconv.formats.format import check_pattern
from shardconv.plan.adapter_plan import MAGNITUDE, A, AdaptedLayer
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import PlanError, SourceError
from shardconv.support.structs import convert

Rank = Annotated[int, Meta(gt=0)]
#: Other settings that are accepted: the module names are in the tensors, and some settings are checked on their own.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern", "layers_to_transform",
    "lora_dropout", "loftq_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type", "bias", "lora_bias", "peft_type", "init_lora_weights",
})  # fmt: skip
#: Initializations that do not change the weights of the base model. After others, its weights differ from the files.
_INITIALIZERS = (True, False, None, "gaussian", "orthogonal", "eva")
#: The longest module name that patterns are matched with.
_MAX_NAME = 256


class AdapterSettings(Struct, frozen=True):
    """The settings of a LoRA adapter that determine its values, under the names of PEFT.

    Attributes:
        r: rank of layers that no pattern matches.
        lora_alpha: alpha of layers that no pattern matches.
        rank_pattern: pattern of module names to rank.
        alpha_pattern: pattern of module names to alpha.
        use_rslora: whether products are scaled by alpha / sqrt(rank) instead of alpha / rank.
        use_dora: whether layers have magnitudes (DoRA).
        fan_in_fan_out: whether weights are stored as [input, output].
        target_modules: names of modules, or the ends of names, which the tensors have to fit; or a regular expression,
            which is not compared.
        exclude_modules: the same, of modules that are not adapted.
        modules_to_save: the same, of modules whose tensors are replaced.
    """

    r: Rank = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()
    modules_to_save: tuple[str, ...] | str = ()

    def scaling(self, module: str) -> float:
        """The factor of the product B A of a layer."""
        rank = _matched(self.rank_pattern, module, self.r)
        alpha = _matched(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check(self, layer: AdaptedLayer, rank: int) -> None:
        """Check the tensors of a layer.

        Args:
            layer: the layer.
            rank: the rank of its tensors.

        Raises:
            PlanError: if the settings are for another adapter.
        """
        expected = int(_matched(self.rank_pattern, layer.module, self.r))
        if rank != expected:
            raise PlanError(
                f"{layer.tensors[A]}: has rank {rank} (expected {expected} by r and rank_pattern of {ADAPTER_CONFIG}): "
                f"{_OTHER_SETTINGS}"
            )
        targets, excluded = _names(self.target_modules), _names(self.exclude_modules)
        if (targets and not _is_named(layer.module, targets)) or _is_named(layer.module, excluded):
            raise PlanError(
                f"{layer.tensors[A]}: PEFT does not adapt {layer.module} by target_modules and exclude_modules of "
                f"{ADAPTER_CONFIG} (got {', '.join((*targets, *excluded)):.200}): {_OTHER_SETTINGS}"
            )
        if (MAGNITUDE in layer.tensors) != self.use_dora:
            raise PlanError(
                f"{layer.tensors[A]}: {layer.module} has {'a' if MAGNITUDE in layer.tensors else 'no'} magnitude "
                f"vector, and {ADAPTER_CONFIG} has use_dora = {self.use_dora}: {_OTHER_SETTINGS}"
            )

    def check_saved(self, replaced: Collection[str], base: Collection[str]) -> None:
        """Check that the adapter has tensors for all ``modules_to_save`` that the base model has.

        Args:
            replaced: names of the tensors of the base model that the adapter replaces.
            base: names of all tensors of the base model.

        Raises:
            PlanError: if a module does not have any.
        """
        for module in _names(self.modules_to_save):
            expected = [name for name in base if _is_in(name, module)]
            if expected and not any(_is_in(name, module) for name in replaced):
                raise PlanError(
                    f"{expected[0]}: is in {module}, one of modules_to_save of {ADAPTER_CONFIG}, but the adapter does "
                    f"not have a tensor that replaces it: copy the adapter again"
                )


class Adapter(NamedTuple):
    """An adapter.

    Attributes:
        source: its files.
        settings: its settings.
    """

    source: Source
    settings: AdapterSettings

    def on(self, base: Mapping[str, TensorSpec] | None, rules: RuleSet, class_name: str | None) -> Self:
        """The adapter of PEFT for a base model: itself.

        Args:
            base: name to dtype and shape of the tensors of the base model; None if only its config is known.
            rules: its rules.
            class_name: the type of the model, of diffusers its class.
        """
        del base, rules, class_name
        return self

    def parts(self) -> "Mapping[str, Adapter]":
        """Component of a pipeline to its part of the adapter; "" for one that is not named."""
        return {"": self}


#: Name of a setting to its type.
_TYPES = {field.name: field.type for field in fields(AdapterSettings)}
#: Settings with a table of patterns to the setting for modules that no pattern matches.
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
_OTHER_SETTINGS = f"restore the {ADAPTER_CONFIG} of this adapter"


def read_settings(path: AnyPath) -> AdapterSettings:
    """Read the settings of an adapter.

    Args:
        path: an ``adapter_config.json``.

    Raises:
        SourceError: if it cannot be read.
        PlanError: if it is not of a LoRA adapter, or a setting is not supported.
    """
    return parse_settings(path, read_json(path))


def parse_settings(path: AnyPath, table: Mapping[str, object]) -> AdapterSettings:
    """Parse the settings of an adapter, which are in the file ``path``; errors as :func:`read_settings`."""
    _check_supported(path, table)
    # PEFT also accepts null, false and "" instead of an empty table, list or flag
    given = {key: value for key, value in table.items() if key in _TYPES and (value or key in _PATTERNS.values())}
    for name, value, kind in _settings_and_entries(given):
        try:
            convert(value, kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("expected a finite number")
        except ValueError as error:
            raise SourceError(f"{path}: {name} is {value!r:.40} ({error}): correct the file") from error
    settings = convert(given, AdapterSettings)
    for key in _PATTERNS:
        for pattern in getattr(settings, key):
            check_pattern(pattern, key, str(path), "write the names of the modules")
    return settings


def _settings_and_entries(settings: Mapping[str, object]) -> Iterator[tuple[str, object, Any]]:
    """Yield name, value and type of each setting; for a table of patterns, of each of its entries."""
    for key, value in settings.items():
        if key in _PATTERNS and isinstance(value, dict):
            yield from ((f"{key}.{pattern}", entry, _TYPES[_PATTERNS[key]]) for pattern, entry in value.items())
        else:
            yield key, value, _TYPES[key]


def _check_supported(path: AnyPath, table: Mapping[str, object]) -> None:
    """Refuse other adapters than LoRA, and settings that are not supported or not known, unless they are not in use."""
    remedy = merge_adapter(path.parent, table.get("task_type"))
    if (kind := table.get("peft_type")) != "LORA":
        raise PlanError(f"{path}: peft_type {kind!r:.40} is not supported (expected LORA): {remedy}")
    initializer = table.get("init_lora_weights", True)
    if initializer not in _INITIALIZERS:
        raise PlanError(
            f"{path}: init_lora_weights {initializer!r:.40} changes the base model, so the adapter does not fit the "
            f"one on disk (expected {', '.join(map(repr, _INITIALIZERS))}): save it with PEFT's "
            f"path_initial_model_for_weight_conversion"
        )
    for key, value in table.items():
        if key not in {*_WITHOUT_EFFECT, *_TYPES} and value:
            raise PlanError(f"{path}: {key} is not supported (got {value!r:.60}): {remedy}")


def _names(modules: tuple[str, ...] | str) -> tuple[str, ...]:
    """The names in a setting; none of a regular expression."""
    return () if isinstance(modules, str) else modules


def _is_named(module: str, names: Collection[str]) -> bool:
    """Whether PEFT takes a module for one of these, which may be the ends of names after a dot."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _is_in(tensor: str, module: str) -> bool:
    """Whether a tensor belongs to a module whose name ends so, after a dot or not, as PEFT finds modules to save."""
    return f"{module}." in tensor


def _matched(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the name of a module, or the end of the name after a dot.

    Raises:
        PlanError: if the name is too long to be matched in bounded time.
    """
    if patterns and len(module) > _MAX_NAME:
        raise PlanError(f"{module:.60}...: has {len(module)} characters (expected at most {_MAX_NAME} for patterns)")
    starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
    for pattern, value in patterns.items():
        if any(re.compile(pattern).fullmatch(module, start) for start in starts):
            return value
    return default

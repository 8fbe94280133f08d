"""Random inputs for small models: text, images, audio, and text with placeholder tokens for images or audio.

The config and the signature of ``forward`` determine most inputs; ``types.toml`` has the others.
``special.toml`` has the inputs of single model types, and ``diffusion.toml`` of models of diffusers. The number of
placeholder tokens is the number of features that the model computes.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardconv.convert.model import config_fields
from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.derived_inputs import (
    BATCH,
    GRID,
    LENGTH,
    audio_inputs,
    image_inputs,
    is_type,
    pair_of,
    random_tokens,
    text_inputs,
    vocabulary_size,
)
from shardconv.hf.diffusion import default_fields, of_class, table
from shardconv.plan.families.config_fields import Fields, lookup
from shardconv.support.errors import RunError, UsageError, option


def example_inputs(model: PretrainedModel, seed: int = 1) -> dict[str, Any]:
    """Random inputs with which a model can be called, as ``model(**example_inputs(model))``.

    Args:
        model: a small model of transformers, whose inputs are tensors, or of diffusers.
        seed: of the random generator.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model.config, Mapping):
        return diffusion_inputs(model, generator)
    names = inspect.signature(model.forward).parameters
    kind = str(model.config.model_type)
    given = special_inputs(model, generator)
    has_both, has_own = is_type("images_and_audio", kind), bool(given) or is_type("text_only", kind)
    if not has_own and (has_both or "pixel_values" not in names):
        given |= audio_inputs(model, names, generator)
    if not has_own or has_both:
        given |= image_inputs(model, names, generator)
    if given.keys().isdisjoint({"input_ids", "decoder_input_ids"}):
        given |= text_inputs(model, names, given, generator)
    return given


def can_generate_text(model: PretrainedModel) -> bool:
    """Whether ``generate`` returns tokens of text for the inputs of :func:`example_inputs`."""
    can_generate = getattr(model, "can_generate", None)
    return bool(can_generate and can_generate()) and not is_type("no_generation", model.config.model_type)


#: An input in ``special.toml``.
_Table = Mapping[str, Any]


def special_inputs(model: PretrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    """The inputs of a class or model type that has its own; none for all others."""
    for key in (type(model).__name__, str(model.config.model_type)):
        if (table := _tables().get(_tables()["same_inputs"].get(key, key))) is not None:
            names = {"batch": BATCH, "length": LENGTH, "grid": GRID, "vocabulary": vocabulary_size(model)}
            fields = Fields(_ConfigFields(model.config), {**names, **table.get("defaults", {})})
            values = _TextValues(model, generator, fields)
            return {name: values.draw(row) for name, row in table.items() if name != "defaults"}
    return {}


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("special.toml").read_text("utf-8"))


class _ConfigFields(Mapping[str, object]):
    """A config as a mapping, with its properties and nested configs."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __getitem__(self, name: str) -> object:
        if (value := getattr(self._config, name, None)) is None:
            raise KeyError(name)
        return _ConfigFields(value) if hasattr(value, "to_dict") else value

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._config))

    def __len__(self) -> int:
        return len(vars(self._config))


class _Values:
    """Draws the values of the inputs of one model.

    Args:
        generator: of the random values.
        fields: of the config, and further names in the expressions of sizes.
    """

    def __init__(self, generator: torch.Generator, fields: Fields) -> None:
        self._generator, self._fields = generator, fields

    def draw(self, table: _Table) -> Tensor:
        """The values that a table describes."""
        kind = next(iter(table))
        draw: Callable[[_Table], Tensor] = getattr(self, f"_{kind}")
        return draw(table)

    def _shape(self, sizes: list[str | int]) -> tuple[int, ...]:
        return tuple(map(self._fields.evaluate, sizes))

    def _normal(self, table: _Table) -> Tensor:
        return torch.randn(self._shape(table["normal"]), generator=self._generator)

    def _uniform(self, table: _Table) -> Tensor:
        values = torch.rand(self._shape(table["uniform"]), generator=self._generator)
        return values.sort(dim=-1).values if table.get("sorted") else values

    def _integers(self, table: _Table) -> Tensor:
        shape = self._shape(table["integers"])
        return torch.randint(0, self._fields.evaluate(table["below"]), shape, generator=self._generator)

    def _ones(self, table: _Table) -> Tensor:
        shape, dtypes = self._shape(table["ones"]), {"bool": torch.bool, "float32": torch.float32}
        ones = torch.zeros(shape, dtype=dtypes.get(table.get("dtype", ""), torch.int64))
        start, stop = (
            self._fields.evaluate(table.get(key, default)) for key, default in (("from", 0), ("to", shape[-1]))
        )
        ones[..., start:stop] = 1
        return ones

    def _numbers(self, table: _Table) -> Tensor:
        shape = self._shape(table["numbers"])
        return torch.arange(prod(shape)).view(shape)

    def _each(self, table: _Table) -> Tensor:
        return torch.tensor([self._evaluated(table["each"])] * BATCH)

    def _evaluated(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._evaluated(item) for item in value]
        return self._fields.evaluate(value) if isinstance(value, str) else value

    def _patches(self, table: _Table) -> Tensor:
        width = self._fields.evaluate(table["patches"])
        patches = torch.randn(BATCH, GRID * GRID, width, generator=self._generator)
        cells = torch.arange(GRID * GRID)
        positions = torch.stack([cells // GRID + 1, cells % GRID + 1], dim=-1).expand(BATCH, -1, -1)
        return torch.cat([positions.float(), patches], dim=-1)

    def _positions(self, table: _Table) -> Tensor:
        side = torch.arange(self._fields.evaluate(table["positions"]))
        return torch.cartesian_prod(side, side).expand(BATCH, -1, -1)


class _TextValues(_Values):
    """:class:`_Values` of a model that reads text.

    Args:
        model: a small model.
        generator: of the random values.
        fields: see :class:`_Values`.
    """

    def __init__(self, model: PretrainedModel, generator: torch.Generator, fields: Fields) -> None:
        super().__init__(generator, fields)
        self._model = model

    def _tokens(self, table: _Table) -> Tensor:
        after: Mapping[str, str | int] = table.get("after", {})
        placeholders = [
            torch.full((BATCH, self._fields.evaluate(count)), self._fields.evaluate(field))
            for field, count in after.items()
        ]
        return torch.cat([*placeholders, random_tokens(self._model, self._shape(table["tokens"]), self._generator)], 1)

    def _pixels(self, table: _Table) -> Tensor:
        size = pair_of(lookup(_ConfigFields(self._model.config), table["size"])) if "size" in table else ()
        return torch.rand(*self._shape(table["pixels"]), *size, generator=self._generator) * 2 - 1


# --- models of diffusers ---------------------------------------------------------------------------------------------


#: The sizes of a denoising step that users choose, to the names in ``diffusion.toml``.
_CHOSEN = {
    "batch": "batch", "seq": "text", "height": "pixel_height", "width": "pixel_width", "frames": "pixel_frames",
}  # fmt: skip


def step_sizes(
    kind: type[nn.Module], config: Mapping[str, object], given: Mapping[str, int | None]
) -> dict[str, int | None]:
    """The sizes of a denoising step of a model of real size: ``batch``, ``seq``, ``height``, ``width`` and ``frames``.

    Args:
        kind: the class of the model.
        config: the content of ``config.json``.
        given: values that replace defaults; None for the default.

    Returns:
        None for a size that no input has.

    Raises:
        RunError: if the step is not counted.
    """
    if reason := _why_not_counted(config, given):
        raise RunError(reason)
    fields = _fields_of_step(config, given)
    return {name: fields.evaluate(_CHOSEN[name]) if is_used else None for name, is_used in _used(kind, config).items()}


def check_step(kind: type[nn.Module], config: Mapping[str, object], given: Mapping[str, int]) -> None:
    """Check the sizes of a denoising step.

    Args:
        kind: the class of the model.
        config: the content of ``config.json``.
        given: the sizes that the user passed.

    Raises:
        UsageError: if a side is not a multiple of a patch, or no input of the model has a size.
    """
    if _why_not_counted(config, given):
        return
    used, patch = _used(kind, config), _fields_of_step(config, {}).evaluate("patch_pixels")
    for name, size in given.items():
        if not used[name]:
            raise UsageError(f"no input of a {kind.__name__} depends on {option(**{name: size})}: remove it")
        if name in ("height", "width") and (rest := size % patch):
            other = " or ".join(option(**{name: near}) for near in (size - rest, size - rest + patch) if near)
            raise UsageError(f"{option(**{name: size})} is not a multiple of {patch}: pass {other}")


def _used(kind: type[nn.Module], config: Mapping[str, object]) -> dict[str, bool]:
    """Whether an input has a size, of those that users choose."""
    fields = _fields_of_step(full := {**default_fields(kind), **config}, {})
    with torch.device("meta"):
        _draw(kind, full, _DiffusionValues(torch.Generator(), fields), is_small=False)
    return {name: size in fields.read for name, size in _CHOSEN.items()}


def _fields_of_step(config: Mapping[str, object], given: Mapping[str, int | None]) -> Fields:
    chosen = {_CHOSEN[name]: size for name, size in given.items() if size is not None}
    step = of_class(config.get("_class_name"))["step"]
    return _fields_of(config, {**table()["steps"], **step, **chosen})


def _fields_of(config: Mapping[str, object], step: Mapping[str, Any]) -> Fields:
    """The names in expressions: fields, with bools as 0 or 1, ``num_`` with the name of a list, and sizes."""
    lengths = {f"num_{name}": len(value) for name, value in config.items() if isinstance(value, list | tuple)}
    numbers = {name: int(value) if isinstance(value, bool) else value for name, value in config.items()}
    return Fields({**lengths, **numbers}, {**table()["sizes"], **step})


def _why_not_counted(config: Mapping[str, object], given: Mapping[str, int | None]) -> str:
    """The reason why a denoising step is not counted; "" if it is."""
    entry = of_class(name := config.get("_class_name"))
    if "step" not in entry or "not_counted" in entry:
        return str(entry.get("not_counted", f"the inputs of a {name} of real size are not known"))
    if entry["step"].get("text") == 0 and not given.get("seq"):
        return f"the pipeline does not have a default number of tokens: pass {option(seq='TOKENS')}"
    missing = [one for field, one in entry.get("needs", {}).items() if config.get(field) and find_spec(one) is None]
    return f"a {name} needs {missing[0]}: pip install {missing[0]}" if missing else ""


def diffusion_inputs(
    model: PretrainedModel, generator: torch.Generator, step: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Random inputs of a model of diffusers.

    Args:
        model: the model.
        generator: of the random values.
        step: the sizes of a denoising step of a model of real size, see :func:`step_sizes`; None for a small model.
    """
    config = config_fields(model)
    fields = _fields_of(config, {}) if step is None else _fields_of_step(config, step)
    return _draw(type(model), config, _DiffusionValues(generator, fields), is_small=step is None)


def _draw(
    kind: type[nn.Module], config: Mapping[str, object], values: "_DiffusionValues", *, is_small: bool
) -> dict[str, Any]:
    """The inputs of a class; those that determine sizes are on the CPU."""
    entry = of_class(kind.__name__)
    given = {**table()["inputs"], **table()["latents"].get(entry.get("latents"), {}), **entry.get("inputs", {})}
    given |= {} if is_small else entry.get("step_inputs", {})
    names = [name for name in inspect.signature(kind.forward).parameters if _has(config, given.get(name, {}))]
    with_values = entry.get("sized_by", ())
    return {
        name: values.draw_on("cpu", given[name]) if name in with_values else values.draw(given[name]) for name in names
    }


def _has(config: Mapping[str, object], entry: Any) -> bool:
    """Whether a model gets an input: its entry is not empty, and the config has all fields in ``if``."""
    return isinstance(entry, list) or (bool(entry) and all(map(config.get, entry.get("if", ()))))


class _DiffusionValues(_Values):
    """:class:`_Values` of a model of diffusers."""

    def draw(self, table: Any) -> Any:
        """The values that a table describes; for a list, the values of each item."""
        return [self.draw(one) for one in table] if isinstance(table, list) else super().draw(table)

    def draw_on(self, device: str, table: Any) -> Any:
        """The values that a table describes, on this device instead of the default one."""
        with torch.device(device):
            return self.draw(table)

    def _full(self, table: Mapping[str, Any]) -> Tensor:
        return torch.full(self._shape(table["full"]), self._evaluated(table["fill"]))

    def _complex(self, table: Mapping[str, Any]) -> Tensor:
        shape = self._shape(table["complex"])
        return torch.polar(torch.ones(shape), torch.randn(shape, generator=self._generator))

    def _grid(self, table: Mapping[str, Any]) -> Tensor:
        return torch.cartesian_prod(*map(torch.arange, self._shape(table["grid"]))).float()

    def _tensor(self, table: Mapping[str, Any]) -> Tensor:
        return torch.tensor(table["tensor"])

    def _value(self, table: Mapping[str, Any]) -> object:
        return self._evaluated(table["value"])

    def _tuple(self, table: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self.draw(table["tuple"]))

    def _repeat(self, table: Mapping[str, Any]) -> list[Any]:
        return [self.draw(table["of"]) for _ in range(self._fields.evaluate(table["repeat"]))]

    def _dict(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.draw(one) for name, one in table["dict"].items()}

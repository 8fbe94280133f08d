"""Types of the objects of transformers that shardconv uses.

For annotations only: transformers is optional, and mypy does not read it.
"""

from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn


class Config(Protocol):
    """A ``PreTrainedConfig``: the fields that all model types have, and others by name."""

    model_type: str
    is_decoder: bool
    is_encoder_decoder: bool

    def to_dict(self) -> dict[str, Any]:
        """All fields, as ``config.json`` has them."""

    def get_text_config(self, *, decoder: bool = False) -> "Config":
        """The config of the text submodel, or of its decoder; the config itself if there is none."""

    def __getattr__(self, name: str) -> Any:
        """A field that only some model types have."""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config with these fields."""


class Model(nn.Module):
    """A ``PreTrainedModel``. Never instantiated: it declares what shardconv calls."""

    config: Config
    device: torch.device
    generation_config: Any
    main_input_name: str
    base_model_prefix: str

    def __init__(self, config: Config) -> None: ...

    @classmethod
    def from_pretrained(cls, path: object, **options: object) -> Any:
        """The model with the weights of a folder; with ``output_loading_info`` also a report."""
        raise NotImplementedError

    @classmethod
    def _from_config(cls, config: Config, **options: object) -> Self:
        raise NotImplementedError

    @classmethod
    def _load_pretrained_model(cls, *arguments: object) -> tuple[Any, object]:
        raise NotImplementedError

    def save_pretrained(self, path: object, **options: object) -> None:
        """Write config and weights to a folder."""

    def can_generate(self) -> bool:
        """Whether the class has ``generate``."""
        raise NotImplementedError

    def generate(self, **options: object) -> Tensor:
        """The tokens of prompts and continuations."""
        raise NotImplementedError

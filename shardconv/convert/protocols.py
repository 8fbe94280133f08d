"""Types of the objects of transformers that shardconv uses, for type checkers.

Owns the assumptions about models, configs, outputs and tokenizers. Does not import transformers, and no class here is
instantiated.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn


class ModelConfig(Protocol):
    """A config of a model or of a submodel: the fields that all model types have, and others by name."""

    model_type: str
    is_decoder: bool
    is_encoder_decoder: bool
    output_attentions: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields, as in ``config.json``."""

    def get_text_config(self, *, decoder: bool = ...) -> "ModelConfig":
        """The config of the submodel that reads text; with ``decoder``, of its decoder."""

    def __getattr__(self, name: str) -> Any:
        """A field that only some model types have."""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config with these fields."""


class ModelOutput(Protocol):
    """The output of a model: a mapping whose items are attributes, too."""

    logits: Tensor
    last_hidden_state: Tensor

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> object: ...

    def get(self, name: str) -> object:
        """An item, or None."""

    def keys(self) -> Iterable[str]:
        """The names of the items."""


class PretrainedModel(nn.Module):
    """A ``PreTrainedModel``. Has annotations only: at run time it adds nothing to a class that is derived from it."""

    config: ModelConfig
    device: torch.device
    generation_config: Any
    main_input_name: str
    input_modalities: str | Sequence[str]
    base_model_prefix: str
    from_pretrained: ClassVar[Callable[..., Any]]
    from_config: ClassVar[Callable[..., "PretrainedModel"]]  # of diffusers
    _from_config: ClassVar[Callable[..., "PretrainedModel"]]
    _load_pretrained_model: ClassVar[Callable[..., tuple[Any, object]]]
    can_generate: Callable[[], bool]
    generate: Callable[..., Tensor]
    get_decoder: Callable[[], nn.Module]
    get_encoder: Callable[[], nn.Module]
    get_input_embeddings: Callable[[], nn.Module]
    save_pretrained: Callable[..., None]


class Tokenizer(Protocol):
    """A tokenizer."""

    chat_template: str | None
    eos_token: str | None
    mask_token: str | None
    mask_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    padding_side: str

    def __call__(
        self, text: Sequence[str], *, return_tensors: str, padding: bool, return_attention_mask: bool
    ) -> MutableMapping[str, Tensor]:
        """Token ids and attention mask of texts."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """A prompt in the chat template."""

    def batch_decode(self, sequences: Tensor, *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""


class Streamer(Protocol):
    """Receives the tokens that ``generate`` makes."""

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then tokens as they are generated."""

    def end(self) -> None:
        """Receive the end of the last token."""

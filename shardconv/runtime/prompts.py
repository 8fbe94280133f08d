"""Prompts of a run: their token ids, from a tokenizer or as given, and checks that a model can read them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardconv.convert.protocols import PretrainedModel, Tokenizer
from shardconv.files.folder import AnyPath
from shardconv.hf.tokenizer import load_tokenizer
from shardconv.support.errors import RunError, UsageError, one_line

#: The number of token ids of the default prompt of a comparison.
_NUM_IDS = 16
#: The most digits of a token id, so that it fits into int64.
_MAX_DIGITS = 18


class Codec:
    """Converts prompts to token ids, and generated tokens to text, or to ids if the prompts are ids, such as ``1 2 3``.

    Args:
        tokenizer: of prompts that are text; None for token ids.
        is_chat: whether to apply the chat template to prompts.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, is_chat: bool = False) -> None:
        self.tokenizer = tokenizer
        self._is_chat = is_chat

    @classmethod
    def of_text(cls, path: AnyPath, *, is_trusted: bool, is_chat: bool) -> Self:
        """The codec of prompts that are text.

        Args:
            path: the folder of the tokenizer.
            is_trusted: whether code of the checkpoint may be run.
            is_chat: whether to apply the chat template to prompts.

        Raises:
            RunError: if the tokenizer cannot be loaded or does not have a chat template.
            SourceError: if a remote file of it cannot be read.
        """
        tokenizer: Tokenizer = load_tokenizer(path, is_trusted=is_trusted)
        if is_chat and not tokenizer.chat_template:
            raise RunError(f"{path}: does not have a chat template: run it without --chat")
        return cls(tokenizer, is_chat=is_chat)

    def encode(self, prompts: Sequence[str], model: PretrainedModel) -> dict[str, Tensor]:
        """Encode prompts as token ids and attention mask, [prompts, tokens].

        Raises:
            RunError: if the tokenizer cannot encode them, or the model does not have a token.
        """
        side = padding_side(model)
        inputs = _padded(prompts, side) if self.tokenizer is None else self._tokenized(prompts, self.tokenizer, side)
        rows, largest = vocabulary_size(model), int(inputs["input_ids"].max())
        if rows is not None and largest >= rows:
            remedy = "use smaller --token-ids" if self.tokenizer is None else "this tokenizer belongs to another model"
            raise RunError(f"a prompt has token {largest}, and the model's vocabulary has {rows:,} tokens: {remedy}")
        return inputs

    def _tokenized(self, prompts: Sequence[str], tokenizer: Tokenizer, side: str) -> dict[str, Tensor]:
        texts = [_as_chat(prompt, tokenizer) for prompt in prompts] if self._is_chat else list(prompts)
        tokenizer.padding_side = side
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None and len(texts) > 1:
            raise RunError("the tokenizer does not have a token for padding: run one prompt at a time")
        found = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, return_attention_mask=True)
        if not bool(found["attention_mask"].any(1).all()):
            raise RunError("the tokenizer encodes a prompt to no tokens: give a longer prompt")
        return {"input_ids": found["input_ids"].long(), "attention_mask": found["attention_mask"]}

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode tokens [prompts, tokens], one text per prompt."""
        if self.tokenizer is None:
            return [" ".join(map(str, row)) for row in tokens.tolist()]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def _as_chat(prompt: str, tokenizer: Tokenizer) -> str:
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise RunError(f"the chat template cannot be used: {one_line(error)}: run it without --chat") from error


def _padded(prompts: Sequence[str], side: str) -> dict[str, Tensor]:
    """Token ids as inputs of a model."""
    ids = [torch.tensor(parse_ids(prompt)) for prompt in prompts]
    rows = {"input_ids": ids, "attention_mask": [torch.ones_like(row) for row in ids]}
    return {name: pad_sequence(some, batch_first=True, padding_side=side) for name, some in rows.items()}


def parse_ids(text: str) -> list[int]:
    """Parse token ids, separated by spaces or commas.

    Raises:
        UsageError: if there are none, the text has anything else, or a number does not fit into int64.
    """
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f'--token-ids: got {text!r}, expected numbers, as in --token-ids "1 2 3"')
    if (longest := max(words, key=len))[_MAX_DIGITS:]:
        raise UsageError(f"--token-ids: {longest:.40} is not in the vocabulary of any model: use smaller ones")
    return [int(word) for word in words]


def default_ids(model: PretrainedModel) -> str:
    """Return the default prompt: token ids at equal distances over the vocabulary, without special tokens."""
    rows = vocabulary_size(model)
    if rows is None and not isinstance(model.input_modalities, str):
        raise no_text_model(model, " and ".join(model.input_modalities))
    if rows is None:
        raise RunError(f"the vocabulary size of a {type(model).__name__} is unknown: pass --token-ids")
    special = set(_special_ids(model.config.to_dict()))
    usable = [number for number in range(rows) if number not in special]
    return " ".join(str(usable[place * (len(usable) - 1) // (_NUM_IDS - 1)]) for place in range(_NUM_IDS))


def _special_ids(config: Mapping[str, object]) -> Iterator[int]:
    """Yield the values of config fields that name tokens, in nested configs, too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_ids(value)
        elif "token" in str(name):
            yield from (one for one in (value if isinstance(value, list) else [value]) if type(one) is int)


def padding_side(model: PretrainedModel) -> str:
    """Return "left" for decoders, which continue a prompt, else "right", as positions count from the first token."""
    return "left" if model.can_generate() and not model.config.is_encoder_decoder else "right"


def check_input(model: PretrainedModel) -> None:
    """Refuse a model that does not read text.

    Raises:
        RunError: if its main input is not token ids.
    """
    if (name := model.main_input_name) != "input_ids":
        raise no_text_model(model, f"{name} and not text")


def no_text_model(model: PretrainedModel, inputs: str, problem: str = "") -> RunError:
    """Return the error for a model that does not run on text alone.

    Args:
        model: the model.
        inputs: its inputs.
        problem: of text alone.
    """
    return RunError(
        f"a {type(model).__name__} reads {inputs}{problem}: call it from Python, as shardconv.load(...) gives it"
    )


def vocabulary_size(model: PretrainedModel) -> int | None:
    """Return the size of a model's vocabulary; None if its input embedding is not a table, or unknown."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # transformers finds no layer of a common name, for example in CLIP
        return None


def check_positions(model: PretrainedModel, num_tokens: int, max_new_tokens: int) -> None:
    """Refuse more tokens than the position embeddings of a model have rows.

    Args:
        model: the model.
        num_tokens: tokens of the longest prompt.
        max_new_tokens: tokens to generate.

    Raises:
        RunError: if there are more.
    """
    new = max_new_tokens if model.can_generate() else 0
    for name, positions in _position_tables(model):
        is_decoder = ".decoder." in f".{name}."
        needed = (new if is_decoder else num_tokens) if model.config.is_encoder_decoder else num_tokens + new
        if needed > positions:
            room = positions if is_decoder and model.config.is_encoder_decoder else positions - num_tokens
            remedy = f"use --max-new-tokens {room}" if 0 < room < new else "use a shorter prompt"
            raise RunError(f"the model has {positions} positions ({name}), and this run needs up to {needed}: {remedy}")


def _position_tables(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of tables of learned positions, and their numbers of positions."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (last == "wpe" or re.search(r"(^|_)pos(itions?)?(_|$)", last)):
            reserved = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            yield name, module.num_embeddings - reserved

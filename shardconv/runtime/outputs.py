"""Options and outputs of a run: prompts as inputs; generated text, filled masks or embeddings, as the model has."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from msgspec import Struct, field
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.convert.converted_model import ConvertedModel
from shardconv.convert.protocols import ModelOutput, PretrainedModel, Streamer, Tokenizer
from shardconv.files.folder import AnyPath
from shardconv.hf.tokenizer import load_tokenizer
from shardconv.support.errors import RunError, UsageError, one_line, option

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
        raise RunError(f"the vocabulary size of a {type(model).__name__} is unknown: give --token-ids")
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


#: The number of tokens that are reported for a mask.
_NUM_CANDIDATES = 5

#: The inputs of a model, by name.
Inputs = dict[str, Tensor]


class RunOptions(Struct, frozen=True):
    """Options of a run.

    Attributes:
        max_new_tokens: maximum number of tokens to generate per prompt.
        temperature: 0 for greedy decoding, else the divisor of the logits of sampled tokens.
        seed: seed of sampled tokens.
        device: such as ``cpu`` or ``cuda``; None for the accelerator where there is one.
        chat: apply the model's chat template to the prompts.
        check: an unsharded checkpoint to compare with, in float32; None for no comparison.
        dtype: dtype of the model, such as ``bf16``; None as it is stored.
        verify: check each rank's file against its checksums while it is read.
        dequantize: load quantized layers as unquantized ones.
        unused: patterns of tensors that the model need not use.
        trust_remote_code: run code of the checkpoint for its model or tokenizer.
        tp: tensor parallel size of a source; None for a split checkpoint.
        pp: number of pipeline stages of a source.
        stages: number of layers of each, such as "20,20".
        plan: how a source is read and planned.
        token_ids: prompts and outputs are token ids, such as ``1 2 3``. With ``check``, there is a default prompt.
        adapter: a split adapter to apply, or its name among the adapters of the checkpoint; None for none.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    device: str | None = None
    chat: bool = False
    check: Path | None = None
    dtype: str | None = None
    verify: bool = True
    dequantize: bool = False
    unused: tuple[str, ...] = ()
    trust_remote_code: bool = False
    token_ids: bool = False
    tp: int | None = None
    pp: int | None = None
    stages: str = ""
    plan: PlanOptions = field(default_factory=PlanOptions)
    adapter: Path | None = None


class ModelRun(Struct, frozen=True):
    """A model with its inputs.

    Attributes:
        model: the model, sharded.
        codec: encoded the prompts.
        inputs: the inputs of the model.
        options: the options of the run.
    """

    model: ConvertedModel
    codec: Codec
    inputs: Inputs
    options: RunOptions

    def generation_arguments(self) -> dict[str, object]:
        """Return the arguments of ``generate`` that options determine."""
        temperature, tokenizer = self.options.temperature, self.codec.tokenizer
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        padding = {} if tokenizer is None else {"pad_token_id": tokenizer.pad_token_id}
        single = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None}  # overrides generation_config.json
        return {"max_new_tokens": self.options.max_new_tokens, **single, **sampling, **padding}


class Outputs(Struct, frozen=True):
    """Outputs of a model.

    Attributes:
        texts: the report for each prompt.
        tokens: generated tokens, [prompts, tokens]; None if nothing is generated.
    """

    texts: list[str]
    tokens: Tensor | None = None


class TimedScores:
    """A logits processor for ``generate`` that records the time of each token, and refuses scores that are NaN."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the next tokens, [prompts, vocabulary].

        Raises:
            RunError: if one is NaN.
        """
        refuse_nan(scores)
        self._times.append(time.perf_counter())
        return scores

    @property
    def first_token_seconds(self) -> float | None:
        """Time from the start to the first token; None if there is none."""
        return self._times[1] - self._times[0] if len(self._times) > 1 else None

    def tokens_per_second(self, prompts: int) -> float | None:
        """Return the tokens of all prompts per second, after the first token; None if there are none."""
        steps = len(self._times) - 2
        return prompts * steps / (self._times[-1] - self._times[1]) if steps > 0 else None


def compute_outputs(run: ModelRun, scores: TimedScores, streamer: Streamer | None) -> Outputs:
    """Generate text if the model can; else fill masks, or compute an embedding of each prompt.

    Raises:
        RunError: if the model computes none of these, or its outputs are NaN.
    """
    model, codec, inputs = run.model, run.codec, run.inputs
    if model.can_generate():
        return _generate(run, scores, streamer)
    output = _call(model, inputs)
    if "logits" not in output and "last_hidden_state" not in output:
        raise _no_report(model, output)
    refuse_nan(without_padding(output_values(output), inputs))
    if type(model).__name__.endswith("ForMaskedLM"):
        if codec.tokenizer is None:
            return Outputs(codec.decode(output.logits.argmax(-1)))
        return Outputs(_fill_masks(codec.tokenizer, inputs, output.logits))
    if "last_hidden_state" in output:
        mask = inputs["attention_mask"].unsqueeze(-1).bool()
        means = output.last_hidden_state.float().masked_fill(~mask, 0).sum(1) / mask.sum(1)
        return Outputs([json.dumps([round(x, 6) for x in mean]) for mean in means.tolist()])
    raise _no_report(model, output)


def _call(model: ConvertedModel, inputs: Inputs) -> ModelOutput:
    """Call a model on text alone, which a model that reads images, too, may refuse or fail on."""
    try:
        output: ModelOutput = model(**inputs)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(model.input_modalities, str):
            raise
        reads = " and ".join(model.input_modalities)
        raise no_text_model(model, reads, f", and fails on text alone ({one_line(error)})") from error
    return output


def _no_report(model: nn.Module, output: ModelOutput) -> RunError:
    return RunError(
        f"a {type(model).__name__} computes {', '.join(output.keys())}, which are neither text nor embeddings: load it "
        f"with shardconv.load(...) in Python and call it"
    )


def _generate(run: ModelRun, scores: TimedScores, streamer: Streamer | None) -> Outputs:
    model, inputs = run.model, run.inputs
    torch.manual_seed(run.options.seed)
    try:
        tokens = model.generate(**inputs, **run.generation_arguments(), streamer=streamer, logits_processor=[scores])
    except (TypeError, ValueError) as error:
        raise RunError(f"a {type(model).__name__} does not generate from token ids: {one_line(error)}") from error
    prompt = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return Outputs(run.codec.decode(tokens[:, prompt:]), tokens)


def refuse_nan(values: Tensor) -> None:
    """Refuse outputs with NaN, from which tokens would be chosen without an error.

    Raises:
        RunError: if one is NaN.
    """
    if values.isnan().any():
        raise RunError(
            "the outputs of the model are NaN: a tensor of the checkpoint holds NaN, or its dtype overflows. Compare "
            f"with the source by shardconv verify --against SRC, or run in {option(dtype='fp32')}"
        )


def _fill_masks(tokenizer: Tokenizer, inputs: Inputs, logits: Tensor) -> list[str]:
    """Return the most likely tokens for each mask."""
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise RunError(
            "the tokenizer does not have a mask token, which a model that fills masks needs: use the tokenizer of the "
            "model, or pass --token-ids"
        )
    if not inputs["input_ids"].eq(mask_id).any(1).all():
        raise RunError(f"this model fills masks: put {tokenizer.mask_token} into each prompt")
    lines = []
    for ids, row in zip(inputs["input_ids"], logits, strict=True):
        masks = ids.eq(mask_id).nonzero().flatten()
        probabilities, tokens = row[masks].float().softmax(-1).topk(_NUM_CANDIDATES, -1)
        candidates = [
            ", ".join(f"{tokenizer.decode([token])} {value:.3f}" for token, value in zip(*pair, strict=True))
            for pair in zip(tokens.tolist(), probabilities.tolist(), strict=True)
        ]
        lines.append("; ".join(candidates))
    return lines


def output_values(output: ModelOutput) -> Tensor:
    """Return the logits of an output; its last hidden state if it has none."""
    return output.logits if "logits" in output else output.last_hidden_state


def without_padding(values: Tensor, inputs: Inputs) -> Tensor:
    """Return outputs of tokens that are not padding."""
    mask = inputs.get("attention_mask")
    if mask is None or values.dim() != 3 or values.shape[:2] != mask.shape:
        return values
    return values[mask.bool()]

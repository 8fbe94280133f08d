"""Outputs of a model for prompts, by the options of a run: generated text, filled masks or embeddings."""

import json
import time
from pathlib import Path

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.convert.converted_model import ConvertedModel
from shardconv.convert.protocols import ModelOutput, Streamer, Tokenizer
from shardconv.runtime.prompts import Codec, no_text_model
from shardconv.support.errors import RunError, one_line, option

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
    """A logits processor for ``generate`` that records the time of each token, and refuses scores that are NaN.

    Attributes:
        prompt_tokens: the number of tokens before the first generated one; None until it is generated.
    """

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self.prompt_tokens: int | None = None

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the next tokens, [prompts, vocabulary].

        Raises:
            RunError: if one is NaN.
        """
        refuse_nan(scores)
        if self.prompt_tokens is None:
            self.prompt_tokens = tokens.shape[1]
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
    return Outputs(run.codec.decode(tokens[:, scores.prompt_tokens :]), tokens)


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

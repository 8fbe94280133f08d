"""Options and report of a run."""

from dataclasses import dataclass, field
from pathlib import Path

from shardconv.checkpoint.sources.planning import PlanOptions


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run.

    Attributes:
        max_new_tokens: maximum number of tokens to generate per prompt.
        temperature: 0 for greedy decoding, else the divisor of the logits of sampled tokens.
        seed: seed of sampled tokens.
        device: such as ``cpu`` or ``cuda``; None for the accelerator where there is one.
        chat: apply the model's chat template to the prompts.
        check: an unsharded checkpoint to compare with, in float32; None for no comparison.
        dtype: dtype of the model, such as ``bf16``; None as it is stored.
        verify: check each rank's file against its checksums first.
        dequantize: load quantized layers as unquantized ones.
        unused: patterns of tensors that the model need not use.
        trust_remote_code: run code of the checkpoint for its model or tokenizer.
        tp: tensor parallel size of a source; None for a split checkpoint.
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
    plan: PlanOptions = field(default_factory=PlanOptions)
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Outputs and figures of a run. Times are those of one rank.

    Attributes:
        path: the checkpoint.
        tp: tensor parallel size.
        device: device of this rank.
        prompts: the prompts.
        outputs: for each prompt its continuation, the tokens that fill its masks, or an embedding as JSON.
        load_seconds: time to load the model.
        load_bytes: size of the rank's file, or of the one that a split of the source would have.
        memory_bytes: peak memory of each rank; on the device if it is an accelerator.
        dequantized_bytes: size of this rank's tensors after quantized layers are dequantized; None if none are.
        first_token_seconds: time from the prompt to the first token; None if nothing is generated.
        tokens_per_second: tokens of all prompts per second, after the first token; None if nothing is generated.
        differences: with ``check``, the differences from the unsharded model; empty if there are none.
        error: with ``check``, the largest error of an output, relative to the largest output.
        notes: notes on the checkpoint and the run.
        adapter: the split adapter that was applied, also to the model of ``check``; None for none.
    """

    path: str
    tp: int
    device: str
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    load_seconds: float
    load_bytes: int
    memory_bytes: tuple[int, ...]
    dequantized_bytes: int | None
    first_token_seconds: float | None
    tokens_per_second: float | None
    differences: tuple[str, ...] | None
    error: float | None
    notes: tuple[str, ...]
    adapter: str | None = None

    @property
    def has_continuations(self) -> bool:
        """Whether the model generates tokens, rather than filling masks or encoding."""
        return self.first_token_seconds is not None

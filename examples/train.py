"""Train the demo model: a small Llama on the help topics that ship with Python.

The text is the dictionary ``pydoc_data.topics.topics``, which every Python
installation carries, so nothing is downloaded. The script trains a byte-level
BPE tokenizer and a LlamaForCausalLM of about three million parameters on it, and
saves both with ``save_pretrained``, the weights in bfloat16.

The sizes suit splitting: eight attention heads over four key/value heads, and a
hidden and an intermediate size that divide evenly. The vocabulary is odd on
purpose, so that the embedding and the output head do not.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 1999
SEQUENCE_TOKENS = 256
WARMUP_STEPS = 100
REPORT_EVERY = 100
EVALUATION_BATCH = 16


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts and wrap it for transformers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=SEQUENCE_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model for the tokenizer's vocabulary."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Join the texts into one stream of tokens, each text closed by EOS."""
    stream: list[int] = []
    for text in texts:
        stream += tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream)


def windows_at(stream: torch.Tensor, starts: torch.Tensor, bos: int) -> torch.Tensor:
    """Slice a window at each start, with BOS before it, as in a prompt."""
    windows = stream[starts[:, None] + torch.arange(SEQUENCE_TOKENS - 1)]
    return torch.cat([torch.full((len(starts), 1), bos), windows], dim=1)


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise linearly during the warm-up, then fall to a twentieth along a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, stream: torch.Tensor, *, steps: int, batch: int, peak: float) -> None:
    """Fit the model to random windows of the stream, reporting on stderr."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    bos = model.config.bos_token_id
    model.train()
    began = time.monotonic()
    for step in range(1, steps + 1):
        starts = torch.randint(len(stream) - SEQUENCE_TOKENS + 2, (batch,))
        windows = windows_at(stream, starts, bos)
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps:
            elapsed = time.monotonic() - began
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {elapsed:.0f} s", file=sys.stderr)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Average the loss per token over the whole stream, window after window."""
    model.eval()
    window = SEQUENCE_TOKENS - 1
    starts = torch.arange(0, len(stream) - window + 1, window)
    total = 0.0
    for first in range(0, len(starts), EVALUATION_BATCH):
        some = starts[first : first + EVALUATION_BATCH]
        windows = windows_at(stream, some, model.config.bos_token_id)
        total += model(input_ids=windows, labels=windows).loss.item() * len(some)
    return total / len(starts)


def continue_greedily(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
    """Return the prompt with the model's most likely continuation."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model on Python's help topics.")
    default_out = Path(__file__).parent / "demo-model"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to save into")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--threads", type=int, default=1, help="processor threads; the result depends on them")
    parser.add_argument("--prompt", default="If the class defines", help="text to continue")
    parser.add_argument("--tokens", type=int, default=80, help="number of tokens to generate")
    return parser.parse_args()


def main() -> None:
    """Train, save, and print the loss and a continuation."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    texts = [topics[name] for name in sorted(topics)]
    tokenizer = build_tokenizer(texts)
    stream = encode(tokenizer, texts)
    model = build_model(tokenizer)
    print(
        f"{sum(map(len, texts))} characters, {len(stream)} tokens,"
        f" {len(tokenizer)} in the vocabulary, {model.num_parameters()} parameters",
        file=sys.stderr,
    )
    train(
        model,
        stream,
        steps=arguments.steps,
        batch=arguments.batch,
        peak=arguments.learning_rate,
    )
    model.to(torch.bfloat16)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    model.float()  # the values just saved; a CPU computes faster with them in float32
    print(f"loss {mean_loss(model, stream):.3f}")
    print(continue_greedily(model, tokenizer, arguments.prompt, arguments.tokens))


if __name__ == "__main__":
    main()

"""A small GPT with torch's layers or with parallel layers."""

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn

from shardconv.distributed import Axis
from shardconv.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropyLoss,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 45, 32, 4, 12, 2


class Block(nn.Module):
    """Attention and an MLP; with ``axis``, over the local heads."""

    def __init__(self, axis: Axis | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if axis is None:
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        else:
            self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, split_sizes=(WIDTH, WIDTH, WIDTH), group=axis)
            self.out = RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, group=axis)
            self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, group=axis)
            self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, group=axis)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(-3, -2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps tokens to their loss; the head is tied, and the vocabulary of 45 is not a multiple of any tp."""

    def __init__(self, axis: Axis | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.embedding = (
            nn.Embedding(VOCAB, WIDTH) if axis is None else VocabParallelEmbedding(VOCAB, WIDTH, group=axis)
        )
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(axis) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        if axis is None:
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embedding.weight
            self.loss = nn.CrossEntropyLoss()
        else:
            self.head = VocabParallelClassifier(WIDTH, VOCAB, False, weight=self.embedding.weight, group=axis)
            self.loss = ParallelCrossEntropyLoss(num_classes=VOCAB, group=axis)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(tokens.shape[1] - 1))
        logits = self.head(self.norm(self.blocks(x)))
        return self.loss(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Learnable tokens of shape [8, LENGTH + 1]: consecutive numbers from a random start."""
    start = torch.randint(VOCAB, (8, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(LENGTH + 1) * (1 + start % 3)) % VOCAB

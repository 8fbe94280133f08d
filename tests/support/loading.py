"""Checkpoints of the small models and their splits, for tests of loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardconv
from tests.support.models import MODELS, VOCAB

#: Quantized models cannot be run; the other requires a field that configs of transformers 5.23 do not store.
NAMES = [name for name in MODELS if name not in ("deepseek_v3-hub", "t5-classifier")]
TP = {"pair": 2, "four": 4}


def source_and_split(home: Path, name: str, tp: int) -> tuple[Path, Path]:
    """The checkpoint of a model, and the split checkpoint."""
    source, split = home / name, home / f"{name}-tp{tp}"
    if not source.exists():
        model = MODELS[name]
        model.write(source) if model.rewrite or model.extra else model.build(0.3).save_pretrained(source)
    if not split.exists():
        shardconv.split(source, split, tp=tp)
    return source, split


def inputs_of(name: str, model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    needs_two = model.config.is_encoder_decoder and not name.endswith("encoder")
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if needs_two else {})}


def check_fails(axis: Any, path: Path, messages: list[str], options: dict[str, Any] | None = None) -> None:
    """Check that every rank raises; ``messages`` has a pattern per rank, or one for all."""
    message = messages[axis.rank % len(messages)]
    with pytest.raises(shardconv.ShardconvError, match=message):
        shardconv.load(path, device="cpu", group=axis, **(options or {}))


#: The plan file of :class:`Mlp`.
PLAN = """
[units]
hidden = { count = 24 }

[rules]
"up"   = { style = "colwise", unit = "hidden" }
"down" = { style = "rowwise", unit = "hidden" }
"""


class Mlp(nn.Module):
    """A module that no family serves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

"""Checkpoints of the small models and their splits, for tests of loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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


def check_logits(axis: Any, name: str, source: Path, split: Path) -> None:
    """Check that a loaded model is one of the unsharded class, and that all outputs are equal to 1e-4."""
    kind = json.loads((source / "config.json").read_text())["architectures"][0]
    unsharded = getattr(transformers, kind).from_pretrained(source).eval()
    model = shardconv.load(split, device="cpu", group=axis)
    assert model.unsharded_class is type(unsharded)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    expected, found = (one(**inputs_of(name, one)) for one in (unsharded, model))
    for key, value in expected.items():
        if torch.is_tensor(value) and value.is_floating_point():
            assert (found[key] - value).abs().max() <= 1e-4 * value.abs().max(), key


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

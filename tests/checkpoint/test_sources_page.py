"""docs/sources.md: the table of formats is that of the tests, and of the layouts that can be read and written."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardconv.layouts import LAYOUTS, META, SOURCE_LAYOUTS
from tests.checkpoint.test_adapter import TPS as OF_ADAPTERS
from tests.checkpoint.test_dcp_source import TPS as OF_DCP
from tests.checkpoint.test_external import DEEPSEEK_TPS, DEEPSPEED_TPS, META_TPS, MISTRAL_TPS, WRITTEN_TPS
from tests.checkpoint.test_saved_by_vllm import TPS as OF_VLLM
from tests.checkpoint.test_torch_source import TPS as OF_PYTORCH
from tests.plan.test_families import TPS as OF_SAFETENSORS

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"


class Row(NamedTuple):
    """A format: what it is, its ``--from``, what writes it, what tests compare with, and at which tp."""

    name: str
    layout: str
    written: str
    compared: str
    tps: Iterable[int]

    def line(self) -> str:
        layout = f"`{self.layout}`" if self.layout else ""
        return f"| {self.name} | {layout} | {self.written} | {self.compared} | {', '.join(map(str, self.tps))} |"


ROWS = (
    Row("safetensors files", "", "by `merge`, byte for byte", "safetensors, transformers", OF_SAFETENSORS),
    Row(
        "PyTorch files (`torch.save`)", "", "no, `merge` writes safetensors files with equal tensors",
        "`torch.load`, transformers", OF_PYTORCH,
    ),
    Row(
        "Meta's `consolidated.NN.pth` and `params.json` (Llama 1 to 3)", "meta", "`split --layout meta`",
        "tensors of transformers' Llama, logits of Meta's model, and files that torch loads",
        [tp for tp in META_TPS if tp in WRITTEN_TPS],
    ),
    Row(
        "Mistral's `consolidated.safetensors` and `params.json`", "meta", "as Meta's files",
        "tensors of transformers' model", MISTRAL_TPS,
    ),
    Row(
        "DeepSeek's `model{rank}-mp{tp}.safetensors` (V3, R1, V3.2)", "deepseek", "no",
        "tensors of transformers' DeepSeek-V3, with FP8 weights and scales", DEEPSEEK_TPS,
    ),
    Row(
        "DeepSpeed's `tp_NN_MM.pt` and `ds_inference_config.json` (Llama)", "deepspeed", "no",
        "the tensors of the Llama of which DeepSpeed 0.19 wrote them", DEEPSPEED_TPS,
    ),
    Row(
        "vLLM's `model-rank-R-part-P.safetensors` (`save_sharded_state`)", "vllm", "`split --layout vllm`",
        "tensors of transformers' Llama, Qwen2 and Qwen3", OF_VLLM,
    ),
    Row(
        "torch.distributed.checkpoint: `.metadata` and `*.distcp`", "dcp", "no; see `--layout dcp`",
        "DTensors that torch saved on 4 ranks", OF_DCP,
    ),
    Row("LoRA adapters of PEFT: [adapters](adapters.md)", "", "by `merge`, byte for byte", "PEFT", OF_ADAPTERS),
)  # fmt: skip


def test_the_page_has_the_table():
    head = ("| format | `--from` | written | compared with | tp |", "|---|---|---|---|---|")
    assert "\n".join([*head, *(row.line() for row in ROWS)]) in PAGE.read_text()


def test_the_table_has_all_layouts_that_are_read_and_those_that_are_written():
    assert {row.layout for row in ROWS if row.layout} == {*SOURCE_LAYOUTS}
    written = {layout for layout in LAYOUTS if any(f"split --layout {layout}`" in row.written for row in ROWS)}
    assert written == {META, "vllm"}

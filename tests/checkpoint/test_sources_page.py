"""docs/sources.md: the table has the sizes of the tests, and the layouts that can be read and written."""

from pathlib import Path

from shardconv.layouts import FOREIGN, LAYOUTS, SOURCE_LAYOUTS
from tests.checkpoint.test_adapter import TPS as OF_ADAPTERS
from tests.checkpoint.test_dcp_source import TPS as OF_DCP
from tests.checkpoint.test_external import DEEPSEEK_TPS, DEEPSPEED_TPS, META_TPS, MISTRAL_TPS, WRITTEN_TPS
from tests.checkpoint.test_megatron import TPS as OF_MEGATRON
from tests.checkpoint.test_saved_by_vllm import TPS as OF_VLLM
from tests.checkpoint.test_torch_source import TPS as OF_PYTORCH
from tests.plan.test_families import TPS as OF_SAFETENSORS

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
#: The first word of a format, its ``--from``, and the tensor parallel sizes of its tests.
ROWS = [
    ("safetensors", "", OF_SAFETENSORS),
    ("PyTorch", "", OF_PYTORCH),
    ("Meta's", "meta", [tp for tp in META_TPS if tp in WRITTEN_TPS]),
    ("Mistral's", "meta", MISTRAL_TPS),
    ("DeepSeek's", "deepseek", DEEPSEEK_TPS),
    ("DeepSpeed's", "deepspeed", DEEPSPEED_TPS),
    ("vLLM's", "vllm", OF_VLLM),
    ("torch.distributed.checkpoint:", "dcp", OF_DCP),
    ("Megatron-Core:", "megatron", OF_MEGATRON),
    ("LoRA", "", OF_ADAPTERS),
]


def rows() -> list[list[str]]:
    """The cells of the table."""
    _, _, table = PAGE.read_text().partition("|---|---|---|---|---|\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.partition("\n\n")[0].splitlines()]


def test_the_table_has_the_sizes_of_the_tests():
    found = [(name.split()[0], layout.strip("`"), tps) for name, layout, _, _, tps in rows()]
    assert found == [(name, layout, ", ".join(map(str, tps))) for name, layout, tps in ROWS]


def test_the_table_has_all_layouts_that_are_read_and_those_that_are_written():
    assert {layout for _, layout, _ in ROWS if layout} == {*SOURCE_LAYOUTS}
    written = {layout for layout in LAYOUTS if any(f"split --layout {layout}`" in row[2] for row in rows())}
    assert written == {*FOREIGN, "vllm"}

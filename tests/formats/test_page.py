"""docs/quantization.md: the tables are those of the tests and of the settings that are refused."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from shardconv.formats.settings import _READERS, _REFUSED
from tests.formats.test_compressed_tensors import SCHEMES
from tests.formats.test_fp8 import KINDS
from tests.formats.test_other_formats import AUTOFP8, OF_BITSANDBYTES, OF_MODELOPT, OF_QUANTO, QUANTO
from tests.formats.test_torchao import KINDS as OF_TORCHAO
from tests.support.quantized import SIZES

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
#: The commands that are tested.
COMMANDS = {"split, merge, reshard, verify": "yes", "run": "dequantized"}


def sizes_of(models: Iterable[str], sizes: dict[str, tuple[int, ...]] = SIZES) -> str:
    return "; ".join(f"{model}: {', '.join(map(str, sizes[model]))}" for model in models)


OF_GPTQ = "llama: 2, 4; phi3: 2; qwen2: 2; qwen3_moe: 2; deepseek_v3: 2"

#: Format, what quantizes it, what dequantizes it, and the models with their tensor parallel sizes.
FORMATS = (
    (f"compressed-tensors: {', '.join(SCHEMES)}", *["compressed-tensors"] * 2, sizes_of(SIZES)),
    ("compressed-tensors: W4A16_ASYM with act-order", "the tests", "compressed-tensors", sizes_of(["llama"])),
    (f"FP8: {', '.join(KINDS)}", "transformers", "transformers", sizes_of(SIZES)),
    (f"FP8 of AutoFP8: {', '.join(AUTOFP8)}", "the tests", "the tests", sizes_of(OF_MODELOPT)),
    ("FP8 of FBGEMM", "the tests", "the tests", sizes_of(OF_MODELOPT)),
    ("MXFP4 of gpt-oss", "the tests", "transformers", sizes_of(["gpt_oss"], {"gpt_oss": (2,)})),
    ("ModelOpt FP8", "the tests", "the tests", sizes_of(OF_MODELOPT)),
    ("ModelOpt NVFP4", "the tests", "the tests", sizes_of(OF_MODELOPT)),
    ("GPTQ: 2, 3, 4, 8 bits", "gptqmodel, the tests", "gptqmodel, the tests", OF_GPTQ),
    ("AWQ: 4 bits", "gptqmodel, the tests", "gptqmodel, the tests", OF_GPTQ),
    ("bitsandbytes int8", "bitsandbytes", "bitsandbytes", sizes_of(OF_BITSANDBYTES)),
    (f"torchao: {', '.join(OF_TORCHAO)}", "torchao", "torchao", sizes_of(SIZES)),
    ("torchao: Int4Tensor", "the tests", "torchao", "llama: 2, 4"),
    (f"Quanto: {', '.join(QUANTO)}", "optimum-quanto", "optimum-quanto", sizes_of(OF_QUANTO)),
)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join((head, "|" + "---|" * len(titles), *body))


def tables() -> dict[str, str]:
    titles = ("format", "quantized by", "dequantized by", "tensor parallel sizes")
    rows = [(*row, *COMMANDS.values()) for row in FORMATS]
    rows = [
        (*row[:-1], "refused") if "Int4Tensor" in row[0] else row for row in rows
    ]  # values as a GPU kernel packs them
    formats = table((*titles, *COMMANDS), rows)
    refused = [(f"`{method}`", reason) for method, reason in _REFUSED.items()]
    return {"formats": formats, "refused": table(("`quant_method`", "reason"), refused)}


@pytest.mark.parametrize("name", ["formats", "refused"])
def test_the_page_has_the_tables(name):
    assert tables()[name] in PAGE.read_text()


def test_the_page_lists_the_methods():
    assert f"`quant_method` is {', '.join(f'`{method}`' for method in _READERS)}." in " ".join(PAGE.read_text().split())

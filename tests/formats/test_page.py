"""docs/quantization.md: the tables are those of the tests and of the settings that are refused."""

from collections.abc import Iterable
from pathlib import Path

from shardconv.formats.settings import _READERS, _REFUSED
from tests.formats.test_compressed_tensors import SCHEMES
from tests.formats.test_other_formats import AUTOFP8, KINDS, OF_BITSANDBYTES, OF_MODELOPT, OF_QUANTO, QUANTO
from tests.formats.test_torchao import KINDS as OF_TORCHAO
from tests.support.quantized import SIZES

PAGE = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
TITLES = "| format | quantized by | dequantized by | tensor parallel sizes | split, merge, reshard, verify | run |"


def sizes_of(models: Iterable[str], sizes: dict[str, tuple[int, ...]] = SIZES) -> str:
    return "; ".join(f"{model}: {', '.join(map(str, sizes[model]))}" for model in models)


OF_GPTQ = "llama: 2, 4; phi3: 2; qwen2: 2; qwen3_moe: 2; deepseek_v3: 2"
#: Format to the models with their tensor parallel sizes.
FORMATS = {
    f"compressed-tensors: {', '.join(SCHEMES)}": sizes_of(SIZES),
    "compressed-tensors: W4A16_ASYM with act-order": sizes_of(["llama"]),
    f"FP8: {', '.join(KINDS)}": sizes_of(SIZES),
    f"FP8 of AutoFP8: {', '.join(AUTOFP8)}": sizes_of(OF_MODELOPT),
    "FP8 of FBGEMM": sizes_of(OF_MODELOPT),
    "MXFP4 of gpt-oss": sizes_of(["gpt_oss"], {"gpt_oss": (2,)}),
    "ModelOpt FP8": sizes_of(OF_MODELOPT),
    "ModelOpt NVFP4": sizes_of(OF_MODELOPT),
    "GPTQ: 2, 3, 4, 8 bits": OF_GPTQ,
    "AWQ: 4 bits": OF_GPTQ,
    "bitsandbytes int8": sizes_of(OF_BITSANDBYTES),
    f"torchao: {', '.join(OF_TORCHAO)}": sizes_of(SIZES),
    "torchao: Int4Tensor": "llama: 2, 4",
    f"Quanto: {', '.join(QUANTO)}": sizes_of(OF_QUANTO),
}


def rows(titles: str) -> list[list[str]]:
    """The cells of a table."""
    _, *lines = PAGE.partition(f"{titles}\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_has_the_formats_and_their_sizes():
    found = rows(TITLES)
    assert {name: sizes for name, _, _, sizes, _, _ in found} == FORMATS
    assert [name for name, *_, run in found if run == "refused"] == ["torchao: Int4Tensor"]  # packed for a GPU kernel


def test_the_page_has_the_refused_methods():
    assert rows("| `quant_method` | reason |") == [[f"`{method}`", reason] for method, reason in _REFUSED.items()]


def test_the_page_lists_the_methods():
    assert f"`quant_method` is {', '.join(f'`{method}`' for method in _READERS)}." in " ".join(PAGE.split())

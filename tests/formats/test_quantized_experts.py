"""Whole experts of quantized checkpoints on each rank: outputs equal those of the unsharded, dequantized model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardconv
from shardconv.support.errors import OutputError
from tests.support.adapters import adapted, unadapted, write_adapter
from tests.support.checkpoints import contents
from tests.support.faults import STRIPE_MODULES, failing_after
from tests.support.gptq import dequantize, pack
from tests.support.matrix import cases
from tests.support.models import Tensors, change_config, read
from tests.support.quantized import MODELS, check_run, write

EXPERTS, GROUP, BLOCK = 5, 32, 32
OF_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip
OF_FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def to_gptq(name: str, tensor: torch.Tensor) -> Tensors:
    """Random codes and zero points, and scales for values of about 0.05."""
    layer, (out, size) = name.removesuffix(".weight"), tensor.shape
    random = np.random.default_rng(len(name) + out)
    return {
        f"{layer}.qweight": pack(random.integers(0, 16, (size, out)), 4, 0),
        f"{layer}.qzeros": pack(random.integers(4, 12, (size // GROUP, out)), 4, 1),
        f"{layer}.scales": torch.from_numpy((random.random((size // GROUP, out)) * 0.02).astype(np.float16)),
        f"{layer}.g_idx": torch.arange(size, dtype=torch.int32) // GROUP,
    }


def from_gptq(tensors: Tensors) -> Tensors:
    full = {name: one.float() if name.endswith(".scales") else one for name, one in tensors.items()}
    return {f"{layer}.weight": weight.T for layer, weight in dequantize(full, OF_GPTQ).items()}


def to_fp8(name: str, tensor: torch.Tensor) -> Tensors:
    """The values in float8, and random scales of blocks."""
    blocks = [-(-size // BLOCK) for size in tensor.shape]
    scales = torch.rand(blocks, generator=torch.Generator().manual_seed(len(name))) + 0.5
    return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def from_fp8(tensors: Tensors) -> Tensors:
    found = {}
    for name in tensors:
        if name.endswith("_scale_inv"):
            weight = tensors[name.removesuffix("_scale_inv")].float()
            scales = tensors[name].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            found[name.removesuffix("_scale_inv")] = weight * scales[: weight.shape[0], : weight.shape[1]]
    return found


class Form(NamedTuple):
    """A storage of matrices: the tensors of one weight, the weights of a checkpoint, and ``quantization_config``."""

    quantize: Callable[[str, torch.Tensor], Tensors]
    dequantize: Callable[[Tensors], Tensors]
    settings: dict[str, Any]


FORMS = {
    "gptq": Form(
        to_gptq,
        from_gptq,
        OF_GPTQ,
    ),
    "fp8": Form(to_fp8, from_fp8, OF_FP8),
}
#: Ends of the names of tensors that store a quantized weight.
STORED = (".qweight", ".qzeros", ".scales", ".g_idx", "_scale_inv")


@pytest.fixture(scope="module", params=FORMS)
def source(request, tmp_path_factory):
    """A quantized checkpoint; beside it, ``dequantized`` has the same values in float32."""
    home, form = tmp_path_factory.mktemp(request.param), FORMS[request.param]
    sizes = {"num_hidden_layers": 2, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    model = replace(MODELS["qwen3_moe"], config={**MODELS["qwen3_moe"].config, **sizes})
    unquantized = model.write(home / "unquantized")
    quantized = write(unquantized, home / "source", form.quantize, form.settings)
    stored = read(quantized)
    values = {name: one for name, one in stored.items() if not name.endswith(STORED)} | form.dequantize(stored)
    (home / "dequantized").mkdir()
    values = {name: one.float().contiguous() for name, one in values.items()}
    save_file(values, home / "dequantized" / "model.safetensors", metadata={"format": "pt"})
    (home / "dequantized" / "config.json").write_bytes((unquantized / "config.json").read_bytes())
    change_config(home / "dequantized", {"dtype": "float32"})
    return quantized


def dequantized(source: Path) -> Path:
    return source.parent / "dequantized"


def check_outputs(axis, source, path, options, lora=None):
    unsharded = unadapted(source).eval() if lora is None else adapted(source, lora)
    model = shardconv.load(path, device="cpu", dequantize=True, dtype="fp32", **options)
    given = {"input_ids": torch.arange(3, 12)[None]}
    with torch.inference_mode():
        expected, found = (one(**given).logits for one in (unsharded, model))
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        given |= {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**given), unsharded.generate(**given))
    own, full = (
        sum(one.numel() for name, one in each.named_parameters() if ".experts." in name) for each in (model, unsharded)
    )
    return own / full


#: Tensor and expert parallel sizes of four ranks, and the number of stages.
SIZES = [(2, 4, 1), (1, 4, 1), (4, 4, 1), (2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(("tp", "ep", "pp"), cases(SIZES, lambda tp, *_: tp == 2))
def test_outputs_equal_those_of_the_dequantized_model(ranks, source, tmp_path, tp, ep, pp):
    """From rank files and from the source."""
    sizes = {"tp": tp, "ep": ep, "pp": pp}
    shardconv.split(source, tmp_path / "split", **sizes)
    held = ranks("four", check_outputs, dequantized(source), tmp_path / "split", {})
    assert max(held) <= -(-EXPERTS // ep) / EXPERTS / pp
    assert ranks("four", check_outputs, dequantized(source), source, sizes) == held
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_adapter(ranks, source, tmp_path):
    lora = write_adapter(tmp_path / "lora", dequantized(source), target_modules=["q_proj", "o_proj"])
    shardconv.split(source, tmp_path / "split", tp=2, ep=4, adapters=[lora])
    shardconv.split(lora, tmp_path / "alone", base=source, tp=2, ep=4)
    for name in ("split/adapters/lora", "alone"):
        ranks("four", check_outputs, dequantized(source), tmp_path / "split", {"adapter": tmp_path / name}, lora)


def test_split_for_vllm(ranks, source, tmp_path):
    shardconv.split(source, tmp_path / "split", tp=2, ep=4, engine="vllm")
    ranks("four", check_outputs, dequantized(source), tmp_path / "split", {})
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_an_interrupted_split_is_resumed(source, tmp_path, monkeypatch):
    for module in STRIPE_MODULES:
        monkeypatch.setattr(f"shardconv.checkpoint.{module}.STRIPE_BYTES", 4096)
    options = {"tp": 2, "ep": 4}
    shardconv.split(source, tmp_path / "all", **options)
    with failing_after(5), pytest.raises(OutputError, match="Input/output error"):
        shardconv.split(source, tmp_path / "resumed", resume=True, **options)
    assert shardconv.split(source, tmp_path / "resumed", resume=True, **options).resumed_bytes > 0
    assert contents(tmp_path / "resumed") == contents(tmp_path / "all")


def test_reshard(source, tmp_path):
    shardconv.split(source, tmp_path / "old", tp=2, ep=4)
    shardconv.reshard(tmp_path / "old", tmp_path / "new", tp=2, ep=1)
    shardconv.split(source, tmp_path / "direct", tp=2)
    assert contents(tmp_path / "new") == contents(tmp_path / "direct")


def test_run_compares_with_the_unsharded_model(source, tmp_path):
    check_run(source, tmp_path / "split", tp=2, ep=4)

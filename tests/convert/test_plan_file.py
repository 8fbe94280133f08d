"""Modules of the user without a config, converted by a plan file, compared with the unsharded ones."""

import copy
import re
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import shardconv
from shardconv.convert import model as conversion
from shardconv.distributed import Axis
from tests.support.comparison import check_gradients
from tests.support.ranks import on_ranks

UNITS = """
[units]
head   = { count = 8, size = 4 }
hidden = { count = 24 }
"""
RULES = """
[rules]
"layers.*.qkv"     = { style = "packed_colwise", segments = ["head", "head", "head"] }
"layers.*.o"       = { style = "rowwise", unit = "head" }
"layers.*.gate_up" = { style = "packed_colwise", segments = ["hidden", "hidden"] }
"layers.*.down"    = { style = "rowwise", unit = "hidden" }
"""
MODULES = '[modules]\n"layers.*" = { attributes = { num_heads = "head" } }\n'
PLAN_FILE = UNITS + RULES + MODULES


class Layer(nn.Module):
    """Attention with fused q, k and v, and a gated MLP with fused gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate_up, self.down = nn.Linear(32, 48), nn.Linear(24, 32)
        self.num_heads, self.num_steps, self.hidden = 8, 3, 24  # no code reads the last one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = map(self.by_head, self.qkv(x).chunk(3, -1))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        found: torch.Tensor = x + self.down(torch.tanh(gate) * up)
        return found / self.num_steps

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Net(nn.Module):
    """Two layers, without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


GROUPS = """
[units]
one    = { count = 4, size = 4 }
hidden = { count = 24 }
[rules]
"layers.*.qkv"     = { style = "packed_colwise", segments = ["one", "one", "one"], groups = 2 }
"layers.*.o"       = { style = "rowwise" }
"layers.*.gate_up" = { style = "packed_colwise", segments = ["hidden", "hidden"] }
"layers.*.down"    = { style = "rowwise", unit = "hidden" }
"""


class GroupedLayer(Layer):
    """Has the number of heads of each group, which is the same on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.num_heads, 4)).unbind(-3)
        return self.o((q * k * v).flatten(2))


class Grouped(Net):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GroupedLayer() for _ in range(2))
        for layer in self.layers:
            layer.num_heads = 4


class Channels(nn.Module):
    """A depthwise convolution between two layers, whose forward reads its number of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv = nn.Conv1d(16, 16, 3, groups=16, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2))


CHANNELS = """
[units]
channel = { count = 16 }
[rules]
"up"   = { style = "colwise", unit = "channel" }
"conv" = { style = "by_rows", unit = "channel" }
"down" = { style = "rowwise", unit = "channel" }
"""


class GatedMlp(nn.Module):
    """A fused projection without attention, for which it is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 32), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        half = both.shape[-1] // 2
        return self.down(nn.functional.silu(both[..., :half]) * both[..., half:])


GATED = """
[units]
hidden = { count = 16 }
[rules]
"gate_up" = { style = "packed_colwise", segments = ["hidden", "hidden"] }
"down" = { style = "rowwise", unit = "hidden" }
"""


class NanoAttention(nn.Module):
    """Fused projections, and reshapes by the width of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 8, 32
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()  # noqa: N806 - as the field has it
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (one.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for one in (q, k, v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(heads.transpose(1, 2).contiguous().view(B, T, C))


NANO = """
[rules]
"c_attn" = { style = "colwise_gather_output" }
"c_proj" = { style = "rowwise" }
"""
#: Modules of other structures, the width of their inputs, and their plan files.
CONVERTED = {
    "fused layers": (Net, 32, PLAN_FILE),
    "fused gated MLP": (GatedMlp, 32, GATED),
    "attention that reshapes to the width of its input": (NanoAttention, 32, NANO),
    "units that are counted per group": (Grouped, 32, GROUPS),
    "numbers of layers of torch": (Channels, 8, CHANNELS),
}


@pytest.fixture
def path(tmp_path, name):
    (tmp_path / "net.toml").write_text(CONVERTED[name][2])
    return tmp_path / "net.toml"


@pytest.mark.parametrize("name", CONVERTED)
@on_ranks("pair")
def test_module_without_a_config_is_converted_by_a_plan_file(axis, path, name):
    """Check outputs and gradients; a warning is an error."""
    kind, width, _ = CONVERTED[name]
    before, x = kind(), torch.randn(2, 5, width)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardconv.PlanWarning)
        after = shardconv.convert_model(copy.deepcopy(before), rules=path, group=axis)
    torch.testing.assert_close(after(x), before(x), atol=1e-6, rtol=1e-5)  # sums in another order
    before(x).square().sum().backward()
    after(x).square().sum().backward()
    check_gradients(before, after, axis)


def test_numbers_of_units_are_not_compared_on_one_rank(tmp_path):
    (tmp_path / "net.toml").write_text(UNITS + RULES)
    shardconv.convert_model(Net(), rules=tmp_path / "net.toml", group=Axis("tensor", 0, 1, (0,), None))


@pytest.mark.parametrize("inherits", ['inherits = "llama"\n', ""])
def test_rules_that_read_a_config_name_the_missing_field(tmp_path, inherits):
    (tmp_path / "net.toml").write_text(inherits + RULES.replace('"head"', '"query_head"') + "[units]\nhidden = {}\n")
    with pytest.raises(shardconv.PlanError, match=r"config field \w+ is missing: .* or set it in \[config\]"):
        shardconv.convert_model(Net(), rules=tmp_path / "net.toml", group=Axis("tensor", 0, 1, (0,), None))


CONFIG_RULES = """
[units]
hidden = { count = "width" }
[rules]
"up"   = { style = "colwise", unit = "hidden" }
"down" = { style = "rowwise", unit = "hidden" }
"""


class Frozen(dict):
    """A config that is a mapping, as in diffusers."""


class Unet(nn.Module):
    """A model of another library, which writes its state dict."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.up, self.down, self.config = nn.Linear(4, 8), nn.Linear(8, 4), config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), f"{folder}/model.pt")


@on_ranks("pair", plan=CONFIG_RULES)
def test_model_of_another_library(axis, path):
    """Check a config of each kind, forward, and that no shards are written, also of a model inside another one."""
    for config in (Frozen(width=8), SimpleNamespace(width=8)):
        torch.manual_seed(0)
        before, x = Unet(config), torch.randn(3, 4)
        after = shardconv.convert_model(copy.deepcopy(before), str(path), group=axis)
        assert after.up.out_features // axis.size == len(after.up.weight)
        torch.testing.assert_close(after(x), before(x), atol=1e-6, rtol=1e-5)  # a sum over ranks
        assert type(after) is Unet
    with pytest.raises(ValueError, match=r"^the model \(Unet\): save_pretrained would write the shards of one rank"):
        after.save_pretrained(path.parent)
    outer = nn.ModuleDict({"unet": Unet(None)})
    shardconv.convert_parallel_linear(nn.ModuleList([outer["unet"]]), -1, gather_output=True, group=axis)
    with pytest.raises(ValueError, match=r"^0 \(Unet\): save_pretrained would write"):
        copy.deepcopy(outer)["unet"].save_pretrained(path.parent)
    assert not list(path.parent.glob("*.pt"))
    with pytest.raises(shardconv.PlanError, match=r"^config field width is missing: set it in the config of the model"):
        shardconv.convert_model(Unet(Frozen()), str(path), group=axis)


class Mlps(nn.Module):
    """Four MLPs in two tensors, of which each token uses one; nothing in the name of the class says so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 24, 8)), nn.Parameter(torch.randn(4, 8, 24))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("ti,toi->to", x, self.up[numbers]).tanh()
        return torch.einsum("ti,toi->to", hidden, self.down[numbers])


MLPS = """
[units]
hidden = { count = 24 }
[rules]
"*.up" = { style = "colwise", unit = "hidden" }
"*.down" = { style = "rowwise", unit = "hidden" }
"""
#: The line that the error names.
ALL_REDUCED = '"mlps" = { allreduce_input_grad = true, allreduce_output = true }'


def check_mlps(axis, name, path):
    torch.manual_seed(0)
    before, x, numbers = nn.ModuleDict({name: Mlps()}), torch.randn(6, 8), torch.tensor([0, 3, 1, 1, 2, 0])
    after = shardconv.convert_model(copy.deepcopy(before), rules=path, group=axis)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    found, expected = (one[name](given, numbers) for one, given in zip((after, before), inputs, strict=True))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # sums of 24 products in another order
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=1e-5, rtol=1e-5)


@on_ranks("pair", plan=MLPS)
def test_modules_called_experts_are_packed_experts(axis, path):
    check_mlps(axis, "experts", path)


@on_ranks("pair", plan=f"{MLPS}[modules]\n{ALL_REDUCED}")
def test_own_row_parallel_matrices_with_an_override(axis, path):
    check_mlps(axis, "mlps", path)


@on_ranks("pair", plan=MLPS)
def test_own_row_parallel_matrices_need_an_override(axis, path):
    """Check that the output without one, the partial sum of each rank, is refused."""
    advice = f"mlps: a Mlps multiplies by shards of down, .* add {re.escape(ALL_REDUCED)} to "
    with pytest.raises(shardconv.PlanError, match=advice.replace('"', "'")):
        shardconv.convert_model(nn.ModuleDict({"mlps": Mlps()}), rules=path, group=axis)


@pytest.mark.parametrize(("package", "old"), [("torch", "2.11.0+cu130"), ("transformers", "4.57.3")])
def test_old_packages_are_refused(monkeypatch, tmp_path, package, old):
    found = {"torch": "2.12.0", "transformers": "5.10.1", package: old}
    needed = ["click>=8.2", 'torch>=2.12; extra == "torch"', 'transformers>=5.0; extra == "transformers"']
    monkeypatch.setattr(conversion, "version", found.__getitem__)
    monkeypatch.setattr(conversion, "_bounds", conversion._bounds.__wrapped__)
    monkeypatch.setattr(conversion, "requires", {"shardconv": needed}.__getitem__)
    monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
    (tmp_path / "net.toml").write_text(PLAN_FILE)
    with pytest.raises(shardconv.ShardconvError, match=rf"^{package} {re.escape(old)} is not supported \(expected "):
        shardconv.convert_model(Net(), str(tmp_path / "net.toml"), group=Axis("tensor", 0, 1, (0,), None))
    found[package] = "11.0rc1"
    conversion.check_versions()

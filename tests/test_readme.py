"""The README tells the truth about the families, and its conversions of a model run."""

import re
from pathlib import Path

import pytest

from tests.support.forked import run_python

README = Path(__file__).parent.parent / "README.md"


def test_the_summary_of_models_is_that_of_the_table():
    """Both are written by tools/model_matrix: neither was changed by hand, or alone."""
    summary = README.read_text("utf-8").partition("<!-- models -->\n")[2].partition("<!-- end of models -->")[0]
    assert summary in (README.parent / "docs" / "models.md").read_text("utf-8")
    assert summary.startswith("| models | types | right on 2 and 4 ranks |")


def run_with(word, more, tmp_path):
    """The README's Python with this word in it, and more behind it, on two ranks, as a user runs it; its output."""
    code = next(
        text for text in re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL) if word in text
    )
    script = tmp_path / "script.py"
    script.write_text(code + more)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run_python(*torchrun, script, cwd=README.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_is_left_to_fill_in():
    pages = [
        README,
        *README.parent.glob("docs/*.md"),
        README.parent / "CONTRIBUTING.md",
        README.parent / "CHANGELOG.md",
    ]
    assert [page.name for page in pages if "@@" in page.read_text("utf-8")] == []


@pytest.mark.parametrize("word", ["ModuleList", "LlamaPolicy"])
def test_the_conversions_in_the_readme(tmp_path, word):
    """Then the logits are those of the unsharded model, and so is the state dict."""
    more = """
import torch

ids = torch.arange(20).view(2, 10)
plain = AutoModelForCausalLM.from_pretrained("examples/demo-model").float()
with torch.no_grad():
    expected, found = plain(ids).logits, model.float()(ids).logits
assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()  # float32, sums over two ranks
state = shardconv.gather_state_dict(model)
assert list(state) == list(plain.state_dict())
assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
assert model.model.layers[0].mlp.up_proj.weight.shape[0] == plain.model.layers[0].mlp.up_proj.weight.shape[0] // 2
shardconv.destroy_parallel()
"""
    run_with(word, more, tmp_path)


def test_the_sharded_tensors_in_the_readme(tmp_path):
    more = """
whole = torch.arange(16.0).view(4, 4)
rank = groups.tensor.rank
assert torch.equal(x.to_local(), whole[2 * rank : 2 * rank + 2])
assert torch.equal(y.to_local(), whole[:, 2 * rank : 2 * rank + 2])
shardconv.destroy_parallel()
"""
    printed = run_with("plan_redistribution", more, tmp_path)
    assert printed.count("CommSpec") == 2
    assert printed.count("Cost(forward=") == 2

"""README.md and the pages in docs: their commands and Python run as printed, and their links and figures are valid."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import shardconv
from shardconv.plan.families.loading import parse_plan_file
from tests.support.forked import python_command
from tools.picture import PICTURE
from tools.picture import commands as pictured
from tools.plots import sections

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages whose code tests/test_coming_from.py runs.
TESTED_ELSEWHERE = {"coming-from.md"}
LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"))]

#: Languages of fenced blocks. All blocks of the first set are run, unless a comment before the block has the reason. A
#: block with the comment ``file: NAME`` is written to that file, for later blocks. The steps of a workflow are run.
RUN, NOT_RUN = {"console", "python", "yaml"}, {"json", "text", "toml"}
_FILE = "file: "
_FENCED = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)

#: Text of a Python block to the code appended to it, which checks the page's claims about its result.
CHECKS = {
    "convert_parallel_linear(ModuleList": "model",
    "rules=LlamaPolicy": "model",
    "tensor.plan_redistribution(": "tensors",
    "HuggingFaceStorageReader(": "dcp",
}
_MODEL = """
import torch

ids = torch.arange(20).view(2, 10)
unsharded = AutoModelForCausalLM.from_pretrained("demo-model").float()
with torch.no_grad():
    expected, found = unsharded(ids).logits, model.float()(ids).logits
assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()  # float32, sums over two ranks
state = shardconv.gather_state_dict(model)
assert list(state) == list(unsharded.state_dict())
assert all(torch.equal(state[name], tensor) for name, tensor in unsharded.state_dict().items())
assert model.model.layers[0].mlp.up_proj.weight.shape[0] == unsharded.model.layers[0].mlp.up_proj.weight.shape[0] // 2
shardconv.destroy_parallel()
"""
_TENSORS = """
full = torch.arange(16.0).view(4, 4)
rank = groups.tensor.rank
assert torch.equal(x.to_local(), full[2 * rank : 2 * rank + 2])
assert torch.equal(y.to_local(), full[:, 2 * rank : 2 * rank + 2])
shardconv.destroy_parallel()
"""
_DCP = """
import torch

expected = {name: parameter.clone() for name, parameter in unsharded.state_dict().items()}
for parameter in unsharded.state_dict().values():
    parameter.zero_()
dcp.load(unsharded.state_dict(), storage_reader=HuggingFaceStorageReader("demo-model-tp2"))
assert all(torch.equal(parameter, expected[name]) for name, parameter in unsharded.state_dict().items())
"""
_CODE = {"model": _MODEL, "tensors": _TENSORS, "dcp": _DCP}


class Block(NamedTuple):
    """A fenced block, and the comment before it."""

    comment: str
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.comment.startswith(("not run: ", _FILE))

    @property
    def file(self) -> str:
        """The name of the file that the page makes of it; empty for none."""
        return self.comment.removeprefix(_FILE) if self.comment.startswith(_FILE) else ""


def blocks(page: Path) -> list[Block]:
    found = _FENCED.finditer(page.read_text("utf-8"))
    return [Block(match["comment"] or "", match["language"], match["text"]) for match in found]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", page.read_text("utf-8"))


TO_RUN = [page for page in PAGES if page.name not in TESTED_ELSEWHERE and any(block.is_run for block in blocks(page))]


def by_name(page: Path) -> str:
    return page.name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TO_RUN, ids=by_name)
def test_code_of_a_page_runs(page, tmp_path):
    """All blocks in order, in one folder with the demo model; the output of commands is the printed one."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "demo-model").symlink_to(ROOT / "examples" / "demo-model")
    environment = command_environment(tmp_path / "bin")
    for number, block in enumerate(blocks(page)):
        if block.file:
            (home / block.file).write_text(block.text, "utf-8")
        if block.language == "yaml":
            for command in steps(block.text):
                check_command(command, "...", home, environment)
        elif block.is_run and block.language == "console":
            for command, expected in commands(block.text):
                check_command(command, expected, home, environment)
        elif block.is_run:
            check_python(block, home / f"block{number}.py", environment)


def command_environment(folder: Path) -> dict[str, str]:
    """An environment with the commands of this Python and this package, without GPUs."""
    folder.mkdir()
    for name, module in {"shardconv": "shardconv", "torchrun": "torch.distributed.run --standalone"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(python_command())} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    package = str(Path(shardconv.__file__).parents[1])
    return {**os.environ, "PATH": path, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with its printed output."""
    parts = re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block begins with a command: {text}"
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts[1:]]


def commands_of(block: Block) -> list[tuple[str, str]]:
    return commands(block.text) if block.language == "console" else []


def steps(workflow: str) -> list[str]:
    """The commands of a workflow, except those that install packages."""
    jobs = yaml.safe_load(workflow)["jobs"].values()
    found = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return [command for command in found if not command.startswith("pip install ")]


def check_command(command: str, expected: str, home: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        command, shell=True, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    fails = re.search(r"^shardconv: ", expected, re.MULTILINE) is not None
    assert (result.returncode != 0) is fails, f"{command}\n{result.stdout}"
    assert re.fullmatch(pattern(expected), stable(result.stdout)), f"{command}\n{result.stdout}\nexpected:\n{expected}"


def stable(text: str) -> str:
    """Output with the same spacing on all machines, and without figures that depend on the machine."""
    text = re.sub(r"(?m)^[\w-]+: .* left\n", "", text)  # progress after 10 seconds
    text = re.sub(r"(?m)[ \t]+", " ", text)
    text = re.sub(r"\d[\d.]* (?:s\b|[kMGT]?B/s|tokens/s)", "TIME", text)  # seconds and rates
    text = re.sub(r"(?<=peak memory per rank )[^\n]*", "MEMORY", text)
    text = re.sub(r"\d(?:\.\d)?e-\d\d", "ERROR", text)  # rounding errors
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def pattern(expected: str) -> str:
    """A regular expression of an expected output, in which ``...`` stands for any text, and options are data."""
    return "(?s)" + re.escape(stable(expected)).replace(r"\.\.\.", ".*")


def check_python(block: Block, script: Path, environment: dict[str, str]) -> None:
    checks = [code for text, code in CHECKS.items() if text in block.text]
    script.write_text(block.text + "".join(_CODE[code] for code in checks), "utf-8")
    ranks = re.fullmatch(r"run on (\d) ranks", block.comment)
    start = ["torchrun", "--nproc-per-node", ranks[1]] if ranks else python_command()
    result = subprocess.run(
        [*start, script.name], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("options", [{"tp": 3, "pad": True}, {"tp": 2, "pp": 2}], ids=str)
def test_reader_of_the_format(options, tmp_path, monkeypatch):
    """Stripes that begin inside a row, at the end of an interval, and in padding."""
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 5000)
    shardconv.split(ROOT / "examples" / "demo-model", tmp_path / "split", **options)
    reader = [sys.executable, ROOT / "examples" / "reader.py", "split"]
    subprocess.run(reader, cwd=tmp_path, check=True, timeout=200)
    source = ROOT / "examples" / "demo-model" / "model.safetensors"
    assert (tmp_path / source.name).read_bytes() == source.read_bytes()


def test_every_check_belongs_to_a_block():
    texts = [block.text for page in TO_RUN for block in blocks(page) if block.is_run]
    assert [text for text in CHECKS if sum(text in block for block in texts) != 1] == []


def test_the_plan_files_of_the_pages_are_valid():
    texts = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    units = [parse_plan_file("page.toml", text).units.keys() for text in texts]
    assert units == [
        set(),
        set(),
        {"head", "hidden"},
        set(),
        {"head", "hidden"},
        {"query_head", "kv_head"},
        {"head", "hidden"},
        {"qkv_of_head"},
        {"head"},
    ]


class Layer(nn.Module):
    """A layer of the second plan file of docs/plan-files.md."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)
        self.num_heads = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norm(x + self.o(heads.transpose(1, 2).flatten(2)))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model that no family serves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(99, 128), nn.Linear(128, 99)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def check_net(axis, source, split):
    unsharded, ids = Net(), torch.arange(10).view(2, 5)
    unsharded.load_state_dict(load_file(source))
    found = shardconv.load(split, model=Net, device="cpu", group=axis)(ids)
    torch.testing.assert_close(found, unsharded(ids), atol=1e-5, rtol=1e-5)


def test_the_plan_file_without_a_family_is_right(ranks, tmp_path):
    text = next(block.text for block in blocks(ROOT / "docs" / "plan-files.md") if "count = 512" in block.text)
    (tmp_path / "own.toml").write_text(text)
    save_file(Net().state_dict(), tmp_path / "net.safetensors")
    shardconv.split(tmp_path / "net.safetensors", tmp_path / "split", tp=2, rules=tmp_path / "own.toml")
    ranks("pair", check_net, tmp_path / "net.safetensors", tmp_path / "split")


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_block_is_run_or_has_a_reason(page):
    """Commands in blocks without a language, or in indented blocks, would not be run."""
    for block in blocks(page):
        assert block.language in RUN | NOT_RUN, block
        assert not block.comment or re.fullmatch(r"not run: .+|run on \d ranks|file: \S+", block.comment), block
    assert re.findall(r"\n\n    \S[^\n]*", prose(page)) == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=by_name)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"https?:", link):
            name, _, anchor = link.partition("#")
            target = (page.parent / name) if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)
    assert broken == []


def test_index_links_all_pages():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text("utf-8")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", text)


def test_figures_of_the_readme_are_measured():
    """Each is in the section of benchmarks/RESULTS.md that its command writes."""
    table = (ROOT / "README.md").read_text("utf-8").partition("## Measured")[2].partition("\n## ")[0]
    results = sections((ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8"))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    section, missing = "", []
    for what, measured, command in rows:
        section = command.partition("--only ")[2].partition(" ")[0] or section  # else "the same"
        missing += [(what, number) for number in numbers(measured) if number not in numbers(results[section])]
    assert len(rows) > 8
    assert missing == []


def shown_in_the_picture() -> str:
    """The text of docs/assets/demo.svg, line by line."""
    lines: dict[float, str] = {}
    for text in ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text"):
        if text.get("clip-path"):  # not the title
            lines[float(text.get("y"))] = lines.get(float(text.get("y")), "") + (text.text or "")
    return "\n".join(line.replace("\xa0", " ") for _, line in sorted(lines.items()))


def test_the_picture_is_current():
    """It shows the commands of the demo, and prints what the pages print, which is tested above; ``make picture``."""
    shown = " ".join(stable(shown_in_the_picture()).split())
    pages = (ROOT / "README.md", ROOT / "docs" / "tutorial.md")
    printed = {each for page in pages for block in blocks(page) if block.is_run for each in commands_of(block)}
    found = [(command, expected) for command, expected in printed if f"$ {command} " in shown]
    assert {command for command, _ in found} == {command for command in pictured() if command.startswith("shardconv")}
    for command, expected in found:
        assert re.search(pattern(f"$ {command}\n{expected}").replace("\\\n", r"\ "), shown), command


@pytest.mark.parametrize(("page", "lines"), [("README.md", 120), ("CHANGELOG.md", 60), ("ARCHITECTURE.md", 120)])
def test_page_is_short(page, lines):
    assert len((ROOT / page).read_text("utf-8").splitlines()) <= lines


def test_documentation_is_short():
    """The words of docs/, without pages and tables that tools write."""
    pages = {page.name: page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")}
    del pages["models.md"], pages["diffusion-models.md"]
    texts = [re.sub(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL) for text in pages.values()]
    assert sum(len(text.split()) for text in texts) <= 28_000


def test_summary_of_models_equals_that_of_the_table():
    """Both are written by tools/model_matrix; README.md has their sums."""
    page = (ROOT / "docs" / "concepts.md").read_text("utf-8")
    summary = page.partition("<!-- models -->\n")[2].partition("<!-- end of models -->")[0]
    assert summary in (ROOT / "docs" / "models.md").read_text("utf-8")
    assert summary.startswith("| task | types | passed at tp 2 and 4 |")
    rows = [line.split(" | ") for line in summary.splitlines()[2:]]
    types, right = (sum(int(row[column]) for row in rows) for column in (1, 2))
    claim = f"{right} of {types} (task, model type) pairs of transformers are correct at tp 2 and 4"
    assert claim in (ROOT / "README.md").read_text("utf-8")


def test_python_page_has_all_public_names():
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    pages = page + (ROOT / "docs" / "parallel-layers.md").read_text("utf-8")
    assert [name for name in shardconv.__all__ if not re.search(rf"`(shardconv\.)?{name}\b", pages)] == []

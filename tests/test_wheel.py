"""The wheel has all files, and its package splits and merges."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.checkpoints import contents, write_checkpoint

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of an unpacked wheel, built from a copy of the tree."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "shardconv", folder / "tree" / "shardconv", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    build = "from hatchling.build import build_wheel; print(build_wheel('..'))"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "tree", check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(folder / built.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_wheel_has_the_data_files(installed):
    assert (installed / "shardconv" / "py.typed").is_file()
    for data in ("plan/families", "plan/families/blocks"):
        own, files = (sorted((root / "shardconv" / data).glob("*.toml")) for root in (ROOT, installed))
        assert [path.read_text() for path in files] == [path.read_text() for path in own]
    assert (installed / "shardconv" / "layouts" / "vllm.toml").is_file()
    own, files = (sorted((root / "shardconv" / "html" / "assets").iterdir()) for root in (ROOT, installed))
    assert [(path.name, path.read_text()) for path in files] == [(path.name, path.read_text()) for path in own]


def test_version_is_that_of_the_citation(installed):
    (metadata,) = installed.glob("shardconv-*.dist-info/METADATA")
    version = re.search(r"^Version: (.*)$", metadata.read_text(), re.MULTILINE)
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_wheel_has_the_plugin_of_vllm(installed):
    """Its entry point can be imported without vLLM; only vLLM calls it."""
    (metadata,) = installed.glob("shardconv-*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nshardconv = shardconv.engines.vllm_plugin:register\n" in metadata.read_text()
    code = "import sys; from shardconv.engines.vllm_plugin import register; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(installed)}, check=True)


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, safetensors=None, transformers=None)
from shardconv.cli import main
main()
"""


def run_without_torch(installed, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], cwd=folder, env=environment, check=False, capture_output=True,
        text=True,
    )  # fmt: skip


def test_checkpoints_are_rewritten_without_torch(installed, tmp_path):
    source = write_checkpoint(tmp_path / "model", parts=2)
    commands = ("plan model", "split model --tp 2", "verify model-tp2 --against model --html v.html",
                "plan model --tp 2 --html p.html", "reshard model-tp2 --tp 1",
                "merge model-tp2")  # fmt: skip
    results = [run_without_torch(installed, tmp_path, *command.split()) for command in commands]
    assert [result.returncode for result in results] == [0] * 6, results
    assert {path.name for path in tmp_path.glob("*.html")} == {"v.html", "p.html"}
    assert contents(tmp_path / "model-merged") == contents(source)


def test_command_that_needs_torch_names_the_packages(installed, tmp_path):
    write_checkpoint(tmp_path / "model", parts=2)
    result = run_without_torch(installed, tmp_path, "plan", "model", "--prove")
    assert result.returncode == 1
    assert result.stderr == (
        "shardconv: this command needs torch, which is not installed: pip install 'safetensors>=0.8' 'torch>=2.12' "
        "'transformers>=5.5'\n"
    )

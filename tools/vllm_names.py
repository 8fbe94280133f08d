"""Record the tensors that vLLM holds on each rank, as expected values of tests.

    python -m tools.vllm_names --vllm PYTHON [TYPE ...]

PYTHON is the interpreter of an environment with vLLM; this tool runs in the project's environment. It writes small
checkpoints with transformers, whose values are the numbers of elements (``vllm_sources.py``); vLLM loads them on each
rank (``vllm_record.py``); the tensors are recorded in ``tests/data/vllm/VERSION.json``, one line per checkpoint.
With types, only their lines are replaced.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers

from tools.torchvision import declare_operators
from tools.vllm_compare import differences
from tools.vllm_sources import write_all

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "vllm"


def record_all(python: str, folders: Iterable[Path]) -> None:
    """Load each folder in vLLM; a crash of its process loses only the current folder."""
    left = list(folders)
    while left:
        command = [python, "-m", "tools.vllm_record", *map(str, left)]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        begun = [folder for folder in left if (folder / "started").exists()]
        if not begun:
            raise RuntimeError(f"{python} cannot run vLLM: {done.stderr[-2000:]}")
        left = [folder for folder in left if folder not in begun]
        last = begun[-1]
        if not (last / "record.json").exists():
            reason = "took too long" if "Timeout" in done.stderr else f"exit code {done.returncode}"
            (last / "record.json").write_text(json.dumps({"status": "not constructed", "reason": reason}))


def entry(folder: Path, model_type: str, served: Mapping[str, str]) -> dict[str, Any]:
    """The line of one checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0]
    found = json.loads((folder / "record.json").read_text())
    line = {"type": model_type, "architecture": architecture, "module": served[architecture], "status": found["status"]}
    if found["status"] != "loaded":
        return {**line, "reason": found["reason"]}
    shapes = json.loads((folder / "shapes.json").read_text())
    tensors = {name: _tensor(one) for name, one in sorted(found["tensors"].items())}
    made = dict(sorted(found["made"].items()))
    seen = {key: found[key] for key in ("unused", "refused", "kernels")}
    return {**line, **seen, "config": config, "sources": shapes, "made": made, "tensors": tensors}


def _tensor(found: Mapping[str, Any]) -> list[Any]:
    """[dtype, {tp: [shape, digest per rank, or one for all]}], with the value of a constant instead of digests."""
    if len(set(values := found["values"])) == 1 and values[0] != "loaded":
        return [found["dtype"], {tp: [shapes[0]] for tp, shapes in found["shapes"].items()}, values[0]]
    ranks = {}
    for tp, digests in found["digests"].items():
        if any(shape != found["shapes"][tp][0] for shape in found["shapes"][tp]):
            raise ValueError(f"ranks of tp {tp} hold different shapes: {found['shapes'][tp]}")
        ranks[tp] = [found["shapes"][tp][0], *(digests if len(set(digests)) > 1 else digests[:1])]
    return [found["dtype"], ranks]


def dump(fixture: Mapping[str, Any]) -> str:
    """JSON with a line for each checkpoint."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in fixture.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(fixture: Mapping[str, Any]) -> str:
    """The status of each checkpoint."""
    rows = [(name, line) for name, line in fixture.items() if "status" in line]
    return "\n".join(f"{name:28} {line['status']:20} {line.get('reason', '')}" for name, line in rows)


def run(python: str, home: Path, only: list[str]) -> dict[str, Any]:
    """Run all stages, with intermediate files in a folder."""
    about = home / "architectures.json"
    subprocess.run([python, "-m", "tools.vllm_record", "--architectures", str(about)], cwd=ROOT, check=True)
    known = json.loads(about.read_text())
    served = known["architectures"]
    fixture: dict[str, Any] = {"versions": {**known["versions"], "transformers of sources": transformers.__version__}}
    written: dict[str, str] = {}
    for name, model_type, error in write_all(home, served, only):
        fixture[name] = {"type": model_type, "status": "not written", "reason": error}
        if not error:
            written[name] = model_type
    record_all(python, [home / name for name in written])
    for name, model_type in written.items():
        fixture[name] = entry(home / name, model_type, served)
    return fixture


def write(fixture: Mapping[str, Any], *, only: bool) -> Path:
    """Write the file of vLLM's release; with ``only``, keep the other lines."""
    release = ".".join(fixture["versions"]["vllm"].split(".")[:2])
    target = DATA / f"{release}.json"
    old = json.loads(target.read_text()) if only and target.exists() else {}
    DATA.mkdir(parents=True, exist_ok=True)
    target.write_text(dump({**old, **fixture}))
    return target


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="Interpreter of an environment with vLLM.")
    parser.add_argument("--work", type=Path, metavar="DIR", help="Folder for intermediate files.")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="Model types or checkpoints to record again.")
    options = parser.parse_args()
    declare_operators()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="vllm-names-") as temporary:
        home = (options.work or Path(temporary)).absolute()
        home.mkdir(parents=True, exist_ok=True)
        fixture = run(options.vllm, home, options.types)
        target = write(fixture, only=bool(options.types))
        sys.stdout.write(f"{table(fixture)}\n\n{target}: {target.stat().st_size} bytes\n\n")
        sys.stdout.write("Elements that ranks of vLLM read, and ranks of shardconv do not hold:\n")
        for name, found in fixture.items():
            sys.stdout.writelines(f"{line}\n" for line in differences(home / name, name, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

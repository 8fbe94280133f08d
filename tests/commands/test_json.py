"""Output of every command with ``--json``: it conforms to its published schema in docs/schemas."""

import json
import subprocess
import sys

import jsonschema
import pytest

from tests.support.checkpoints import DEMO
from tests.support.command import ENVIRONMENT, Result, call
from tests.support.matrix import cases
from tools.json_schemas import FOLDER, schemas

#: Name of a schema to a command; ``HOME`` is a folder with a split checkpoint.
COMMANDS = {
    "split": "split DEMO --tp 2 -o HOME/new",
    "merge": "merge HOME/split -o HOME/merged",
    "reshard": "reshard HOME/split --tp 4 -o HOME/resharded",
    "verify": "verify HOME/split --against DEMO",
    "pad": "pad DEMO --multiple-of tp=1,vocab=64 -o HOME/padded",
    "unpad": "unpad HOME/of-pad -o HOME/unpadded",
    "plan": "plan DEMO --tp 2",
    "plan-list-families": "plan --list-families llama",
    "plan-prove": "plan DEMO --prove --tp 2",
    "plan-prove-pipeline": "plan HOME/pipeline --prove --tp 2 --component text_encoder_2",
    "plan-cost": "plan DEMO --cost --tp 2",
    "plan-cost-pipeline": "plan HOME/pipeline --cost --tp 2",
    "plan-propose": "plan DEMO --propose",
    "plan-measure-link": "plan --measure-link",
    "run": "run HOME/split --prompt An --device cpu --max-new-tokens 2",
    "run-pipeline": "run HOME/pipeline --tp 2 --prompt a --device cpu --steps 1 -o HOME/picture.png",
    "error": "plan DEMO --tp 3",
}


def under_torchrun(*words: str) -> Result:
    """Run a command in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardconv", *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    assert call("split", DEMO, "--tp", "2", "-o", folder / "split", "-q").code == 0
    assert call("pad", DEMO, "--multiple-of", "tp=1,vocab=64", "-o", folder / "of-pad", "-q").code == 0
    return folder


_WITH_MODEL = {
    "plan-prove", "plan-prove-pipeline", "plan-cost", "plan-cost-pipeline", "plan-propose", "plan-measure-link", "run",
    "run-pipeline",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(COMMANDS, lambda name: name not in _WITH_MODEL))
def test_output_conforms_to_its_schema(home, capfd, name):
    if name.endswith("-pipeline") and not (home / "pipeline").exists():
        from tests.support.diffusion import write_diffusion  # noqa: PLC0415 - imports diffusers, which takes seconds

        write_diffusion(home / "pipeline", "flux")
    words = [word.replace("HOME", str(home)).replace("DEMO", str(DEMO)) for word in COMMANDS[name].split()] + ["--json"]
    result = call(*words) if name != "plan-measure-link" else under_torchrun(*words)
    schema = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    output = result.out or capfd.readouterr().out  # rank 0 of a run is another process
    jsonschema.Draft202012Validator(schema).validate(json.loads(output))


def test_every_schema_has_a_command():
    assert COMMANDS.keys() == schemas().keys()


@pytest.mark.parametrize("name", schemas())
def test_published_schema_is_the_generated_one(name):
    """Otherwise run python -m tools.json_schemas."""
    assert json.loads((FOLDER / f"{name}.json").read_text("utf-8")) == schemas()[name]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["split", DEMO, "--tp", "two"], 2),
        (["split", DEMO, "--no-such-option"], 2),
        (["no-such-command"], 2),
        (["plan", "--cost"], 2),
        (["split", DEMO, "--tp", "2", "--layout", "nonsense"], 2),
        (["verify", "nowhere"], 1),
        (["merge", DEMO], 1),
    ],
    ids=str,
)
def test_every_error_is_an_object(arguments, code):
    """Also errors of wrong usage; the message is on stderr as well."""
    result = call(*arguments, "--json")
    error = json.loads(result.out)
    jsonschema.Draft202012Validator(schemas()["error"]).validate(error)
    assert (result.code, error["exit_code"]) == (code, code)
    assert result.err == f"shardconv: {error['error']}\n"

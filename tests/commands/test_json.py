"""Output of every command with ``--json``: it conforms to its published schema in docs/schemas."""

import json

import jsonschema
import pytest

from tests.support.checkpoints import DEMO
from tests.support.command import call
from tests.support.matrix import cases
from tools.json_schemas import FOLDER, schemas

#: Name of a schema to a command; ``{}`` is a folder with a split checkpoint.
COMMANDS = {
    "split": ["split", DEMO, "--tp", "2", "-o", "{}/new"],
    "merge": ["merge", "{}/split", "-o", "{}/merged"],
    "reshard": ["reshard", "{}/split", "--tp", "4", "-o", "{}/resharded"],
    "verify": ["verify", "{}/split", "--against", DEMO],
    "pad": ["pad", DEMO, "--multiple-of", "tp=1,vocab=64", "-o", "{}/padded"],
    "unpad": ["unpad", "{}/of-pad", "-o", "{}/unpadded"],
    "plan": ["plan", DEMO, "--tp", "2"],
    "plan-list-families": ["plan", "--list-families", "llama"],
    "plan-prove": ["plan", DEMO, "--prove", "--tp", "2"],
    "plan-cost": ["plan", DEMO, "--cost", "--tp", "2"],
    "run": ["run", "{}/split", "--prompt", "An", "--device", "cpu", "--max-new-tokens", "2"],
    "error": ["plan", DEMO, "--tp", "3"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    assert call("split", DEMO, "--tp", "2", "-o", folder / "split", "-q").code == 0
    assert call("pad", DEMO, "--multiple-of", "tp=1,vocab=64", "-o", folder / "of-pad", "-q").code == 0
    return folder


@pytest.mark.parametrize("name", cases(COMMANDS, lambda name: name not in {"plan-prove", "plan-cost", "run"}))
def test_output_conforms_to_its_schema(home, capfd, name):
    result = call(*(str(word).replace("{}", str(home)) for word in COMMANDS[name]), "--json")
    schema = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    output = result.out or capfd.readouterr().out  # rank 0 of a run is another process
    jsonschema.Draft202012Validator(schema).validate(json.loads(output))


def test_every_schema_has_a_command():
    assert COMMANDS.keys() == schemas().keys()


@pytest.mark.parametrize("name", schemas())
def test_published_schema_is_the_generated_one(name):
    """Otherwise run python -m tools.json_schemas."""
    assert json.loads((FOLDER / f"{name}.json").read_text("utf-8")) == schemas()[name]

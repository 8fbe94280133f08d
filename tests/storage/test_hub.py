"""Models on the Hub, emulated on loopback: names, revisions and tokens; files come from another host, as on the Hub."""

import json
from collections.abc import Iterator

import huggingface_hub
import pytest

import shardconv
from shardconv.files.storage import folders
from shardconv.support.errors import UsageError
from tests.support.checkpoints import contents, write_checkpoint
from tests.support.command import call, run
from tests.support.hub import COMMIT, OTHER, TOKEN, Hub, serve_hub
from tests.support.web_server import Answer


@pytest.fixture
def hub(made, monkeypatch) -> Iterator[Hub]:
    with serve_hub(contents(made / "model")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_split_writes_the_bytes_of_a_local_split(made, hub, tmp_path):
    shardconv.split("hf://org/model", tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(made / "split")


def test_plan_reads_headers_only(hub):
    shardconv.report_plan("hf://org/model@v1.0", tp=2)
    weights = [request for request in hub.server.log if request.path.endswith(".safetensors")]
    assert sum(request.sent for request in weights) < 4000
    assert not any(request.path.endswith("tokenizer.json") for request in hub.server.log)


def test_a_revision_is_read(made, hub, tmp_path):
    other = contents(write_checkpoint(tmp_path / "other", seed=5))
    hub.commits[OTHER] = other
    expected = shardconv.report_plan(tmp_path / "other", tp=2)
    for revision in ("refs/pr/3", "refs%2Fpr%2F3"):
        assert shardconv.report_plan(f"hf://org/model@{revision}", tp=2).tensors == expected.tensors


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("hf://org/model@v1.0", "", "model"),
        ("hf://org/model@refs/pr/3", "", "model"),
        ("hf://org/model@refs%2Fpr%2F3", "", "model"),
        ("hf://org/model@refs/pr/3/sub@2", "sub@2/", "sub@2"),
    ],
)
def test_results_are_named_by_the_model_or_the_folder_in_it(made, hub, tmp_path, monkeypatch, url, folder, name):
    hub.commits[OTHER] = {f"{folder}{each}": data for each, data in contents(made / "model").items()}
    monkeypatch.chdir(tmp_path)
    result = call("split", url, "--tp", "2")
    assert result.code == 0, result.err
    assert json.loads((tmp_path / f"{name}-tp2" / "shardconv.json").read_text())["source_name"] == name


def test_a_branch_that_moves_does_not_mix_commits(made, hub, tmp_path):
    def move(path: str) -> None:
        hub.revisions["main"] = OTHER

    hub.server.fault = move
    shardconv.split("hf://org/model@main", tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(made / "split")


def test_the_token_is_sent_to_the_hub_only(hub):
    shardconv.report_plan("hf://org/private")
    sent = {request.path.startswith("/store/"): request.headers.get("authorization") for request in hub.server.log}
    assert sent == {False: f"Bearer {TOKEN}", True: None}


def test_no_token_is_sent_if_that_is_disabled(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    shardconv.report_plan("hf://org/model")
    assert {request.headers.get("authorization") for request in hub.server.log} == {None}


def test_the_token_is_not_in_results(hub, tmp_path):
    result = call("split", "hf://org/private", "--tp", "2", "-o", tmp_path / "out", "--json")
    assert result.code == 0
    assert TOKEN not in result.out + result.err
    assert TOKEN not in (tmp_path / "out" / "shardconv.json").read_text()


def test_a_file_of_a_model_is_a_source(hub, made):
    hub.commits[COMMIT]["sub/one.safetensors"] = contents(made / "model")["model-00001-of-00002.safetensors"]
    hub.commits[COMMIT]["sub/config.json"] = contents(made / "model")["config.json"]
    assert shardconv.report_plan("hf://org/model@main/sub/one.safetensors").family == "llama"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://org/none", "does not exist, or is private: correct the name, or set HF_TOKEN"),
        ("hf://org/model@v9", "does not have the revision v9"),
        ("hf://org/gated", "access is restricted: accept its terms on the Hub"),
        ("hf://org/model/sub", "does not exist"),
    ],
)
def test_models_that_cannot_be_read_are_one_error(hub, url, message):
    result = call("plan", url)
    assert result.code == 1
    assert result.err.startswith(f"shardconv: {url}: {message}")
    assert result.err.count("\n") == 1


def test_a_wrong_token_is_named(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    denied = "access is denied (status 401): the server refused the credentials of HF_TOKEN: correct them"
    assert call("plan", "hf://org/model").err.startswith(f"shardconv: hf://org/model: {denied}")


@pytest.mark.parametrize(
    ("status", "remedy"), [(400, "correct the URL"), (429, "run the command again later"), (503, "run the command")]
)
def test_remedy_for_the_status_of_the_hub(hub, monkeypatch, status, remedy):
    monkeypatch.setattr(hub.server, "route", lambda *_: Answer(status))
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    answered = f"cannot be read: the server answered with status {status}: {remedy}"
    assert call("plan", "hf://org/model").err.startswith(f"shardconv: hf://org/model: {answered}")


@pytest.mark.parametrize("url", ["hf://model", "hf://datasets/org/model", "hf://org@x/model"])
def test_urls_that_are_no_models_are_usage_errors(hub, url):
    with pytest.raises(UsageError):
        shardconv.report_plan(url)


@pytest.mark.parametrize(
    ("endpoint", "remedy"),
    [
        ("", "check the network, set HTTPS_PROXY for a proxy or HF_ENDPOINT for a mirror, or pass a downloaded folder"),
        ("http://127.0.0.1:9", "correct HF_ENDPOINT, or start its server"),
    ],
)
def test_remedy_for_a_hub_that_cannot_be_reached(monkeypatch, endpoint, remedy):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    reason = folders._hub_reason(ConnectionError(), None)
    assert reason == f"cannot be read: the Hub cannot be reached (ConnectionError): {remedy}"


def test_without_an_endpoint_the_hub_itself_is_asked():
    """In a new process, which has not imported anything of huggingface_hub; offline, so that it asks nothing."""
    result = run("plan", "hf://org/model", env={"HF_HUB_OFFLINE": "1"})
    assert (result.code, result.err) == (1, "shardconv: hf://org/model: HF_HUB_OFFLINE is set: unset it\n")

"""Paths of users: URLs are refused where only local paths can be used, and names on the Hugging Face Hub."""

import json
import re
from pathlib import Path

import pytest

import shardconv
from shardconv.files.paths import local_path
from shardconv.support.errors import UsageError
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.command import call, finish, start
from tests.support.matrix import each_once, needs_torch

URLS = {
    "s3://bucket/out": "aws s3 cp --recursive",
    "gs://bucket/out": "gcloud storage cp --recursive",
    "hf://org/model": "hf download org/model --local-dir model",
    "hf://org/model/sub/folder": "hf download org/model --local-dir model",
    "https://huggingface.co/org/model/tree/main": "hf download org/model --local-dir model",
    "https://example.com/model": "Download it to a local folder first",
    "file:///data/model": "is a URL (expected a local path)",
    "S3://bucket/out": "aws s3 cp --recursive",
}
PATHS = (
    "model", "a/b", "/a/b", "./a:b", "a:b", "c:/model", "C:\\model", "C:model", "~/x", "a b/c:/d", ".", "..", "a//b",
    "./s3//bucket",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "tiny", config=llama_config(layers=1))
    shardconv.split(folder / "tiny", folder / "tiny-tp2", tp=2)
    return folder


@pytest.mark.parametrize("given", [str, Path], ids=["str", "Path"])
@pytest.mark.parametrize("url", URLS)
def test_urls_are_refused_with_a_download_command(url, given):
    with pytest.raises(UsageError) as caught:
        local_path(given(url))
    assert str(caught.value).startswith(f"{url}: " if not url.startswith("file") else "file://")
    assert URLS[url] in str(caught.value)


def test_plan_file_that_does_not_exist(made, tmp_path):
    (tmp_path / "own.toml").touch()
    result = call("plan", made / "tiny", "--rules", tmp_path / "ownn.toml")
    similar = tmp_path / "own.toml"
    assert result.err == f"shardconv: {tmp_path / 'ownn.toml'}: does not exist (similar: {similar}): correct the path\n"


@pytest.mark.parametrize("path", PATHS)
def test_local_paths_are_accepted(path):
    assert local_path(path) == local_path(Path(path)) == Path(path)


S3 = "s3://bucket/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["split", "{tiny}", "--tp", "2", "--rules", S3],
        ["split", "{tiny}", "--tp", "2", "--config", S3],
        ["split", "{tiny}", "--tp", "2", "--adapter", S3],
        ["plan", "{tiny}", "--rules", S3],
        ["plan", "{tiny}", "--config", S3],
        ["run", "{tiny}-tp2", "--prompt", "x", "--check", S3],
    ],
    ids=" ".join,
)
def test_commands_refuse_urls_that_they_cannot_use(made, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = call(*(argument.format(tiny=made / "tiny") for argument in arguments), "--json")
    assert result.code == 2
    assert json.loads(result.out)["error"].startswith(f"{S3}: is a URL (expected a local path)")
    assert contents(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["plan"], ["merge"], ["verify", "{tiny}-tp2", "--against"]], ids=" ".join)
def test_names_of_the_hub_are_explained(made, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = call(*(word.format(tiny=made / "tiny") for word in words), "org/My.Model-7b")
    assert result.code == 1
    assert "org/My.Model-7b: " in result.err
    assert (
        "on the Hugging Face Hub, pass hf://org/My.Model-7b, or download it first: "
        "hf download org/My.Model-7b --local-dir My.Model-7b" in result.err
    )


@pytest.mark.parametrize("path", ["model", "a/b/c", "/a/b", "../a", "a/model.safetensors", "a/config.json"])
def test_other_paths_are_not_taken_for_names_of_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    result = call("plan", path)
    assert result.code == 1
    assert "Hub" not in result.err


# --- paths that do not exist ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("split", "tiyn", "--tp", "2"), ("plan", "tiyn"), ("run", "tiyn", "--tp", "2"),
        ("split", "tiny", "--adapter", "tiyn", "--tp", "2"), ("verify", "tiny-tp2", "--against", "tiyn"),
        pytest.param(("run", "tiny-tp2", "--token-ids", "1", "--check", "tiyn"), marks=needs_torch),
    ],
)  # fmt: skip
def test_similar_path_is_suggested_for_one_that_does_not_exist(made, arguments):
    result = call(*(made / one if one.startswith("ti") else one for one in arguments))
    assert result.code == 1
    assert result.err.endswith(f"{made / 'tiyn'}: does not exist (similar: {made / 'tiny'}): correct the path\n")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("host0/x-tp4,host1/x-tp4", "several folders are separated by spaces: pass each as its own argument"),
        ("host*/x-tp4", "the shell expands patterns without quotes: remove the quotes, or correct the pattern"),
    ],
)
def test_several_folders_in_one_argument_are_explained(tmp_path, monkeypatch, given, remedy):
    for host in ("host0", "host1"):
        (tmp_path / host / "x-tp4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = call("merge", given)
    assert (result.code, result.err) == (1, f"shardconv: {given}: does not exist: {remedy}\n")


def test_no_path_is_suggested_where_nothing_is_similar(made):
    assert call("plan", made / "mistral").err == f"shardconv: {made / 'mistral'}: does not exist: correct the path\n"


def test_exchanged_arguments_of_verify_are_named(made):
    result = call("verify", made / "tiny", "--against", made / "tiny-tp2")
    assert result.code == 2
    assert result.err.endswith(f"exchange the two (shardconv verify {made / 'tiny-tp2'} --against {made / 'tiny'})\n")


def test_similar_path_is_suggested_before_the_hub(made, monkeypatch):
    monkeypatch.chdir(made.parent)
    assert f"(similar: {made.name}/tiny)" in call("plan", f"{made.name}/tiyn").err
    assert f"hf://{made.name}/mistral" in call("plan", f"{made.name}/mistral").err


# --- unfinished runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def killed(made, tmp_path) -> Path:
    """The destination of a split that was killed."""
    target = tmp_path / "tiny-tp2"
    code = (
        "import os; from shardconv.checkpoint.engine.copy import CopyJob; CopyJob.copy_stripe = lambda *_: os._exit(9)"
    )
    assert finish(start("split", made / "tiny", "--tp", 2, "-o", target, patch=code)).code == 9
    return target


@pytest.mark.parametrize(
    ("command", "path"),
    each_once([["verify"], ["merge"], ["plan"], ["split", "--tp", "2"], ["run", "--token-ids", "1"]], ["", "result"]),
)
def test_staging_folder_of_an_unfinished_run_is_explained(killed, command, path):
    folder = killed.parent / ".tiny-tp2.partial"
    assert call(command[0], folder / path, *command[1:]).err == (
        f"shardconv: {folder / path}: holds the files of an unfinished run for {killed}: wait until it "
        f"finishes, or if it was killed, run its command again with --resume, or remove {folder}\n"
    )


def test_destination_of_an_unfinished_run_is_explained(made, killed):
    result = call("verify", killed)
    assert result.err == (
        f"shardconv: {killed}: does not exist (a run has not finished writing it): wait until it finishes, or if "
        f"it was killed, run its command again with --resume, or remove {killed.parent / '.tiny-tp2.partial'}\n"
    )
    assert call("split", made / "tiny", "--tp", 2, "-o", killed, "--resume").code == 0
    assert call("verify", killed).code == 0


# --- URLs without their colon ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3//bucket/x", "s3://bucket/x"),
        ("gs//bucket", "gs://bucket"),
        ("hf//org/model", "hf://org/model"),
        ("https//user:secret@host/x?signature=secret", "https://host/x"),
    ],
)
def test_url_without_its_colon_is_refused(path, url):
    with pytest.raises(UsageError, match=f"is not a URL .did you mean {re.escape(url)}\\?.: add the colon") as caught:
        local_path(path)
    assert "secret" not in str(caught.value)

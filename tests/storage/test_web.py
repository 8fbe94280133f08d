"""Checkpoints on web servers: what is read, what is refused, and what is not shown."""

import json
import re
import sys
import tempfile

import pytest

import shardconv
from shardconv.files.storage.url import parse
from shardconv.support.errors import SourceError, UsageError
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.faults import failing_after
from tests.support.s3_server import environment
from tests.support.web_server import HEADER_REQUESTS, WebServer, num_requests

INDEX = "model.safetensors.index.json"
FILE = "model-00001-of-00002.safetensors"
SECRETS = ("the-user", "the-password", "the-signature")


def test_split_writes_the_bytes_of_a_local_split(made, web, tmp_path):
    shardconv.split(f"{web.url}/model/{INDEX}", tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(made / "split")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("tag", "v1", "v2"), ("changed", "Thu, 01 Jan 2026 00:00:00 GMT", "Thu, 01 Jan 2026 00:00:01 GMT")],
)
def test_an_interrupted_split_is_resumed_unless_the_file_changed(made, web, tmp_path, monkeypatch, name, first, second):
    """By its ETag, or else by the time of its last change."""
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 4096)
    shardconv.split(made / "model", tmp_path / "expected", tp=2)
    web.tag = ""
    setattr(web, name, first)
    arguments = ["split", f"{web.url}/model/{INDEX}", "--tp", "2", "-o", tmp_path / "out", "--resume"]
    with failing_after(3):
        assert "finished stripes are kept" in call(*arguments, "--threads", "1").err
    setattr(web, name, second)
    assert f"{web.url}/model/{FILE} is not as in the interrupted run" in call(*arguments).err
    setattr(web, name, first)
    assert json.loads(call(*arguments, "--json").out)["resumed_bytes"] > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_server_without_versions_is_not_resumed(web, tmp_path):
    """The other stripes could be of another file with the same size and header."""
    web.tag = ""
    arguments = ["split", f"{web.url}/model/{INDEX}", "--tp", "2", "-o", tmp_path / "out"]
    result = call(*arguments, "--resume")
    assert result.code == 2
    assert result.err.startswith(f"shardconv: {web.url}/model/{FILE}: its server sends neither an ETag nor ")
    assert list(tmp_path.iterdir()) == []
    assert call(*arguments).code == 0


def test_plan_of_a_file_uses_the_config_next_to_it(made, web):
    web.files["/one/weights.safetensors"] = web.files[f"/model/{FILE}"]
    web.files["/one/config.json"] = web.files["/model/config.json"]
    assert shardconv.report_plan(f"{web.url}/one/weights.safetensors").family == "llama"


def test_a_server_without_ranges_is_refused(web, tmp_path):
    web.has_ranges = False
    result = call("split", f"{web.url}/model/{INDEX}", "--tp", "2", "-o", tmp_path / "out")
    assert result.code == 1
    assert "the server does not support ranges of bytes: download the checkpoint" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("{web}/model", "pass the URL of a weight file or an index"),
        ("https://huggingface.co/org/model/tree/main", "pass the URL of hf://org/model"),
    ],
)
def test_a_folder_of_a_web_server_is_explained(web, url, remedy):
    with pytest.raises(UsageError, match=f"web servers do not list folders: {remedy}"):
        shardconv.report_plan(url.format(web=web.url))


# --- changes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["v1", ""], ids=["with a tag", "without a tag"])
def test_a_file_that_changes_is_an_error(web, tmp_path, tag):
    web.tag = tag
    path = f"/model/{FILE}"

    def change(requested: str) -> None:
        if requested == path and num_requests(web, path) == HEADER_REQUESTS:
            web.files[path] += b"" if tag else b"x"
            web.tag = "v2" if tag else ""

    web.fault = change
    with pytest.raises(SourceError, match="changed while it was read"):
        shardconv.split(f"{web.url}/model/{INDEX}", tmp_path / "out", tp=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_is_one_error(web, tmp_path):
    path = f"/model/{FILE}"
    web.fault = lambda requested: "404" if num_requests(web, path) >= HEADER_REQUESTS and requested == path else None
    result = call("split", f"{web.url}/model/{INDEX}", "--tp", "2", "-o", tmp_path / "out")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "does not exist" in result.err
    assert list(tmp_path.iterdir()) == []


# --- secrets --------------------------------------------------------------------------------------------------------


def signed(web: WebServer, path: str) -> str:
    return f"{web.url.replace('://', '://the-user:the-password@')}/{path}?signature=the-signature"


def is_shown(text: str) -> bool:
    return any(secret in text for secret in SECRETS)


def test_secrets_of_a_url_are_sent(web):
    shardconv.report_plan(signed(web, f"model/{INDEX}"))
    assert {request.query for request in web.log} == {"signature=the-signature"}
    assert all(request.headers["authorization"].startswith("Basic ") for request in web.log)


def test_secrets_of_a_url_are_not_in_results(web, tmp_path):
    url = signed(web, f"model/{INDEX}")
    plan = call("plan", url, "--tp", "2", "--json")
    assert json.loads(plan.out)["source"].startswith(f"{web.url}/model")
    split = call("split", url, "--tp", "2", "-o", tmp_path / "out", "--json")
    verify = call("verify", tmp_path / "out", "--against", url)
    assert (plan.code, split.code, verify.code) == (0, 0, 0)
    assert not any(is_shown(one.out + one.err) for one in (plan, split, verify))
    assert not is_shown((tmp_path / "out" / "shardconv.json").read_text())


@pytest.mark.parametrize("status", ["401", "403", "404", "400"])
def test_secrets_of_a_url_are_not_in_errors(web, status):
    web.fault = lambda path: status if path.endswith(".safetensors") else None
    result = call("plan", signed(web, f"model/{FILE.replace('-00001-of-00002', '')}"))
    assert result.code == 1
    assert not is_shown(result.out + result.err)


@pytest.mark.parametrize("arguments", [["split", ".", "--tp", "2", "-o"], ["run", "--prompt", "x"], ["plan"]])
def test_secrets_are_not_shown_where_urls_are_refused(arguments):
    if arguments[0] == "run":
        pytest.importorskip("torch")
    result = call(*arguments, "https://the-user:the-password@host/model?signature=the-signature")
    assert result.code == 2
    assert not is_shown(result.out + result.err)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "has an unknown scheme"),
        ("https://", "is not complete"),
        ("s3:///x", "is not complete"),
        ("hf://user:hf_SECRET@org/model", "hf://org/model: has credentials"),
        ("hf://user:hf_SECRET@org/model@main", "hf://...: has credentials"),
        ("hf://hf_SECRET@org/model", "hf://org/model: has credentials"),
        ("https://user:pa/SECRET@host/m.safetensors", "https://...@host: has / ? # or @ in the password"),
        ("https://user:pa?SECRET@host/m.safetensors", "https://...@host: has / ? # or @ in the password"),
        ("https://user:pa#SECRET@host:80/m.safetensors", "https://...@host:80: has / ? # or @ in the password"),
        ("https://user:p@a/SECRET@host/m.safetensors", "https://...: has / ? # or @ in the password"),
        ("https://user:SECRET@ho\u2100st/m.safetensors", "is not a valid URL"),
        ("s3://key:pa/SECRET@bucket/x", "s3://...@bucket: has credentials"),
        ("s3://bucket/key?X-Amz-Signature=SECRET", "s3://bucket/key: has a query (expected only a bucket and a key)"),
        ("az://container/key?sv=1&sig=SECRET", "presigned URLs are https://"),
    ],
)
@pytest.mark.parametrize("given", ["source", "output"])
def test_secrets_of_urls_that_are_not_valid_are_not_shown(tmp_path, url, message, given):
    result = call("plan", url) if given == "source" else call("split", tmp_path, "--tp", "2", "-o", url)
    assert result.code == 2
    assert "SECRET" not in result.out + result.err
    assert given == "output" or message in result.err


@pytest.mark.parametrize(
    "url",
    ["https://host:8080/org/m@main/x.safetensors", "https://[::1]:80/m@main", "https://user:pw@host/x", "hf://a/b@c"],
)
def test_an_at_sign_in_a_path_is_not_the_end_of_a_password(url):
    assert parse(url).path == url.partition("://")[2].partition("/")[2]


@pytest.mark.parametrize("has_keys", [False, True])
def test_access_that_is_denied_is_one_error_with_the_remedy(web, monkeypatch, has_keys):
    """Credentials that the server refuses are named, without their values."""
    environment(monkeypatch, web.url)
    web.fault = lambda path: "403"
    remedy = "the server refused the credentials of AWS_ACCESS_KEY_ID"
    if not has_keys:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        remedy = "set AWS_ACCESS_KEY_ID"
    result = call("plan", "s3://bucket/model")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert f"s3://bucket/model: access is denied (status 403): {remedy}" in result.err
    assert "test-key" not in result.err
    assert "test-secret" not in result.err


def test_a_plan_makes_no_temporary_files(web, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shardconv.report_plan(f"{web.url}/model/{INDEX}")
    with pytest.raises(SourceError):
        shardconv.report_plan(f"{web.url}/model/none.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["plan", "s3://bucket/x"], ["split", "{made}/model", "--tp", "2", "-o", "s3://b/x"]]
)
def test_a_missing_package_is_named(made, monkeypatch, arguments):
    """It is not wrong usage."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    result = call(*(argument.format(made=made) for argument in arguments))
    assert result.code == 1
    install = "pip install 'huggingface-hub>=1.0' 'obstore>=0.11'"
    assert re.fullmatch(rf"shardconv: URLs require obstore .*: {install}\n", result.err)

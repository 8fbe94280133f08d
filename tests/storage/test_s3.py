"""Checkpoints in S3, on a real S3 server on loopback: every command gives what it gives for the local folder."""

import json
import os
import socket

import boto3
import pytest

import shardconv
from shardconv.files.paths import open_path
from shardconv.files.storage import stores
from shardconv.hf.tokenizer import load_tokenizer
from shardconv.support.errors import IntegrityError, RunError, SourceError, SplitCheckpointError
from tests.support.checkpoints import contents, llama_config, llama_specs, write_checkpoint, write_weights
from tests.support.command import call
from tests.support.gptq import write_gptq
from tests.support.s3_server import S3Server, serve_s3, upload

LISTING_BYTES = 2000


@pytest.fixture(scope="module")
def s3(made) -> S3Server:
    with serve_s3("bucket") as server:
        upload(made / "model", "bucket", "models/model")
        upload(made / "split", "bucket", "split")
        yield server


def test_split_writes_the_bytes_of_a_local_split(made, s3, tmp_path):
    """And fetches each byte once."""
    before = s3.num_sent
    shardconv.split("s3://bucket/models/model", tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(made / "split")
    assert s3.num_sent - before <= 1.02 * sum(map(len, contents(made / "model").values())) + LISTING_BYTES


def test_verify_compares_with_a_remote_source(made, s3):
    report = shardconv.verify(made / "split", against="s3://bucket/models/model")
    assert report.is_compared
    assert report.differences == ()
    assert report.against == "s3://bucket/models/model"


def test_merge_fetches_tensors_that_alternate_in_a_file_once(s3, tmp_path):
    """vLLM concatenates layers of AWQ along the columns, so that the ranges of their rows overlap."""
    sizes = {"hidden": 256, "heads": 8, "kv_heads": 8, "intermediate": 512}
    source = write_gptq(tmp_path / "awq", bits=4, group=32, version="awq", **sizes)
    shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    upload(tmp_path / "split", "bucket", "awq")
    before = s3.num_sent
    shardconv.merge("s3://bucket/awq", tmp_path / "merged")
    assert s3.num_sent - before <= 1.02 * sum(map(len, contents(tmp_path / "split").values())) + LISTING_BYTES
    assert contents(tmp_path / "merged") == contents(source)


def test_some_ranks_of_a_remote_source(made, s3, tmp_path):
    """Folders with some of the ranks may be remote, too."""
    for rank in range(2):
        shardconv.split("s3://bucket/models/model", tmp_path / f"host{rank}", tp=2, ranks=rank)
    shardconv.split(made / "model", tmp_path / "local", tp=2, ranks=0)
    assert contents(tmp_path / "host0") == contents(tmp_path / "local")
    upload(tmp_path / "host1", "bucket", "host1")
    shardconv.merge([tmp_path / "host0", "s3://bucket/host1"], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(made / "model")


@pytest.mark.parametrize(
    ("fault", "message"), [("403", "access is denied"), ("cut", "the connection .* was lost|the request failed")]
)
@pytest.mark.usefixtures("_fast_retries")
def test_rank_files_that_cannot_be_read_are_not_damaged(s3, monkeypatch, fault, message):
    monkeypatch.setattr(s3, "fault", lambda _method, path, _query: fault if "/rank-1" in path else None)
    with pytest.raises(SplitCheckpointError, match=message) as caught:
        shardconv.verify("s3://bucket/split")
    assert not isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize(("fault", "error"), [("403", SourceError), (None, RunError)])
def test_a_tokenizer_that_cannot_be_read_is_not_damaged(s3, tmp_path, monkeypatch, fault, error):
    (tmp_path / "tokenizer.json").write_text("{")
    upload(tmp_path, "bucket", "tokenizer")
    folder = open_path("s3://bucket/tokenizer")
    monkeypatch.setattr(s3, "fault", lambda _method, path, _query: fault if "tokenizer.json" in path else None)
    with pytest.raises(error, match=r"access is denied|the tokenizer cannot be loaded \(got .*\): copy"):
        load_tokenizer(folder, is_trusted=False)


def test_commands_read_a_remote_split(made, s3, tmp_path):
    """The plan is that in its manifest."""
    shardconv.merge("s3://bucket/split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(made / "model")
    shardconv.reshard("s3://bucket/split", tmp_path / "remote", tp=4)
    shardconv.reshard(made / "split", tmp_path / "local", tp=4)
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    remote, local = shardconv.report_plan("s3://bucket/split"), shardconv.report_plan(made / "split")
    assert (remote.tensors, remote.source) == (local.tensors, "s3://bucket/split")


NO_BUCKET = "its bucket or container does not exist: correct its name, or the endpoint"
ONLY = "does not exist, but its bucket or container does: correct the name of the"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/none", f"{ONLY} folder"),
        ("s3://bucket/models/model/none.safetensors", f"{ONLY} file"),
        ("s3://no-bucket/x", NO_BUCKET),
        ("s3://no-bucket/x.safetensors", NO_BUCKET),
        ("s3://no-bucket", NO_BUCKET),
    ],
)
def test_a_missing_bucket_is_not_a_missing_folder(s3, url, message):
    result = call("plan", url)
    assert (result.code, result.err) == (1, f"shardconv: {url}: {message}\n")


def test_a_missing_file_where_lists_are_denied(s3, monkeypatch):
    """The store does not say whether the bucket exists."""
    real = stores.obstore

    class Denied:
        def __getattr__(self, name):
            return getattr(real(), name)

        def list(self, *_, **__):
            raise PermissionError("status code: 403")

    monkeypatch.setattr(stores, "obstore", Denied)
    result = call("plan", "s3://bucket/none.safetensors")
    assert result.code == 1
    assert result.err == "shardconv: s3://bucket/none.safetensors: does not exist: correct the URL\n"


@pytest.mark.parametrize("user", ["", "user:se%2Fcret@"])
def test_a_refused_connection_names_the_server_without_credentials(s3, monkeypatch, user):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "max_retries": 1})
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{user}{server}")
    result = call("plan", "s3://bucket/models/model")
    assert f"s3://bucket/models/model: cannot be read: the server {server} cannot be reached" in result.err
    assert "after 1 retries: correct AWS_ENDPOINT_URL, or start the server" in result.err
    assert "cret" not in result.err


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("is_source", [True, False])
def test_missing_credentials_are_named(made, s3, monkeypatch, name, is_source):
    monkeypatch.delenv(name)
    url = "s3://bucket/none"
    result = call("plan", url) if is_source else call("split", made / "model", "--tp", "2", "-o", url)
    message = "s3://bucket/none: credentials are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    assert message in result.err


def test_errors_name_the_url(s3, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"\x00" * 4)
    upload(tmp_path / "bad", "bucket", "bad")
    result = call("plan", "s3://bucket/bad", "--json")
    assert json.loads(result.out)["error"].startswith("s3://bucket/bad/model.safetensors: is not a safetensors file")


def test_keys_of_a_profile_are_used(s3, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = profile-key\naws_secret_access_key = x\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    shardconv.report_plan("s3://bucket/models/model")
    assert "Credential=profile-key/" in s3.authorizations[-1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_PROFILE", "none", "AWS_PROFILE=none: is not in the AWS config"),
        ("AWS_ENDPOINT_URL", "user:secret@127.0.0.1:9000", "AWS_ENDPOINT_URL.*is not a URL"),
    ],
)
def test_settings_that_cannot_be_used_are_errors(s3, monkeypatch, name, value, message):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match=message) as caught:
        shardconv.report_plan("s3://bucket/models/model")
    assert "secret" not in str(caught.value)


def test_models_that_diffusers_saves_again_are_downloaded_first(s3, tmp_path):
    specs = llama_specs(llama_config()) | {"layer.processor.to_k_ip.0.weight": ("BF16", (8, 8))}
    (tmp_path / "flux").mkdir()
    write_weights(tmp_path / "flux" / "diffusion_pytorch_model.safetensors", specs)
    upload(tmp_path / "flux", "bucket", "flux")
    with pytest.raises(SourceError, match=r" \(first download s3://bucket/flux\):\n") as error:
        shardconv.split("s3://bucket/flux", tp=2)
    assert "AutoModel.from_pretrained('flux', dtype=torch.bfloat16).save_pretrained(" in str(error.value)


def test_empty_objects_for_folders_are_skipped(s3, made, tmp_path):
    upload(made / "model", "bucket", "marked")
    upload(made / "model", "bucket", "marked/sub")
    client = s3.client
    for key in ("marked/", "marked/sub/"):
        client.put_object(Bucket="bucket", Key=key, Body=b"")
    shardconv.split("s3://bucket/marked", tmp_path / "out", tp=2, ignore=("sub/*.safetensors*",))
    assert {"sub/config.json", "config.json"} < contents(tmp_path / "out").keys()


def test_a_folder_that_a_run_has_not_finished_writing_is_refused(s3, made, tmp_path):
    """Its weights are visible, but other files may be missing."""
    upload(made / "model", "bucket", "unfinished")
    s3.client.put_object(Bucket="bucket", Key="unfinished/.shardconv.lock", Body=b"{}")
    index = "s3://bucket/unfinished/model.safetensors.index.json"
    for source in ("s3://bucket/unfinished", index):
        result = call("split", source, "--tp", "2", "-o", tmp_path / "out")
        assert (result.code, list(tmp_path.iterdir())) == (1, [])
        assert result.err == (
            "shardconv: s3://bucket/unfinished: a run has not finished writing it: wait until it finishes, or if it "
            "was killed, remove s3://bucket/unfinished/.shardconv.lock and run its command again\n"
        )


def test_an_at_sign_is_part_of_the_name_of_a_folder(s3, made, tmp_path, monkeypatch):
    upload(made / "model", "bucket", "model@2")
    monkeypatch.chdir(tmp_path)
    shardconv.split("s3://bucket/model@2", tp=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model@2-tp2"]


def test_the_lock_of_a_folder_can_be_ignored(s3, made, tmp_path):
    upload(made / "model", "bucket", "left")
    s3.client.put_object(Bucket="bucket", Key="left/.shardconv.lock", Body=b"{}")
    shardconv.split("s3://bucket/left", tmp_path / "out", tp=2, ignore=(".shardconv.lock",))
    assert contents(tmp_path / "out").keys() == contents(made / "split").keys()


@pytest.mark.parametrize("name", [".other.safetensors.lock", "sub/.shardconv.lock"])
def test_the_lock_of_another_destination_is_left_out(s3, made, tmp_path, name):
    upload(made / "model", "bucket", "beside")
    s3.client.put_object(Bucket="bucket", Key=f"beside/{name}", Body=b"{}")
    report = shardconv.split("s3://bucket/beside", tmp_path / "out", tp=2)
    s3.client.delete_object(Bucket="bucket", Key=f"beside/{name}")
    assert report.left_out == {name: "lock of a run that has not finished"}
    assert contents(tmp_path / "out").keys() == contents(made / "split").keys()


def test_remote_pytorch_files_are_not_taken_for_duplicates(s3, made):
    upload(made / "model", "bucket", "both")
    s3.client.put_object(Bucket="bucket", Key="both/pytorch_model.bin", Body=b"PK")
    with pytest.raises(SourceError, match=r"pytorch_model.bin \(is not a file of torch.save.*ignore="):
        shardconv.report_plan("s3://bucket/both")
    assert shardconv.report_plan("s3://bucket/both", ignore=("*.bin",)).family == "llama"


def test_names_that_are_not_valid_on_every_system_are_refused(s3, tmp_path):
    write_checkpoint(tmp_path / "model", config=llama_config(layers=1))
    (tmp_path / "model" / "a:b").write_text("x")
    boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket="names")
    upload(tmp_path / "model", "names", "odd")
    with pytest.raises(SourceError, match="s3://names/odd: the name of file 'a:b' is not valid on every system"):
        shardconv.report_plan("s3://names/odd")

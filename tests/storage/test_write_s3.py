"""Checkpoints that are written to S3, on a real S3 server on loopback, which is also asked what was left behind."""

import random
from itertools import product
from pathlib import Path

import pytest

import shardconv
from shardconv.files.storage import stores
from tests.storage.written import check_nothing_left, failing, without_identity
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.command import call
from tests.support.matrix import cases
from tests.support.pipelines import write_pipeline
from tests.support.s3_server import upload as copy_to_s3


def test_the_manifest_is_written_last(made, s3):
    shardconv.split(made / "model", "s3://bucket/out/order", tp=2)
    written = [path for method, path, query in s3.requests if method == "PUT" and "uploadId" not in query]
    assert written[0].endswith("/.shardconv.lock")
    assert written[-1].endswith("/shardconv.json")
    completed = [at for at, (method, _, query) in enumerate(s3.requests) if method == "POST" and "uploadId=" in query]
    assert max(completed) < s3.requests.index(("PUT", "/bucket/out/order/config.json", ""))


def test_merge_writes_one_file(made, s3, tmp_path):
    shardconv.merge(made / "split", tmp_path / "one.safetensors")
    report = shardconv.merge(made / "split", "s3://bucket/out/one.safetensors")
    assert report.path == "s3://bucket/out/one.safetensors"
    assert s3.objects("out/one.safetensors") == {"": (tmp_path / "one.safetensors").read_bytes()}


def test_reshard_writes_the_tensors_of_a_split(made, s3):
    shardconv.reshard(made / "split", "s3://bucket/out/reshard", tp=4)
    shardconv.split(made / "model", "s3://bucket/out/split4", tp=4)
    assert s3.objects("out/reshard/") == s3.objects("out/split4/")


@pytest.mark.parametrize(
    ("layout", "replicate"),
    cases(
        [("vllm", ()), ("dcp", ("model.embed_tokens.weight", "lm_head.weight"))],
        lambda layout, replicate: layout == "vllm",
    ),
)
def test_layouts_are_merged_into_the_source(made, s3, tmp_path, layout, replicate):
    shardconv.split(made / "model", f"s3://bucket/out/{layout}", tp=2, layout=layout, replicate=replicate)
    shardconv.merge(f"s3://bucket/out/{layout}", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(made / "model")


@pytest.mark.parametrize(("layout", "tp"), [("meta", 1), ("megatron", 2)])
def test_layouts_without_a_manifest_are_those_of_a_local_split(made, s3, tmp_path, layout, tp):
    shardconv.split(made / "model", tmp_path / "local", tp=tp, layout=layout)
    shardconv.split("s3://bucket/model", f"s3://bucket/out/{layout}", tp=tp, layout=layout)
    assert s3.objects(f"out/{layout}/") == contents(tmp_path / "local")
    assert s3.unfinished() == []


def test_pad_and_unpad(made, s3, tmp_path):
    write_checkpoint(tmp_path / "odd", config=llama_config(layers=1, heads=6, kv_heads=2))
    copy_to_s3(tmp_path / "odd", "bucket", "odd")
    shardconv.pad("s3://bucket/odd", "s3://bucket/out/padded", tp=4, check_model=False)
    shardconv.pad(tmp_path / "odd", tmp_path / "padded", tp=4, check_model=False)
    assert s3.objects("out/padded/") == contents(tmp_path / "padded")
    shardconv.unpad("s3://bucket/out/padded", "s3://bucket/out/unpadded")
    assert s3.objects("out/unpadded/") == contents(tmp_path / "odd")


def test_pipelines(s3, tmp_path):
    """They are read from a URL and written to one, and their manifest is written last."""
    source = write_pipeline(tmp_path / "source")
    copy_to_s3(source, "bucket", "source-pipeline")
    report = shardconv.split("s3://bucket/source-pipeline", "s3://bucket/out/pipeline", tp=2)
    written = [path for method, path, query in s3.requests if method == "PUT" and "uploadId" not in query]
    assert written[-1].endswith("/out/pipeline/shardconv-pipeline.json")
    assert report.path == "s3://bucket/out/pipeline"
    assert shardconv.verify("s3://bucket/out/pipeline", against="s3://bucket/source-pipeline").differences == ()
    shardconv.reshard("s3://bucket/out/pipeline", "s3://bucket/out/pipeline4", tp=4)
    shardconv.merge("s3://bucket/out/pipeline4", "s3://bucket/out/merged")
    assert s3.objects("out/merged/") == contents(source)
    assert s3.unfinished() == []


def test_a_dry_run_writes_nothing(made, s3):
    report = shardconv.split(made / "model", "s3://bucket/out/dry", tp=2, dry_run=True)
    assert (report.path, report.destination_exists) == ("s3://bucket/out/dry", False)
    check_nothing_left(s3, "out/dry")


def test_overwriting_removes_the_old_manifest_before_a_new_file_is_visible(made, s3):
    for tp in (4, 2):
        s3.requests.clear()
        shardconv.split(made / "model", "s3://bucket/out/again", tp=tp, overwrite=True)
    deleted = next(at for at, (method, _, query) in enumerate(s3.requests) if method == "POST" and "delete" in query)
    completed = [at for at, (method, _, query) in enumerate(s3.requests) if method == "POST" and "uploadId=" in query]
    assert deleted < min(completed)


@pytest.mark.parametrize("target", ["s3://bucket/model", "s3://bucket/model/out", "s3://bucket"])
def test_a_destination_in_or_around_the_source_is_refused(s3, target):
    before = s3.objects("model/")
    result = call("split", "s3://bucket/model", "--tp", "2", "-o", target, "--overwrite")
    assert result.code == 2
    assert "choose another path with -o" in result.err
    assert s3.objects("model/") == before


@pytest.mark.parametrize(
    "faults", cases(["500 503", "429", "cut", "late"], lambda faults: faults in {"500 503", "late"})
)
def test_passing_faults_do_not_change_the_result(made, s3, faults):
    chooser = random.Random(0)
    s3.fault = lambda method, *_: chooser.choice(faults.split()) if method != "GET" and chooser.random() < 0.2 else None
    target = f"out/faults-{faults.replace(' ', '-')}"
    shardconv.split(made / "model", f"s3://bucket/{target}", tp=2)
    s3.fault = lambda *_: None
    assert without_identity(s3.objects(f"{target}/")) == without_identity(contents(made / "split"))
    assert s3.unfinished() == []


@pytest.mark.parametrize(
    ("step", "fault", "after"),
    cases(
        [*product(["lock", "start", "part", "complete", "file", "manifest"], ["403", "500"], [0]), ("part", "500", 5)],
        lambda step, fault, after: (
            after or (step, fault) in {("lock", "403"), ("part", "500"), ("complete", "403"), ("manifest", "500")}
        ),
    ),
)
def test_lasting_faults_are_one_error_and_leave_nothing(made, s3, monkeypatch, step, fault, after):
    """There are six parts."""
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "max_retries": 2})
    s3.fault = failing(step, fault, after)
    target = f"out/lasting-{step}-{fault}-{after}"
    result = call("split", made / "model", "--tp", "2", "-o", f"s3://bucket/{target}")
    assert (result.code, result.err.count("\n")) == (1, 1)
    reason = (
        "access is denied (status 403)" if fault == "403" else "cannot be written: the server answered with status 500"
    )
    assert reason in result.err
    assert f"s3://bucket/{target}" in result.err
    check_nothing_left(s3, target)


def test_an_error_in_the_source_leaves_nothing(made, s3, tmp_path):
    write_checkpoint(tmp_path / "split-me", config=llama_config(layers=1))
    shardconv.split(tmp_path / "split-me", tmp_path / "split", tp=2)
    path = tmp_path / "split" / "rank-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    result = call("merge", tmp_path / "split", "-o", "s3://bucket/out/damaged")
    assert result.code == 1
    assert "checksum" in result.err
    check_nothing_left(s3, "out/damaged")


def test_temporary_folders_are_removed(made, s3, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    shardconv.split("s3://bucket/model", "s3://bucket/out/tmp", tp=2)
    assert list(Path(tmp_path / "tmp").iterdir()) == []

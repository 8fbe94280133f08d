"""Loading checkpoints in S3: parameters are those of the local checkpoint, and each rank fetches its own bytes once."""

import os
import shutil
from unittest import mock

import pytest
import torch

import shardconv
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.files.paths import open_path
from shardconv.support.errors import PeerError, RunError, ShardconvError
from tests.support.checkpoints import contents
from tests.support.diffusion import latents, write_diffusion
from tests.support.hub import serve_hub
from tests.support.loading import source_and_split
from tests.support.s3_server import S3Server, serve_s3, upload

#: Bytes of the lists of the folder, one for each rank.
LISTS = 5_000


@pytest.fixture(scope="module")
def s3(home) -> S3Server:
    source, split = source_and_split(home, "llama", 2)
    with serve_s3("bucket") as server:
        upload(source, "bucket", "source")
        upload(split, "bucket", "split")
        yield server


def connection(endpoint):
    """The environment in which a rank finds the server."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": endpoint, **keys}


def check_equal(axis, url, local, endpoint, tmp, options):
    """Check that a checkpoint at a URL has the parameters of a local one, and that no temporary folder is left."""
    os.environ.update(**connection(endpoint), TMPDIR=str(tmp))
    remote = shardconv.load(url, device="cpu", group=axis, **options)
    expected = shardconv.load(local, device="cpu", group=axis, **options)
    found, wanted = remote.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_source_at_a_url_is_loaded(ranks, source, s3, tmp_path):
    ranks("pair", check_equal, "s3://bucket/source", source, s3.url, tmp_path, {"tp": 2})
    assert list(tmp_path.iterdir()) == []


def test_a_rank_file_at_a_url_is_fetched_once(ranks, split, s3, tmp_path):
    before = s3.num_sent
    ranks("pair", check_equal, "s3://bucket/split", split, s3.url, tmp_path, {})
    needed = {name: len(data) * (1 if name.startswith("rank-") else 2) for name, data in contents(split).items()}
    assert s3.num_sent - before <= 1.02 * sum(needed.values()) + LISTS


def state_of(pipeline):
    """Component and name to parameter."""
    modules = {name: one for name, one in pipeline.components.items() if isinstance(one, torch.nn.Module)}
    assert modules.keys() > {"transformer", "vae"}
    return {(name, key): value for name, one in modules.items() for key, value in one.state_dict().items()}


def check_pipelines(axis, source, split, endpoint, temporary):
    os.environ.update(**connection(endpoint), TMPDIR=str(temporary))
    for local, options in ((source, {"tp": 2}), (split, {})):
        expected = shardconv.load(local, device="cpu", group=axis, **options)
        found = shardconv.load(f"s3://bucket/{local.name}", device="cpu", group=axis, **options)
        assert state_of(found).keys() == state_of(expected).keys()
        assert all(torch.equal(value, state_of(expected)[name]) for name, value in state_of(found).items())
        assert latents(found, "flux", output_type="pt").isfinite().all()
    options = {"tp": 2, "component": "text_encoder"}
    check_equal(axis, f"s3://bucket/{source.name}", source, endpoint, temporary, options)
    with (
        mock.patch("shardconv.runtime.pipeline.remote_versions", return_value={"vae": str(axis.rank)}),
        pytest.raises(RunError, match="versions of remote files differ between ranks"),
    ):
        shardconv.load(f"s3://bucket/{split.name}", device="cpu", group=axis)
    assert not list(temporary.iterdir())


def check_ignored(axis, endpoint):
    os.environ.update(**connection(endpoint))
    shardconv.load("s3://bucket/with-weights", tp=2, device="cpu", group=axis, ignore=["all.safetensors"])


def test_pipelines_at_a_url_are_loaded(ranks, s3, tmp_path):
    """Also what diffusers loads, which ranks copy; and one component. Ignored files are not copied."""
    source = write_diffusion(tmp_path / "pipeline", "flux")
    shardconv.split(source, tmp_path / "split-pipeline", tp=2)
    for name in ("pipeline", "split-pipeline"):
        upload(tmp_path / name, "bucket", name)
    (tmp_path / "temporary").mkdir()
    ranks("pair", check_pipelines, source, tmp_path / "split-pipeline", s3.url, tmp_path / "temporary")
    ignored, before = bytes(2**24), s3.num_sent
    (source / "all.safetensors").write_bytes(ignored)
    upload(source, "bucket", "with-weights")
    ranks("pair", check_ignored, s3.url)
    assert s3.num_sent - before < len(ignored)


def check_no_room(axis, url, endpoint, num_bytes):
    os.environ.update(connection(endpoint))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: num_bytes - 1 if name == "SC_PAGE_SIZE" else 1)
        with pytest.raises(ShardconvError, match=r"cpu has room for .*, or copy the checkpoint to a disk of this host"):
            shardconv.load(url, device="cpu", group=axis)
        patch.setattr(os, "sysconf", lambda name: num_bytes if name == "SC_PAGE_SIZE" else 1)
        shardconv.load(url, device="cpu", group=axis)


def test_memory_is_checked_before_rank_files_are_fetched_into_it(ranks, split, s3):
    (num_bytes,) = {path.stat().st_size for path in split.glob("rank-*")}
    ranks("pair", check_no_room, "s3://bucket/split", s3.url, num_bytes)


def check_one_fails(axis, endpoint):
    os.environ.update(connection(endpoint))
    with pytest.raises(ShardconvError, match="s3://bucket/missing: does not exist") as caught:
        shardconv.load(["s3://bucket/split", "s3://bucket/missing"][axis.rank], device="cpu", group=axis)
    assert isinstance(caught.value, PeerError) is (axis.rank == 0)


def test_a_url_that_one_rank_cannot_open_is_an_error_on_all_ranks(ranks, s3):
    ranks("pair", check_one_fails, s3.url)


# --- versions ---------------------------------------------------------------------------------------------------------


def check_versions_differ(axis, endpoint, options):
    os.environ.update(HF_ENDPOINT=endpoint)
    with pytest.raises(RunError, match=r"versions of remote files differ between ranks .*: start again") as caught:
        shardconv.load("hf://org/model", device="cpu", group=axis, verify=False, **options)
    assert "values of tensors" not in str(caught.value)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_commit_that_is_pushed_while_ranks_load_is_an_error(ranks, source, tmp_path, is_split):
    """Of a source, and of a split checkpoint without checksums."""
    if is_split:
        shardconv.split(source, tmp_path / "split", tp=2, checksums=False)
    files = contents(tmp_path / "split" if is_split else source)
    with serve_hub(files) as hub:
        hub.push_after_the_first(files)
        ranks("pair", check_versions_differ, hub.server.url, {} if is_split else {"tp": 2})


def test_the_command_for_an_adapter_at_a_url_has_the_url(source, s3, tmp_path):
    place = shutil.copytree(source, tmp_path / "place")
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(b"")
    upload(place, "bucket", "a place")
    folder = open_path("s3://bucket/a place")
    note = open_loadable(folder, tp=2, options={"ignore": ("adapter_*",)}).adapter_note
    command = "shardconv split 's3://bucket/a place' --adapter 's3://bucket/a place' --tp 2"
    assert f"(to apply one, {command}, and pass --adapter NAME)" in note

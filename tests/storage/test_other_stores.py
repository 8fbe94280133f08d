"""Checkpoints that are written to S3, Google Cloud Storage and Azure Blob Storage, on servers on loopback.

Google's store is moto's S3 server, which accepts the requests of Google's clients. Azure's is Azurite; without it, the
tests with Azure are skipped.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from obstore.store import AzureStore

import shardconv
from shardconv.files.storage import upload
from shardconv.files.storage.stores import list_files
from shardconv.files.storage.url import parse
from shardconv.support.errors import OutputError, SourceError
from tests.storage.written import PART, without_identity
from tests.support.azurite import ACCOUNT, KEY, send, serve_azure
from tests.support.checkpoints import contents
from tests.support.command import call


class Store(NamedTuple):
    """A store with an empty bucket or folder.

    Attributes:
        url: of the bucket.
        put: writes an object with the store's own client.
        objects: name, without a prefix, to content of all objects with it.
        unfinished: the answer of the store that lists uploads, with their names.
    """

    url: str
    put: Callable[[str, bytes], object]
    objects: Callable[[str], dict[str, bytes]]
    unfinished: Callable[[], str]


@pytest.fixture(scope="module")
def azure():
    with serve_azure("bucket") as url:
        yield url


@pytest.fixture(params=["s3", "gs", "az"])
def store(request, server, monkeypatch, _fast_retries) -> Store:
    """With small parts, so that every weight file is a multipart upload."""
    monkeypatch.setattr(upload, "part_bytes", lambda _: PART)
    monkeypatch.setattr(upload, "MEMORY_BYTES", 4 * PART)
    return _open(request, server, monkeypatch)


def _open(request, server, monkeypatch) -> Store:
    if request.param != "az":
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        kind, put = request.param, server.client.put_object  # in a folder each of the one bucket
        return Store(
            f"{kind}://bucket/{kind}", lambda name, data: put(Bucket="bucket", Key=f"{kind}/{name}", Body=data),
            lambda prefix: server.objects(f"{kind}/{prefix}"), lambda: "\n".join(server.unfinished()),
        )  # fmt: skip
    url = request.getfixturevalue("azure")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}")
    return azure_store(url)


def azure_store(url: str) -> Store:
    client = AzureStore(
        "bucket", account_name=ACCOUNT, account_key=KEY, endpoint=url, client_options={"allow_http": True}
    )

    def objects(prefix: str) -> dict[str, bytes]:
        names = [one["path"] for chunk in client.list(prefix) for one in chunk]
        return {name.removeprefix(prefix): bytes(client.get(name).bytes()) for name in names}

    query = {"restype": "container", "comp": "list", "include": "uncommittedblobs"}
    return Store("az://bucket", client.put, objects, lambda: send(url, "GET", "bucket", query).decode())


def put_folder(store: Store, folder, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_split_reads_a_store(made, store, tmp_path):
    put_folder(store, made / "model", "read/model")
    shardconv.split(f"{store.url}/read/model", tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(made / "split")


def test_merge_writes_the_bytes_of_the_source(made, store):
    shardconv.split(made / "model", f"{store.url}/stores/both", tp=2)
    shardconv.merge(f"{store.url}/stores/both", f"{store.url}/stores/merged")
    assert store.objects("stores/merged/") == contents(made / "model")


def test_an_existing_checkpoint_is_only_overwritten_on_request(made, store):
    url = f"{store.url}/stores/twice"
    shardconv.split(made / "model", url, tp=4)
    before = store.objects("stores/twice/")
    result = call("split", made / "model", "--tp", "2", "-o", url)
    assert result.err == f"shardconv: {url}: exists: choose another path with -o, or pass --overwrite\n"
    assert store.objects("stores/twice/") == before
    shardconv.split(made / "model", url, tp=2, overwrite=True)
    assert without_identity(store.objects("stores/twice/")) == without_identity(contents(made / "split"))


def test_of_two_runs_one_writes_and_one_fails(made, store):
    """The lock is written on the condition that it does not exist."""
    second = []

    def start_second(done: int, total: int) -> None:
        if not second:
            second.append(call("split", made / "model", "--tp", "4", "-o", f"{store.url}/stores/race"))

    shardconv.split(made / "model", f"{store.url}/stores/race", tp=2, progress=start_second)
    assert "another run is writing it since" in second[0].err
    assert without_identity(store.objects("stores/race/")) == without_identity(contents(made / "split"))


def test_a_failed_run_leaves_no_visible_file_and_is_repeated(made, store):
    """Only Azure keeps its parts for a week: its protocol does not have a request that removes them."""
    url = f"{store.url}/stores/failed"
    with pytest.raises(KeyboardInterrupt):
        shardconv.split(made / "model", url, tp=2, progress=_interrupt)
    assert store.objects("stores/failed/") == {}
    assert ("stores/failed/rank-0-of-2.safetensors" in store.unfinished()) is url.startswith("az")
    shardconv.split(made / "model", url, tp=2)
    assert without_identity(store.objects("stores/failed/")) == without_identity(contents(made / "split"))


def _interrupt(done: int, total: int) -> None:
    if done == total:
        raise KeyboardInterrupt


def test_a_file_that_changes_is_an_error(store):
    store.put("changes/model.safetensors", bytes(1000))
    file = list_files(parse(f"{store.url}/changes"))["model.safetensors"]
    file.read(memoryview(bytearray(10)), 0)
    store.put("changes/model.safetensors", b"x" * 1000)
    with pytest.raises(SourceError, match="changed while it was read"):
        file.read(memoryview(bytearray(10)), 10)


def test_a_bucket_that_does_not_exist_is_one_error(made, store):
    with pytest.raises(OutputError, match="its bucket or container does not exist: create it"):
        shardconv.split(made / "model", store.url.replace("bucket", "missing") + "/out", tp=2)


def test_the_address_of_an_emulator_without_a_scheme_is_an_error(made, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9000")
    result = call("split", made / "model", "--tp", "2", "-o", "gs://bucket/out")
    assert (result.code, result.err) == (
        1, "shardconv: STORAGE_EMULATOR_HOST is not a URL (expected http://HOST:PORT or https://HOST): correct it\n"
    )  # fmt: skip

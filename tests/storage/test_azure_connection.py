"""Connection strings of Azure: the server that a request goes to, and fields that are refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.azurite import KEY
from tests.support.command import call
from tests.support.web_server import serve

#: A public cloud's account of this name may belong to someone else.
ACCOUNT = "account"


@pytest.fixture(autouse=True)
def _no_other_settings(monkeypatch, _fast_retries) -> None:
    for name in ("ACCOUNT", "KEY", "SAS_TOKEN", "ENDPOINT"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


def plan(monkeypatch, *fields: str) -> str:
    """The message of a plan with a connection string of some fields."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ";".join(fields))
    result = call("plan", "az://container/model")
    assert result.code == 1
    assert KEY not in result.err
    return result.err


@contextmanager
def recorded() -> Iterator[tuple[str, set[tuple[str, str]]]]:
    """The URL of a server without files, and host and path of the requests to it."""
    seen: set[tuple[str, str]] = set()
    with serve(route=lambda path, headers: seen.add((headers["host"], path))) as server:
        yield server.url, seen


@pytest.mark.parametrize("secret", [f"AccountKey={KEY}", "SharedAccessSignature=sv=1&sig=x"])
@pytest.mark.parametrize("suffix", ["EndpointSuffix", "endpointsuffix"])
def test_a_request_goes_to_the_cloud_of_the_connection_string(monkeypatch, secret, suffix):
    """A proxy on loopback gets the request, with the name of the server."""
    fields = ("DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", secret, f"{suffix}=core.cloud.invalid")
    with recorded() as (url, seen):
        monkeypatch.setenv("http_proxy", url)
        plan(monkeypatch, *fields)
        assert seen == {(f"{ACCOUNT}.blob.core.cloud.invalid", "/container")}


def test_the_protocol_is_https_by_default(monkeypatch):
    message = plan(monkeypatch, f"AccountName={ACCOUNT}", f"AccountKey={KEY}", "EndpointSuffix=core.cloud.invalid")
    assert f"the server {ACCOUNT}.blob.core.cloud.invalid cannot be reached" in message


def test_a_blob_endpoint_comes_before_the_suffix(monkeypatch):
    fields = (f"AccountName={ACCOUNT}", f"AccountKey={KEY}", "EndpointSuffix=core.cloud.invalid")
    with recorded() as (url, seen):
        plan(monkeypatch, *fields, f"BlobEndpoint={url}/{ACCOUNT}")
        assert {path for _, path in seen} == {f"/{ACCOUNT}/container"}


def test_endpoints_of_other_services_are_not_used(monkeypatch):
    others = [f"{name}Endpoint=https://{name}.invalid/" for name in ("Queue", "File", "Table", "BlobSecondary")]
    with recorded() as (url, seen):
        endpoint = f"BlobEndpoint={url}/{ACCOUNT}"
        plan(monkeypatch, f"AccountName={ACCOUNT}", f"AccountKey={KEY}", *others, endpoint, "")
        assert seen


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        ("EndpointSufix=core.cloud.invalid", "EndpointSufix"),
        ("UseDevelopmentStorage=true", "UseDevelopmentStorage"),
        ("AccountName", "text that is not NAME=VALUE"),
        (KEY, "text that is not NAME=VALUE"),
    ],
)
def test_a_field_that_is_not_known_is_refused(monkeypatch, field, shown):
    message = plan(monkeypatch, f"AccountName={ACCOUNT}", field)
    assert message.startswith(f"shardconv: AZURE_STORAGE_CONNECTION_STRING has {shown} (expected AccountName,")


def test_an_endpoint_without_a_scheme_is_refused(monkeypatch):
    message = plan(monkeypatch, f"AccountName={ACCOUNT}", f"AccountKey={KEY}", "BlobEndpoint=host:1")
    assert "the endpoint in AZURE_STORAGE_CONNECTION_STRING is not a URL" in message

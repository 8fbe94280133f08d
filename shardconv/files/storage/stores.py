"""Stores of URLs, with the credentials and endpoints of the stores' own tools, and lists of their files."""

import base64
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from shardconv.files.storage.clients import obstore, obstore_stores
from shardconv.files.storage.credentials import CONNECTION_STRING, azure_options, credential_provider, profile_options
from shardconv.files.storage.errors import MissingError, explain, explained
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.files.storage.url import Location
from shardconv.support.errors import ShardconvError, SourceError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, ObjectStore, RetryConfig

#: The whole request may take this long if bytes keep coming; a connection without any is given up sooner.
_CLIENT: "ClientConfig" = {"timeout": "15m", "read_timeout": "30s", "connect_timeout": "10s"}
#: What the store's client retries: refused and lost connections, timeouts, and the status codes 429 and 5xx.
RETRIES: "RetryConfig" = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}
#: Maximum number of files in a folder.
_MAX_FILES = 100_000


def open_store(location: Location) -> "ObjectStore":
    """The store of a bucket, container or web server.

    Raises:
        SourceError: if the credentials in the environment cannot be used, or obstore is not installed.
    """
    with explained(str(location)):
        return _OPEN[location.scheme](location)


def open_web(url: str, headers: Mapping[str, str]) -> "ObjectStore":
    """The store of a web server: ``url`` is its root, and may have a query that is sent with every request."""
    options = {**_CLIENT, "allow_http": url.startswith("http:"), "default_headers": dict(headers)}
    store: ObjectStore = obstore_stores().HTTPStore(url, client_options=options, retry_config=RETRIES)
    return store


def list_files(
    location: Location, explain: Callable[[Exception, str], ShardconvError] = explain
) -> dict[str, RemoteFile]:
    """Name, relative to the folder, to file of everything in a folder of an object store.

    Args:
        location: of the folder.
        explain: makes the error if it cannot be listed.

    Raises:
        SourceError: if it cannot be listed, unless ``explain`` makes another one, or has too many files.
    """
    store, prefix = open_store(location), location.prefix
    with explained(str(location), explain):
        sizes = _sizes(store, prefix, location)
    folders = {str(parent) for name in sizes for parent in PurePosixPath(name).parents}
    return {
        name: RemoteFile(store, prefix + name, location.to(name), size)
        for name, size in sizes.items()
        if size or name not in folders  # some tools write an empty object for a folder
    }


def has_bucket(location: Location) -> bool:
    """Whether the bucket or container of a missing file exists; also False if it is unknown, as without permission.

    Raises:
        SourceError: if it does not exist.
    """
    try:
        with explained(str(location)):
            next(iter(obstore().list(open_store(location), location.prefix or None, chunk_size=1)), None)
    except MissingError:
        raise
    except SourceError:
        return False
    return True


def _sizes(store: "ObjectStore", prefix: str, location: Location) -> dict[str, int]:
    """Name, without the prefix, to size of each object."""
    sizes: dict[str, int] = {}
    for chunk in obstore().list(store, prefix or None):
        sizes |= {meta["path"].removeprefix(prefix): meta["size"] for meta in chunk if meta["path"].startswith(prefix)}
        if len(sizes) > _MAX_FILES:
            raise SourceError(f"{location}: has more than {_MAX_FILES} files: pass the folder of one checkpoint")
    return sizes


def _open_s3(location: Location) -> "ObjectStore":
    options = profile_options()
    variables = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = next(filter(None, variables), options.get("endpoint", ""))
    if endpoint:
        options["endpoint"] = _checked_endpoint(endpoint, "AWS_ENDPOINT_URL, or endpoint_url of the AWS profile,")
    store: ObjectStore = obstore_stores().S3Store(
        location.host,
        config=options,
        client_options={**_CLIENT, "allow_http": endpoint.startswith("http:")},
        retry_config=RETRIES,
        credential_provider=credential_provider(options),
    )
    return store


def _checked_endpoint(url: str, setting: str) -> str:
    """The URL of a server in a setting; obstore panics for one without a scheme."""
    if not url.startswith(("http://", "https://")):
        raise SourceError(f"{setting} is not a URL (expected http://HOST:PORT or https://HOST): correct it")
    return url


def _open_gcs(location: Location) -> "ObjectStore":
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    config: GCSConfig = {}
    if emulator:  # as in Google's libraries, which send it no credentials
        config = {"base_url": _checked_endpoint(emulator, "STORAGE_EMULATOR_HOST"), "bearer_token": "none"}
    store: ObjectStore = obstore_stores().GCSStore(
        location.host,
        config=config,
        client_options={**_CLIENT, "allow_http": emulator.startswith("http:")},
        retry_config=RETRIES,
    )
    return store


def _open_azure(location: Location) -> "ObjectStore":
    options = azure_options()
    if endpoint := options.get("endpoint", ""):
        _checked_endpoint(endpoint, f"the endpoint in {CONNECTION_STRING}")
    client = {**_CLIENT, "allow_http": endpoint.startswith("http:")}
    store: ObjectStore = obstore_stores().AzureStore(
        location.host, config=options, client_options=client, retry_config=RETRIES
    )
    return store


def _open_http(location: Location) -> "ObjectStore":
    headers = {}
    if location.user:
        headers["authorization"] = "Basic " + base64.b64encode(unquote(location.user).encode()).decode()
    query = f"?{location.query}" if location.query else ""
    return open_web(f"{location.scheme}://{location.host}/{query}", headers)


_OPEN = {"s3": _open_s3, "gs": _open_gcs, "az": _open_azure, "http": _open_http, "https": _open_http}

"""Stores of URLs, with the credentials and endpoints of the stores' own tools, and lists of their files.

obstore does not read profiles of AWS, and connection strings and short variables of Azure: they are read here, as its
options. Profiles that do not store keys (single sign-on, roles, processes) need boto3.
"""

import base64
import os
import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from shardconv.files.storage.clients import obstore, obstore_stores
from shardconv.files.storage.errors import MissingError, explain, explained
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.files.storage.url import Location
from shardconv.support.errors import ShardconvError, SourceError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSConfig, ObjectStore, RetryConfig

#: The whole request may take this long if bytes keep coming; a connection without any is given up sooner.
_CLIENT: "ClientConfig" = {"timeout": "15m", "read_timeout": "30s", "connect_timeout": "10s"}
#: Retries of the store's client, after refused and lost connections, timeouts, and the status codes 429 and 5xx.
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
    return _open("HTTPStore", url, url, headers)


def _open(
    kind: str, name: str, endpoint: str, headers: Mapping[str, str] | None = None, **settings: object
) -> "ObjectStore":
    """A store of a class of obstore; ``endpoint`` is the URL of its server, "" for the default."""
    client = {**_CLIENT, "allow_http": endpoint.startswith("http:"), "default_headers": dict(headers or {})}
    store_class = getattr(obstore_stores(), kind)
    store: ObjectStore = store_class(name, client_options=client, retry_config=RETRIES, **settings)
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
    options = _profile_options()
    variables = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = next(filter(None, variables), options.get("endpoint", ""))
    if endpoint:
        options["endpoint"] = _checked_endpoint(endpoint, "AWS_ENDPOINT_URL, or endpoint_url of the AWS profile,")
    provider = _credential_provider(options)
    return _open("S3Store", location.host, endpoint, config=options, credential_provider=provider)


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
    return _open("GCSStore", location.host, emulator, config=config)


def _open_azure(location: Location) -> "ObjectStore":
    options = _azure_options()
    if endpoint := options.get("endpoint", ""):
        _checked_endpoint(endpoint, f"the endpoint in {_CONNECTION_STRING}")
    return _open("AzureStore", location.host, endpoint, config=options)


def _open_http(location: Location) -> "ObjectStore":
    headers = {}
    if location.user:
        headers["authorization"] = "Basic " + base64.b64encode(unquote(location.user).encode()).decode()
    query = f"?{location.query}" if location.query else ""
    return open_web(f"{location.scheme}://{location.host}/{query}", headers)


_OPEN = {"s3": _open_s3, "gs": _open_gcs, "az": _open_azure, "http": _open_http, "https": _open_http}


# --- options of S3, by profiles of AWS -------------------------------------------------------------------------------

#: The settings of a profile, and the options of obstore.
_AWS_OPTIONS = {
    "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint",
}  # fmt: skip
#: Variables of the environment that take precedence over options of a profile.
_AWS_VARIABLES = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
}  # fmt: skip
#: Settings by which boto3 obtains keys.
_OBTAINED = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


def _profile_options() -> dict[str, str]:
    """The options of S3 that the profile has; empty if the environment has keys, or without a profile.

    Raises:
        SourceError: if AWS_PROFILE is not in the files, or the profile does not store keys and boto3 is not installed.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    given = os.environ.get("AWS_PROFILE")
    name = given or "default"
    settings = _profile(name)
    if given and not settings:
        raise SourceError(f"AWS_PROFILE={given}: is not in the AWS config or credentials file: correct the name")
    if "aws_access_key_id" not in settings and any(key in settings for key in _OBTAINED) and find_spec("boto3") is None:
        raise SourceError(
            f"AWS profile {name}: stores no keys (it uses {next(key for key in _OBTAINED if key in settings)}): "
            f"pip install boto3, which obtains them, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    found = {option: settings[key] for key, option in _AWS_OPTIONS.items() if key in settings}
    return {key: value for key, value in found.items() if not any(map(os.environ.get, _AWS_VARIABLES.get(key, ())))}


def _credential_provider(options: Mapping[str, str]) -> Callable[[], object] | None:
    """Obtain keys with boto3 where neither the environment nor the profile stores them; None without a profile."""
    name = os.environ.get("AWS_PROFILE") or "default"
    has_keys = "access_key_id" in options or os.environ.get("AWS_ACCESS_KEY_ID")
    if has_keys or not any(key in _profile(name) for key in _OBTAINED):
        return None
    from boto3 import Session  # noqa: PLC0415 - only for such profiles
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - only for such profiles

    provider: Callable[[], object] = Boto3CredentialProvider(Session(profile_name=name))
    return provider


def _profile(name: str) -> dict[str, str]:
    """The settings of a profile in both files; the credentials file takes precedence."""
    config = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    credentials = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    section = name if name == "default" else f"profile {name}"
    return {**_profile_section(config, section), **_profile_section(credentials, name)}


def _profile_section(path: Path, section: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (ConfigParserError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read ({type(error).__name__}): correct the file") from None
    return dict(parser[section]) if parser.has_section(section) else {}


# --- options of Azure ------------------------------------------------------------------------------------------------

_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
#: Variables, and the options of obstore.
_AZURE_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key", "AZURE_STORAGE_SAS_TOKEN": "sas_key",
}  # fmt: skip
#: Fields of a connection string, whose case does not matter, and the options of obstore.
_AZURE_FIELDS = {
    "accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}  # fmt: skip
#: Fields that the endpoint follows from, unless it is given, with their defaults.
_PROTOCOL, _SUFFIX = ("defaultendpointsprotocol", "https"), ("endpointsuffix", "core.windows.net")
#: Fields of other services, and of replicas that are only read where the account cannot be reached.
_UNUSED = re.compile(r"(file|queue|table|dfs|web)(secondary)?endpoint|blobsecondaryendpoint")
_FIELD_NAME = re.compile("[A-Za-z]{1,40}")


def _azure_options() -> dict[str, str]:
    """The options of obstore.

    Raises:
        SourceError: if a connection string is not valid, or has a field that is not known.
    """
    fields = _fields(os.environ.get(_CONNECTION_STRING, ""))
    options = {option: fields[name] for name, option in _AZURE_FIELDS.items() if name in fields}
    options |= {option: os.environ[name] for name, option in _AZURE_VARIABLES.items() if os.environ.get(name)}
    if fields and "endpoint" not in options and "account_name" in options:
        protocol, suffix = (fields.get(name) or default for name, default in (_PROTOCOL, _SUFFIX))
        options["endpoint"] = f"{protocol}://{options['account_name']}.blob.{suffix}"
    return options


def _fields(text: str) -> dict[str, str]:
    """Name in lower case to value of the fields of a connection string."""
    fields = {}
    for field in filter(None, text.split(";")):
        name, equals, value = field.partition("=")
        key = name.strip().lower()
        is_known = key in _AZURE_FIELDS or key in {_PROTOCOL[0], _SUFFIX[0]} or _UNUSED.fullmatch(key)
        if not equals or not is_known:
            shown = name if equals and _FIELD_NAME.fullmatch(name) else "text that is not NAME=VALUE"  # it may be a key
            raise SourceError(
                f"{_CONNECTION_STRING} has {shown} (expected AccountName, AccountKey or SharedAccessSignature, and "
                f"BlobEndpoint or EndpointSuffix): correct it, or set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"
            )
        fields[key] = value
    return fields

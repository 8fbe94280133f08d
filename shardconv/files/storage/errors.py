"""Errors of stores as one line each: without the URLs in their texts, which may contain signatures."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardconv.support.errors import OutputError, ShardconvError, SourceError

_STATUS = re.compile(r"status code: (?P<code>\d{3})")
_KIND = re.compile(r"kind: (?P<kind>Connect|Timeout|Interrupted|Decode|Request)\b")
_RETRIES = re.compile(r"after (?P<count>\d+) retries")
_KINDS = {
    "Connect": "the server{} cannot be reached",
    "Timeout": "the server{} did not answer in time",
    "Interrupted": "the connection to the server{} was lost",
}
#: The server of a request, without the user and password before it.
_SERVER = re.compile(r"https?://(?:[^/?#\s]*@)?(?P<server>(?:\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::\d+)?)(?=[/?#\s)]|$)")
#: Responses of stores where a bucket or container does not exist; a 404 of a list has the same cause.
_IS_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist|performing list request")
#: Sources of the credentials of a scheme.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "a valid HF_TOKEN, or run hf auth login",
}
#: Variables with credentials, and with the address of the server, of a scheme.
_SECRETS = {
    "s3": ("AWS_ACCESS_KEY_ID",), "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"), "hf": ("HF_TOKEN",),
}  # fmt: skip
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_CONNECTION_STRING",), "hf": ("HF_ENDPOINT",),
}  # fmt: skip
#: Messages of stores' clients without credentials, or with only a part of them.
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|metadata\.google|token request|Account must be|Missing (AccessKeyId|SecretAccessKey)"
)
_NO_RANGES = "the server does not support ranges of bytes: download the checkpoint to a local folder first"
OTHER_RANGE = "the server sent another range than the requested one: run the command again, or download the file"
_CHANGED = "changed while it was read: run the command again"
_NO_BUCKET = "cannot be written: its bucket or container does not exist: create it, or correct its name or the endpoint"

_NO_CONDITIONS = (
    "cannot be written: the store does not support conditional writes, or another request that is needed: write to a "
    "local folder, and upload it by the store's own tools"
)

#: Types of errors, and types of their causes.
_KNOWN = {"PreconditionError": _CHANGED, "NotSupportedError": _NO_RANGES, "UnexpectedRange": OTHER_RANGE}


class MissingError(SourceError):
    """A file, folder or bucket does not exist."""


class TransferError(SourceError):
    """A transfer failed after it began, so that another attempt may succeed."""


def is_empty(error: Exception) -> bool:
    """Whether a file has fewer bytes than the first one of the requested range."""
    return _status(error) == "416"


def changed(shown: str) -> SourceError:
    """The error for a file that changed."""
    return SourceError(f"{shown}: {_CHANGED}")


def explain(error: Exception, shown: str) -> SourceError:
    """The error for a failed request.

    Args:
        error: of the store.
        shown: the URL that is shown.
    """
    is_lost = "kind: Interrupted" in str(error) or "kind: Timeout" in str(error)
    kind = MissingError if _is_missing(error) else TransferError if is_lost else SourceError
    return kind(f"{shown}: {_reason(error, _scheme(shown), 'read')}")


def explain_write(error: Exception, shown: str) -> OutputError:
    """The error for a failed request that writes or deletes; arguments as in :func:`explain`."""
    if _is_missing(error):
        return OutputError(f"{shown}: {_NO_BUCKET}")
    is_refused = type(error).__name__ in {"NotSupportedError", "NotImplementedError"} or _status(error) == "501"
    return OutputError(f"{shown}: {_NO_CONDITIONS if is_refused else _reason(error, _scheme(shown), 'written')}")


@contextmanager
def explained(shown: str, make_error: Callable[[Exception, str], ShardconvError] = explain) -> Iterator[None]:
    """Replace the errors of clients, which are of many types, by shardconv's.

    Args:
        shown: the URL that is shown.
        make_error: makes the error from a client's error and the URL.
    """
    try:
        yield
    except ShardconvError:
        raise
    except Exception as error:  # noqa: BLE001 - clients do not have a common type of errors
        raise make_error(error, shown) from None


def _is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or _status(error) in {"404", "410"}


def _scheme(shown: str) -> str:
    return shown.partition(":")[0]


def _reason(error: Exception, scheme: str, done: str) -> str:
    """The problem, and the remedy if there is one; ``done`` is the action of the request, as a participle."""
    status, name = _status(error), type(error).__name__
    if known := next((text for kind, text in _KNOWN.items() if kind == name or kind in str(error)), ""):
        return known
    if _is_missing(error):
        missing = "its bucket or container does not exist: correct its name, or the endpoint"
        return missing if _IS_BUCKET.search(str(error)) else "does not exist: correct the URL"
    if _NO_CREDENTIALS.search(str(error)):
        return f"credentials are missing{_remedy(scheme)}"
    if name in {"PermissionDeniedError", "UnauthenticatedError"}:
        return _denied(scheme, status)
    tried = f" after {match['count']} retries" if (match := _RETRIES.search(str(error))) else ""
    if status:
        return status_reason(status, scheme, done, tried)
    kind = match["kind"] if (match := _KIND.search(str(error))) else ""
    server = f" {match['server']}" if (match := _SERVER.search(str(error))) else ""
    failed = _KINDS.get(kind, "the request failed").format(server)
    return f"cannot be {done}: {failed}{tried}: {_connection_remedy(scheme, server, kind)}"


def status_reason(status: str, scheme: str, done: str, tried: str = "") -> str:
    """The problem and the remedy for the status of a response that is an error.

    Args:
        status: the status.
        scheme: the scheme of the URL.
        done: the action of the request, as a participle.
        tried: the number of retries, after a space.
    """
    if status in {"401", "403"}:
        return _denied(scheme, status)
    remedy = "run the command again later" if status in {"408", "429"} or status >= "500" else "correct the URL"
    return f"cannot be {done}: the server answered with status {status}{tried}: {remedy}"


def _denied(scheme: str, status: str) -> str:
    given = next(filter(os.environ.get, _SECRETS.get(scheme, ())), "")
    refused = f": the server refused the credentials of {given}: correct them, or allow them to access it"
    return f"access is denied{f' (status {status})' if status else ''}{refused if given else _remedy(scheme)}"


def _remedy(scheme: str) -> str:
    """The credentials of a scheme to set; empty for a web server."""
    return f": set {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""


def _connection_remedy(scheme: str, server: str, kind: str) -> str:
    """The remedy for a connection that failed; names the variable that has a server that cannot be reached."""
    if kind != "Connect":
        return "run the command again"
    names = (name for name in _ENDPOINTS.get(scheme, ()) if server and server.strip() in os.environ.get(name, ""))
    name = next(names, "")
    return f"correct {name}, or start the server" if name else "check the network and the name of the server"


def _status(error: Exception) -> str:
    match = _STATUS.search(str(error))
    return match["code"] if match else ""

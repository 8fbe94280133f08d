"""Models on the Hugging Face Hub: names, revisions and tokens by huggingface_hub, bytes by ranges."""

import os
import re
from dataclasses import replace
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from shardconv.files.storage.problems import explained
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.files.storage.requirements import huggingface_hub
from shardconv.files.storage.stores import open_web
from shardconv.files.storage.url import Location
from shardconv.support.errors import SourceError, UsageError

#: A model, an optional revision (a branch, tag or commit; %2F for a slash in it), and an optional path in it.
_MODEL = re.compile(r"(?P<name>[^/@]+)(@(?P<revision>refs/(pr|convert)/[^/]+|[^/]+))?(/(?P<path>.+))?")


#: What errors of huggingface_hub mean, with the remedy.
_REASONS = {
    "GatedRepoError": "access is restricted: accept its terms on the Hub, then set HF_TOKEN or run hf auth login",
    "RepositoryNotFoundError": "does not exist, or is private: correct the name, or set HF_TOKEN or run hf auth login",
    "HFValidationError": "is not a valid name of a model",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set: unset it",
}


def split_model(location: Location) -> tuple[str, str | None, str]:
    """The name of a model with its organization, the revision, and the path in it.

    Raises:
        UsageError: if the location is not that of a model.
    """
    match = _MODEL.fullmatch(location.path)
    if match is None or location.host in {"datasets", "spaces", "models"} or "@" in location.host:
        raise UsageError(f"{location}: is not a model on the Hub (expected hf://ORGANIZATION/MODEL@REVISION)")
    revision = match["revision"]
    return f"{location.host}/{match['name']}", unquote(revision) if revision else None, match["path"] or ""


def folder_name(location: Location) -> str:
    """The name of a folder in a model, or of the model, without the revision."""
    folder = replace(location, path=location.folder)
    model, _, path = split_model(folder)
    return PurePosixPath(path or model).name


def list_model(location: Location) -> dict[str, RemoteFile]:
    """Name, relative to the folder, to file of everything in a model, at one commit.

    Raises:
        SourceError: if the model does not exist, access is denied, or huggingface_hub is not installed.
        UsageError: if the location is not that of a model.
    """
    model, revision, path = split_model(location)
    hub = huggingface_hub()
    endpoint = os.environ.get("HF_ENDPOINT") or hub.constants.ENDPOINT
    token = None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()
    with explained(str(location), lambda error, shown: SourceError(f"{shown}: {_reason(error, revision)}")):
        info = hub.HfApi(endpoint=endpoint, token=token).model_info(model, revision=revision, files_metadata=True)
    parts = urlsplit(endpoint)
    store = open_web(f"{parts.scheme}://{parts.netloc}/", {"authorization": f"Bearer {token}"} if token else {})
    prefix = Location("hf", location.host, path).prefix
    base = f"{parts.path.strip('/')}/{model}/resolve/{info.sha}".lstrip("/")
    return {
        file.rfilename.removeprefix(prefix): RemoteFile(
            store, f"{base}/{file.rfilename}", location.to(file.rfilename.removeprefix(prefix)), file.size,
            is_pinned=True,
        )
        for file in info.siblings
        if file.rfilename.startswith(prefix)
    }  # fmt: skip


def _reason(error: Exception, revision: str | None) -> str:
    """What went wrong, and the remedy."""
    kind = type(error).__name__
    if kind == "RevisionNotFoundError":
        return f"does not have the revision {revision}: see its branches and tags on the Hub"
    if kind in _REASONS:
        return _REASONS[kind]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"cannot be read: the Hub answered with status {status}"
    return f"cannot be read: the Hub cannot be reached ({kind})"

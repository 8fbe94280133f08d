"""Remote folders: the files that belong to a URL, as stores, web servers and the Hugging Face Hub list them."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from shardconv.files.containers.safetensors import MAX_HEADER_BYTES, header_bytes
from shardconv.files.folder import NUM_REQUESTS, RemotePath, progress_of_headers, remote_folder
from shardconv.files.storage.clients import huggingface_hub
from shardconv.files.storage.errors import explained, status_reason
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.files.storage.stores import has_bucket, list_files, open_store, open_web
from shardconv.files.storage.url import Location
from shardconv.files.weight_formats import CONFIG_NAME, SAFETENSORS, is_index
from shardconv.plan.quantization import SETTINGS_FILES
from shardconv.support.errors import SourceError, UsageError

#: Files that web servers are asked for beside the weights, as they do not list folders.
_AUXILIARY_FILES = (
    CONFIG_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", *SETTINGS_FILES,
)  # fmt: skip
_HUB_HOSTS = ("huggingface.co", "hf.co")
#: A model, an optional revision (a branch, tag or commit; %2F for a slash in it), and an optional path in it.
_MODEL = re.compile(r"(?P<name>[^/@]+)(@(?P<revision>refs/(pr|convert)/[^/]+|[^/]+))?(/(?P<path>.+))?")
#: Error of huggingface_hub to the problem and the remedy.
_HUB_REASONS = {
    "GatedRepoError": "access is restricted: accept its terms on the Hub, then set HF_TOKEN or run hf auth login",
    "RepositoryNotFoundError": "does not exist, or is private: correct the name, or set HF_TOKEN or run hf auth login",
    "HFValidationError": "is not a valid name of a model: correct it, as in hf://org/model",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set: unset it",
}


def open_remote(location: Location) -> RemotePath:
    """List a remote folder, and read the headers of its safetensors files.

    Args:
        location: of the folder, or of a file in it.

    Raises:
        SourceError: if it does not exist or cannot be listed, or a package is not installed.
        UsageError: if it does not name a model on the Hub, or is the folder of a web server, which cannot be listed.
    """
    files = _remote_files(location)
    if not files or (location.file and location.file not in files):
        raise _missing(location)
    name = _model_folder(location) if location.scheme == "hf" else PurePosixPath(location.folder).name
    folder = remote_folder(name or location.host, location.to("").rstrip("/"), files)
    _prefetch_headers([file for each, file in files.items() if each.endswith(".safetensors") and "/" not in each])
    return folder / location.file if location.file else folder


def _missing(location: Location) -> SourceError:
    """The error for a missing file or folder.

    Raises:
        SourceError: if its bucket or container is missing, too.
    """
    if location.is_web or location.scheme == "hf" or not has_bucket(location):
        return SourceError(f"{location}: does not exist: correct the URL")
    if not location.path:
        return SourceError(f"{location}: is empty")
    kind = "file" if location.file else "folder"
    return SourceError(f"{location}: does not exist, but its bucket or container does: correct the name of the {kind}")


def _prefetch_headers(files: list[RemoteFile]) -> None:
    """Fetch the headers of all safetensors files concurrently; reading one later raises its errors."""
    progress = progress_of_headers.get()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        for done, _ in enumerate(pool.map(_prefetch_header, files), 1):
            if progress is not None:
                progress(done, len(files))


def _prefetch_header(file: RemoteFile) -> None:
    with suppress(SourceError):
        file.keep(header_bytes(file))


def _remote_files(location: Location) -> dict[str, RemoteFile]:
    """Name to file of all files in the folder of a URL, or of the file of a URL and the config next to it."""
    if location.is_web:
        return _web_files(location)
    is_single = location.file is not None and location.file.endswith(".safetensors")
    if is_single and location.scheme != "hf":
        return _existing(location, [str(location.file), CONFIG_NAME])
    files = _model_files(location) if location.scheme == "hf" else list_files(location)
    return {name: file for name, file in files.items() if not is_single or name in {location.file, CONFIG_NAME}}


def _web_files(location: Location) -> dict[str, RemoteFile]:
    name = location.file
    if name is None:
        model = "/".join(location.path.split("/")[:2])
        other = f"a weight file or an index (*{SAFETENSORS.index_suffix})"
        remedy = f"hf://{model}" if location.host in _HUB_HOSTS else other
        raise UsageError(f"{location}: web servers do not list folders: pass the URL of {remedy}")
    if not is_index(name):
        return _existing(location, [name] if location.query else [name, CONFIG_NAME])
    index = _existing(location, [name])
    listed = _listed(index[name].read_all(MAX_HEADER_BYTES)) if index else []
    return index | _existing(location, [*listed, *_AUXILIARY_FILES])


def _listed(text: bytes) -> list[str]:
    """The names in an index; empty if it is not valid, which is found when it is opened."""
    try:
        weight_map = json.loads(text)["weight_map"]
        return sorted({name for name in weight_map.values() if isinstance(name, str) and "/" not in name})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _existing(location: Location, names: list[str]) -> dict[str, RemoteFile]:
    """Name to file of those files of a folder that exist."""
    store = open_store(location)
    files = {name: RemoteFile(store, location.prefix + name, location.to(name)) for name in names}
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        exist = pool.map(RemoteFile.exists, files.values())
        return {name: file for (name, file), is_there in zip(files.items(), exist, strict=True) if is_there}


# --- the Hub --------------------------------------------------------------------------------------------------------


def _split_model(location: Location) -> tuple[str, str | None, str]:
    """The name of a model with its organization, the revision, and the path in it.

    Raises:
        UsageError: if the location does not name a model.
    """
    match = _MODEL.fullmatch(location.path)
    if match is None or location.host in {"datasets", "spaces", "models"} or "@" in location.host:
        raise UsageError(f"{location}: is not a model on the Hub (expected hf://ORGANIZATION/MODEL@REVISION)")
    revision = match["revision"]
    return f"{location.host}/{match['name']}", unquote(revision) if revision else None, match["path"] or ""


def _model_folder(location: Location) -> str:
    """The name of a folder in a model, or of the model, without the revision."""
    model, _, path = _split_model(replace(location, path=location.folder))
    return PurePosixPath(path or model).name


def _model_files(location: Location) -> dict[str, RemoteFile]:
    """Name, relative to the folder, to file of everything in a model, at one commit.

    Raises:
        SourceError: if the model does not exist, access is denied, or huggingface_hub is not installed.
        UsageError: if the location does not name a model.
    """
    model, revision, path = _split_model(location)
    hub = huggingface_hub()
    endpoint = os.environ.get("HF_ENDPOINT") or hub.constants.ENDPOINT
    token = None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()
    with explained(str(location), lambda error, shown: SourceError(f"{shown}: {_hub_reason(error, revision)}")):
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


def _hub_reason(error: Exception, revision: str | None) -> str:
    """The problem, and the remedy."""
    kind = type(error).__name__
    if kind == "RevisionNotFoundError":
        return f"does not have the revision {revision}: see its branches and tags on the Hub"
    if kind in _HUB_REASONS:
        return _HUB_REASONS[kind]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status_reason(str(status), "hf", "read")
    remedy = "check the network, set HTTPS_PROXY for a proxy or HF_ENDPOINT for a mirror, or pass a downloaded folder"
    if os.environ.get("HF_ENDPOINT"):
        remedy = "correct HF_ENDPOINT, or start its server"
    return f"cannot be read: the Hub cannot be reached ({kind}): {remedy}"

"""URLs of remote checkpoints: their parts, and the text that is shown, without passwords and signatures."""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from shardconv.support.errors import UsageError

#: A scheme has at least two letters, so it is not a drive letter. A Path keeps only one of the two slashes.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<rest>.*)", re.DOTALL)
_WEB = ("http", "https")
SCHEMES = ("s3", "gs", "az", *_WEB, "hf")
#: A host with an optional port, without user name and password.
_HOST = re.compile(r"(\[[^\]]*\]|[^:@\[\]]*)(:\d{0,5})?")
#: The start of a query; keys of object stores may contain ? and #.
_QUERY, _STORE_QUERY = re.compile(r"[?#]"), re.compile(r"\?[^/=]*=")
#: Suffixes of files; a URL with any other end is a folder.
_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")

#: The file in a folder of an object store that a run keeps while it writes the folder.
LOCK_NAME = ".shardconv.lock"
_LOCK_NAMES = re.compile(r"(.*/)?(\.shardconv|\.[^/]+\.safetensors)\.lock")


class Location(Struct, frozen=True):
    """A parsed URL of a file or folder.

    Attributes:
        scheme: one of :data:`SCHEMES`.
        host: bucket, container, host with port, or organization on the Hub.
        path: the rest, without slashes at its ends.
        user: user name and password, or an empty text; secret.
        query: the part after the question mark, such as a signature; secret.
    """

    scheme: str
    host: str
    path: str
    user: str = ""
    query: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")

    __repr__ = __str__  # without secrets

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, which cannot list folders."""
        return self.scheme in _WEB

    @property
    def file(self) -> str | None:
        """The name of the file; None for a folder."""
        return PurePosixPath(self.path).name if self.path.endswith(_FILES) else None

    @property
    def folder(self) -> str:
        """The path of the folder, or of the folder of the file; empty for the top one."""
        parent = PurePosixPath(self.path).parent.as_posix() if self.file else self.path
        return "" if parent == "." else parent

    @property
    def prefix(self) -> str:
        """The beginning of the names of all files in the folder."""
        return f"{self.folder}/" if self.folder else ""

    def to(self, name: str) -> str:
        """The text that is shown for a file in the folder."""
        return "/".join(filter(None, [f"{self.scheme}://{self.host}", self.folder, name]))


def lock_name(file: str | None) -> str:
    """The name of the lock of a file in its folder, or of the folder."""
    return f".{file}.lock" if file else LOCK_NAME


def is_lock(name: str) -> bool:
    """Whether a file, by its path, is a lock."""
    return _LOCK_NAMES.fullmatch(name) is not None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, of any scheme."""
    return _URL.fullmatch(os.fspath(path)) is not None


def parse(url: str | Path) -> Location:
    """Parse a URL of a remote checkpoint.

    Raises:
        UsageError: if its scheme is not supported, or it is not complete.
    """
    match = _URL.fullmatch(os.fspath(url))
    assert match is not None
    scheme, rest = match["scheme"].lower(), match["rest"]
    shown = without_secrets(url)
    if scheme not in SCHEMES:
        raise UsageError(f"{shown}: has an unknown scheme (expected one of {', '.join(SCHEMES)})")
    is_web = scheme in _WEB
    is_ambiguous = _is_ambiguous(rest)
    if is_web and is_ambiguous:
        raise UsageError(
            f"{shown}: has / ? # or @ in the password (expected %2F %3F %23 %40): encode / ? # @ in the password, "
            f"and @ in the path and query"
        )
    parts = _split(scheme, rest, shown) if is_web else SplitResult(scheme, *_bucket_and_key(rest), "", "")
    user, _, host = parts.netloc.rpartition("@")
    if not is_web and (user or is_ambiguous):
        raise UsageError(f"{shown}: has credentials (expected them in the environment): remove them from the URL")
    if not is_web and _STORE_QUERY.search(rest):
        raise UsageError(f"{shown}: has a query (expected only a bucket and a key): presigned URLs are https://")
    if not host:
        raise UsageError(f"{shown}: is not complete (expected {_EXAMPLES.get(scheme, scheme + '://HOST/PATH')})")
    path = unquote(parts.path) if is_web else parts.path
    return Location(scheme, host, path.strip("/"), user, parts.query)


_EXAMPLES = {
    "s3": "s3://BUCKET/FOLDER", "gs": "gs://BUCKET/FOLDER", "az": "az://CONTAINER/FOLDER",
    "hf": "hf://ORGANIZATION/MODEL",
}  # fmt: skip


def _split(scheme: str, rest: str, shown: str) -> SplitResult:
    try:
        return urlsplit(f"{scheme}://{rest}", allow_fragments=False)
    except ValueError:  # its text may contain the password
        raise UsageError(f"{shown}: is not a valid URL: correct its host") from None


def _bucket_and_key(rest: str) -> tuple[str, str]:
    """Bucket and key of an object store, where ? and # are part of a key."""
    bucket, _, key = rest.partition("/")
    return bucket, key


def _is_ambiguous(rest: str) -> bool:
    """Whether the password may contain one of / ? # @, so that it is not clear where it ends."""
    authority, *after = re.split(r"[/?#]", rest, maxsplit=1)
    return "@" in "".join(after) and _HOST.fullmatch(authority) is None


def without_secrets(url: str | Path) -> str:
    """A URL without user name, password, query and fragment; any other path unchanged."""
    match = _URL.fullmatch(os.fspath(url))
    if match is None:
        return os.fspath(url)
    scheme, rest = match["scheme"], match["rest"]
    if _is_ambiguous(rest):
        _, _, after = rest.partition("@")
        return f"{scheme}://..." + ("" if "@" in after else f"@{re.split(r'[/?#]', after, maxsplit=1)[0]}")
    shown = (_STORE_QUERY if scheme.lower() in _EXAMPLES else _QUERY).split(rest, maxsplit=1)[0]
    host, slash, path = shown.partition("/")
    user, _, name = host.rpartition("@")
    is_secret = scheme.lower() != "hf" or ":" in user or user.startswith("hf_")  # hf://MODEL@REVISION has none
    return f"{scheme}://{name if is_secret else host}{slash}{path}"

"""The Hub, emulated on loopback: names, revisions and tokens; files come from another host, as on the Hub."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.checkpoints import with_other_rows
from tests.support.web_server import Answer, WebServer, serve

COMMIT, OTHER = "a" * 40, "b" * 40
TOKEN = "hf_the_token"


class Hub:
    """One model with a branch, a pull request and a private twin.

    Attributes:
        server: its server.
        revisions: revision to commit.
        commits: commit to files.
        resolved: called with each revision, or "main", after its commit was looked up.
    """

    def __init__(self, server: WebServer, files: dict[str, bytes]) -> None:
        self.server = server
        self.revisions = {"main": COMMIT, "v1.0": COMMIT, "refs/pr/3": OTHER, COMMIT: COMMIT}
        self.commits = {COMMIT: files}
        self._lock = threading.Lock()
        self.resolved: Callable[[str], None] = lambda _revision: None
        server.route = self._route

    def _route(self, path: str, headers: dict[str, str]) -> Answer | None:
        _, _, rest = path.partition("/api/models/")
        if rest:
            return self._describe(rest, headers)
        model, _, file = path.partition("/resolve/")
        if not file:
            return None  # the store of files
        if model == "/org/private" and headers.get("authorization") != f"Bearer {TOKEN}":
            return Answer(401)
        commit, _, name = file.partition("/")
        self.server.files[f"/store/{commit}/{name}"] = self.commits[commit][name]
        return Answer(302, {"location": f"http://localhost:{self.server.port}/store/{commit}/{name}?signature=x"})

    def _describe(self, rest: str, headers: dict[str, str]) -> Answer:
        name, _, revision = rest.partition("/revision/")
        if headers.get("authorization") not in {None, f"Bearer {TOKEN}"}:
            return Answer(401, {"x-error-message": "Invalid credentials in Authorization header"})
        if name == "org/gated":
            return Answer(403, {"x-error-code": "GatedRepo"}, b'{"error": "gated"}')
        if name not in {"org/model", "org/private"} or (
            name == "org/private" and headers.get("authorization") != f"Bearer {TOKEN}"
        ):
            return Answer(401, {"x-error-code": "RepoNotFound"}, b'{"error": "none"}')
        with self._lock:
            commit = self.revisions.get(revision or "main")
            self.resolved(revision or "main")
        if commit is None:
            return Answer(404, {"x-error-code": "RevisionNotFound"}, b'{"error": "none"}')
        siblings = [{"rfilename": each, "size": len(data)} for each, data in self.commits[commit].items()]
        return Answer(200, {}, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def push_after_the_first(self, files: dict[str, bytes]) -> None:
        """Push a commit when the branch was resolved once, so that only the first process sees the one before it.

        Args:
            files: those of the model; the commit has other values in the last rows of their largest tensors.
        """
        self.commits[OTHER] = {
            name: with_other_rows(data) if name.endswith(".safetensors") else data for name, data in files.items()
        }
        self.resolved = lambda revision: self.revisions.update({revision: OTHER})


@contextmanager
def serve_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """Run a Hub with one model of these files."""
    with serve() as server:
        yield Hub(server, files)

"""A hub on a loopback port, which speaks the part of the hub's API that fetching a model uses."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE_BYTES = 1024
"""From this size on, files are stored by their SHA-256, as the real hub stores weights."""


@dataclass
class Repository:
    """A repository's files, and how the hub misbehaves when they are read."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str = ""  # with a token, the repository is private
    gated: bool = False
    damaged: tuple[str, ...] = ()  # these files arrive with a wrong first byte
    cut_at: dict[str, list[int]] = field(default_factory=dict)  # file -> byte at which each next answer is cut
    announced_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    ranges: dict[str, list[str]] = field(default_factory=dict)  # file -> the Range headers that came for it
    storage_tokens: set[str] = field(default_factory=set)  # tokens that came to the storage's host
    is_down: bool = False

    @property
    def num_reads(self) -> int:
        return sum(map(len, self.ranges.values()))


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the context ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    @property
    def hub(self) -> Hub:
        hub = self.server.hub  # type: ignore[attr-defined]
        assert isinstance(hub, Hub)
        return hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.is_down:
            self._answer(503)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._describe(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            # The real hub sends clients to another host for the content, too.
            port = urlsplit(self.hub.url).port
            if self._allowed(found[1]):
                self._answer(302, {"location": f"http://localhost:{port}/storage/{found[1]}/{found[3]}"})
        elif found := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
            self._send_file(self.hub.repositories[found[1]], found[2])
        else:
            self._answer(404)

    def _allowed(self, name: str) -> bool:
        repository = self.hub.repositories.get(name)
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and not given):
            self._answer(401, {"x-error-code": "RepoNotFound"})
        elif repository.gated:
            self._answer(403, {"x-error-code": "GatedRepo"})
        elif repository.token and given != repository.token:
            self._answer(401, {"x-error-message": "Invalid credentials in Authorization header"})
        else:
            return True
        return False

    def _describe(self, name: str, revision: str) -> None:
        if not self._allowed(name):
            return
        repository = self.hub.repositories[name]
        if revision not in repository.revisions:
            self._answer(404, {"x-error-code": "RevisionNotFound"})
            return
        files = [_sibling(path, data, repository) for path, data in repository.files.items()]
        body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files}
        self._answer(200, {"content-type": "application/json"}, json.dumps(body).encode())

    def _send_file(self, repository: Repository, path: str) -> None:
        data = repository.files[path]
        wanted = self.headers.get("range", "")
        self.hub.ranges.setdefault(path, []).append(wanted)
        self.hub.storage_tokens.add(self.headers.get("authorization", ""))
        if path in repository.damaged:
            data = b"\xff" + data[1:]
        first = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        headers = {"content-range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if wanted else {}
        cuts = repository.cut_at.get(path, [])
        cut = cuts.pop(0) if cuts else len(data)
        self._answer(206 if wanted else 200, headers, data[first:cut], len(data) - first)
        if cut < len(data):
            self.close_connection = True

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


def _sibling(path: str, data: bytes, repository: Repository) -> dict[str, object]:
    size = repository.announced_bytes.get(path, len(data))
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    known: dict[str, object] = {"rfilename": path, "size": size, "blobId": blob}
    if len(data) >= _LARGE_BYTES:
        known["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
    return known

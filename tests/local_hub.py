"""A small hub on the loopback for tests: metadata, addresses that redirect, ranges, and every fault on request.

It speaks what huggingface_hub asks for (model info with blobs, HEAD of resolve) and serves the bytes from a second
port, as the real hub does. Every request for bytes is noted with what it asked for, what was sent, and the headers.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = "moonshotai/Kimi-K3"
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


@lru_cache(maxsize=256)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=256)
def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@lru_cache(maxsize=4)
def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix != ".npz"}


def files_of(directory: Path) -> dict[str, bytes]:
    """A checkpoint's files as a repository's, without what was recorded beside it; read once."""
    return dict(_contents(directory))


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request for bytes. kind, and at: after how many bytes of the body.

    cut: the connection breaks. stall: silence for `seconds`. short: a consistent answer with fewer bytes.
    ignore_range: 200 and the whole file. other_size, other_start: a Content-Range of another file or place.
    wrong_length: a Content-Length that is not the body's. corrupt: one bit of byte `at` of the body. status: that
    status with `headers`. gzip: a body that says it is packed. longer: more bytes than were asked for, unannounced.
    """

    kind: str
    at: int = 0
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    seconds: float = 5.0


@dataclass(slots=True)
class Asked:
    """One request for bytes at the second port. begin, end: what was asked for, end exclusive."""

    name: str
    begin: int
    end: int
    headers: dict[str, str]
    sent: int = 0
    fault: Fault | None = None


@dataclass
class LocalHub:
    """files: the repository's bytes by name; faults: asked for each request for bytes, None for none.

    before: called with every request for bytes before it is answered. api: what the metadata requests met.
    """

    files: dict[str, bytes]
    large: Callable[[str], bool] = lambda name: name.endswith((".safetensors", ".model"))
    faults: Callable[[Asked], Fault | None] = lambda asked: None
    before: Callable[[Asked], None] = lambda asked: None
    refuse: Callable[[str, dict[str, str]], tuple[int, dict[str, str]] | None] = lambda path, headers: None
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    commit: str = COMMIT
    repository: str = REPOSITORY
    with_blobs: bool = True
    redirect: bool = True
    listed: dict[str, bytes] | None = None  # what the metadata speaks of, where that is not what is served
    asked: list[Asked] = field(default_factory=list)
    api: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""
    content: str = ""
    bytes_per_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def checksum(self, name: str) -> str:
        """What the metadata says: sha256 of a large file, the git object id of a small one."""
        data = (self.listed or self.files)[name]
        return _sha256(data) if self.large(name) else _git_id(data)

    def siblings(self) -> list[dict[str, object]]:
        """The metadata of every file."""
        found: list[dict[str, object]] = []
        for name, data in (self.listed or self.files).items():
            entry: dict[str, object] = {"rfilename": name}
            if self.with_blobs:
                entry |= {"size": len(data), "blobId": _git_id(data)}
                if self.large(name):
                    entry["lfs"] = {"sha256": self.checksum(name), "size": len(data), "pointerSize": 134}
            found.append(entry)
        return found

    def note(self, asked: Asked) -> None:
        """Keep a request."""
        with self._lock:
            self.asked.append(asked)

    @property
    def num_sent(self) -> int:
        """Bytes of bodies that were sent."""
        return sum(asked.sent for asked in self.asked)


class _Api(BaseHTTPRequestHandler):
    """The hub's own port: metadata, HEAD of a file, and the redirect to its bytes."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.api.append((self.command, path, headers))
        if refused := hub.refuse(path, headers):
            self._send(refused[0], refused[1], b"refused")
        elif match := re.fullmatch(rf"/api/models/{hub.repository}/revision/(.+)", path):
            commit = hub.branches.get(match[1], match[1])
            if commit != hub.commit:
                self._send(404, {"x-error-code": "RevisionNotFound"}, b"no such revision")
                return
            body = {"id": hub.repository, "sha": commit, "siblings": hub.siblings()}
            self._send(200, {"content-type": "application/json"}, json.dumps(body).encode())
        elif path.startswith("/api/models/"):
            self._send(404, {"x-error-code": "RepoNotFound"}, b"no such repository")
        elif match := re.fullmatch(rf"/{hub.repository}/resolve/{hub.commit}/([^/]+)", path):
            self._resolve(match[1])
        else:
            self._send(404, {"x-error-code": "EntryNotFound"}, b"no such file")

    def _resolve(self, name: str) -> None:
        hub = self.hub
        if name not in hub.files:
            self._send(404, {"x-error-code": "EntryNotFound"}, b"no such file")
            return
        size = len((hub.listed or hub.files)[name])
        about = {
            "x-repo-commit": hub.commit,
            "x-linked-size": str(size),
            "x-linked-etag": f'"{hub.checksum(name)}"',
            "etag": f'"{hub.checksum(name)}"',
        }
        if hub.redirect:
            self._send(302, {**about, "location": f"{hub.content}/blob/{name}?signature=secret-of-the-store"}, b"")
        elif self.command == "HEAD":
            self._send(200, {**about, "content-length": str(size)}, b"")
        else:
            _serve(self, hub, name)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "content-length" not in headers:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Content(BaseHTTPRequestHandler):
    """The second port: bytes."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        _serve(self, self.hub, unquote(self.path.partition("?")[0]).rsplit("/", 1)[-1])

    def log_message(self, *_: object) -> None:
        pass


def _serve(handler: BaseHTTPRequestHandler, hub: LocalHub, name: str) -> None:
    data = hub.files[name]
    headers = {key.lower(): value for key, value in handler.headers.items()}
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
    begin, end = (int(match[1]), min(int(match[2]) + 1, len(data))) if match else (0, len(data))
    asked = Asked(name, begin, int(match[2]) + 1 if match else len(data), headers)
    hub.note(asked)
    hub.before(asked)
    fault = asked.fault = hub.faults(asked)
    kind = fault.kind if fault else ""
    if begin >= len(data) and data:
        fault = asked.fault = Fault("status", status=416)
        kind = "status"
    if kind == "status" and fault is not None:
        handler.send_response(fault.status)
        for key, value in (*fault.headers, ("content-length", "0")):
            handler.send_header(key, value)
        handler.end_headers()
        return
    whole = kind == "ignore_range" or match is None
    body = data if whole else data[begin:end]
    if fault is not None and kind == "corrupt":
        place = fault.at % max(len(body), 1)
        body = body[:place] + bytes([body[place] ^ 16]) + body[place + 1 :]
    if fault is not None and kind == "short":
        body = body[: max(fault.at % max(len(body), 1), 1)]
    start = 0 if whole else begin + (1 if kind == "other_start" else 0)
    total = len(data) + (7 if kind == "other_size" else 0)
    handler.send_response(200 if whole else 206)
    if not whole:
        handler.send_header("content-range", f"bytes {start}-{start + len(body) - 1}/{total}")
    if kind == "gzip":
        handler.send_header("content-encoding", "gzip")
    length = len(body) + (3 if kind == "wrong_length" else 0)
    if kind == "longer":
        handler.send_header("connection", "close")
        body += b"more than was asked for"
    else:
        handler.send_header("content-length", str(length))
    handler.end_headers()
    _send_body(handler, hub, asked, fault, body)
    if kind in ("longer", "wrong_length", "cut"):
        handler.close_connection = True


def _send_body(handler: BaseHTTPRequestHandler, hub: LocalHub, asked: Asked, fault: Fault | None, body: bytes) -> None:
    stop = len(body) if fault is None or fault.kind not in ("cut", "stall") else min(fault.at, len(body))
    step = 1 << 16
    try:
        for place in range(0, stop, step):
            piece = body[place : min(place + step, stop)]
            handler.wfile.write(piece)
            asked.sent += len(piece)
            if hub.bytes_per_s:
                time.sleep(len(piece) / hub.bytes_per_s)
        if fault is not None and fault.kind == "stall":
            handler.wfile.flush()
            hub.closing.wait(fault.seconds)
            handler.close_connection = True
    except (BrokenPipeError, ConnectionResetError):
        handler.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


@contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    """Serve the hub on two ports until the block ends."""
    servers = []
    for handler in (_Api, _Content):
        bound = type(handler.__name__, (handler,), {"hub": hub})
        servers.append(_Server(("127.0.0.1", 0), bound))
    ports = [server.server_address[1] for server in servers]
    hub.endpoint, hub.content = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"  # two hosts by name
    threads = [threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

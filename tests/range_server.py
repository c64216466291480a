"""A small HTTP server of one folder that answers ranges, writes down what it was asked and sent, and can misbehave."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Request:
    """One request and what was sent for it."""

    name: str
    range: tuple[int, int] | None  # begin, end as asked; None without a range
    headers: dict[str, str]
    sent: int = 0


@dataclass
class Answer:
    """What the server is about to send; a fault may change it. promised: Content-Length, None: the body's length."""

    status: int
    headers: dict[str, str]
    body: bytes
    promised: int | None = None


Fault = Callable[[Request, Answer], Answer]


@dataclass
class RangeServer:
    """A running server. faults: applied to the answers for files whose name matches, in turn."""

    address: str
    folder: Path
    requests: list[Request] = field(default_factory=list)
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def misbehave(self, pattern: str, fault: Fault) -> None:
        """Apply a fault to the files whose name matches the regular expression."""
        self.faults.append((pattern, fault))

    @property
    def sent_bytes(self) -> int:
        """Bytes of all bodies with status 200 or 206."""
        return sum(request.sent for request in self.requests)


@contextmanager
def serve(folder: Path) -> Iterator[RangeServer]:
    """Serve a folder on loopback until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            """Be silent."""

        def do_GET(self) -> None:
            """Answer one request."""
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            wanted = (int(asked[1]), int(asked[2]) + 1) if asked else None
            request = Request(urlsplit(self.path).path.rsplit("/", 1)[-1], wanted, dict(self.headers))
            with server.lock:
                server.requests.append(request)
            answer = _answer(folder, request)
            for pattern, fault in server.faults:
                if re.search(pattern, request.name):
                    answer = fault(request, answer)
            self._send(request, answer)

        def _send(self, request: Request, answer: Answer) -> None:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            length = len(answer.body) if answer.promised is None else answer.promised
            self.send_header("Content-Length", str(length))
            self.end_headers()
            try:
                self.wfile.write(answer.body)
            except OSError:  # the client closed, as it should when it refuses the answer
                self.close_connection = True
                return
            request.sent = len(answer.body) if answer.status in (200, 206) else 0
            if length != len(answer.body):
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away is no error here."""

    http = Server(("127.0.0.1", 0), Handler)
    server = RangeServer(f"http://127.0.0.1:{http.server_address[1]}", folder)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _answer(folder: Path, request: Request) -> Answer:
    path = folder / request.name
    if not path.is_file():
        return Answer(404, {}, b"")
    size = path.stat().st_size
    headers = {"ETag": f'"{request.name}"', "Accept-Ranges": "bytes"}
    if request.range is None:
        return Answer(200, headers, path.read_bytes())
    begin, end = request.range[0], min(request.range[1], size)
    if begin >= size:
        return Answer(416, {**headers, "Content-Range": f"bytes */{size}"}, b"")
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    return Answer(206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}, data)

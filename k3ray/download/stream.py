"""One request for a span of one file: redirects followed without the token, the answer judged, its bytes kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from k3ray.download.answers import IgnoredRange, Transient, WantedBytes, bytes_to_skip, check_linked, check_status
from k3ray.download.hub import Hub
from k3ray.download.part_file import PartFile
from k3ray.http_client import new_http_client, redirected

MAX_REDIRECTS = 8
LEAST_BYTES = 4096  # fewer than these in stall_s is a stall as well


class Stopped(Exception):
    """The download was interrupted."""


class Sink(Protocol):
    """Where counts go."""

    def fetched(self, count: int) -> None:
        """Bytes that arrived and belong to the file."""

    def lost(self, count: int) -> None:
        """Bytes that were counted as here and are not the file's."""

    def skipped(self, count: int) -> None:
        """Bytes that arrived although they are here, because the server sent a whole file."""


@dataclass(slots=True)
class Line:
    """What requests share: the hub, the connections, the interruption, and how long silence may last."""

    hub: Hub
    client: httpx.Client
    stall_s: float
    stop: threading.Event = field(default_factory=threading.Event)


def new_client(stall_s: float, workers: int) -> httpx.Client:
    """Connections for so many files at once; no read waits longer than stall_s."""
    timeout = httpx.Timeout(stall_s, connect=min(stall_s, 20.0))
    limits = httpx.Limits(max_connections=2 * workers + 2, max_keepalive_connections=workers)
    return new_http_client(timeout, limits)


def stream(line: Line, url: str, wanted: WantedBytes, part: PartFile, sink: Sink, accept_whole: bool) -> None:
    """Fetch bytes wanted.begin..end to the part, which stands at begin; whatever arrived is kept on every way out.

    accept_whole: take a whole file where a span was asked for, and drop what comes before. Raises Transient,
    AccessRefused, Stopped, PartClosed, OSError.
    """
    try:
        _request(line, url, wanted, part, sink, accept_whole)
    finally:
        part.flush()
    if part.position < wanted.end:
        raise Transient(f"{_host(url)}: the body ended {wanted.end - part.position} bytes early")


def _request(line: Line, url: str, wanted: WantedBytes, part: PartFile, sink: Sink, accept_whole: bool) -> None:
    for _ in range(MAX_REDIRECTS):
        headers = {**line.hub.headers_for(url), "range": wanted.range_header}
        at_hub = urlsplit(url).netloc == urlsplit(line.hub.endpoint).netloc
        with _telling_host(url, line.stall_s), line.client.stream("GET", url, headers=headers) as answer:
            if at_hub:
                check_linked(wanted, answer.headers)
            if answer.has_redirect_location:
                target = redirected(url, answer.headers["location"])
                if target is None:
                    raise Transient(f"{_host(url)} redirects to something that is no http or https address")
                url = target
                continue
            check_status(wanted, answer.status_code, answer.headers, _host(url), at_hub)
            skip = bytes_to_skip(wanted, answer.status_code, answer.headers)
            if skip and not accept_whole:
                raise IgnoredRange(f"{_host(url)} ignored the range and sent the whole file")
            _receive(line, answer, wanted, part, sink, skip)
            return
    raise Transient(f"more than {MAX_REDIRECTS} redirects")


@contextmanager
def _telling_host(url: str, stall_s: float) -> Iterator[None]:
    """What breaks on the way to a host becomes Transient, and every Transient has the host's name."""
    try:
        yield
    except Transient as error:
        if not str(error).startswith(_host(url)):
            error.args = (f"{_host(url)}: {error}",)
        raise
    except httpx.TimeoutException:
        raise Transient(f"{_host(url)}: no byte for {stall_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last: a host that is no name
        raise Transient(f"{_host(url)}: {type(error).__name__} ({error})") from None


def _receive(line: Line, answer: httpx.Response, wanted: WantedBytes, part: PartFile, sink: Sink, skip: int) -> None:
    """Keep the body's bytes after the first `skip` and up to the wanted end."""
    since, seen = time.monotonic(), 0
    for whole in answer.iter_raw():  # as they arrive: a chunk size would hold bytes back, and lose them with the line
        if line.stop.is_set():
            raise Stopped
        seen += len(whole)
        if (now := time.monotonic()) - since > line.stall_s:
            if seen < LEAST_BYTES:
                raise Transient(f"{seen} bytes in {now - since:.0f} s")
            since, seen = now, 0
        dropped = min(skip, len(whole))
        skip -= dropped
        if dropped:
            sink.skipped(dropped)
        piece = whole[dropped : dropped + wanted.end - part.received]
        if piece:
            part.add(piece)
            sink.fetched(len(piece))
        if part.received == wanted.end:
            return


def _host(url: str) -> str:
    """What may be shown of an address: a signed one carries secrets after its path."""
    return urlsplit(url).netloc.rpartition("@")[2]

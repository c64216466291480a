"""A checkpoint's files on a server, read by HTTP ranges only, with every answer checked before its body is believed.

A token goes to the hub it belongs to and to nobody else: not to another server, nor along a redirect to one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import quote, urlsplit

import httpx

from k3ray.audit.address import HUB, origin_of, parse_address
from k3ray.audit.snapshot import SourceKind
from k3ray.audit.source_files import Ledger, SourceError
from k3ray.http_client import is_private, new_http_client, redirected

MAX_REDIRECTS = 5
WAITS_S = (1.0, 4.0, 15.0)  # before the second, third and fourth try
TIMEOUT = httpx.Timeout(30.0, connect=15.0)
STALL_S, LEAST_BYTES = 30.0, 4096  # a body of fewer bytes in that time has stalled, though some come
_RETRIED = frozenset((408, 429, 500, 502, 503, 504))
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_NONE = re.compile(r"bytes \*/([0-9]{1,19})")
_BROKEN = ("Server disconnected", "peer closed connection")  # how httpx says that a connection ended too early
_COMMIT = re.compile(r"[0-9a-f]{40}")

Result = TypeVar("Result")


class _TryAgain(Exception):
    """A try that failed in a way that often passes."""


class HttpFiles:
    """A checkpoint below a base URL."""

    kind: SourceKind = "http"

    def __init__(
        self,
        address: str,
        token: str | None = None,
        hub: str = HUB,
        waits_s: tuple[float, ...] = WAITS_S,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Nothing is asked of the server yet. token: of the hub at `hub`. say: told of tries that are repeated."""
        parsed = parse_address(address)
        self.address = parsed.base
        self.ledger = Ledger()
        self._origin = parsed.origin
        self._authorization = parsed.authorization
        if not self._authorization and token and origin_of(hub) == parsed.origin and is_private(hub):
            self._authorization = f"Bearer {token}"
        self._named_revision = parsed.revision
        self._commits: set[str] = set()
        self._tags: dict[str, str] = {}
        self._say = say
        self._waits_s = waits_s
        self._closed = threading.Event()
        self._client = new_http_client(TIMEOUT, httpx.Limits(max_connections=16))

    def close(self) -> None:
        """Close the connections; a thread that still reads or waits ends at its next step."""
        self._closed.set()
        self._client.close()

    @property
    def revision(self) -> str:
        """The commit that the server named, else the one in the address."""
        return next(iter(self._commits), self._named_revision)

    def shard_names(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """The shards that the index names: a server has no list."""
        return named

    def read_whole(self, name: str, limit: int) -> bytes | None:
        """A small file's content, without a range, at most `limit` bytes; None when the server has no such file."""

        def once() -> bytes | None:
            with self._answer(name, None) as answer:
                if answer.status_code == 404:
                    return None
                self._check_status(name, answer, 200)
                length = answer.headers.get("content-length", "")
                if length.isdecimal() and int(length) > limit:
                    raise self._error(name, f"a content of {length} bytes", f"at most {limit}")
                packed = answer.headers.get("content-encoding", "identity")
                if packed != "identity" and not name.endswith(f".{packed.removesuffix('ip')}"):
                    raise self._error(name, f"a content encoded as {packed[:40]!r}", "the file's own bytes")
                return self._receive(name, answer, limit, int(length) if length.isdecimal() else None)

        data = self._tried(name, once)
        if data is not None:
            self.ledger.keep(name, data, len(data))
        return data

    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes begin..end of a file, fewer only where it ends before."""

        def once() -> tuple[bytes, int]:
            with self._answer(name, f"bytes={begin}-{end - 1}") as answer:
                nothing = _NONE.fullmatch(answer.headers.get("content-range", ""))
                if answer.status_code == 416 and nothing is not None and int(nothing[1]) <= begin:
                    return b"", int(nothing[1])
                if answer.status_code == 200:
                    expected = "the asked range alone (status 206): this server ignores ranges, nothing was read of it"
                    raise self._error(name, "the whole file (status 200)", expected)
                self._check_status(name, answer, 206)
                last, size = self._check_range(name, answer, begin, end)
                return self._receive(name, answer, last + 1 - begin, last + 1 - begin), size

        if begin == end:
            return b""
        data, size = self._tried(name, once)
        known = self.ledger.size(name)
        if known is not None and known != size:
            raise self._error(name, f"{size} bytes", f"the {known} of before: it changed while it was audited")
        self.ledger.keep(name, data, size, begin)
        return data

    def _check_range(self, name: str, answer: httpx.Response, begin: int, end: int) -> tuple[int, int]:
        """The last byte and the file's size that the answer states, when they are what was asked for."""
        stated = answer.headers.get("content-range", "")
        match = _RANGE.fullmatch(stated)
        expected = f"bytes {begin}-{end - 1} of a stated size"
        if match is None:
            raise self._error(name, f"Content-Range {stated[:80]!r}", expected)
        first, last, size = (int(number) for number in match.groups())
        if first != begin or last != min(end, size) - 1:
            raise self._error(name, f"Content-Range {stated[:80]!r}", expected)
        length = answer.headers.get("content-length", str(last + 1 - first))
        if length != str(last + 1 - first):
            raise self._error(name, f"Content-Length {length[:40]} for {stated}", f"{last + 1 - first}")
        if (packed := answer.headers.get("content-encoding", "identity")) != "identity":
            raise self._error(name, f"a content encoded as {packed[:40]!r}", "the file's own bytes")
        tag = answer.headers.get("x-linked-etag") or answer.headers.get("etag") or ""
        if self._tags.setdefault(name, tag) != tag:
            raise self._error(name, "another ETag than before", "one file: it changed while it was audited")
        return last, size

    def _check_status(self, name: str, answer: httpx.Response, expected: int) -> None:
        status = answer.status_code
        if status == expected:
            return
        if status in _RETRIED:
            raise _TryAgain(f"status {status}")
        if status in (401, 403):
            raise self._error(name, f"status {status}", "permission: set HF_TOKEN to a token that may read it")
        if status == 404:
            raise self._error(name, "no such file (status 404)", "it there: correct the address or its revision")
        raise self._error(name, f"status {status}", f"status {expected}")

    def _receive(self, name: str, answer: httpx.Response, limit: int, expected: int | None) -> bytes:
        """The body, never more than `limit` bytes of it; a body of another length than `expected` is tried again."""
        pieces, count = [], 0
        since, before = time.monotonic(), 0
        for piece in answer.iter_raw():
            count += len(piece)
            if (now := time.monotonic()) - since > STALL_S:
                if count - before < LEAST_BYTES:
                    raise _TryAgain(f"{count - before} bytes in {now - since:.0f} s")
                since, before = now, count
            self.ledger.count_bytes(name, len(piece))
            if count > limit:
                raise self._error(name, f"a body of more than {limit} bytes", f"at most {limit}")
            pieces.append(piece)
        if expected is not None and count != expected:
            raise _TryAgain(f"a body of {count} bytes where {expected} were stated")
        return b"".join(pieces)

    def _tried(self, name: str, once: Callable[[], Result]) -> Result:
        """The result of the first try that succeeds."""
        waits = iter(self._waits_s)
        while True:
            try:
                return once()
            except (_TryAgain, httpx.TransportError) as error:
                reason = str(error) if isinstance(error, _TryAgain) else _describe(error)
                if (wait := next(waits, None)) is None:
                    tries = len(self._waits_s) + 1
                    raise self._error(name, f"{reason}, {tries} times", "the asked bytes: try later") from None
                if not self._closed.is_set():
                    self._say(f"{name}: {reason}; trying again in {wait:g} s")
                if self._closed.wait(wait):
                    raise self._error(name, "the connections closed", "no more of it") from None

    @contextmanager
    def _answer(self, name: str, asked: str | None) -> Iterator[httpx.Response]:
        """The answer for a file, its body unread, after redirects; credentials go to the address's own origin only."""
        url = f"{self.address}/{quote(name)}"
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity"}
            if asked:
                headers["Range"] = asked
            if self._authorization and origin_of(url) == self._origin:
                headers["Authorization"] = self._authorization
            self.ledger.count_request()
            with self._client.stream("GET", url, headers=headers) as answer:
                self._note_commit(name, answer)
                if not answer.has_redirect_location:
                    yield answer
                    return
                target = redirected(url, answer.headers["location"])
            if target is None:
                raise self._error(name, "a redirect to something else", "one to an http or https address")
            if urlsplit(target).scheme != "https" and urlsplit(url).scheme == "https":
                raise self._error(name, "a redirect away from https", "https throughout")
            url = target
        raise self._error(name, f"more than {MAX_REDIRECTS} redirects", "the file")

    def _note_commit(self, name: str, answer: httpx.Response) -> None:
        commit = answer.headers.get("x-repo-commit", "")
        if _COMMIT.fullmatch(commit):
            self._commits.add(commit)
            if len(self._commits) > 1:
                found = "the commits " + " and ".join(sorted(self._commits))
                raise self._error(name, found, "one: the repository moved; put a commit into the address")

    def _error(self, name: str, found: str, expected: str) -> SourceError:
        return SourceError(f"{self.address}/{name}: found {found}, expected {expected}")


def _describe(error: httpx.TransportError) -> str:
    """What went wrong with the connection, without an address: a redirect's may hold a signature."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, httpx.RemoteProtocolError) and not str(error).startswith(_BROKEN):
        return "an answer that is not HTTP"
    return "a connection that broke in the middle"

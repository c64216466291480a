"""The audit over HTTP from a server at fault: refused with what was found, or asked again and every byte counted."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from k3ray.audit.http_files import HttpFiles
from k3ray.workers.failure import Failure
from tests.audited import ANY_SHARD, SHARD, fetched
from tests.range_server import Answer, Fault, RangeServer, Request


# What the server does: each has a refusal of its own below.
def ignore_range(request: Request, answer: Answer) -> Answer:
    data = b"x" * 5_000_000
    return Answer(200, {}, data)


def short_body(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=answer.body[:-1], promised=len(answer.body))


def wrong_length(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=answer.body + b"!!!")


def other_range(request: Request, answer: Answer) -> Answer:
    begin, end = request.range or (0, 0)
    return replace(answer, headers={**answer.headers, "Content-Range": f"bytes {begin + 1}-{end}/999999999"})


def no_range(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={"ETag": "a"})


def gone(request: Request, answer: Answer) -> Answer:
    return Answer(404, {}, b"no")


def forbidden(request: Request, answer: Answer) -> Answer:
    return Answer(403, {}, b"no")


def always_busy(request: Request, answer: Answer) -> Answer:
    return Answer(503, {}, b"")


def packed(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"})


def other_file(request: Request, answer: Answer) -> Answer:
    tag = f'"{request.range}"'
    return replace(answer, headers={**answer.headers, "ETag": tag})


def to_no_address(request: Request, answer: Answer) -> Answer:
    return Answer(302, {"Location": "http://127.0.0.1:99999/x?signature=s3cret"}, b"")


def circle(request: Request, answer: Answer) -> Answer:
    return Answer(302, {"Location": f"/{request.name}"}, b"")


def huge_header(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=(2**63).to_bytes(8, "little")) if request.range == (0, 8) else answer


def header_past_the_end(request: Request, answer: Answer) -> Answer:
    return replace(answer, body=(90_000_000).to_bytes(8, "little")) if request.range == (0, 8) else answer


def growing(request: Request, answer: Answer) -> Answer:
    stated = answer.headers["Content-Range"]
    grown = stated if request.range == (0, 8) else stated + "0"
    return replace(answer, headers={**answer.headers, "Content-Range": grown})


def endless_number(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Range": "bytes 0-7/" + "9" * 5000})


def other_digits(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Range": "bytes 0-7/\u00b2\u00b3"})


def unspeakable(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "\x07gzip"})


def endless_header(request: Request, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "X-Long": "x" * 1_000_000})


@pytest.mark.parametrize(
    ("pattern", "fault", "message"),
    [
        (SHARD, endless_number, "found Content-Range 'bytes 0-7/9{70}', expected bytes 0-7"),
        (SHARD, other_digits, "found Content-Range 'bytes 0-7/..', expected bytes 0-7"),
        (SHARD, unspeakable, r"content encoded as '\\x07gzip'"),
        (SHARD, endless_header, "an answer that is not HTTP, 3 times"),
        (r"config\.json", endless_header, "an answer that is not HTTP, 3 times"),
        (SHARD, ignore_range, "found the whole file .status 200., expected the asked range alone .* ignores ranges"),
        (SHARD, short_body, "connection that broke in the middle, 3 times"),
        (SHARD, wrong_length, "Content-Length 11 for bytes 0-7/"),
        (SHARD, other_range, "found Content-Range 'bytes 1-8/999999999', expected bytes 0-7"),
        (SHARD, no_range, "found Content-Range '', expected bytes 0-7"),
        (SHARD, gone, "no such file .status 404."),
        (r"config\.json", gone, "config.json that can be read|nothing that can be read"),
        (r"index\.json", gone, "neither shards nor model.safetensors.index.json"),
        (SHARD, forbidden, "status 403, expected permission: set HF_TOKEN"),
        (SHARD, always_busy, "status 503, 3 times"),
        (SHARD, packed, "content encoded as .gzip."),
        (r"config\.json", packed, "content encoded as .gzip."),
        (SHARD, other_file, "another ETag than before"),
        (SHARD, circle, "more than 5 redirects"),
        (SHARD, to_no_address, "a redirect to something else, expected one to an http or https address"),
        (SHARD, huge_header, f"header length of {2**63}, expected at most 100000000 bytes"),
        (SHARD, header_past_the_end, "header length of 90000000 in a file of"),
        (SHARD, growing, "expected the .* of before: it changed while it was audited"),
    ],
)
def test_a_fault_is_refused(range_server: RangeServer, pattern: str, fault: Fault, message: str) -> None:
    range_server.misbehave(pattern, fault)
    with pytest.raises(Failure, match=message) as caught:
        fetched(range_server.address)
    assert range_server.address in str(caught.value)
    assert "\n  File" not in str(caught.value)


def test_a_server_that_ignores_ranges_is_refused_before_its_body_is_read(range_server: RangeServer) -> None:
    range_server.misbehave(ANY_SHARD, ignore_range)
    with closing(HttpFiles(range_server.address, waits_s=())) as files:
        with pytest.raises(Failure, match="nothing was read of it"):
            files.read(SHARD, 0, 8)
        assert files.ledger.fetched_bytes == 0


def test_a_body_that_only_drips_is_given_up(range_server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes before the line's own time is up, and a header would take a month."""
    clock = iter(range(0, 10**9, 20))  # seconds between two bytes
    monkeypatch.setattr("k3ray.audit.http_files.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    drips = httpx.Response(206, stream=httpx.ByteStream(b"x" * 200))
    monkeypatch.setattr(drips, "iter_raw", lambda: iter([b"x"] * 200))
    with closing(HttpFiles(range_server.address)) as files, pytest.raises(Exception, match="2 bytes in 40 s"):
        files._receive(SHARD, drips, 200, 200)


def test_a_server_that_is_busy_for_a_moment_is_asked_again(range_server: RangeServer) -> None:
    busy = iter([True, True])
    range_server.misbehave(SHARD, lambda request, answer: always_busy(request, answer) if next(busy, False) else answer)
    snapshot = fetched(range_server.address)
    assert snapshot.disagreements == ()
    assert snapshot.source.requests == len(range_server.requests)


def test_a_broken_body_is_fetched_again_and_its_bytes_are_counted_twice(
    range_server: RangeServer, wide_checkpoint: Path
) -> None:
    once = iter([True])
    range_server.misbehave(SHARD, lambda request, answer: short_body(request, answer) if next(once, False) else answer)
    row = next(file for file in fetched(range_server.address).source.files if file.name == SHARD)
    parts = sorted({request.range for request in range_server.requests if request.name == SHARD and request.range})
    assert row.fetched_bytes == sum(end - begin for begin, end in parts) + 7
    data = (wide_checkpoint / SHARD).read_bytes()
    assert row.sha256 == hashlib.sha256(b"".join(data[begin:end] for begin, end in parts)).hexdigest()


def test_a_repository_that_moves_is_refused(range_server: RangeServer) -> None:
    commits = iter(["a" * 40] * 4 + ["b" * 40] * 1000)
    range_server.misbehave(
        "", lambda request, answer: replace(answer, headers={**answer.headers, "X-Repo-Commit": next(commits)})
    )
    with pytest.raises(Failure, match="the repository moved; put a commit into the address"):
        fetched(range_server.address)


def test_no_server_at_all(range_server: RangeServer) -> None:
    said: list[str] = []
    nobody = HttpFiles(range_server.address.rsplit(":", 1)[0] + ":9", waits_s=(0.0, 0.0), say=said.append)
    with closing(nobody), pytest.raises(Failure, match="no connection, 3 times"):
        nobody.read(SHARD, 0, 8)
    assert said == [f"{SHARD}: no connection; trying again in 0 s"] * 2

"""What an answer to a request for bytes means, how long is waited, and who may see the token."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.download.answers import AccessRefused, Transient, WantedBytes, bytes_to_skip, check_linked, check_status
from k3ray.download.checksums import Checksum
from k3ray.download.hub import Hub, HubRefused, check_endpoint
from k3ray.download.patience import Patience, parse_retry_after

SHA = Checksum("sha256", "ab" * 32)
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


def wanted(begin: int = 10, end: int = 50, size: int = 100) -> WantedBytes:
    return WantedBytes("a.safetensors", begin, end, size, SHA, COMMIT)


@pytest.mark.parametrize(
    ("status", "headers", "skip"),
    [
        (206, {"content-range": "bytes 10-49/100", "content-length": "40"}, 0),
        (206, {"content-range": "bytes 10-20/100", "content-length": "11"}, 0),  # short, and honest about it
        (206, {"content-range": "bytes 10-49/*"}, 0),
        (200, {"content-length": "100"}, 10),
        (200, {}, 10),
    ],
)
def test_answers_that_hold_the_bytes(status: int, headers: dict[str, str], skip: int) -> None:
    check_status(wanted(), status, headers, "host", True)
    assert bytes_to_skip(wanted(), status, headers) == skip


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (206, {}, "sent the range 'none', expected bytes 10-49"),
        (206, {"content-range": "bytes 11-49/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-50/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-9/100"}, "expected bytes 10-49"),
        (206, {"content-range": "bytes 10-49/101"}, "holds a file of 101 bytes, expected 100"),
        (206, {"content-range": "bytes 10-49/100", "content-length": "39"}, "content length of 39"),
        (200, {"content-length": "99"}, "a whole file of 99 bytes, expected 100"),
        (200, {"content-length": "-1"}, "content length '-1'"),
        (200, {"content-encoding": "gzip"}, "as gzip"),
    ],
)
def test_answers_that_do_not(status: int, headers: dict[str, str], message: str) -> None:
    with pytest.raises(Transient, match=message):
        bytes_to_skip(wanted(), status, headers)


@pytest.mark.parametrize("status", [401, 403, 404, 451])
def test_a_refusal_of_the_hub_ends_it_and_one_of_the_store_does_not(status: int) -> None:
    with pytest.raises(AccessRefused, match=rf"a.safetensors: host answered {status}; "):
        check_status(wanted(), status, {}, "host", True)
    with pytest.raises(Transient, match=rf"store answered {status}"):
        check_status(wanted(), status, {}, "store", False)


@pytest.mark.parametrize(
    ("status", "header", "seconds"), [(429, "7", 7.0), (503, "1", 1.0), (500, None, None), (416, "9", None)]
)
def test_what_a_busy_server_asks_for(status: int, header: str | None, seconds: float | None) -> None:
    with pytest.raises(Transient) as caught:
        check_status(wanted(), status, {} if header is None else {"retry-after": header}, "host", True)
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"x-repo-commit": "f" * 40}, "answered for commit ffff"),
        ({"x-linked-size": "99"}, "a file of 99 bytes, expected 100"),
        ({"x-linked-etag": f'"{"cd" * 32}"'}, "another content"),
    ],
)
def test_a_hub_that_speaks_of_another_file(headers: dict[str, str], message: str) -> None:
    with pytest.raises(Transient, match=message):
        check_linked(wanted(), headers)
    right = {"x-repo-commit": COMMIT, "x-linked-size": "100", "x-linked-etag": f'"{SHA.value}"'}
    check_linked(wanted(), right)
    check_linked(wanted(), {})


def test_retry_after_is_a_number_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    cases = {"12": 12.0, "Thu, 01 Jan 2026 00:01:40 GMT": 100.0, "Thu, 01 Jan 2025 00:00:00 GMT": 0.0}
    assert {text: parse_retry_after(text, now) for text in cases} == cases
    assert [parse_retry_after(text, now) for text in (None, "", "soon", "-1", "1.5", "9" * 30)] == [None] * 6


@given(st.integers(1, 10**6), st.integers(0, 2**32))
def test_waiting_grows_with_jitter_and_has_an_end(failures: int, seed: int) -> None:
    patience, chance = Patience(), random.Random(seed)
    longest = min(2.0 ** min(failures - 1, 20), patience.longest_wait_s)
    assert longest / 2 <= patience.wait_s(failures, None, chance) <= longest
    assert 30.0 <= patience.wait_s(failures, 30.0, chance) <= 31.0
    assert patience.wait_s(failures, 1e9, chance) <= patience.longest_retry_after_s + 1


def test_the_token_is_only_for_the_endpoint_itself() -> None:
    hub = Hub("https://hub.example", "test", "hf_secret")
    mine = hub.headers_for("https://hub.example/x")
    assert mine["authorization"] == "Bearer hf_secret" and mine["accept-encoding"] == "identity"
    for url in (
        "https://cdn.example/x",
        "http://hub.example/x",
        "https://hub.example:444/x",
        "https://hub.example.evil/x",
    ):
        assert "authorization" not in {key.lower() for key in hub.headers_for(url)}
    assert "hf_secret" not in repr(hub)
    assert not Hub("http://mirror.example", "test", "hf_secret").sends_token
    assert Hub("http://127.0.0.1:80", "test", "hf_secret").sends_token


@pytest.mark.parametrize(
    "text",
    ["hub.example", "ftp://h", "https://", "https://u:p@h", "https://h?x=1", "http://[1", "http://h:x", "http://ho st",
     "http://h\n", "http://hüb", "http://a..b", f"https://{'a' * 64}.b", "https://h/a b", "https://h/#", "http://h:0"],
)  # fmt: skip
def test_an_endpoint_that_is_none(text: str) -> None:
    with pytest.raises(HubRefused, match="--endpoint: expected an address") as caught:
        check_endpoint(text, "--endpoint")
    assert "u:p" not in str(caught.value)
    for usable in ("https://h/base", "http://127.0.0.1:8080", "https://a-b.c.d.", "http://[::1]:8080", "http://h_1"):
        assert check_endpoint(f"{usable}/", "x") == usable

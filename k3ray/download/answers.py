"""What one HTTP answer to a request for bytes begin..end of a file means: pure, without a connection.

An answer is used only when it is proven to hold the bytes that were asked for of a file of the expected size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from k3ray.download.checksums import Checksum
from k3ray.download.patience import parse_retry_after
from k3ray.workers.failure import Failure

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_AGAIN = (408, 425, 429)
_NOTED = ", as the folder's record.json has it from the hub where the download began"


class Transient(Exception):
    """An attempt that failed in a way that may pass: its text says what happened."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class IgnoredRange(Transient):
    """The whole file was sent where a part of it was asked for."""


class AccessRefused(Failure):
    """The hub does not give the file to this user: trying again is no use."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class WantedBytes:
    """Bytes begin..end (end exclusive) of one file of `size` bytes."""

    name: str
    begin: int
    end: int
    size: int
    checksum: Checksum
    commit: str

    @property
    def range_header(self) -> str:
        """The Range header's value."""
        return f"bytes={self.begin}-{self.end - 1}"


def check_linked(wanted: WantedBytes, headers: Mapping[str, str]) -> None:
    """Raise Transient when the hub's own headers speak of another commit, size or content than the metadata did."""
    commit = headers.get("x-repo-commit")
    if commit and commit != wanted.commit:
        raise Transient(f"it answered for commit {commit[:40]}, expected {wanted.commit}")
    linked_size = headers.get("x-linked-size")
    if linked_size and linked_size != str(wanted.size):
        raise Transient(f"it offers a file of {linked_size[:20]} bytes, expected {wanted.size}{_NOTED}")
    linked = Checksum.from_text(headers.get("x-linked-etag", ""))
    if linked is not None and linked.kind == wanted.checksum.kind and linked != wanted.checksum:
        raise Transient(f"it offers another content ({linked}), expected {wanted.checksum}{_NOTED}")


def check_status(wanted: WantedBytes, status: int, headers: Mapping[str, str], host: str, at_hub: bool) -> None:
    """Raise AccessRefused or Transient for an answer that is no content."""
    if status in (200, 206):
        return
    advice = _REFUSALS.get(status)
    if advice is not None and at_hub:  # elsewhere it may be a signed address that ran out: the hub gives a new one
        raise AccessRefused(f"{wanted.name}: {host} answered {status}; {advice}")
    if status == 416:
        raise Transient(f"{host} answered 416: it has no bytes {wanted.begin}-{wanted.end - 1}, of a {wanted.size}-byte"
                        " file by its metadata: it holds another size")  # fmt: skip
    asked = parse_retry_after(headers.get("retry-after")) if status in _AGAIN or status >= 500 else None
    what = {429: " (too many requests)", 503: " (unavailable)"}.get(status, "")
    raise Transient(f"{host} answered {status}{what}", asked)


_REFUSALS = {
    401: "set HF_TOKEN to a valid token (huggingface.co/settings/tokens)",
    403: "the token has no access: accept the model's terms on its page, or use a token that may read it",
    404: "there is no such file at this revision: check --repo, --revision and --endpoint",
    410: "the file is gone: check --repo, --revision and --endpoint",
    451: "it may not be given out there: use another --endpoint",
}


def bytes_to_skip(wanted: WantedBytes, status: int, headers: Mapping[str, str]) -> int:
    """How many bytes of the body come before the wanted ones: none, or those before them in a whole file.

    Raises Transient when the body is something else.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Transient(f"it sent the body as {encoding[:20]}, expected the bytes as they are")
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise Transient(f"it sent the content length {length[:20]!r}")
    if status == 200:
        if length is not None and int(length) != wanted.size:
            raise Transient(f"it sent a whole file of {length} bytes, expected {wanted.size}")
        return wanted.begin
    found = headers.get("content-range", "none")
    match = _CONTENT_RANGE.fullmatch(found)
    if match is None or int(match[1]) != wanted.begin or not wanted.begin <= int(match[2]) < wanted.end:
        raise Transient(f"it sent the range {found[:60]!r}, expected bytes {wanted.begin}-{wanted.end - 1}")
    if match[3] not in ("*", str(wanted.size)):
        raise Transient(f"it holds a file of {match[3]} bytes, expected {wanted.size}")
    if length is not None and int(length) != int(match[2]) + 1 - wanted.begin:
        raise Transient(f"it sent a content length of {length} for the range {found[:60]!r}")
    return 0

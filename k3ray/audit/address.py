"""The address of a checkpoint on a server, taken apart: what may be shown of it, and who its credentials belong to."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from k3ray.workers.failure import Failure

HUB = "https://huggingface.co"


class AddressError(Failure):
    """An address that no checkpoint can be read from."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Address:
    """A base URL taken apart. authorization: what the user put before the host, as a header, "" without."""

    base: str
    origin: str
    authorization: str
    revision: str


def parse_address(text: str) -> Address:
    """The base URL of a checkpoint's files; raises AddressError."""
    shown = re.sub(r"//[^/]*@", "//", re.split(r"[?#]", text)[0])
    try:
        parts = urlsplit(text)
        origin, host = origin_of(text), parts.hostname
    except ValueError:
        raise AddressError(f"{shown}: found no address, expected one like {HUB}/OWNER/NAME/resolve/COMMIT") from None
    if parts.scheme not in ("http", "https") or not host:
        raise AddressError(
            f"{shown}: found no http or https address, expected one like {HUB}/OWNER/NAME/resolve/COMMIT"
        )
    if parts.query or parts.fragment:
        found = "found something after ? or #"
        raise AddressError(f"{shown}: {found}, expected the folder's address; file names are put after it")
    pieces = [piece for piece in parts.path.split("/") if piece]
    if origin == HUB and not (len(pieces) >= 4 and pieces[2] == "resolve"):
        owner = "/".join(pieces[:2]) or "OWNER/NAME"
        found = "found a page of the hub, expected the files of one revision"
        raise AddressError(f"{shown}: {found}: {HUB}/{owner}/resolve/COMMIT (or /resolve/main)")
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + b64encode(pair.encode()).decode()
    revision = pieces[3] if len(pieces) >= 4 and pieces[2] == "resolve" else ""
    return Address("/".join([origin, *pieces]), origin, authorization, revision)


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL: who would see what is sent there."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"

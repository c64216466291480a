"""Connections over HTTP: made with the proxies and certificates of the environment, or refused with their names."""

from __future__ import annotations

import ipaddress
from urllib.parse import urljoin, urlsplit

import httpx

from k3ray.workers.failure import Failure


class ConnectionSettingsFailure(Failure):
    """Proxy or certificate settings of the environment that no connection can be made with."""

    exit_code = 2


def new_http_client(timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.Client:
    """A client that follows no redirect by itself; raises ConnectionSettingsFailure, which shows no address."""
    try:
        return httpx.Client(timeout=timeout, limits=limits, follow_redirects=False)
    except (ValueError, OSError, ImportError, httpx.InvalidURL) as error:  # an unknown scheme, no such file, no socksio
        raise ConnectionSettingsFailure(
            f"no connection can be made with the environment's settings ({type(error).__name__}): correct or unset "
            "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
        ) from None


def is_private(url: str) -> bool:
    """Whether nobody on the way reads what is sent there: an encrypted line, or none that leaves this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        return parts.scheme == "https" or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redirected(url: str, location: str) -> str | None:
    """Where an answer for `url` leads with this Location header; None when that is no http or https address."""
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(target)
    except (ValueError, httpx.InvalidURL):
        return None
    return target if usable else None

"""What tests of the audit's page share: writing one, turning to a view, and that it asked for nothing."""

from __future__ import annotations

from pathlib import Path

from k3ray.audit.page import render
from k3ray.audit.snapshot import Snapshot
from tests.browser import Browser

VIEWS = ("layers", "tensors", "parameters", "boundary")


def write_page(path: Path, snapshot: Snapshot) -> str:
    """Write the snapshot's page and return its address."""
    path.write_text(render(snapshot), "utf-8")
    return path.as_uri()


def turn_to(browser: Browser, view: str) -> None:
    """Click the view's tab."""
    browser.run("document.getElementById(arguments[0]).click()", f"tab-{view}")


def forget(browser: Browser) -> None:
    """Drop what earlier pages said and asked for."""
    browser.console()
    browser.requests()


def assert_silent(browser: Browser, address: str) -> None:
    """The console is empty, and of the network only the page itself was asked for."""
    assert browser.console() == []
    asked = {url.partition("#")[0] for url in browser.requests() if not url.startswith("data:")}
    assert address in asked, "the log of requests has not even the page"
    assert asked <= {address, "about:blank"}

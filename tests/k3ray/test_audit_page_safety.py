"""The audit's page keeps to itself: hostile strings are text, nothing is fetched, and nothing could be."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.audit import page
from k3ray.audit.snapshot import Snapshot, Statement
from tests.audit_pages import VIEWS, assert_silent, forget, turn_to, write_page
from tests.audit_sample import released_sample
from tests.browser import Browser

HOSTILE = '</script><img src=x onerror="window.hostile=1"><!--<script>{{data}}${window.hostile=2}\'\u2028\u202egpj'
EMPTY = replace(released_sample(), statements=(), layers=(), kinds=(), statistics=(), recorded=(), probe=None)
# What a script that got in would try: to send by three ways, and to run inline.
ATTEMPT = """
const done = arguments[0];
new Image().src = "/image";
const frame = '<iframe src="/frame"></iframe>';
document.body.insertAdjacentHTML("beforeend", '<img src="data:," onerror="window.inline = 1">' + frame);
fetch("/fetch").catch(() => 0).then(() => setTimeout(() => done(typeof window.inline), 200));
"""


def hostile_copy(value: Any) -> Any:
    """The same record with every free text in it made hostile; enumerated words and numbers stay."""
    if isinstance(value, dict):
        kept = ("kind", "by", "view", "attention", "feed_forward", "letter", "where", "sha256_of", "format", "made_at")
        return {
            key: item if isinstance(item, str) and key in kept and len(item) < 20 and "#" not in item
            else hostile_copy(item) for key, item in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [hostile_copy(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_hostile_strings_are_text(browser: Browser, page_folder: Path, sample: Snapshot) -> None:
    raw = hostile_copy(json.loads(msgspec.json.encode(sample)))
    raw["statistics"][0]["extra"] = {"__proto__": 1.5, HOSTILE: 2.5}
    address = write_page(page_folder / "hostile.html", msgspec.convert(raw, Snapshot))
    browser.resize(390)
    browser.prefer("light")
    forget(browser)
    browser.open(address)
    assert browser.run("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert browser.run("return document.querySelectorAll('script').length") == 2
    for view in VIEWS:
        turn_to(browser, view)
        (text,) = browser.texts(f"#view-{view}")
        assert all(part in text for part in (HOSTILE.partition("\u2028")[0], "\u27e8U+202E\u27e9gpj"))
        assert "\u202e" not in text
        assert browser.overflow() == 0
    assert browser.run("return document.getElementById('view-parameters').textContent.includes('__proto__')")
    assert browser.run("return typeof window.hostile") == "undefined"
    assert_silent(browser, address)


@pytest.fixture
def server(sample: Snapshot) -> Iterator[tuple[str, list[str]]]:
    """A web server on loopback with the page, and an empty one; the path of every request is kept."""
    asked: list[str] = []
    pages = {"/audit": page.render(sample), "/empty": "<!doctype html><link rel=icon href=data:,><body>"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = pages.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def test_the_page_asks_for_nothing_and_could_not(browser: Browser, server: tuple[str, list[str]]) -> None:
    """The policy, not only good manners: with it a script that got in reaches nobody, without it the same one does."""
    address, asked = server
    forget(browser)
    browser.open(f"{address}/audit")
    for view in VIEWS:
        turn_to(browser, view)
    assert_silent(browser, f"{address}/audit")
    assert asked == ["/audit"]
    assert browser.driver.execute_async_script(ATTEMPT) == "undefined"
    assert asked == ["/audit"]
    refusals = [line for line in browser.console() if "Content Security Policy" in line]
    assert len(refusals) >= 3  # and so the empty console above was one that speaks
    browser.open(f"{address}/empty")
    assert browser.driver.execute_async_script(ATTEMPT) == "number"
    assert {"/empty", "/image", "/frame", "/fetch"} <= set(asked)
    forget(browser)


@given(st.text())
def test_any_text_comes_back_and_cannot_leave_its_element(text: str) -> None:
    statement = Statement("a.b", "layers", "U", "k3ray", text, text, "", None, "")
    embedded = page.embedded_json(replace(EMPTY, statements=(statement,)))
    assert not re.search("[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded)["statements"][0]["subject"] == text


def test_the_document_is_whole_and_names_no_address(sample: Snapshot) -> None:
    found: Counter[str] = Counter()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found[tag] += 1
            for name, value in attrs:
                assert not name.startswith("on") and name != "style"
                assert name not in ("src", "href", "srcset", "action") or (value or "").startswith(("data:", "#"))

    text = page.render(sample)
    Tags().feed(text)
    assert found["script"] == 2 and found["style"] == 1 and "{{" not in text
    assert "@import" not in text and "url(" not in text


def test_every_part_of_the_page_is_used_once() -> None:
    lying = {path.name for path in (Path(page.__file__).parent / "page").iterdir() if path.is_file()}
    assert lying == {*page.STYLES, *page.SCRIPTS, "page.html"}
    assert len(page.STYLES + page.SCRIPTS) == len(set(page.STYLES + page.SCRIPTS))

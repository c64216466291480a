"""What a reader of the audit's page meets first, on a phone too; and what is there without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3ray.audit.plain_page import plain_page
from k3ray.audit.snapshot import KINDS, Recorded, Snapshot, Statement
from tests.audit_pages import turn_to, write_page
from tests.audit_sample import released_sample
from tests.browser import Browser

EMPTY = replace(released_sample(), statements=(), layers=(), kinds=(), statistics=(), recorded=(), probe=None)


@pytest.fixture
def opened(browser: Browser, page_folder: Path, sample: Snapshot) -> Browser:
    """The sample's page, anew, at a desktop's width in the light."""
    browser.resize(1280)
    browser.prefer("light")
    browser.open(write_page(page_folder / "first.html", sample))
    return browser


@pytest.fixture
def scriptless(browser: Browser) -> Iterator[Browser]:
    """The browser with its pages' scripts off."""
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    yield browser
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_what_to_read_first_leads_to_its_view(opened: Browser) -> None:
    points = opened.texts(".read-first a")
    assert points == [
        "1 statement of 5 compared differs.",
        "A_log is stored as [128] for 96 heads.",
        "1 question is left open.",
    ]
    assert "First: bytes of tensors." in opened.texts(".read-first li")[0]
    where = (
        "return [...document.querySelectorAll('[role=tabpanel]')].filter((p) => p.checkVisibility()).map((p) => p.id)"
    )
    for number, view in enumerate(("tensors", "parameters", "boundary")):
        opened.driver.execute_async_script(
            "addEventListener('hashchange', () => setTimeout(arguments[1]), {once: true});"
            "scrollTo(0, 0); document.querySelectorAll('.read-first a')[arguments[0]].click()",
            number,
        )
        assert opened.run(where) == [f"view-{view}"]
        assert 0 <= opened.run("return document.querySelector('[role=tablist]').getBoundingClientRect().top") < 300


def test_nothing_wrong_is_said_first_too(opened: Browser, page_folder: Path, sample: Snapshot) -> None:
    right = tuple(one for one in sample.statements if one.agrees is not False and one.kind != "U")
    named = replace(sample, statements=right, source=replace(sample.source, kind="config and index only"))
    opened.open(write_page(page_folder / "right.html", named))
    assert opened.texts(".read-first a") == [
        "Nothing that was compared differs.",
        "A_log is stored as [128] for 96 heads.",
        "No shard was opened.",
    ]
    assert "headers" not in opened.texts(".read-first li")[0]


def test_a_value_that_is_as_expected_is_said_once(opened: Browser) -> None:
    turn_to(opened, "tensors")
    same, other = (opened.texts(f"[data-id='tensors.{name}'] dt") for name in ("total", "bytes"))
    assert (same, other) == (["found, as expected"], ["found", "expected"])


def test_the_boundary_counts_what_others_recorded(opened: Browser, sample: Snapshot) -> None:
    turn_to(opened, "boundary")
    cells = "return [...document.querySelectorAll('.matrix-table tbody tr')].map((row) => row.children[2].innerText)"
    others = Counter(one.kind for one in sample.statements if one.by != "k3ray")
    others.update(row.letter for row in sample.statistics if row.by != "k3ray")
    assert opened.run(cells) == [str(others[letter]) for letter in KINDS] + [str(len(sample.recorded))]


def test_a_figure_stands_apart_from_its_unit_and_its_notes(
    opened: Browser, page_folder: Path, sample: Snapshot
) -> None:
    found = "2.27e-07 of the largest element; worst at 3"
    long = Statement("kda.chunked.9", "boundary", "X", "k3ray", "chunked", found, "at most 1e-05", True, "here")
    figures = (
        Recorded("a", "b", "c", "about 3", "tokens/s", ""),
        Recorded("a", "b", "c", "8.3 falling to 4.9", "s", ""),
    )
    opened.open(write_page(page_folder / "figures.html", replace(sample, statements=(long,), recorded=figures)))
    turn_to(opened, "boundary")
    assert opened.texts(".boundary-table .value b") == ["2.27e-07", "about 3", "8.3 falling to 4.9"]
    row = opened.run("return [...document.querySelectorAll('[data-id=\"kda.chunked.9\"] td')].map((c) => c.innerText)")
    assert row[1].split() == ["2.27e-07", "of", "the", "largest", "element", "expected", "at", "most", "1e-05"]
    assert row[3] == "worst at 3"


def test_the_checksums_say_what_they_are_over(opened: Browser, sample: Snapshot) -> None:
    turn_to(opened, "boundary")
    (text,) = opened.texts(".files-table")
    assert "bytes 0\u2013812,343" in text and "whole file" in text


def test_on_a_phone_the_legend_keeps_its_meanings(opened: Browser) -> None:
    opened.resize(390)
    assert opened.shown(".kind-switch .meaning") == 5
    assert opened.overflow() == 0
    assert opened.shown(".bank-key") == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_without_scripts_everything_said_is_there(
    scriptless: Browser, page_folder: Path, sample: Snapshot, width: int
) -> None:
    scriptless.resize(width)
    scriptless.prefer("dark")
    scriptless.open(write_page(page_folder / "plain.html", sample))
    (text,) = scriptless.texts("body")
    for one in sample.statements:
        assert all(part in text for part in (one.subject, one.found, one.source))
    for row in sample.recorded:
        assert f"{row.value} {row.unit}" in text
    assert scriptless.shown("noscript table") == 6
    assert scriptless.overflow() == 0
    assert scriptless.low_contrast() == []
    assert scriptless.shown(".controls, .masthead") == 0


@given(st.text() | st.text("<>&\"'/!-ab="))
@example("</td></noscript><script>a</script>")
def test_no_text_leaves_its_cell(text: str) -> None:
    statement = Statement(text, "layers", "U", "k3ray", text, text, text, None, text)
    found: Counter[str] = Counter()
    said: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found[tag] += 1

        def handle_data(self, data: str) -> None:
            said.append(data)

    def tags(statements: tuple[Statement, ...]) -> Counter[str]:
        found.clear()
        said.clear()
        parser = Tags()
        parser.feed(plain_page(replace(EMPTY, statements=statements)))
        parser.close()
        return Counter(found)

    plain = tags((replace(statement, subject="a", found="a", expected="a", source="a"),))
    assert tags((statement,)) == plain
    assert not any(mark in "".join(said) for mark in "\x00\x1b\u202e\u200b")

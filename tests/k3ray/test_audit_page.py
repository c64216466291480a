"""The audit's page in a real browser: four views, keyboard, filters, both widths and themes, print."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.audit.snapshot import Snapshot
from tests.audit_pages import VIEWS, turn_to, write_page
from tests.browser import Browser

LEFT, RIGHT, UP, DOWN, HOME, END, TAB = "\ue012", "\ue014", "\ue013", "\ue015", "\ue011", "\ue010", "\ue004"


def chosen_tab(browser: Browser) -> tuple[str, str, int]:
    """The tab with the focus, the panel that is shown, and how many tabs the Tab key stops at."""
    return tuple(browser.run(
        "return [document.activeElement.id, [...document.querySelectorAll('[role=tabpanel]')]"
        ".filter((p) => p.checkVisibility()).map((p) => p.id).join(),"
        "document.querySelectorAll('[role=tab][tabindex=\"0\"][aria-selected=true]').length]"
    ))  # fmt: skip


def test_tabs_by_keyboard(opened: Browser) -> None:
    opened.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    walk = [
        (RIGHT, "tensors"), (RIGHT, "parameters"), (RIGHT, "boundary"), (RIGHT, "layers"), (LEFT, "boundary"),
        (HOME, "layers"), (END, "boundary"), (LEFT, "parameters"),
    ]  # fmt: skip
    for key, view in walk:
        opened.press(key)
        assert chosen_tab(opened) == (f"tab-{view}", f"view-{view}", 1)
        assert opened.run("return location.hash") == f"#{view}"
    outline = "const s = getComputedStyle(document.activeElement);"
    assert opened.run(f"{outline} return s.outlineStyle === 'solid' && parseFloat(s.outlineWidth) >= 2")
    opened.press(TAB)  # from a tab the Tab key goes into its panel
    assert opened.run("return document.activeElement.id") == "view-parameters"
    assert opened.run("return document.activeElement.getAttribute('aria-labelledby')") == "tab-parameters"


def test_the_address_names_the_view(browser: Browser, page_address: str) -> None:
    browser.open(f"{page_address}#boundary")
    assert chosen_tab(browser)[1] == "view-boundary"
    browser.driver.execute_async_script(
        "addEventListener('hashchange', () => setTimeout(arguments[0])); location.hash = '#tensors'"
    )
    assert chosen_tab(browser)[1] == "view-tensors"
    browser.open(f"{page_address}#nothing-here")
    assert chosen_tab(browser)[1] == "view-layers"


def test_the_map_holds_every_layer_where_it_belongs(opened: Browser, sample: Snapshot) -> None:
    rows = opened.run(
        "return [...document.querySelectorAll('.attnres-block')].map((block) =>"
        "[...block.querySelectorAll('.layer')].map((cell) => [+cell.dataset.layer, cell.className, cell.dataset.kind]))"
    )
    blocks = sorted({row.attnres_block for row in sample.layers})
    expected = [
        [[row.layer, f"layer {row.attention} {row.feed_forward}", row.letter] for row in sample.layers
         if row.attnres_block == block] for block in blocks
    ]  # fmt: skip
    assert rows == expected and sum(map(len, rows)) == 93
    assert opened.texts(".map-key b") == ["69 KDA", "24 MLA", "92 MoE", "1 dense"]
    full = (
        "return [...document.querySelectorAll('.layer-map .bank')].map((bank) => bank.querySelectorAll('.full').length)"
    )
    assert opened.run(full) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_layer_details_by_keyboard_and_by_click(opened: Browser, sample: Snapshot) -> None:
    assert opened.run("return document.querySelectorAll('.layer[tabindex=\"0\"]').length") == 1
    opened.run("document.querySelector('.layer[tabindex=\"0\"]').focus()")
    for key, layer in (
        (RIGHT, 1),
        (DOWN, 13),
        (RIGHT, 14),
        (RIGHT, 15),
        (UP, 3),
        (END, 92),
        (RIGHT, 92),
        (LEFT, 91),
        (HOME, 0),
        (UP, 0),
    ):
        opened.press(key)
        assert opened.run("return +document.activeElement.dataset.layer") == layer
        assert_details(opened, sample, layer)
    opened.run("document.querySelector('.layer[data-layer=\"47\"]').click()")
    assert_details(opened, sample, 47)
    assert opened.run("return document.querySelectorAll('.layer[aria-pressed=true]').length") == 1


def assert_details(browser: Browser, sample: Snapshot, layer: int) -> None:
    row = sample.layers[layer]
    (text,) = browser.texts(".layer-details")
    assert text.startswith(f"Layer {layer}\n")
    for part in (
        row.attention,
        row.feed_forward,
        f"{row.tensors:,}",
        f"{row.bytes:,} B",
        *row.shards,
        f"layer {layer + 1}",
    ):
        assert part in text
    assert browser.texts(".layer-details .badge b") == [row.letter]


def test_every_statement_stands_in_its_view_with_its_evidence(opened: Browser, sample: Snapshot) -> None:
    for view in VIEWS:
        turn_to(opened, view)
        (text,) = opened.texts(f"#view-{view}")
        for statement in (s for s in sample.statements if s.view == view):
            assert all(
                part in text for part in (statement.subject, statement.found, statement.expected, statement.source)
            )
            row = opened.run(
                "return [...document.querySelectorAll(`#${arguments[0]} [data-kind]`)]"
                ".filter((e) => e.dataset.id === arguments[1]).map((e) => [e.dataset.kind, e.dataset.by,"
                "e.querySelector('.badge b').innerText, e.querySelector('.owner').textContent, e.dataset.agrees])",
                f"view-{view}", statement.id,
            )  # fmt: skip
            ours = statement.by == "k3ray"
            owner = "by k3ray" if ours else "“\u2009recorded by others\u2009”"
            agrees = {True: "true", False: "false", None: "null"}[statement.agrees]
            assert row == [[statement.kind, "ours" if ours else "others", statement.kind, owner, agrees]]


def test_evidence_differs_in_letter_word_colour_and_shape(opened: Browser) -> None:
    marks = opened.run(
        "return [...document.querySelectorAll('.kind-switch .badge')].map((b) => [b.querySelector('b').innerText,"
        "b.querySelector('span').innerText, getComputedStyle(b).color, b.querySelector('svg').innerHTML])"
    )
    assert [mark[0] for mark in marks] == list("ODXSU")
    for aspect in zip(*marks, strict=True):
        assert len(set(aspect)) == 5
    turn_to(opened, "parameters")
    look = "return getComputedStyle(document.querySelector(arguments[0])).borderTopStyle"
    assert opened.run(look, ".statistic.ours") == "solid" and opened.run(look, ".statistic.others") == "dashed"


def test_the_main_statement_is_the_a_log_mismatch(opened: Browser) -> None:
    turn_to(opened, "parameters")
    assert opened.texts(".a-log-sizes b") == ["[128]", "96"] and opened.texts(".against") == ["≠"]
    squares = opened.run("return [...document.querySelectorAll('.a-log-entries i')].map((i) => i.className)")
    assert squares == ["head"] * 96 + ["tail"] * 32
    assert opened.texts(".a-log .large h4") == ["A_log: shape in the checkpoint against heads in the config"]
    (readers,) = opened.texts(".readers")
    assert "Four public loaders keep the first 96" in readers and "k3ray keeps one entry a head" in readers


def test_shares_and_bars_follow_the_bytes(opened: Browser, sample: Snapshot) -> None:
    turn_to(opened, "tensors")
    total = sum(row.bytes or 0 for row in sample.kinds)
    experts = sum(row.bytes or 0 for row in sample.kinds if row.where == "routed experts")
    assert opened.texts(".headline-figure") == [f"{experts / total:.2%}".replace("%", " %")]
    width = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect().width)"
    first, rest = opened.run(width, ".share-bar:first-of-type .share")[:2]
    assert first / (first + rest) == pytest.approx(experts / total, abs=0.002)
    bars = opened.run(
        "return [...document.querySelectorAll('.kind-bar')].map((bar) =>"
        "[bar.closest('tr').innerText, bar.getBoundingClientRect().width / bar.parentElement.clientWidth])"
    )
    most = max(row.bytes or 0 for row in sample.kinds)
    scale = max(share for _, share in bars)
    for row in sample.kinds:
        matching = [share for text, share in bars if re.search(rf"\b{row.bytes or -1:,} B", text)]
        assert row.bytes is None or row.bytes < 1000 or matching, row.kind
        for share in matching:
            assert share / scale == pytest.approx((row.bytes or 0) / most, abs=0.012)


def test_an_expert_is_drawn_from_the_snapshots_shapes(opened: Browser) -> None:
    turn_to(opened, "tensors")
    (text,) = opened.texts(".expert")
    for part in ("17,547,264 B for 33,030,144 weights", "[3,072 × 1,792]", "[3,584 × 96]", "32 consecutive columns"):
        assert part in text
    assert opened.texts(".nibble p") == ["high nibble holds column 2j + 1", "low nibble holds column 2j"]


def test_filters(opened: Browser, sample: Snapshot) -> None:
    turn_to(opened, "boundary")
    before = opened.shown("#view-boundary [data-kind]")
    opened.run("document.querySelector('.kind-switch.kind-X').click()")
    assert opened.shown('#view-boundary [data-kind="X"]') == 0 < opened.shown("#view-boundary [data-kind]") < before
    opened.run("document.querySelectorAll('.owner-switch')[1].click()")
    assert opened.shown('[data-by="others"]') == 0
    assert any("hidden by the filters" in text for text in opened.texts(".hidden-note"))
    opened.run("document.getElementById('show-all').click()")
    assert opened.shown("#view-boundary [data-kind]") == before and opened.shown("#show-all") == 0
    opened.run("document.querySelector('.differing-switch').click()")
    differing = [s.id for s in sample.statements if s.agrees is False]
    assert (
        opened.run(
            "return [...document.querySelectorAll('.statement')].filter((e) => !e.hidden).map((e) => e.dataset.id)"
        )
        == differing
        != []
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_both_widths_and_themes(opened: Browser, page_folder: Path, width: int, theme: str) -> None:
    opened.resize(width)
    opened.prefer(theme)
    for view in VIEWS:
        turn_to(opened, view)
        assert opened.overflow() == 0
        assert opened.low_contrast() == []
        if (theme == "dark") == (width == 390):  # each width and each theme once
            picture = page_folder / f"{view}-{width}-{theme}.png"
            opened.screenshot(picture)
            assert picture.stat().st_size > 30_000
    dark = opened.run("return getComputedStyle(document.documentElement).backgroundColor") == "rgb(16, 21, 26)"
    assert dark == (theme == "dark")
    boxes = "return [...document.querySelectorAll('.scroller')].map((box) => box.scrollWidth - box.clientWidth)"
    assert max(opened.run(boxes)) > 0 or width > 390  # a wide table scrolls in its box


def test_the_narrowest_phone_and_the_other_theme_by_hand(opened: Browser) -> None:
    opened.resize(320)
    for view in VIEWS:
        turn_to(opened, view)
        assert opened.overflow() == 0
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    light = opened.run(ground)
    opened.run("document.getElementById('theme').click(); document.getElementById('theme').click()")
    assert opened.texts("#theme") == ["Theme: dark"] and opened.run(ground) != light


def test_print_shows_every_view(opened: Browser) -> None:
    opened.resize(718)  # A4 within its margins
    opened.prefer("dark", media="print")
    assert opened.shown("[role=tabpanel]") == 4 and opened.shown("[role=tablist]") == 0
    assert opened.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.low_contrast() == [] and opened.overflow() == 0
    assert opened.print_pdf().startswith(b"%PDF-")


def test_a_snapshot_with_nothing_in_it(browser: Browser, page_folder: Path, sample: Snapshot) -> None:
    empty = replace(sample, statements=(), layers=(), kinds=(), statistics=(), recorded=(), probe=None,
                    source=replace(sample.source, total_bytes=None, files=(), revision=""))  # fmt: skip
    browser.console()
    browser.open(write_page(page_folder / "empty.html", empty))
    for view in VIEWS:
        turn_to(browser, view)
        assert browser.shown(f"#view-{view} .empty") > 0
    assert browser.console() == []


def test_another_checkpoint(browser: Browser, page_folder: Path, sample: Snapshot) -> None:
    """Few layers, another block, A_log as long as the heads, sizes unknown: nothing of the release is assumed."""
    layers = tuple(
        replace(row, attnres_block=row.layer // 5, bytes=None, shards=("a", "b")) for row in sample.layers[:13]
    )
    kinds = tuple(
        replace(row, shape=(96,), bytes=None, letter="D") if row.kind.endswith("A_log") else row for row in sample.kinds
        if row.where == "text"
    )  # fmt: skip
    browser.resize(1280)
    browser.open(write_page(page_folder / "small.html", replace(sample, layers=layers, kinds=kinds)))
    browser.run("document.querySelector('.layer[data-layer=\"7\"]').click()")
    assert "not known" in browser.texts(".layer-details")[0]
    for key, layer in ((RIGHT, 8), (DOWN, 12), (DOWN, 12), (UP, 7)):  # rows of 5, 5 and 3: the nearest below
        browser.press(key)
        assert browser.run("return +document.activeElement.dataset.layer") == layer
    assert browser.run("return document.querySelectorAll('.attnres-block').length") == 3
    turn_to(browser, "tensors")
    assert browser.shown(".headline-figure") == 0 and "no expert to draw" in " ".join(browser.texts("#view-tensors"))
    turn_to(browser, "parameters")
    assert browser.texts(".against") == ["="] and browser.shown(".a-log-entries .tail") == 0
    assert browser.console() == []

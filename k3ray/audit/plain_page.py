"""What the audit's page shows where scripts are off: every statement and statistic in plain tables, escaped.

It stands in the page's noscript element, which a browser with scripts passes over.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from k3ray.audit.snapshot import KINDS, Snapshot, Statement, StatisticRow, View

VIEWS: dict[View, str] = {
    "layers": "Layer map",
    "tensors": "Tensor anatomy",
    "parameters": "Parameter audit",
    "boundary": "Reproduction boundary",
}
# As in page/elements.js: what shows nothing or turns the text around it is shown by number.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def plain_page(snapshot: Snapshot) -> str:
    """The statements by view, the statistics and the recorded figures as HTML without scripts or styles of its own."""
    source = snapshot.source
    kinds = ", ".join(f"{letter} {meaning}" for letter, meaning in KINDS.items())
    parts = [
        '<p class="notice">The drawings need scripts, which are off. Here is everything that the audit says, as '
        "tables; all of it is also in the JSON at the end of this file.</p>",
        f"<p>Source: <code>{_text(source.address)}</code> ({source.kind}), revision "
        f"<code>{_text(source.revision or 'not known')}</code>; {source.fetched_bytes:,} bytes read; made "
        f"{_text(snapshot.made_at)} by k3ray {_text(snapshot.k3ray)}.</p>",
        f"<p>Kinds: {kinds}.</p>",
    ]
    for view, title in VIEWS.items():
        here = [statement for statement in snapshot.statements if statement.view == view]
        ordered = sorted(here, key=lambda one: (one.agrees is not False, not one.main))
        parts.append(_table(title, ("kind", "by", "what", "found", "expected", "", "source"), map(_statement, ordered)))
    columns = ("kind", "by", "statistic", "values", "minimum", "p10", "median", "p90", "maximum", "further")
    parts.append(_table("Statistics of small tensors", columns, map(_statistic, snapshot.statistics)))
    recorded = [(row.who, row.what, f"{row.value} {row.unit}", row.where, row.note) for row in snapshot.recorded]
    parts.append(_table("Recorded, not measured by this audit", ("who", "what", "figure", "where", "note"), recorded))
    return "\n".join(parts)


def _statement(one: Statement) -> tuple[str, ...]:
    verdict = {True: "agrees", False: "differs", None: ""}[one.agrees]
    expected = "the same" if one.agrees and one.expected == one.found else one.expected
    return (one.kind, one.by, one.subject, one.found, expected, verdict, one.source)


def _statistic(row: StatisticRow) -> tuple[str, ...]:
    figures = (row.minimum, row.p10, row.median, row.p90, row.maximum)
    shown = ["" if value is None else f"{value:.5g}" for value in figures]
    further = ", ".join(f"{name} {value:.5g}" for name, value in row.extra.items())
    return (row.letter, row.by, row.subject, f"{row.count:,}", *shown, further)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    box = f'<div class="scroller" tabindex="0" role="region" aria-label="{title}">'
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f"<h2>{title}</h2>\n{box}{table}</div>"


def _text(text: str) -> str:
    return html.escape(_INVISIBLE.sub(lambda hidden: f"\u27e8U+{ord(hidden[0]):04X}\u27e9", text))

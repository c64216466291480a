"""The audit's JSON is written whole and read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3ray.audit.snapshot import KINDS, Snapshot
from k3ray.audit.snapshot_file import SnapshotError, decode_snapshot, encode_snapshot, read_snapshot

Document = dict[str, Any]


def test_it_reads_back_what_it_wrote(sample: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_bytes(encode_snapshot(sample))
    assert read_snapshot(tmp_path / "audit.json") == sample


def test_the_sample_has_every_kind_of_statement(sample: Snapshot) -> None:
    assert {statement.kind for statement in sample.statements} == set(KINDS)
    assert {statement.view for statement in sample.statements} == {"layers", "tensors", "parameters", "boundary"}


def _drop(document: Document) -> None:
    del document["source"]["fetched_bytes"]


def _add(document: Document) -> None:
    document["statements"][3]["verdict"] = "fine"


def _drop_default(document: Document) -> None:
    del document["statements"][0]["main"]


def _letter(document: Document) -> None:
    document["statements"][0]["kind"] = "Q"


def _text(document: Document) -> None:
    document["layers"][5]["tensors"] = "5,000"


def _version(document: Document) -> None:
    document["version"] = 2


def _format(document: Document) -> None:
    document["format"] = "another"


def _negative(document: Document) -> None:
    document["layers"][5]["bytes"] = -1


def _checksum(document: Document) -> None:
    document["source"]["files"][1]["sha256"] = "cd" * 31


def _no_places(document: Document) -> None:
    document["source"]["files"][1]["places"] = []


def _places_past_the_end(document: Document) -> None:
    document["source"]["files"][1]["places"] = [[0, 16_990_911_505]]


def _places_that_overlap(document: Document) -> None:
    document["source"]["files"][1]["places"] = [[0, 8], [7, 9]]


def _more_hashed_than_fetched(document: Document) -> None:
    document["source"]["files"][1]["places"] = [[0, 812_345]]


def _fetched(document: Document) -> None:
    document["source"]["fetched_bytes"] += 1


def _twice(document: Document) -> None:
    document["statements"][1]["id"] = document["statements"][0]["id"]


def _time(document: Document) -> None:
    document["made_at"] = "30 November"


def _median(document: Document) -> None:
    document["statistics"][0]["median"] = 99.5


ODD = [
    _negative, _checksum, _no_places, _places_past_the_end, _places_that_overlap, _more_hashed_than_fetched, _fetched,
    _twice, _time, _median,
]  # fmt: skip


@pytest.mark.parametrize("damage", ODD)
def test_a_document_at_odds_with_itself_is_refused(sample: Snapshot, damage: Callable[[Document], None]) -> None:
    document = json.loads(encode_snapshot(sample))
    damage(document)
    with pytest.raises(SnapshotError, match=r"a\.json: found .*make it again with k3ray audit"):
        decode_snapshot(json.dumps(document).encode(), "a.json")


def test_a_key_that_stands_twice_is_refused(sample: Snapshot) -> None:
    text = encode_snapshot(sample).rstrip()[:-1] + b', "format": "k3ray audit"}'
    with pytest.raises(SnapshotError, match="a key stands twice"):
        decode_snapshot(text, "a.json")


@pytest.mark.parametrize("damage", [_drop, _add, _drop_default, _letter, _text, _version, _format])
def test_another_document_is_refused(sample: Snapshot, damage: Callable[[Document], None]) -> None:
    document = json.loads(encode_snapshot(sample))
    damage(document)
    with pytest.raises(SnapshotError, match=r"a\.json: found .*make it again with k3ray audit"):
        decode_snapshot(json.dumps(document).encode(), "a.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError, match="no audit snapshot"):
        decode_snapshot(data, "a.json")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path / "none.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_not_written(sample: Snapshot, value: float) -> None:
    row = replace(sample.statistics[0], median=value)
    with pytest.raises(ValueError, match=r"snapshot\.statistics\[0\]\.median"):
        encode_snapshot(replace(sample, statistics=(row,)))

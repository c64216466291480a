"""How text is cut: the length rule against its own words, hostile text, and what is not valid Unicode."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray import tokenizer as tokenizer_module
from k3ray.text_cutting import MAX_PIECE, MAX_RUN, cut_text, repair_surrogates, split_valid_utf8
from k3ray.tokenizer import load_tokenizer

K3B = load_tokenizer(Path(__file__).resolve().parents[1] / "data" / "k3b")


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=100))
def test_split_valid_utf8(data: bytes) -> None:
    stretches = list(split_valid_utf8(data))
    assert b"".join(s.encode() if isinstance(s, str) else s for s in stretches) == data
    assert all(stretches)
    # Neighbours differ in kind, so a valid stretch is as long as it can be.
    assert all(isinstance(a, str) != isinstance(b, str) for a, b in pairwise(stretches))


def test_surrogates() -> None:
    assert repair_surrogates("a\ud83d\ude00b\ud800c\udcffd") == "a😀b�c�d"
    assert K3B.encode("a\ud83d\ude00b") == K3B.encode("a😀b")
    assert K3B.encode("\udfff") == K3B.encode_template("\ud800") == K3B.encode("�")


def cut_by_the_rule(text: str, max_piece: int, max_run: int) -> list[str]:
    """The rule in the words of its description, one character at a time."""
    pieces = []
    for low in range(0, len(text), max_piece):
        current, run, space = "", 0, None
        for character in text[low : low + max_piece]:
            run = run + 1 if character.isspace() == space else 1
            space = character.isspace()
            if run > max_run:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet=" \n\u3000ab中^", max_size=80), st.integers(1, 30), st.integers(1, 9))
def test_cutting_follows_the_rule(text: str, max_piece: int, max_run: int) -> None:
    assert list(cut_text(text, max_piece, max_run)) == cut_by_the_rule(text, max_piece, max_run)


def test_space_class_is_isspace() -> None:
    """The cut uses a regular expression; for every code point it must agree with str.isspace."""
    for code in range(0x110000):
        character = chr(code)
        if character.isspace() != (len(list(cut_text(" " + character, 9, 1))) == 2):
            pytest.fail(f"U+{code:04X}")


def test_hostile_text_is_cut_to_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recorded(text: str) -> list[str]:
        pieces = list(cut_text(text))
        seen.extend(map(len, pieces))
        return pieces

    monkeypatch.setattr(tokenizer_module, "cut_text", recorded)
    for character in (" ", "^", "\n", "a", "A", "中", "\u0301", "1"):
        seen.clear()
        text = character * 1_200_000
        ids = K3B.encode(text)
        assert seen == [MAX_RUN] * 48
        assert K3B.decode(ids) == text
    seen.clear()
    assert K3B.decode(K3B.encode("a " * 600_000)) == "a " * 600_000
    assert seen == [MAX_PIECE] * 3


def test_a_long_run_is_cut_where_the_rule_says() -> None:
    """Sixteen spaces are one token here, so that a cut at 25,000 shows in the ids."""
    sixteen, nine = K3B.encode(" " * 16), K3B.encode(" " * 9 + "x")
    assert len(sixteen) == 1
    ids = K3B.encode(" " * 25_009 + "x")
    assert ids == [*K3B.encode(" " * 25_000), *nine]

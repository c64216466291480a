"""How two answers are compared: rows, ties and cuts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.conform.comparison import compare, compare_all, cut, judge_choice, settle_ties, spans


@given(st.integers(1, 600))
def test_the_cut_covers_every_token_once(tokens: int) -> None:
    pieces = cut(tokens)
    rows = [row for span in spans(pieces) for row in range(span.start, span.stop)]
    assert rows == list(range(tokens)) and all(pieces)
    assert tokens < 2 or len(pieces) > 1, "no state would be carried"


def test_choices_by_hand() -> None:
    selection = np.array([[0.1, 0.9, 0.5, 0.5 - 1e-7], [0.1, 0.9, 0.5, 0.2], [0.5, 0.5, 0.5, 0.1]])
    chosen = np.array([[1, 3], [1, 3], [0, 1]])
    choice = judge_choice(chosen, selection, 1e-6)
    assert [(tie.token, tie.ours, tie.theirs) for tie in choice.near_ties] == [(0, (3,), (2,))]
    assert [(other.token, other.margin) for other in choice.wrong] == [(1, pytest.approx(0.3))]
    assert choice.equal == 1 and choice.closest == 0.0 and choice.describe() == "1/3 (1 near tie)"
    ids = np.array([[1, 2], [1, 2], [0, 1]])
    assert settle_ties(chosen, selection, ids, 1e-6).tolist() == [[1, 3], [1, 2], [0, 1]]
    twice = judge_choice(np.array([[1, 1]]), selection[:1], 1e-6)
    assert twice.wrong[0].margin == np.inf


def test_comparing_by_hand() -> None:
    expected = np.array([[100.0, 1.0], [0.1, 0.0], [0.0, 0.0]])
    found = expected + np.array([[1e-3, 0.0], [0.0, -1e-5], [0.0, 0.0]])
    result = compare("x", found, expected, 1e-4)
    assert (result.row, result.column) == (1, 1), "the small row is worse in relation, the large one in value"
    assert result.max_rel == pytest.approx(1e-4) and result.max_abs == pytest.approx(1e-3)
    assert compare("x", expected, expected, 0.0).passed and compare("x", expected, expected, 0.0).used == 0
    for bad in (np.nan, np.inf):
        for pair in ((np.array([[bad, 1.0]]), np.ones((1, 2))), (np.ones((1, 2)), np.array([[bad, 1.0]]))):
            assert not compare("x", *pair, 1e9).passed
    assert not compare("x", np.ones((1, 2)), np.ones((2, 1)), 1.0).passed
    assert not compare("x", np.array([[1e-30]]), np.array([[0.0]]), 1.0).passed
    (missing,) = compare_all(("a", "b"), {"a": np.ones((1, 1))}, {}, 1.0)
    assert missing.name == "a" and not missing.passed

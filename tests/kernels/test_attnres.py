"""The mix of blocks and prefix sum: the twin's bits, raw rows, and a softmax that does not overflow."""

from __future__ import annotations

import numpy as np
import pytest

from k3ray.kernels.attnres import mix
from k3ray.kernels.reference import attnres as twin


@pytest.mark.parametrize(("tokens", "blocks", "width"), [(1, 0, 5), (3, 1, 16), (2, 4, 77), (5, 8, 163), (0, 2, 7)])
def test_the_twin_has_the_same_bits(tokens: int, blocks: int, width: int) -> None:
    rng = np.random.default_rng(width)
    rows, p = (rng.standard_normal(s, dtype=np.float32) for s in ((tokens, blocks, width), (tokens, width)))
    fold = rng.standard_normal(width, dtype=np.float32)
    assert mix(rows, p, fold, 1e-5).tobytes() == twin.mix(rows, p, fold, 1e-5).tobytes()


def _plain(rows: np.ndarray, fold: np.ndarray, eps: float) -> np.ndarray:
    rows = rows.astype(np.float64)
    scores = (rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)) @ fold.astype(np.float64)
    weights = np.exp(scores - scores.max())
    return np.asarray(weights @ rows / weights.sum())


def test_the_twin_has_the_same_bits_where_the_roundings_show() -> None:
    rows = np.random.default_rng(4).standard_normal((2, 2, 60), dtype=np.float32)
    rows[:, 1] = -rows[:, 0]
    p, fold = np.zeros((2, 60), np.float32), np.zeros(60, np.float32)  # three equal weights of a third
    got = mix(rows, p, fold, 1e-5)
    assert got.tobytes() == twin.mix(rows, p, fold, 1e-5).tobytes()
    assert 0 < np.abs(got).max() < 1e-15


def test_it_is_the_published_formula_on_raw_rows_with_the_prefix_sum_last() -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((1, 3, 40), dtype=np.float32) * np.array([0.01, 1, 30], np.float32)[:, None]
    p, fold = rng.standard_normal((1, 40), dtype=np.float32) * 5, rng.standard_normal(40, dtype=np.float32)
    expected = _plain(np.concatenate([rows[0], p]), fold, 1e-5)
    np.testing.assert_allclose(mix(rows, p, fold, 1e-5)[0], expected, rtol=1e-5, atol=1e-6)


def test_without_blocks_the_prefix_sum_comes_back() -> None:
    p = np.random.default_rng(2).standard_normal((3, 33), dtype=np.float32)
    assert mix(np.empty((3, 0, 33), np.float32), p, np.ones(33, np.float32), 1e-5).tobytes() == p.tobytes()


def test_a_token_does_not_see_its_neighbours() -> None:
    rng = np.random.default_rng(3)
    rows, p = rng.standard_normal((6, 4, 50), dtype=np.float32), rng.standard_normal((6, 50), dtype=np.float32)
    fold = rng.standard_normal(50, dtype=np.float32)
    alone = [mix(rows[t : t + 1], p[t : t + 1], fold, 1e-5) for t in range(6)]
    assert np.concatenate(alone).tobytes() == mix(rows, p, fold, 1e-5).tobytes()


def test_extreme_scores_choose_one_row_and_nan_is_not_swallowed() -> None:
    rows, p = np.ones((1, 1, 16), np.float32), -np.ones((1, 16), np.float32)
    fold = np.full(16, 1e4, np.float32)
    np.testing.assert_array_equal(mix(rows, p, fold, 1e-5), rows[:, 0])
    rows[0, 0, 3] = np.nan
    assert np.isnan(mix(rows, p, fold, 1e-5)).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, p, fold = np.ones((2, 3, 8), np.float32), np.ones((2, 8), np.float32), np.ones(8, np.float32)
    for wrong in ((rows[:1], p, fold), (rows[:, :, :7].copy(), p, fold), (rows, p, fold[:7])):
        with pytest.raises(ValueError, match="do not fit"):
            mix(*wrong, 1e-5)

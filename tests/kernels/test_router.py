"""Routing: exact ties, a bias that selects and does not weigh, the fixed order of the sum over experts."""

from __future__ import annotations

import numpy as np
import pytest

from k3ray.kernels.reference import router as twin
from k3ray.kernels.router import NonFiniteScore, combine, select


def _case(tokens: int, experts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, experts), dtype=np.float32) * 3, rng.standard_normal(experts, dtype=np.float32)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(7, 896, 16), (3, 8, 8), (5, 17, 1), (1, 1, 1), (0, 9, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_the_twin_has_the_same_bits(tokens: int, experts: int, k: int, renormalise: bool) -> None:
    logits, bias = _case(tokens, experts, k)
    (ids, weights), (twin_ids, twin_weights) = (f(logits, bias, k, renormalise, 1.7) for f in (select, twin.select))
    assert ids.tobytes() == twin_ids.tobytes() and weights.tobytes() == twin_weights.tobytes()


def test_ties_at_the_sixteenth_of_896_go_to_the_lower_index() -> None:
    logits, bias = np.zeros((1, 896), np.float32), np.zeros(896, np.float32)
    assert select(logits, bias, 16, True, 1.0)[0][0].tolist() == list(range(16))
    logits[0, [800, 3, 850]] = 1.0
    ids, weights = select(logits, bias, 16, True, 1.0)
    assert ids[0].tolist() == [3, 800, 850, 0, 1, 2, *range(4, 14)]
    assert abs(weights.sum() - 1.0) < 1e-15


def test_random_ties_agree_with_a_full_stable_sort() -> None:
    rng = np.random.default_rng(6)
    logits = rng.integers(-3, 4, (50, 896)).astype(np.float32)
    bias = rng.integers(0, 2, 896).astype(np.float32) / 4
    assert select(logits, bias, 16, True, 1.0)[0].tobytes() == twin.select(logits, bias, 16, True, 1.0)[0].tobytes()


def test_the_bias_selects_but_does_not_weigh() -> None:
    logits, bias = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32), np.array([0, 0, 0, 5], np.float32)
    ids, weights = select(logits, bias, 2, True, 1.0)
    scores = 1 / (1 + np.exp(-logits[0].astype(np.float64)))
    assert ids[0].tolist() == [3, 0]
    np.testing.assert_allclose(weights[0], scores[[3, 0]] / scores[[3, 0]].sum(), rtol=1e-14)
    biased = (scores + bias)[[3, 0]]
    assert not np.allclose(weights[0], biased / biased.sum(), rtol=0.1)


def test_scale_and_renormalisation() -> None:
    logits, bias = _case(4, 32, 9)
    plain = select(logits, bias, 4, False, 1.0)[1]
    np.testing.assert_array_equal(select(logits, bias, 4, False, 2.5)[1], plain * 2.5)
    np.testing.assert_allclose(
        select(logits, bias, 4, True, 2.5)[1], 2.5 * plain / plain.sum(axis=1, keepdims=True), rtol=1e-14
    )
    alone = select(logits, bias, 1, True, 1.0)[1]
    assert (alone < 1).all()  # a single expert keeps its score
    vanishing = select(np.full((1, 4), -200.0, np.float32), bias[:4], 2, True, 1.0)[1]
    assert np.isfinite(vanishing).all() and (vanishing < 1e-60).all()  # 1e-20 in the divisor


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_an_error_that_names_it(value: float) -> None:
    logits, bias = _case(3, 20, 1)
    logits[2, 7] = value
    with pytest.raises(NonFiniteScore, match="expert 7 for token 2") as raised:
        select(logits, bias, 4, True, 1.0)
    assert (raised.value.token, raised.value.expert) == (2, 7)
    logits[2, 7], bias[19] = 0.0, value
    with pytest.raises(NonFiniteScore, match="expert 19 for token 0"):
        select(logits, bias, 4, True, 1.0)


def test_k_outside_the_experts_and_wrong_shapes_are_refused() -> None:
    logits, bias = _case(2, 8, 0)
    for k in (0, -1, 9):
        with pytest.raises(ValueError, match="do not fit"):
            select(logits, bias, k, True, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        select(logits, bias[:7], 2, True, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        combine(np.ones((2, 3, 4), np.float32), np.ones((2, 4)))


@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 1), (3, 16, 77), (2, 4, 3584), (0, 2, 5)])
def test_the_sum_over_experts_has_its_twins_bits(tokens: int, k: int, width: int) -> None:
    rng = np.random.default_rng(width)
    outputs, weights = rng.standard_normal((tokens, k, width), dtype=np.float32), rng.random((tokens, k))
    assert combine(outputs, weights).tobytes() == twin.combine(outputs, weights).tobytes()


def test_the_sum_over_experts_rounds_once_a_step() -> None:
    rng = np.random.default_rng(2)
    outputs, weights = rng.standard_normal((1, 2, 50), dtype=np.float32), np.full((1, 2), 1 / 3)
    outputs[0, 1] = -outputs[0, 0]
    got = combine(outputs, weights)
    assert got.tobytes() == twin.combine(outputs, weights).tobytes()
    assert 0 < np.abs(got).max() < 1e-15  # the rounding errors of the first products, not zeros


def test_the_order_of_the_sum_matters_and_is_the_given_one() -> None:
    outputs = np.array([[[1e30], [-1e30], [1.0]]], np.float32)
    assert combine(outputs, np.ones((1, 3)))[0, 0] == 1.0
    assert combine(outputs[:, [0, 2, 1]].copy(), np.ones((1, 3)))[0, 0] == 0.0

"""The short convolution: the twin's bits, the history across any cutting, the place of the last tap."""

from __future__ import annotations

import numpy as np
import pytest

from k3ray.kernels.convolution import short_convolution
from k3ray.kernels.reference import convolution as twin


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 17])
@pytest.mark.parametrize(("channels", "taps"), [(33, 4), (1, 4), (64, 1), (20, 5)])
def test_the_twin_has_the_same_bits(tokens: int, channels: int, taps: int) -> None:
    rng = np.random.default_rng(tokens)
    x, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in ((tokens, channels), (channels, taps)))
    tail = rng.standard_normal((taps - 1, channels), dtype=np.float32)
    mine, theirs = tail.copy(), tail.copy()
    assert short_convolution(x, weight, mine).tobytes() == twin.short_convolution(x, weight, theirs).tobytes()
    assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 16])
def test_any_cutting_gives_the_same_bits_and_the_same_tail(cut: int) -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((33, 21), dtype=np.float32), rng.standard_normal((21, 4), dtype=np.float32)
    whole_tail, tail = np.zeros((3, 21), np.float32), np.zeros((3, 21), np.float32)
    whole = short_convolution(x, weight, whole_tail)
    parts = [short_convolution(x[start : start + cut], weight, tail) for start in range(0, 33, cut)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert tail.tobytes() == whole_tail.tobytes() == x[-3:].tobytes()


def test_the_last_tap_is_the_current_token_and_the_first_the_oldest() -> None:
    weight = np.array([[8.0, 4.0, 2.0, 1.0]], np.float32)
    x = np.array([[1.0], [0.0], [0.0], [0.0], [0.0]], np.float32)
    taps = np.array([1.0, 2.0, 4.0, 8.0, 0.0])
    got = short_convolution(x, weight, np.zeros((3, 1), np.float32))
    np.testing.assert_allclose(got[:, 0], taps / (1 + np.exp(-taps)), rtol=1e-6)


def test_the_taps_are_added_oldest_first() -> None:
    weight = np.ones((2, 4), np.float32)
    tail = np.array([[1e30, 0], [-1e30, 1], [1, -1e30]], np.float32)
    x = np.array([[0, 1e30]], np.float32)
    got = short_convolution(x, weight, tail)  # 1 survives when the large ones have met before it comes
    np.testing.assert_allclose(got, [[1 / (1 + np.exp(-1)), 0]], rtol=1e-6)


def test_a_forgotten_history_shows() -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((8, 5), dtype=np.float32), rng.standard_normal((5, 4), dtype=np.float32)
    whole = short_convolution(x, weight, np.zeros((3, 5), np.float32))
    forgotten = short_convolution(x[4:], weight, np.zeros((3, 5), np.float32))
    assert not np.allclose(whole[4:7], forgotten[:3], atol=1e-3)
    assert whole[7:].tobytes() == forgotten[3:].tobytes()  # four tokens on, the history has left the window


def test_large_inputs_saturate_without_nan() -> None:
    weight = np.ones((3, 2), np.float32)
    x = np.array([[1e4, -1e4, 1e30], [1e4, -1e4, -1e30]], np.float32)
    out = short_convolution(x, weight, np.zeros((1, 3), np.float32))
    np.testing.assert_array_equal(out, np.array([[1e4, 0, 1e30], [2e4, 0, 0]], np.float32))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = np.ones((2, 6), np.float32), np.ones((6, 4), np.float32)
    for wrong in (np.ones((4, 6), np.float32), np.ones((3, 5), np.float32)):
        with pytest.raises(ValueError, match="do not fit"):
            short_convolution(x, weight, wrong)
    with pytest.raises(ValueError, match="do not fit"):
        short_convolution(np.ones((2, 7), np.float32), weight, np.ones((3, 6), np.float32))

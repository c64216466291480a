"""RMSNorm: the twin's bits, the place of eps, values far from one."""

from __future__ import annotations

import numpy as np
import pytest

from k3ray.kernels.norm import rmsnorm
from k3ray.kernels.reference import norm as twin


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 15), (2, 16), (5, 163), (1, 7168), (0, 8)])
def test_the_twin_has_the_same_bits(tokens: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((tokens, width), dtype=np.float32), rng.standard_normal(width, dtype=np.float32)
    assert rmsnorm(x, weight, 1e-5).tobytes() == twin.rmsnorm(x, weight, 1e-5).tobytes()


def test_a_row_does_not_see_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((9, 77), dtype=np.float32), rng.standard_normal(77, dtype=np.float32)
    whole = rmsnorm(x, weight, 1e-6)
    assert whole.tobytes() == b"".join(rmsnorm(x[t : t + 1], weight, 1e-6).tobytes() for t in range(9))


def test_eps_is_inside_the_root() -> None:
    x, weight = np.full((1, 64), 1e-4, np.float32), np.ones(64, np.float32)
    np.testing.assert_allclose(rmsnorm(x, weight, 1e-5), 1e-4 / np.sqrt(1e-8 + 1e-5), rtol=1e-6)


def test_zeros_and_huge_values_stay_finite() -> None:
    weight = np.ones(40, np.float32)
    assert not rmsnorm(np.zeros((2, 40), np.float32), weight, 1e-5).any()
    np.testing.assert_allclose(rmsnorm(np.full((1, 40), 3e38, np.float32), weight, 1e-5), 1.0, rtol=1e-6)


def test_nan_is_not_swallowed() -> None:
    x = np.ones((2, 20), np.float32)
    x[1, 19] = np.nan
    out = rmsnorm(x, np.ones(20, np.float32), 1e-5)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rmsnorm(np.ones((2, 20), np.float32), np.ones(21, np.float32), 1e-5)

"""SiTU: the twin's bits, the bound, and which argument is capped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from k3ray.kernels.reference import situ as twin
from k3ray.kernels.situ import situ


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 77), (2, 3072), (0, 4)])
def test_the_twin_has_the_same_bits(tokens: int, width: int) -> None:
    rng = np.random.default_rng(width)
    gate, up = (rng.standard_normal((tokens, width), dtype=np.float32) * np.float32(s) for s in (20, 60))
    assert situ(gate, up, 4.0, 25.0).tobytes() == twin.situ(gate, up, 4.0, 25.0).tobytes()
    assert situ(gate, up, 3.7, 11.0).tobytes() == twin.situ(gate, up, 3.7, 11.0).tobytes()


def test_it_is_the_published_formula() -> None:
    grid = np.linspace(-9, 9, 37, dtype=np.float32)
    gate, up = (part.reshape(1, -1).copy() for part in np.meshgrid(grid, 3 * grid))
    expected = [
        4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
        for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True)
    ]
    np.testing.assert_allclose(situ(gate, up, 4.0, 25.0)[0], expected, rtol=1e-6, atol=1e-30)


def test_gate_and_up_are_not_interchangeable() -> None:
    gate, up = np.full((1, 3), 2.0, np.float32), np.full((1, 3), -1.0, np.float32)
    assert not np.allclose(situ(gate, up, 4.0, 25.0), situ(up, gate, 4.0, 25.0), rtol=0.1)


def test_the_bound_is_reached_and_never_passed() -> None:
    extremes = np.array([[1e30, -1e30, 500.0, -500.0, 3.4e38]], np.float32)
    out = situ(extremes, extremes, 4.0, 25.0)
    assert np.isfinite(out).all() and out[0, 0] == 100.0 and (np.abs(out) <= 100.0).all()
    assert out[0, 1] == 0.0  # the sigmoid sees the uncapped gate


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        situ(np.ones((1, 3), np.float32), np.ones((1, 4), np.float32), 4.0, 25.0)

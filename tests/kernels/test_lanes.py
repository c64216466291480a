"""The sixteen-lane sum: the order written out, another's answers, and orders that must not match."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.lanes import lane_dot
from k3ray.kernels.reference import lanes as twin

Floats = npt.NDArray[np.float32]


@kernel(types.void(readable(types.float32, 2), readable(types.float32, 1), writable(types.float64, 1)))
def _dots(rows: Floats, x: Floats, out: npt.NDArray[np.float64]) -> None:
    """out[r] = lane_dot(rows[r], x)."""
    for r in range(rows.shape[0]):
        out[r] = lane_dot(rows[r], x)


def dots(rows: Floats, x: Floats) -> npt.NDArray[np.float64]:
    out = np.empty(len(rows))
    _dots(rows, x, out)
    return out


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 31, 32, 100, 127, 2050])
def test_the_twin_has_the_same_bits(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((5, width), dtype=np.float32) * np.float32(2.0) ** rng.integers(-20, 20, (5, width))
    rows, x = rows.astype(np.float32), rng.standard_normal(width, dtype=np.float32)
    assert dots(rows, x).tobytes() == twin.lane_dot(rows, np.broadcast_to(x, rows.shape)).tobytes()


def test_the_order_is_the_one_written_down() -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(53) * 2.0 ** rng.integers(-12, 12, 53)).astype(np.float32)
    y = rng.standard_normal(53, dtype=np.float32)
    products = [float(a) * float(b) for a, b in zip(x, y, strict=True)]
    lanes = [sum(products[lane:48:16]) for lane in range(16)]
    b = [(lanes[q] + lanes[q + 4]) + (lanes[q + 8] + lanes[q + 12]) for q in range(4)]
    total = (b[0] + b[1]) + (b[2] + b[3])
    for product in products[48:]:
        total += product
    assert dots(x[None], y)[0] == total


@pytest.mark.parametrize("width", [32, 100, 1024, 2050])
def test_another_engines_answers_in_the_same_order(shared_data: Path, width: int) -> None:
    fixture = np.load(shared_data / "order_fixture.npz")
    weight = (fixture[f"bf16_{width}_W"].astype(np.uint32) << 16).view(np.float32)
    got = dots(weight, fixture[f"bf16_{width}_x"]).astype(np.float32)
    assert got.tobytes() == fixture[f"bf16_{width}_v1"].tobytes()
    assert got.tobytes() != fixture[f"bf16_{width}_v0"].tobytes()  # an older order that must not match

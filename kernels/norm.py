"""Root-mean-square norm of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.lanes import lane_dot

Floats = npt.NDArray[np.float32]


@kernel(
    types.void(readable(types.float32, 2), readable(types.float32, 1), types.float64, writable(types.float32, 2)),
)
def _rmsnorm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out[t,i] = f32((x[t,i] * inverse_t) * weight[i]), inverse_t = 1 / sqrt(lane_dot(x[t], x[t]) / n + eps)."""
    for t in range(x.shape[0]):
        row = x[t]
        inverse = 1.0 / np.sqrt(lane_dot(row, row) / x.shape[1] + eps)
        for i in range(x.shape[1]):
            out[t, i] = np.float32((np.float64(row[i]) * inverse) * np.float64(weight[i]))


def rmsnorm(x: Floats, weight: Floats, eps: float) -> Floats:
    """weight * x / sqrt(mean(x^2) + eps) per row (docs/numerics, MODEL "RMSNorm").

    x (tokens, n) f32, weight (n,) f32 -> (tokens, n) f32. The sum of squares has the sixteen-lane order; everything
    is in double and rounded once. NaN and infinity pass through. ValueError when the widths differ.
    """
    if x.shape[1:] != weight.shape:
        raise ValueError(f"rmsnorm: weight {weight.shape} does not fit rows of x {x.shape}")
    out = np.empty(x.shape, np.float32)
    _rmsnorm(x, weight, eps, out)
    return out

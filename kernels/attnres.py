"""Block attention residuals: the softmax-weighted mix of the finished blocks and the running prefix sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import inlined, kernel, readable, writable
from k3ray.kernels.lanes import lane_dot
from k3ray.kernels.simd import fma
from k3ray.kernels.vmath import softmax64

Floats = npt.NDArray[np.float32]


@inlined
def _score(row: Floats, fold: Floats, eps: float) -> float:
    """lane_dot(row, fold) * (1 / sqrt(lane_dot(row, row) / D + eps))."""
    return lane_dot(row, fold) * (1.0 / np.sqrt(lane_dot(row, row) / row.shape[0] + eps))  # type: ignore[no-any-return]


@kernel(
    types.void(
        readable(types.float32, 3),
        readable(types.float32, 2),
        readable(types.float32, 1),
        types.float64,
        writable(types.float32, 2),
    ),
)
def _mix(blocks: Floats, p: Floats, fold: Floats, eps: float, out: Floats) -> None:
    """out[t] = f32(sum_i a_i v_i), i ascending with fma from 0.0; a = softmax64(scores); v = blocks[t], then p[t]."""
    tokens, finished, width = blocks.shape
    weights = np.empty(finished + 1)
    total = np.empty(width)
    for t in range(tokens):
        for i in range(finished):
            weights[i] = _score(blocks[t, i], fold, eps)
        weights[finished] = _score(p[t], fold, eps)
        softmax64(weights)
        for j in range(width):
            total[j] = 0.0
        for i in range(finished):
            row, weight = blocks[t, i], weights[i]
            for j in range(width):
                total[j] = fma(weight, np.float64(row[j]), total[j])
        for j in range(width):
            out[t, j] = np.float32(fma(weights[finished], np.float64(p[t, j]), total[j]))


def mix(blocks: Floats, p: Floats, fold: Floats, eps: float) -> Floats:
    """Mix of the raw rows, weighted by softmax over <row / sqrt(mean(row^2)+eps), fold> (MODEL "AttnRes").

    blocks (tokens, n, D) f32, p (tokens, D) f32, fold (D,) f32 = norm weight * proj weight -> (tokens, D) f32.
    n may be 0 (the result is p). ValueError when the shapes do not fit.
    """
    tokens, width = p.shape
    if blocks.shape[0] != tokens or blocks.shape[2:] != (width,) or fold.shape != (width,):
        raise ValueError(f"mix: blocks {blocks.shape}, p {p.shape} and fold {fold.shape} do not fit")
    out = np.empty(p.shape, np.float32)
    _mix(blocks, p, fold, eps, out)
    return out

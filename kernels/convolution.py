"""The short causal depthwise convolution with SiLU, and the history it carries from token to token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.vmath import sigmoid64

Floats = npt.NDArray[np.float32]


@kernel(
    types.void(
        readable(types.float32, 2),
        readable(types.float32, 2),
        writable(types.float32, 2),
        writable(types.float32, 2),
    ),
)
def _short_convolution(x: Floats, weight: Floats, tail: Floats, out: Floats) -> None:
    """a = sum_m weight[c,m] * input[t-K+1+m, c], m ascending from 0.0 in double; out = f32(a * sigmoid(a)).

    A product of two floats is exact in double, so each tap rounds once, at its addition. Inputs before the first
    token come from `tail`, which ends as the last K-1 inputs.
    """
    tokens, channels = x.shape
    history = weight.shape[1] - 1
    taps = np.empty((history + 1, channels))  # the kernel's columns as rows, so that channels are contiguous
    for m in range(history + 1):
        for c in range(channels):
            taps[m, c] = weight[c, m]
    total = np.empty(channels)
    for t in range(tokens):
        for c in range(channels):
            total[c] = 0.0
        for m in range(history + 1):
            source = t + m - history
            row = tail[history + source] if source < 0 else x[source]
            for c in range(channels):
                total[c] += taps[m, c] * np.float64(row[c])
        for c in range(channels):
            out[t, c] = np.float32(total[c] * sigmoid64(total[c]))
    for m in range(history):  # ascending: a row is read before it is overwritten
        source = tokens + m - history
        row = tail[history + source] if source < 0 else x[source]
        for c in range(channels):
            tail[m, c] = row[c]


def short_convolution(x: Floats, weight: Floats, tail: Floats) -> Floats:
    """SiLU of the causal depthwise convolution over consecutive tokens of one sequence (MODEL "KDA layer").

    x (tokens, channels) f32, weight (channels, kernel) f32 with the last tap on the current token, tail
    (kernel-1, channels) f32 IN/OUT, oldest first, zero at a sequence's start -> (tokens, channels) f32.
    ValueError when the shapes do not fit.
    """
    channels, taps = weight.shape
    if x.shape[1:] != (channels,) or tail.shape != (taps - 1, channels):
        raise ValueError(f"short_convolution: x {x.shape}, weight {weight.shape} and tail {tail.shape} do not fit")
    out = np.empty(x.shape, np.float32)
    _short_convolution(x, weight, tail, out)
    return out

"""SiTU, the gated activation of the dense layer, the shared experts and the routed ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.vmath import sigmoid64, tanh64

Floats = npt.NDArray[np.float32]


@kernel(
    types.void(
        readable(types.float32, 2),
        readable(types.float32, 2),
        types.float64,
        types.float64,
        writable(types.float32, 2),
    ),
)
def _situ(gate: Floats, up: Floats, beta: float, linear_beta: float, out: Floats) -> None:
    """out = f32(((beta * tanh(g / beta)) * sigmoid(g)) * (linear_beta * tanh(u / linear_beta))), all in double."""
    for t in range(gate.shape[0]):
        for i in range(gate.shape[1]):
            g, u = np.float64(gate[t, i]), np.float64(up[t, i])
            capped = (beta * tanh64(g / beta)) * sigmoid64(g)
            out[t, i] = np.float32(capped * (linear_beta * tanh64(u / linear_beta)))


def situ(gate: Floats, up: Floats, beta: float, linear_beta: float) -> Floats:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta) (MODEL "SiTU").

    gate, up (tokens, n) f32 -> (tokens, n) f32, |result| <= beta * linear_beta; the sigmoid sees the uncapped gate.
    Rounded once. ValueError when the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"situ: gate {gate.shape} and up {up.shape} differ")
    out = np.empty(gate.shape, np.float32)
    _situ(gate, up, beta, linear_beta, out)
    return out

"""Twin of the SiTU activation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.vmath import as_f32, sigmoid64, tanh64

Floats = npt.NDArray[np.float32]


def situ(gate: Floats, up: Floats, beta: float, linear_beta: float) -> Floats:
    """The twin of `k3ray.kernels.situ.situ`."""
    g, u = gate.astype(np.float64), up.astype(np.float64)
    capped = (beta * tanh64(g / beta)) * sigmoid64(g)
    return as_f32(capped * (linear_beta * tanh64(u / linear_beta)))

"""Twin of the root-mean-square norm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.lanes import lane_dot
from k3ray.kernels.reference.vmath import as_f32

Floats = npt.NDArray[np.float32]


def rmsnorm(x: Floats, weight: Floats, eps: float) -> Floats:
    """The twin of `k3ray.kernels.norm.rmsnorm`."""
    inverse = 1.0 / np.sqrt(lane_dot(x, x) / x.shape[-1] + eps)
    return as_f32((x.astype(np.float64) * inverse[..., None]) * weight.astype(np.float64))

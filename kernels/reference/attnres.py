"""Twin of the block attention residuals' mix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.lanes import lane_dot
from k3ray.kernels.reference.vmath import as_f32, fma, softmax64

Floats = npt.NDArray[np.float32]


def mix(blocks: Floats, p: Floats, fold: Floats, eps: float) -> Floats:
    """The twin of `k3ray.kernels.attnres.mix`."""
    rows = np.concatenate([blocks, p[:, None]], axis=1)
    scores = lane_dot(rows, np.broadcast_to(fold, rows.shape)) * (
        1.0 / np.sqrt(lane_dot(rows, rows) / p.shape[1] + eps)
    )
    weights = softmax64(scores)
    mixed = np.zeros(p.shape)
    for i in range(rows.shape[1]):
        mixed = fma(weights[:, i, None], rows[:, i], mixed)
    return as_f32(mixed)

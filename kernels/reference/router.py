"""Twin of the routing and of the sum over experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.vmath import as_f32, fma, sigmoid64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def select(
    logits: Floats, bias: Floats, k: int, renormalise: bool, scale: float
) -> tuple[npt.NDArray[np.int32], Doubles]:
    """The twin of `k3ray.kernels.router.select`; ValueError for a score that is not finite."""
    scores = sigmoid64(logits)
    selection = scores + bias.astype(np.float64)
    if not (np.isfinite(logits).all() and np.isfinite(selection).all()):
        raise ValueError("a score is not finite")
    ids = np.argsort(-selection, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(scores, ids, axis=1)
    if renormalise and k > 1:
        total = np.zeros(len(logits))
        for rank in range(k):
            total = total + chosen[:, rank]
        chosen = chosen / (total[:, None] + 1e-20)
    return ids.astype(np.int32), chosen * scale


def combine(outputs: Floats, weights: Doubles) -> Floats:
    """The twin of `k3ray.kernels.router.combine`."""
    total = np.zeros((outputs.shape[0], outputs.shape[2]))
    for rank in range(outputs.shape[1]):
        total = fma(weights[:, rank, None], outputs[:, rank], total)
    return as_f32(total)

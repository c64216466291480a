"""Twin of the short causal depthwise convolution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.vmath import as_f32, sigmoid64

Floats = npt.NDArray[np.float32]


def short_convolution(x: Floats, weight: Floats, tail: Floats) -> Floats:
    """The twin of `k3ray.kernels.convolution.short_convolution`; `tail` is updated in place."""
    taps = weight.shape[1]
    inputs = np.concatenate([tail, x]).astype(np.float64)
    total = np.zeros(x.shape)
    for m in range(taps):
        total = total + weight[:, m].astype(np.float64) * inputs[m : m + len(x)]
    tail[:] = inputs[len(x) :]
    return as_f32(total * sigmoid64(total.ravel()).reshape(total.shape))

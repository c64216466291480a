"""Twin of the sixteen-lane sum of products: the order written out in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LANES = 16


def lane_dot(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """sum_i x[..., i] y[..., i] in double: lane l adds i mod 16 = l ascending, fixed fold, tail one by one."""
    products = x.astype(np.float64) * y.astype(np.float64)  # exact
    whole = products.shape[-1] // LANES * LANES
    lanes = np.zeros((*products.shape[:-1], LANES))
    for start in range(0, whole, LANES):
        lanes = lanes + products[..., start : start + LANES]
    b = (lanes[..., 0:4] + lanes[..., 4:8]) + (lanes[..., 8:12] + lanes[..., 12:16])
    total = (b[..., 0] + b[..., 1]) + (b[..., 2] + b[..., 3])
    for i in range(whole, products.shape[-1]):
        total = total + products[..., i]
    return np.asarray(total)

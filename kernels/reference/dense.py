"""Twin of kernels/dense.py: the contract's lanes, tree and tail written out in numpy doubles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def widen(weight: NDArray[Any]) -> NDArray[np.float64]:
    """bf16 bits (uint16) or f32 as doubles; exact."""
    if weight.dtype == np.uint16:
        weight = (weight.astype(np.uint32) << 16).view(np.float32)
    return weight.astype(np.float64)


def matmul(weight: NDArray[Any], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x (tokens, columns) f32 times weight (rows, columns), uint16 (bf16 bits) or f32: (tokens, rows) f32.

    Lane l of 16 sums the columns i with i mod 16 = l in ascending order, in double, over the whole blocks of 16;
    b_l = (a_l + a_{l+4}) + (a_{l+8} + a_{l+12}); acc = (b_0 + b_1) + (b_2 + b_3); the last columns are added one by
    one; rounded once. The product of two floats is exact in double.
    """
    rows, columns = weight.shape
    out = np.empty((x.shape[0], rows), np.float32)
    wide = widen(weight)
    whole = columns - columns % 16
    with np.errstate(over="ignore", invalid="ignore"):
        for token, vector in enumerate(x.astype(np.float64)):
            lanes = np.zeros((rows, 16))
            for start in range(0, whole, 16):
                lanes += wide[:, start : start + 16] * vector[start : start + 16]
            b = (lanes[:, 0:4] + lanes[:, 4:8]) + (lanes[:, 8:12] + lanes[:, 12:16])
            total = (b[:, 0] + b[:, 1]) + (b[:, 2] + b[:, 3])
            for column in range(whole, columns):
                total = total + wide[:, column] * vector[column]
            out[token] = total.astype(np.float32)
    return out

"""Twin of kernels/mxfp4.py: the decoding table and the integer contract written out in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class NonFiniteInput(ValueError):
    """A vector holds NaN or infinity."""


def weights(packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The E2M1 values without their scales, (rows, columns); the low nibble is the even column."""
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    return values


def factors(scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """E8M0 scale bytes as doubles, 2^(byte - 127); 255 stands for a group that contributes nothing."""
    return np.where(scales == 255, 0.0, np.ldexp(1.0, scales.astype(np.int64) - 127))


def decode(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The matrix's values, exact."""
    return weights(packed) * np.repeat(factors(scales), 32, axis=1)


def matmul(packed: NDArray[np.uint8], scales: NDArray[np.uint8], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x (tokens, columns) f32 times the matrix packed (rows, columns / 2), scales (rows, columns / 32).

    For each group of 32 columns: e = frexp's exponent of max |x|, q = rint(x 2^(44 - e)); the integer sum of 2 w q,
    exact below 2^53, times 2^(e - 44 - 1 + scale - 127), is added to accumulator (group mod 4); the result is
    (a0 + a1) + (a2 + a3), rounded once.
    """
    if not np.isfinite(x).all():
        raise NonFiniteInput("x holds NaN or infinity")
    doubled = (2 * weights(packed)).astype(np.int64)
    out = np.empty((x.shape[0], packed.shape[0]), np.float32)
    with np.errstate(over="ignore"):
        for token, vector in enumerate(x.astype(np.float64)):
            sums = np.zeros((4, packed.shape[0]))
            for group in range(scales.shape[1]):
                columns = slice(32 * group, 32 * group + 32)
                exponent = int(np.frexp(np.abs(vector[columns]).max())[1])
                quanta = np.rint(np.ldexp(vector[columns], 44 - exponent)).astype(np.int64)
                dots = (doubled[:, columns] @ quanta).astype(np.float64)
                # dots times a power of two is exact, so this addition is the contract's fma
                sums[group % 4] += np.ldexp(dots, exponent - 45) * factors(scales[:, group])
            out[token] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return out

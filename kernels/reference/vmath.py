"""Twin of the double-precision functions: the same chain of roundings on numpy arrays, no compiler involved.

A numpy array operation rounds once per element, so only the fused multiply-add has to be built: from exact products
and sums and one addition rounded to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008),
and from rational arithmetic where an intermediate would leave the range of doubles.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

ROUNDER = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits
ROUNDER_BITS = 0x4338000000000000
LOG2_E = 1.4426950408889634
LN2_HIGH = 6.93147180369123816490e-01  # 33 bits: k * LN2_HIGH is exact
LN2_LOW = 1.90821492927058770002e-10
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

_SMALLEST, _LARGEST = 2.0**-900, 2.0**900  # no intermediate of the exact sums leaves the doubles in between


def fma(x: npt.ArrayLike, y: npt.ArrayLike, z: npt.ArrayLike) -> Doubles:
    """x * y + z rounded once, elementwise with broadcasting."""
    a, b, c = (np.array(part) for part in np.broadcast_arrays(*(np.asarray(part, np.float64) for part in (x, y, z))))
    with np.errstate(all="ignore"):
        result = _fma_in_range(a, b, c)
        product = np.abs(a * b)
        plain = (a == 0) | (b == 0)
        ordinary = (product >= _SMALLEST) & (np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(c)) < _LARGEST)
        ordinary &= product < _LARGEST
        result = np.where(plain, a * b + c, result)
        for index in zip(*np.nonzero(~(plain | ordinary)), strict=True):
            result[index] = _fma_rational(float(a[index]), float(b[index]), float(c[index]))
    return result


def _two_sum(x: Doubles, y: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded sum and its exact error (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _two_product(x: Doubles, y: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded product and its exact error (Dekker, with Veltkamp's splitting in halves of 26 bits)."""
    product = x * y
    x_high, y_high = (134217729.0 * x - (134217729.0 * x - x) for x in (x, y))
    x_low, y_low = x - x_high, y - y_high
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low


def _fma_in_range(a: Doubles, b: Doubles, c: Doubles) -> Doubles:
    """x * y + z rounded once, where nothing overflows or underflows."""
    product, product_error = _two_product(a, b)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    odd, error = _two_sum(low_error, high_error)
    is_even = (odd.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & is_even, np.nextafter(odd, np.copysign(np.inf, error)), odd)
    return high + odd


def _fma_rational(a: float, b: float, c: float) -> float:
    """x * y + z rounded once, over the whole range, infinities and NaN included."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _reduced(x: Doubles) -> tuple[Doubles, Doubles, npt.NDArray[np.int64]]:
    """x = k ln 2 + r: exp(r) - 1, k as a double, and the bits that hold k."""
    shifted = fma(x, LOG2_E, ROUNDER)
    k = shifted - ROUNDER
    r = fma(-k, LN2_LOW, fma(-k, LN2_HIGH, x))
    tail = np.full_like(r, 1.0 / math.factorial(13))
    for order in range(12, 1, -1):
        tail = fma(tail, r, 1.0 / math.factorial(order))
    return fma(tail * r, r, r), k, shifted.view(np.int64)


def _power_of_two(exponent: npt.NDArray[np.int64]) -> Doubles:
    """The double whose biased exponent field is given."""
    return (exponent << 52).view(np.float64)


def _doubles(x: npt.ArrayLike) -> Doubles:
    return np.array(x, np.float64, ndmin=1)


def exp64(x: npt.ArrayLike) -> Doubles:
    """exp(x), the twin of `k3ray.kernels.vmath.exp64`."""
    with np.errstate(all="ignore"):
        bounded = _doubles(x)
        bounded = np.where(bounded > 800.0, 800.0, bounded)
        bounded = np.where(bounded < -800.0, -800.0, bounded)
        expm1, _, bits = _reduced(bounded)
        exponent = (bits - ROUNDER_BITS + 2046) & 0xFFF
        half = exponent >> 1
        return (1.0 + expm1) * _power_of_two(half) * _power_of_two(exponent - half)


def tanh64(x: npt.ArrayLike) -> Doubles:
    """tanh(x), the twin of `k3ray.kernels.vmath.tanh64`."""
    with np.errstate(all="ignore"):
        given = _doubles(x)
        magnitude = np.abs(given)
        magnitude = np.where(magnitude > 22.0, 22.0, magnitude)
        expm1, _, bits = _reduced(-2.0 * magnitude)
        scale = _power_of_two((bits - ROUNDER_BITS + 1023) & 0x7FF)
        fall = fma(scale, expm1, scale - 1.0)
        return np.copysign(-fall / (2.0 + fall), given)


def sigmoid64(x: npt.ArrayLike) -> Doubles:
    """1 / (1 + exp(-x)), the twin of `k3ray.kernels.vmath.sigmoid64`."""
    with np.errstate(all="ignore"):
        given = _doubles(x)
        fall = exp64(-np.abs(given))
        return np.where(given < 0.0, fall, 1.0) / (1.0 + fall)


def log64(x: npt.ArrayLike) -> Doubles:
    """ln(x), the twin of `k3ray.kernels.vmath.log64`."""
    with np.errstate(all="ignore"):
        given = _doubles(x)
        is_small = given < 2.0**-1022
        bits = np.where(is_small, given * 2.0**54, given).view(np.int64)
        power = (bits - SQRT_HALF_BITS) >> 52
        k = power.astype(np.float64) - np.where(is_small, 54.0, 0.0)
        f = (bits - (power << 52)).view(np.float64) - 1.0
        s = f / (2.0 + f)
        square = s * s
        tail = np.full_like(s, 2.0 / 23.0)
        for divisor in range(21, 1, -2):
            tail = fma(tail, square, 2.0 / divisor)
        correction = fma(-s, f - square * tail, k * LN2_LOW)
        result = fma(k, LN2_HIGH, f + correction)
        result = np.where(given == np.inf, given, result)
        result = np.where(given == 0.0, -np.inf, result)
        return np.where((given < 0.0) | np.isnan(given), np.nan, result)


def softmax64(scores: npt.ArrayLike) -> Doubles:
    """Softmax over the last axis, the twin of `k3ray.kernels.vmath.softmax64`."""
    given = _doubles(scores)
    with np.errstate(all="ignore"):
        weights = exp64(given - given.max(axis=-1, keepdims=True))
    total = np.zeros(weights.shape[:-1])
    for i in range(weights.shape[-1]):
        total = total + weights[..., i]
    return np.asarray(weights / total[..., None])


def as_f32(x: Any) -> npt.NDArray[np.float32]:
    """The one rounding to float32 at a kernel's end."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float64).astype(np.float32)

"""exp, tanh, sigmoid and log in double: polynomials with explicit fma, so that every CPU gives the same bits.

Not libm (it changes between glibc versions and CPUs) and not numpy's ufuncs. Each is branch-free, so a loop over an
array becomes vector code. Rounding points are those of the formulas below and nothing else; maximum errors are those
measured against 60-digit arithmetic in tests/kernels/test_vmath.py.
"""

from __future__ import annotations

from math import factorial

import numpy as np
import numpy.typing as npt

from k3ray.kernels.compile import inlined
from k3ray.kernels.simd import fma

ROUNDER = 1.5 * 2.0**52  # adding it leaves the nearest integer (ties to even) in the low bits
ROUNDER_BITS = 0x4338000000000000  # the same as an integer
LOG2_E = 1.4426950408889634
LN2_HIGH = 6.93147180369123816490e-01  # 33 bits of ln 2: k * LN2_HIGH is exact
LN2_LOW = 1.90821492927058770002e-10
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

E2, E3, E4, E5, E6, E7, E8, E9, E10, E11, E12, E13 = (1.0 / factorial(order) for order in range(2, 14))
L3, L5, L7, L9, L11, L13, L15, L17, L19, L21, L23 = (2.0 / divisor for divisor in range(3, 25, 2))


@inlined
def _reduced(x: float) -> tuple[float, int]:
    """x = k ln 2 + r with |r| <= ln 2 / 2: (exp(r) - 1, integer k + ROUNDER_BITS), for |x| <= 800.

    s = fma(x, LOG2_E, ROUNDER); k = s - ROUNDER; r = fma(-k, LN2_LOW, fma(-k, LN2_HIGH, x));
    t = Horner with fma over 1/13!, ..., 1/2!; exp(r) - 1 = fma(t * r, r, r).
    """
    shifted = fma(x, LOG2_E, ROUNDER)
    k = shifted - ROUNDER
    r = fma(-k, LN2_LOW, fma(-k, LN2_HIGH, x))
    tail = fma(fma(fma(E13, r, E12), r, E11), r, E10)
    tail = fma(fma(fma(fma(tail, r, E9), r, E8), r, E7), r, E6)
    tail = fma(fma(fma(fma(tail, r, E5), r, E4), r, E3), r, E2)
    return fma(tail * r, r, r), np.float64(shifted).view(np.int64)  # type: ignore[return-value]


@inlined
def _power_of_two(exponent: int) -> float:
    """2 ** (exponent - 1023) for exponent in 1..2046; 0 gives zero."""
    return np.int64(exponent << 52).view(np.float64)


@inlined
def exp64(x: float) -> float:
    """exp(x) = ((1 + expm1(r)) * 2^(k div 2)) * 2^(k - k div 2), x held within -800..800; at most 0.9 ulp off.

    Two factors, so that it falls to zero through the subnormals and rises to infinity without inf * 0. NaN stays NaN.
    """
    x = 800.0 if x > 800.0 else x
    x = -800.0 if x < -800.0 else x
    expm1, bits = _reduced(x)
    exponent = (bits - (ROUNDER_BITS - 2046)) & 0xFFF  # k + 2 * 1023, the two biased exponents together
    half = exponent >> 1
    return (1.0 + expm1) * _power_of_two(half) * _power_of_two(exponent - half)  # type: ignore[no-any-return]


@inlined
def tanh64(x: float) -> float:
    """tanh(x) = -f / (2 + f), f = exp(-2|x|) - 1 = fma(2^k, expm1(r), 2^k - 1), x's sign; at most 2.5 ulp off.

    Held at |x| <= 22, where it is 1 already. Odd to the bit, and x itself for tiny x. NaN stays NaN.
    """
    magnitude = abs(x)
    magnitude = 22.0 if magnitude > 22.0 else magnitude
    expm1, bits = _reduced(-2.0 * magnitude)
    scale = _power_of_two((bits - (ROUNDER_BITS - 1023)) & 0x7FF)
    fall = fma(scale, expm1, scale - 1.0)
    return np.copysign(-fall / (2.0 + fall), x)  # type: ignore[no-any-return]


@inlined
def sigmoid64(x: float) -> float:
    """sigmoid(x) = (exp(-|x|) if x < 0 else 1) / (1 + exp(-|x|)); at most 2 ulp off, never an infinity inside."""
    fall = exp64(-abs(x))
    numerator = fall if x < 0.0 else 1.0
    return numerator / (1.0 + fall)  # type: ignore[no-any-return]


@inlined
def log64(x: float) -> float:
    """ln(x): x = 2^k m, m in sqrt(1/2)..sqrt(2), f = m - 1, s = f / (2 + f), q = s * s; at most 0.9 ulp off.

    t = Horner with fma over 2/23, 2/21, ..., 2/3 in q; c = fma(-s, f - q * t, k * LN2_LOW);
    ln(x) = fma(k, LN2_HIGH, f + c). Zero gives -inf, negative NaN, subnormals are scaled by 2^54 first.
    """
    is_small = x < 2.0**-1022
    bits = np.float64(x * 2.0**54 if is_small else x).view(np.int64)
    power = (bits - SQRT_HALF_BITS) >> 52
    k = np.float64(power) - (54.0 if is_small else 0.0)
    f = np.int64(bits - (power << 52)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    q = s * s
    tail = fma(fma(fma(fma(L23, q, L21), q, L19), q, L17), q, L15)
    tail = fma(fma(fma(fma(fma(fma(tail, q, L13), q, L11), q, L9), q, L7), q, L5), q, L3)
    result = fma(k, LN2_HIGH, f + fma(-s, f - q * tail, k * LN2_LOW))
    result = x if x == np.inf else result
    result = -np.inf if x == 0.0 else result
    return np.nan if x < 0.0 or np.isnan(x) else result


@inlined
def softmax64(scores: npt.NDArray[np.float64]) -> None:
    """In place, (n,) with n >= 1: e_i = exp(s_i - max); e_i / sum, the sum in index order from 0.0."""
    largest = scores[0]
    for i in range(1, scores.shape[0]):
        largest = scores[i] if scores[i] > largest else largest
    for i in range(scores.shape[0]):
        scores[i] = exp64(scores[i] - largest)
    total = 0.0
    for i in range(scores.shape[0]):
        total += scores[i]
    for i in range(scores.shape[0]):
        scores[i] /= total

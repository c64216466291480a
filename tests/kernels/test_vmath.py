"""exp, tanh, sigmoid, log in double: the twin's bits, the error against 60 digits, and the ends of the range."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.reference import vmath as twin
from k3ray.kernels.simd import fma
from k3ray.kernels.vmath import exp64, log64, sigmoid64, softmax64, tanh64

Doubles = npt.NDArray[np.float64]
EXP, TANH, SIGMOID, LOG, SOFTMAX = range(5)
TWINS = (twin.exp64, twin.tanh64, twin.sigmoid64, twin.log64)


@kernel(types.void(types.int64, readable(types.float64, 1), writable(types.float64, 1)))
def _apply(function: int, x: Doubles, out: Doubles) -> None:
    """out = function(x)."""
    for i in range(x.shape[0]):
        if function == EXP:
            out[i] = exp64(x[i])
        elif function == TANH:
            out[i] = tanh64(x[i])
        elif function == SIGMOID:
            out[i] = sigmoid64(x[i])
        elif function == LOG:
            out[i] = log64(x[i])
        else:
            out[i] = x[i]
    if function == SOFTMAX:
        softmax64(out)


@kernel(types.void(*[readable(types.float64, 1)] * 3, writable(types.float64, 1)))
def _fma(x: Doubles, y: Doubles, z: Doubles, out: Doubles) -> None:
    """out = x * y + z, rounded once."""
    for i in range(x.shape[0]):
        out[i] = fma(x[i], y[i], z[i])


def apply(function: int, x: npt.ArrayLike) -> Doubles:
    given = np.array(x, np.float64, ndmin=1)
    out = np.empty_like(given)
    _apply(function, given, out)
    return out


def sample(seed: int) -> Doubles:
    """Every binade, the working ranges, random bit patterns, and the special values."""
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [
            rng.uniform(-900, 900, 2001),
            rng.standard_normal(2000) * 2.0 ** -rng.integers(0, 1070, 2000),
            rng.standard_normal(2000) * 8,
            rng.integers(0, 2**64, 3000, dtype=np.uint64).view(np.float64),
            [0.0, -0.0, np.inf, -np.inf, 5e-324, -5e-324, 2.0**-1022, 709.78, 709.79, -745.1, -745.2, 22.0, -22.0],
        ]
    )


def bits(x: Doubles) -> npt.NDArray[np.uint64]:
    """The bits, with every NaN alike: its payload is the CPU's choice."""
    return np.where(np.isnan(x), np.nan, x).view(np.uint64)


@pytest.mark.parametrize("function", [EXP, TANH, SIGMOID, LOG])
def test_the_twin_has_the_same_bits_over_the_whole_range(function: int) -> None:
    x = sample(function)
    np.testing.assert_array_equal(bits(apply(function, x)), bits(TWINS[function](x)))


def test_the_twin_of_softmax_has_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    for count in (1, 2, *range(9, 150, 7)):
        for spread in (1, 40):
            scores = rng.standard_normal(count) * spread
            assert apply(SOFTMAX, scores).tobytes() == twin.softmax64(scores).tobytes()
    backwards = apply(SOFTMAX, scores[::-1] / 40)[::-1]
    assert backwards.tobytes() != apply(SOFTMAX, scores / 40).tobytes()  # the order of the sum does show


def _tanh(x: Decimal) -> Decimal:
    return x - x**3 / 3 if abs(x) < Decimal("1e-15") else ((2 * x).exp() - 1) / ((2 * x).exp() + 1)


def _cases() -> list[tuple[int, float, Doubles, Callable[[Decimal], Decimal]]]:
    rng = np.random.default_rng(7)
    tiny = rng.standard_normal(400) * 2.0 ** -rng.integers(0, 60, 400)
    near_one = 1.0 + rng.uniform(-1, 1, 400) * 2.0 ** -rng.integers(1, 50, 400)
    bend = np.concatenate([tiny, rng.uniform(-1, 1, 600), rng.uniform(-22, 22, 1000)])
    return [
        (EXP, 0.9, np.concatenate([tiny, rng.uniform(-708, 709.7, 1500)]), lambda x: x.exp()),
        (TANH, 2.5, bend, _tanh),
        (SIGMOID, 2.0, np.concatenate([bend, rng.uniform(-700, 700, 600)]), lambda x: 1 / (1 + (-x).exp())),
        (LOG, 0.9, np.concatenate([near_one, np.exp(rng.uniform(-700, 700, 1500))]), lambda x: x.ln()),
    ]


@pytest.mark.parametrize(("function", "bound", "x", "exact"), _cases(), ids=["exp", "tanh", "sigmoid", "log"])
def test_the_documented_error_bounds_hold(
    function: int, bound: float, x: Doubles, exact: Callable[[Decimal], Decimal]
) -> None:
    getcontext().prec = 60
    got = apply(function, x)
    errors = [
        abs((Decimal(float(y)) - exact(Decimal(float(v)))) / Decimal(float(np.spacing(abs(y)))))
        for v, y in zip(x, got, strict=True)
    ]
    assert max(errors) <= bound


def test_saturation_is_smooth_and_makes_no_nan() -> None:
    x = np.concatenate([np.linspace(-800, 800, 3201), [np.inf, -np.inf, 1e308, -1e308]])
    for function in (EXP, TANH, SIGMOID):
        assert not np.isnan(apply(function, x)).any()
    falling = apply(EXP, np.linspace(-708, -746, 400))
    assert (np.diff(falling) <= 0).all() and falling[-1] == 0.0 and (falling > 0).sum() > 380
    np.testing.assert_array_equal(apply(EXP, [-np.inf, np.inf, 0.0]), [0.0, np.inf, 1.0])
    np.testing.assert_array_equal(apply(SIGMOID, [800.0, -800.0, np.inf, -np.inf, 0.0]), [1.0, 0.0, 1.0, 0.0, 0.5])
    np.testing.assert_array_equal(apply(LOG, [0.0, 1.0, np.inf]), [-np.inf, 0.0, np.inf])
    assert np.isnan(apply(LOG, [-1.0, -np.inf])).all()
    for function in (EXP, TANH, SIGMOID, LOG):
        assert np.isnan(apply(function, [np.nan])).all()


def test_tanh_is_odd_to_the_bit_and_the_identity_near_zero() -> None:
    x = np.abs(sample(3)[:6001])
    assert apply(TANH, -x).tobytes() == (-apply(TANH, x)).tobytes()
    tiny = np.array([0.0, 5e-324, 1e-310, 1e-200, 1e-9])
    assert apply(TANH, tiny).tobytes() == tiny.tobytes()


def test_subnormal_logarithms_agree_with_their_scaled_ones() -> None:
    x = np.array([5e-324, 1e-320, 3e-310])
    np.testing.assert_allclose(apply(LOG, x), np.log(x), rtol=1e-14)


DOUBLES = st.floats(width=64)


@settings(max_examples=400, deadline=None)
@given(x=DOUBLES, y=DOUBLES, z=DOUBLES)
def test_the_multiply_add_of_kernel_and_twin_is_the_exact_one(x: float, y: float, z: float) -> None:
    out = np.empty(1)
    _fma(np.array([x]), np.array([y]), np.array([z]), out)
    np.testing.assert_array_equal(bits(out), bits(np.asarray(twin.fma([x], [y], [z]))))


def test_the_multiply_add_rounds_once_where_it_matters() -> None:
    rng = np.random.default_rng(11)
    x, y = (rng.standard_normal(2000) * 2.0 ** rng.integers(-30, 30, 2000) for _ in range(2))
    near = -x * y * (1 + 2.0 ** -rng.integers(1, 60, 2000) * rng.integers(-1, 2, 2000))
    z = np.where(rng.random(2000) < 0.5, near, rng.standard_normal(2000) * 2.0 ** rng.integers(-130, 130, 2000))
    out = np.empty(2000)
    _fma(x, y, z, out)
    exact = [float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert out.tobytes() == np.array(exact).tobytes() == twin.fma(x, y, z).tobytes()
    with np.errstate(all="ignore"):
        assert (out != x * y + z).any()  # these inputs do tell a fused step from two roundings

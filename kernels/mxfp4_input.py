"""Vectors quantised for the MXFP4 kernels: 45-bit fixed point, one exponent a group of 32 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from k3ray.kernels.arrays import aligned_empty, require
from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.mxfp4_groups import DIGIT_BITS, PLANES, QUAD_GROUPS, WEIGHT_SHIFT
from k3ray.kernels.simd import (
    F32,
    F64,
    I16,
    I64,
    array_bytes,
    at,
    llvm_function,
    load,
    multiply_add,
    shuffle,
    splat,
    store,
    vector,
)

GROUP = 32  # columns that share a scale
QUANTUM_BITS = 44  # a group's largest |x| lies in [2^43, 2^44] quanta
_FIELD_BIAS = 1023 - 127 - QUANTUM_BITS - 1 - WEIGHT_SHIFT  # what a double's exponent field holds besides e + scale


class NonFiniteInput(ValueError):
    """A vector to be quantised holds NaN or infinity."""


@dataclass(frozen=True, slots=True)
class QuantisedInput:
    """Vectors in fixed point, laid out for the kernel.

    planes: (tokens, quads, 3 digits, 4 columns mod 4, 4 groups, 8) i16, |digit| <= 2^14, highest digit first.
    exponents: (tokens, quads, 4) i64, the part of a double's exponent field that does not depend on the weights'
    scale, in place (bit 52 up). A width that is no multiple of 128 is filled up with groups of zeros.
    """

    planes: NDArray[np.int16]
    exponents: NDArray[np.int64]
    columns: int

    @property
    def tokens(self) -> int:
        """How many vectors."""
        return int(self.planes.shape[0])

    def take(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> QuantisedInput:
        """The vectors at these indices, in this order: what a batch sends to one expert."""
        indices = np.asarray(tokens, np.int64)
        planes = aligned_empty((len(indices), *self.planes.shape[1:]), np.int16)
        planes[...] = self.planes[indices]
        return QuantisedInput(planes, self.exponents[indices], self.columns)


@intrinsic
def _store_digits(typingctx: Any, x: Any, item: Any, scale: Any, planes: Any, place: Any) -> Any:
    """q = rint(x[item : item + 32] scale) = (h 2^15 + m) 2^15 + l; the digits go to `place` of the flat planes.

    The nearest integer each time, so every digit lies in -2^14..2^14; all of it exact but the first rounding.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        doubles = vector(F64, GROUP)
        nearest = llvm_function(builder, f"llvm.rint.v{GROUP}f64", doubles, [doubles])

        def times(value: ir.Value, power: int) -> ir.Value:
            return builder.fmul(value, splat(F64, 2.0**power, GROUP))

        source = array_bytes(context, builder, signature.args[0], arguments[0])
        target = array_bytes(context, builder, signature.args[3], arguments[3])
        target = at(builder, target, builder.mul(arguments[4], I64(2)))
        values = load(builder, source, vector(F32, GROUP), builder.mul(arguments[1], I64(4)))
        one = builder.insert_element(ir.Constant(doubles, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        scales = shuffle(builder, one, one, [0] * GROUP)
        rest = builder.call(nearest, [builder.fmul(builder.fpext(values, doubles), scales)])
        for plane in range(PLANES):
            unit = DIGIT_BITS * (PLANES - 1 - plane)
            digit = builder.call(nearest, [times(rest, -unit)])
            rest = multiply_add(builder, digit, splat(F64, -(2.0**unit), GROUP), rest)
            words = builder.trunc(
                builder.fptosi(digit, vector(ir.IntType(32), GROUP)),
                vector(I16, GROUP),
            )
            for c in range(4):
                offset = 2 * 8 * QUAD_GROUPS * (4 * plane + c)
                store(builder, shuffle(builder, words, words, range(c, GROUP, 4)), target, offset)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.float64, planes, types.int64), emit


@kernel(
    types.int64(
        readable(types.float32, 2), readable(types.uint32, 2), writable(types.int16, 6), writable(types.int64, 3)
    )
)
def _quantise(x: Any, bits: Any, planes: Any, exponents: Any) -> Any:
    """q = rint(x 2^(44 - e)), e = frexp(max |x|) of the group; the number of the first non-finite group, or -1."""
    tokens, columns = x.shape
    groups = columns // GROUP
    for token in range(tokens):
        for group in range(groups):
            top = np.uint32(0)
            for column in range(group * GROUP, group * GROUP + GROUP):
                top = max(top, bits[token, column] & np.uint32(0x7FFFFFFF))
            field: Any = np.int64(top >> np.uint32(23))
            if field == 255:
                return token * groups + group
            exponent = field - 126
            if field == 0:  # zero, or subnormal with 2^-149 as its unit
                exponent = -149 if top != 0 else 0
                while top != 0:
                    top >>= np.uint32(1)
                    exponent += 1
            quad, g = group // QUAD_GROUPS, group % QUAD_GROUPS
            exponents[token, quad, g] = (exponent + _FIELD_BIAS) << 52
            place = (token * planes.shape[1] + quad) * PLANES * 4 * QUAD_GROUPS * 8 + g * 8
            item = token * columns + group * GROUP
            _store_digits(x, item, math.ldexp(1.0, QUANTUM_BITS - exponent), planes, place)
    return -1


def quantise(x: NDArray[np.float32]) -> QuantisedInput:
    """Quantise x (tokens, columns) f32, C-contiguous, columns a multiple of 32.

    Raises NonFiniteInput where a value is NaN or infinite, ValueError for another dtype, layout or width.
    """
    require("x", x, (np.float32,), (None, None))
    tokens, columns = x.shape
    if columns % GROUP:
        raise ValueError(f"x: found {columns} columns, expected a multiple of {GROUP} (one MXFP4 scale for {GROUP})")
    quads = -(-columns // (GROUP * QUAD_GROUPS))
    planes = aligned_empty((tokens, quads, PLANES, 4, QUAD_GROUPS, 8), np.int16)
    exponents = np.empty((tokens, quads, QUAD_GROUPS), np.int64)
    if columns % (GROUP * QUAD_GROUPS):
        planes[:, -1], exponents[:, -1] = 0, 0
    bad = _quantise(x, x.view(np.uint32), planes, exponents)
    if bad >= 0:
        token, group = divmod(bad, columns // GROUP)
        values = x[token, group * GROUP : (group + 1) * GROUP]
        column = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NonFiniteInput(f"x[{token}, {group * GROUP + column}]: found {values[column]}, expected a finite value")
    return QuantisedInput(planes, exponents, columns)

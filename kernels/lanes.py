"""The sixteen-lane sum of products: the one shape every long reduction of the vector kernels has.

It is the dense contract's order (docs/numerics): lane l adds the products of the columns i with i mod 16 = l in
ascending order, the lanes are folded in a fixed tree, the columns after the last whole sixteen are added one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from k3ray.kernels.compile import inlined
from k3ray.kernels.simd import F32, F64, I32, I64, array_bytes, load, loop, multiply_add, shuffle, vector, zeros

LANES = 16


def _fold(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    """b_l = (a_l + a_{l+4}) + (a_{l+8} + a_{l+12}); (b_0 + b_1) + (b_2 + b_3)."""
    quarters = [shuffle(builder, lanes, lanes, range(first, first + 4)) for first in range(0, LANES, 4)]
    folded = builder.fadd(builder.fadd(quarters[0], quarters[1]), builder.fadd(quarters[2], quarters[3]))
    b0, b1, b2, b3 = (builder.extract_element(folded, I32(lane)) for lane in range(4))
    return builder.fadd(builder.fadd(b0, b1), builder.fadd(b2, b3))


@intrinsic
def _whole_lanes(typingctx: Any, x: Any, y: Any, count: Any) -> Any:
    """Folded lanes over the first `count` (a multiple of 16) products of two float32 vectors."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        sources = [
            array_bytes(context, builder, kind, array)
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        ]

        def step(index: ir.Value, lanes: list[ir.Value]) -> list[ir.Value]:
            offset = builder.mul(index, I64(4))
            narrow = [load(builder, source, vector(F32, LANES), offset) for source in sources]
            wide = [builder.fpext(part, vector(F64, LANES)) for part in narrow]
            return [multiply_add(builder, wide[0], wide[1], lanes[0])]

        return _fold(builder, loop(builder, I64(0), arguments[2], LANES, [zeros(F64, LANES)], step)[0])

    return types.float64(x, y, types.int64), emit


@inlined
def lane_dot(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> float:
    """sum_i x[i] y[i] of two contiguous (n,) float32 vectors in double, in the sixteen-lane order.

    A product of two floats is exact in double, so fused or not is the same bits.
    """
    whole = x.shape[0] & ~(LANES - 1)
    total = _whole_lanes(x, y, whole)
    for i in range(whole, x.shape[0]):
        total += np.float64(x[i]) * np.float64(y[i])
    return total  # type: ignore[no-any-return]

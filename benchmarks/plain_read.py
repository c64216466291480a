"""The yardstick of the kernel benchmarks: a plain read of memory, and a block of work that does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.simd import I64, array_bytes, load, loop, prefetch, store, vector, zeros
from k3ray.kernels.threads import RowPool

LINES = 8  # cache lines a step of the plain read sums
BLOCK = 1 << 14  # steps a block of the pool's work: 8 MB


@intrinsic
def _sum_lines(typingctx: Any, words: Any, low: Any, high: Any, sums: Any) -> Any:
    """sums = the 64-byte lines low..high of the array, added up; prefetched a page ahead as the kernels do."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        source = array_bytes(context, builder, signature.args[0], arguments[0])
        target = array_bytes(context, builder, signature.args[3], arguments[3])

        def step(line: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            places = [builder.mul(builder.add(line, I64(k)), I64(64)) for k in range(LINES)]
            for place in places:
                prefetch(builder, source, builder.add(place, I64(4096)))
            return [
                builder.add(total, load(builder, source, vector(I64, 8), place))
                for total, place in zip(totals, places, strict=True)
            ]

        totals = loop(builder, arguments[1], arguments[2], LINES, [zeros(I64, 8)] * LINES, step)
        for total in totals[1:]:
            totals[0] = builder.add(totals[0], total)
        store(builder, totals[0], target)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, sums), emit


@kernel(types.void(readable(types.int64, 1), types.int64, types.int64))
def _read_lines(words: Any, low: int, high: int) -> None:
    """Read blocks low..high of LINES cache lines."""
    sums = np.empty(8, np.int64)
    _sum_lines(words, low * LINES, high * LINES, sums)


@kernel(types.void(writable(types.int64, 1), types.int64, types.int64))
def nothing(out: Any, low: int, high: int) -> None:
    """A block that costs nothing, to see what a block costs."""
    out[0] = low


def read(memory: NDArray[np.int64], pool: RowPool) -> None:
    """Read the memory once, with every thread of the pool."""
    pool.run(_read_lines, memory.nbytes // (64 * LINES), memory, block_rows=BLOCK)

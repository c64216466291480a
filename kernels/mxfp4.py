"""MXFP4 matrices times one or many quantised vectors: contract 3 of docs/numerics.md.

A vector is quantised once and serves every matrix of its width. Each output is the sum of four double accumulators,
group index mod 4, each fed in ascending order of groups, whatever the batch: four tokens at a time share the decoding
of the weights, the rest go one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from k3ray.kernels.arrays import require
from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.mxfp4_groups import QUAD_BYTES, QUAD_GROUPS, TILE, quads_times_four, quads_times_one
from k3ray.kernels.mxfp4_input import GROUP, NonFiniteInput, QuantisedInput, quantise
from k3ray.kernels.simd import address, aligned_doubles
from k3ray.kernels.threads import RowPool, block_rows

__all__ = ["NonFiniteInput", "QuantisedInput", "matmul", "quantise"]


@kernel(
    types.void(
        readable(types.uint8, 2),
        readable(types.uint8, 2),
        readable(types.int16, 6),
        readable(types.int64, 3),
        readable(types.int64, 4),
        writable(types.float32, 2),
        types.int64,
        types.int64,
    )
)
def _multiply(
    packed: Any, scales: Any, planes: Any, exponents: Any, tile_exponents: Any, out: Any, low: int, high: int
) -> None:
    """out[:, low:high] = x @ w[low:high].T; a row is read once and stays in the first cache for all tokens.

    A row's last one to three groups, when its width is no multiple of 128, are copied into a quad of their own
    whose other scales are 255, so that no byte outside the row is read.
    """
    tokens = planes.shape[0]
    groups = scales.shape[1]
    whole = groups // QUAD_GROUPS
    left = groups % QUAD_GROUPS
    edge = np.zeros(QUAD_BYTES, np.uint8)
    edge_scales = np.full(QUAD_GROUPS, 255, np.uint8)
    sums = aligned_doubles(QUAD_GROUPS * TILE)
    for row in range(low, high):
        for i in range(left * 16):
            edge[i] = packed[row, whole * QUAD_BYTES + i]
        for i in range(left):
            edge_scales[i] = scales[row, whole * QUAD_GROUPS + i]
        weights = address(packed) + row * packed.shape[1]
        factors = address(scales) + row * groups
        for tile in range(tile_exponents.shape[0]):
            sums[:] = 0.0
            for part in range(1 + (left > 0)):
                start, count, w, s = 0, whole, weights, factors
                if part == 1:
                    start, count, w, s = whole, 1, address(edge), address(edge_scales)
                quads_times_four(w, s, planes, tile_exponents, tile, start, count, sums)
            for t in range(TILE):
                total = (sums[t] + sums[TILE + t]) + (sums[2 * TILE + t] + sums[3 * TILE + t])
                out[tile * TILE + t, row] = np.float32(total)
        for token in range(tile_exponents.shape[0] * TILE, tokens):
            sums[:] = 0.0
            for part in range(1 + (left > 0)):
                start, count, w, s = 0, whole, weights, factors
                if part == 1:
                    start, count, w, s = whole, 1, address(edge), address(edge_scales)
                quads_times_one(w, s, planes, exponents, token, start, count, sums)
            out[token, row] = np.float32((sums[0] + sums[1]) + (sums[2] + sums[3]))


def matmul(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    x: QuantisedInput,
    pool: RowPool,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """x times the matrix packed (rows, columns / 2) u8, scales (rows, columns / 32) u8 (E8M0): (tokens, rows) f32.

    The low nibble is the even column. A group with scale byte 255 contributes nothing. Weights may be read-only and
    unaligned and are read from memory once for the whole batch. `out`, when given, is filled and returned. Raises
    ValueError for other shapes or layouts.
    """
    require("packed", packed, (np.uint8,), (None, x.columns // 2))
    rows = packed.shape[0]
    require("scales", scales, (np.uint8,), (rows, x.columns // GROUP))
    if out is not None:
        require("out", out, (np.float32,), (x.tokens, rows), written=True)
    else:
        out = np.empty((x.tokens, rows), np.float32)
    tiles = x.tokens // TILE
    quads = x.exponents.shape[1]
    tiled = np.ascontiguousarray(
        x.exponents[: tiles * TILE].reshape(tiles, TILE, quads, QUAD_GROUPS).transpose(0, 2, 3, 1)
    )
    shared = block_rows(rows, packed.shape[1] + scales.shape[1], pool.threads)
    pool.run(_multiply, rows, packed, scales, x.planes, x.exponents, tiled, out, block_rows=shared)
    return out

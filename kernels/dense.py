"""Dense matrices, bf16 or f32, times one or many vectors: contract 2 of docs/numerics.md, at the memory's speed.

One vector runs over two rows at a time. A batch runs in tiles of ROW_TILE rows by TOKEN_TILE tokens, over chunks of
columns that stay in the first cache, with the sixteen lane sums of every output carried in memory from chunk to chunk:
a lane's sum does not care where it rests, so a batch gives every token the bits it would get alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from k3ray.kernels.arrays import aligned_empty, require
from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.dense_tiles import (
    CHUNK_BLOCKS,
    LANES,
    ROW_BLOCK,
    ROW_TILE,
    TOKEN_TILE,
    as_double,
    decode_rows,
    lane_sum,
    multiply_tile,
    row_sums,
)
from k3ray.kernels.simd import aligned_doubles, fma
from k3ray.kernels.threads import RowPool, block_rows

TILE_GROUP = 4  # token tiles that share a chunk of columns in the first cache

_X = readable(types.float32, 2)
_PACKED = readable(types.float64, 4)
_OUT = writable(types.float32, 2)


def _of_weights(*others: Any) -> tuple[Any, Any]:
    """The two signatures of a kernel that takes bf16 or f32 weights first and the row range last."""
    return tuple(
        types.void(readable(dtype, 2), *others, types.int64, types.int64) for dtype in (types.uint16, types.float32)
    )


@kernel(*_of_weights(readable(types.float64, 1), _OUT))
def _multiply_vector(weight: Any, x: Any, out: Any, low: int, high: int) -> None:
    """out[0, low:high] = weight[low:high] @ x."""
    columns = weight.shape[1]
    whole = columns - columns % LANES
    for row in range(low, high, 2):
        other = min(row + 1, high - 1)
        total, other_total = row_sums(weight, row, other, x)
        for column in range(whole, columns):
            total = fma(as_double(weight, row, column), x[column], total)
            other_total = fma(as_double(weight, other, column), x[column], other_total)
        out[0, row] = np.float32(total)
        out[0, other] = np.float32(other_total)


@kernel(types.void(_X, writable(types.float64, 4)))
def _pack(x: Any, packed: Any) -> None:
    """packed[tile, block, t, l] = x[TOKEN_TILE tile + t, LANES block + l]; the last token fills the last tile up."""
    last = x.shape[0] - 1
    for tile in range(packed.shape[0]):
        for t in range(TOKEN_TILE):
            source = x[min(tile * TOKEN_TILE + t, last)]
            for block in range(packed.shape[1]):
                for lane in range(LANES):
                    packed[tile, block, t, lane] = source[block * LANES + lane]


@kernel(*_of_weights(_PACKED, _X, _OUT))
def _multiply_batch(weight: Any, packed: Any, x: Any, out: Any, low: int, high: int) -> None:
    """out[:, low:high] = x @ weight[low:high].T; a row is read once and stays in the caches for all tokens."""
    tokens, columns = x.shape
    tiles, blocks = packed.shape[:2]
    whole = blocks * LANES
    decoded = aligned_doubles(ROW_TILE * CHUNK_BLOCKS * LANES)
    tile_size = ROW_TILE * TOKEN_TILE * LANES
    sums = aligned_doubles((ROW_BLOCK // ROW_TILE) * TILE_GROUP * tile_size)
    for first in range(low, high, ROW_BLOCK):
        end = min(first + ROW_BLOCK, high)
        for group in range(0, tiles, TILE_GROUP):
            group_end = min(group + TILE_GROUP, tiles)
            sums[:] = 0.0
            for start in range(0, blocks, CHUNK_BLOCKS):
                count = min(CHUNK_BLOCKS, blocks - start)
                for row in range(first, end, ROW_TILE):
                    decode_rows(weight, row, end - 1, start, count, decoded)
                    for tile in range(group, group_end):
                        place = (((row - first) // ROW_TILE) * TILE_GROUP + tile - group) * tile_size
                        multiply_tile(decoded, packed, tile * blocks + start, count, sums, place)
            for token in range(group * TOKEN_TILE, min(group_end * TOKEN_TILE, tokens)):
                tile, t = token // TOKEN_TILE - group, token % TOKEN_TILE
                for row in range(first, end):
                    step, r = (row - first) // ROW_TILE, (row - first) % ROW_TILE
                    total = lane_sum(sums, (step * TILE_GROUP + tile) * tile_size + (r * TOKEN_TILE + t) * LANES)
                    for column in range(whole, columns):
                        total = fma(as_double(weight, row, column), np.float64(x[token, column]), total)
                    out[token, row] = np.float32(total)


def matmul(
    weight: NDArray[Any], x: NDArray[np.float32], pool: RowPool, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """x (tokens, columns) f32 times weight (rows, columns), uint16 (bf16 bits) or f32: (tokens, rows) f32.

    All arrays C-contiguous; weight and x may be read-only and unaligned. The weights are read from memory once for
    the whole batch. `out`, when given, is filled and returned. Raises ValueError for other shapes or layouts.
    """
    require("weight", weight, (np.uint16, np.float32), (None, None))
    rows, columns = weight.shape
    require("x", x, (np.float32,), (None, columns))
    tokens = x.shape[0]
    if out is not None:
        require("out", out, (np.float32,), (tokens, rows), written=True)
    else:
        out = np.empty((tokens, rows), np.float32)
    if tokens == 0:
        return out
    row_bytes = columns * weight.itemsize
    if tokens == 1:
        wide = x[0].astype(np.float64)
        shared = block_rows(rows, row_bytes, pool.threads, multiple=2)
        pool.run(_multiply_vector, rows, weight, wide, out, block_rows=shared)
        return out
    tiles, blocks = -(-tokens // TOKEN_TILE), columns // LANES
    packed = aligned_empty((tiles, blocks, TOKEN_TILE, LANES), np.float64)
    _pack(x, packed)
    shared = block_rows(rows, row_bytes, pool.threads, multiple=ROW_BLOCK)
    pool.run(_multiply_batch, rows, weight, packed, x, out, block_rows=shared)
    return out

"""Inner loops of the dense kernels as vector IR: one row times a vector, and a register tile of rows by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from k3ray.kernels.simd import (
    F32,
    F64,
    I16,
    I32,
    I64,
    array_bytes,
    array_shape,
    at,
    double_lanes,
    load,
    loop,
    multiply_add,
    prefetch,
    shuffle,
    splat,
    store,
    vector,
    zeros,
)

LANES = 16  # the contract's lane sums
ROW_TILE = 2  # rows and tokens of a register tile: 8 sums of 16 registers with AVX2, 16 of 32 with AVX-512
TOKEN_TILE = 4
ROW_BLOCK = 16  # rows whose lane sums are carried together
CHUNK_BLOCKS = 16  # blocks of 16 columns a chunk holds: 16 tokens' chunk is 32 KB

_PREFETCH_BYTES = 2048  # how far ahead in each of the two rows of a single pass: a third to a half faster than none
_BLOCK_BYTES = 8 * LANES


def _lane_groups() -> list[int]:
    """First lanes of the vectors that together hold the sixteen lanes."""
    return list(range(0, LANES, double_lanes()))


def _widen(builder: ir.IRBuilder, weights: ir.Value, is_bf16: bool) -> ir.Value:
    """bf16 bits or f32 values, scalar or vector, as doubles; exact."""

    def like(element: ir.Type) -> ir.Type:
        return vector(element, weights.type.count) if isinstance(weights.type, ir.VectorType) else element

    if is_bf16:
        wide = builder.zext(weights, like(I32))
        half = ir.Constant(I32, 16) if wide.type is I32 else splat(I32, 16, wide.type.count)
        weights = builder.bitcast(builder.shl(wide, half), like(F32))
    return builder.fpext(weights, like(F64))


def _load_weights(builder: ir.IRBuilder, pointer: ir.Value, block: ir.Value, lane: int, is_bf16: bool) -> ir.Value:
    """The weights of a block from `lane` on, one vector register of doubles."""
    element, size = (I16, 2) if is_bf16 else (F32, 4)
    offset = builder.add(builder.mul(block, I64(LANES * size)), I64(lane * size))
    return _widen(builder, load(builder, pointer, vector(element, double_lanes()), offset), is_bf16)


def _row_pointer(context: Any, builder: ir.IRBuilder, matrix_type: Any, matrix: Any, row: Any) -> ir.Value:
    columns = array_shape(context, builder, matrix_type, matrix)[1]
    size = matrix_type.dtype.bitwidth // 8
    return at(
        builder, array_bytes(context, builder, matrix_type, matrix), builder.mul(builder.mul(row, columns), I64(size))
    )


def _tree(builder: ir.IRBuilder, quarters: Sequence[ir.Value]) -> ir.Value:
    """The contract's tree: b_l = (a_l + a_{l+4}) + (a_{l+8} + a_{l+12}), then (b_0 + b_1) + (b_2 + b_3)."""
    b = builder.fadd(builder.fadd(quarters[0], quarters[1]), builder.fadd(quarters[2], quarters[3]))
    b0, b1, b2, b3 = (builder.extract_element(b, I32(lane)) for lane in range(4))
    return builder.fadd(builder.fadd(b0, b1), builder.fadd(b2, b3))


@intrinsic
def as_double(typingctx: Any, matrix: Any, row: Any, column: Any) -> Any:
    """matrix[row, column] in double; uint16 items are bf16 bits."""
    is_bf16 = matrix.dtype == types.uint16

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = _row_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        offset = builder.mul(arguments[2], I64(2 if is_bf16 else 4))
        return _widen(builder, load(builder, pointer, I16 if is_bf16 else F32, offset), is_bf16)

    return types.float64(matrix, types.int64, types.int64), emit


@intrinsic
def row_sums(typingctx: Any, matrix: Any, first: Any, second: Any, x: Any) -> Any:
    """Sums of matrix[first] * x and matrix[second] * x over the whole blocks of 16 columns; x is f64.

    Two rows, because the additions of one wait for each other longer than its weights take to arrive; two blocks a
    step, because two blocks of bf16 are a cache line.
    """
    is_bf16 = matrix.dtype == types.uint16
    block_bytes = LANES * (2 if is_bf16 else 4)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        rows = [_row_pointer(context, builder, signature.args[0], arguments[0], row) for row in arguments[1:3]]
        blocks = builder.lshr(array_shape(context, builder, signature.args[0], arguments[0])[1], I64(4))
        paired = builder.and_(blocks, I64(-2))
        xs = array_bytes(context, builder, signature.args[3], arguments[3])
        groups = [(row, lane) for row in rows for lane in _lane_groups()]

        def add_block(block: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            following = []
            for (row, lane), total in zip(groups, sums, strict=True):
                offset = builder.add(builder.mul(block, I64(_BLOCK_BYTES)), I64(8 * lane))
                v = load(builder, xs, vector(F64, double_lanes()), offset)
                following.append(multiply_add(builder, _load_weights(builder, row, block, lane, is_bf16), v, total))
            return following

        def add_two_blocks(block: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for row in rows:
                for line in range(0, 2 * block_bytes, 64):
                    ahead = builder.add(builder.mul(block, I64(block_bytes)), I64(_PREFETCH_BYTES + line))
                    prefetch(builder, row, ahead)
            return add_block(builder.add(block, I64(1)), add_block(block, sums))

        sums = loop(builder, I64(0), paired, 2, [zeros(F64, double_lanes())] * len(groups), add_two_blocks)
        sums = loop(builder, paired, blocks, 1, sums, add_block)
        quarters = [
            shuffle(builder, total, total, range(lane, lane + 4))
            for total in sums
            for lane in range(0, double_lanes(), 4)
        ]
        totals = [_tree(builder, quarters[:4]), _tree(builder, quarters[4:])]
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.float64, 2)(matrix, types.int64, types.int64, x), emit


@intrinsic
def lane_sum(typingctx: Any, sums: Any, place: Any) -> Any:
    """The contract's tree over the sixteen lane sums at `place`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = at(
            builder,
            array_bytes(context, builder, signature.args[0], arguments[0]),
            builder.mul(arguments[1], I64(8)),
        )
        return _tree(builder, [load(builder, pointer, vector(F64, 4), 32 * quarter) for quarter in range(4)])

    return types.float64(sums, types.int64), emit


@intrinsic
def decode_rows(typingctx: Any, matrix: Any, row: Any, last: Any, start: Any, count: Any, decoded: Any) -> Any:
    """decoded[block, r, lane] = matrix[min(row + r, last)] in double for `count` blocks from block `start` on.

    Meanwhile the second cache is asked for the same place ROW_BLOCK rows further, where the next pass comes by: the
    jumps from row to row are more than the CPU foresees by itself (up to two fifths faster on short rows).
    """
    is_bf16 = matrix.dtype == types.uint16
    size = 2 if is_bf16 else 4

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, row, last, start, count, _ = arguments
        target = array_bytes(context, builder, signature.args[5], arguments[5])
        columns = array_shape(context, builder, signature.args[0], arguments[0])[1]
        next_pass = builder.mul(columns, I64(ROW_BLOCK * size))
        rows = []
        for r in range(ROW_TILE):
            wanted = builder.add(row, I64(r))
            wanted = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
            pointer = _row_pointer(context, builder, signature.args[0], arguments[0], wanted)
            rows.append(at(builder, pointer, builder.mul(start, I64(LANES * size))))

        def step(block: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            for r, pointer in enumerate(rows):
                prefetch(builder, pointer, builder.add(builder.mul(block, I64(LANES * size)), next_pass), nearness=2)
                for lane in _lane_groups():
                    w = _load_weights(builder, pointer, block, lane, is_bf16)
                    place = builder.mul(block, I64(ROW_TILE * _BLOCK_BYTES))
                    store(builder, w, target, builder.add(place, I64(r * _BLOCK_BYTES + 8 * lane)))
            return carried

        loop(builder, I64(0), count, 1, [], step)
        return context.get_dummy_value()

    return types.void(matrix, types.int64, types.int64, types.int64, types.int64, decoded), emit


@intrinsic
def multiply_tile(typingctx: Any, decoded: Any, packed: Any, block: Any, count: Any, sums: Any, place: Any) -> Any:
    """sums[place + (r, t, lane)] += decoded[:count, r, lane] * packed[block : block + count, t, lane], lane by lane.

    One group of lanes at a time, so that the sums of all rows and tokens of the tile fit in the registers.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, _, block, count, _, place = arguments
        weights = array_bytes(context, builder, signature.args[0], arguments[0])
        xs = array_bytes(context, builder, signature.args[1], arguments[1])
        xs = at(builder, xs, builder.mul(block, I64(TOKEN_TILE * _BLOCK_BYTES)))
        kept = array_bytes(context, builder, signature.args[4], arguments[4])
        kept = at(builder, kept, builder.mul(place, I64(8)))
        lanes = vector(F64, double_lanes())
        cells = [(r, t) for r in range(ROW_TILE) for t in range(TOKEN_TILE)]
        for lane in _lane_groups():

            def step(index: ir.Value, totals: list[ir.Value], lane: int = lane) -> list[ir.Value]:
                w_at, x_at = (builder.mul(index, I64(n * _BLOCK_BYTES)) for n in (ROW_TILE, TOKEN_TILE))
                ws = [
                    load(builder, weights, lanes, builder.add(w_at, I64(r * _BLOCK_BYTES + 8 * lane)))
                    for r in range(ROW_TILE)
                ]
                vs = [
                    load(builder, xs, lanes, builder.add(x_at, I64(t * _BLOCK_BYTES + 8 * lane)))
                    for t in range(TOKEN_TILE)
                ]
                return [multiply_add(builder, ws[r], vs[t], total) for (r, t), total in zip(cells, totals, strict=True)]

            places = [(r * TOKEN_TILE + t) * _BLOCK_BYTES + 8 * lane for r, t in cells]
            before = [load(builder, kept, lanes, offset) for offset in places]
            for total, offset in zip(loop(builder, I64(0), count, 1, before, step), places, strict=True):
                store(builder, total, kept, offset)
        return context.get_dummy_value()

    return types.void(decoded, packed, types.int64, types.int64, sums, types.int64), emit

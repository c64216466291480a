"""Inner loops of latent attention as vector IR: register tiles of queries by positions, and of queries by channels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from k3ray.kernels.simd import (
    F32,
    F64,
    I64,
    array_bytes,
    array_shape,
    at,
    double_lanes,
    load,
    loop,
    multiply_add,
    shuffle,
    store,
    vector,
)

POSITIONS = 64  # of a panel; whole vectors and tiles on every CPU
SCORE_QUERIES, SCORE_VECTORS = 2, 4  # 8 sums of 16 registers with AVX2, of 32 with AVX-512
WEIGH_QUERIES, WEIGH_VECTORS = 4, 2


@intrinsic
def weigh_channels(typingctx: Any) -> Any:
    """How many channels a tile of `add_rows` covers."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return I64(WEIGH_VECTORS * double_lanes())

    return types.int64(), emit


def _spread(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A double in every lane of a register."""
    empty = ir.Constant(vector(F64, double_lanes()), ir.Undefined)
    single = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return shuffle(builder, single, single, [0] * double_lanes())


def _rows(
    context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value, first: ir.Value, column: ir.Value, count: int
) -> list[ir.Value]:
    """Pointers to array[min(first + k, last row), column] of a two-dimensional array of doubles."""
    extents = array_shape(context, builder, kind, array)
    last = builder.sub(extents[0], I64(1))
    pointers = []
    for k in range(count):
        wanted = builder.add(first, I64(k))
        row = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
        offset = builder.mul(builder.add(builder.mul(row, extents[1]), column), I64(8))
        pointers.append(at(builder, array_bytes(context, builder, kind, array), offset))
    return pointers


@intrinsic
def fill_panel(typingctx: Any, cache: Any, start: Any, last: Any, first: Any, count: Any, panel: Any) -> Any:
    """panel[c, s] = cache[min(start + s, last), first + c] for c in 0..count, a multiple of 4; s in 0..POSITIONS.

    Four positions by four channels at a time, turned in registers.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, start, last, first, count, _ = arguments
        kinds, four = signature.args, vector(F32, 4)
        pitch = builder.mul(array_shape(context, builder, kinds[0], arguments[0])[1], I64(4))
        history = at(builder, array_bytes(context, builder, kinds[0], arguments[0]), builder.mul(first, I64(4)))
        keys = array_bytes(context, builder, kinds[5], arguments[5])

        def turn(s: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            rows = []
            for k in range(4):
                position = builder.add(start, builder.add(s, I64(k)))
                position = builder.select(builder.icmp_signed("<", position, last), position, last)
                rows.append(at(builder, history, builder.mul(position, pitch)))

            def turn_four(c: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                a, b, d, e = (load(builder, row, four, builder.mul(c, I64(4))) for row in rows)
                low, high = [0, 4, 1, 5], [2, 6, 3, 7]
                pairs = [(shuffle(builder, a, b, half), shuffle(builder, d, e, half)) for half in (low, high)]
                columns = [shuffle(builder, x, y, half) for x, y in pairs for half in ([0, 1, 4, 5], [2, 3, 6, 7])]
                for k, column in enumerate(columns):
                    place = builder.mul(builder.add(c, I64(k)), I64(8 * POSITIONS))
                    wide = builder.fpext(column, vector(F64, 4))
                    store(builder, wide, keys, builder.add(place, builder.mul(s, I64(8))))
                return carried

            return loop(builder, I64(0), count, 4, carried, turn_four)

        loop(builder, I64(0), I64(POSITIONS), 4, [], turn)
        return context.get_dummy_value()

    return types.void(cache, types.int64, types.int64, types.int64, types.int64, panel), emit


@intrinsic
def add_panel(
    typingctx: Any, folded: Any, query: Any, first: Any, panel: Any, count: Any, sums: Any, start: Any
) -> Any:
    """sums[r, start + s] = fma(folded[r, first + c], panel[c, s], .) for c in 0..count ascending, s in 0..POSITIONS.

    r is the SCORE_QUERIES rows from `query` on; the last row stands in for those past the end, all arrays f64.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, query, first, _, count, _, start = arguments
        kinds, lanes = signature.args, double_lanes()
        queries = _rows(context, builder, kinds[0], arguments[0], query, first, SCORE_QUERIES)
        targets = _rows(context, builder, kinds[5], arguments[5], query, start, SCORE_QUERIES)
        keys = array_bytes(context, builder, kinds[3], arguments[3])
        for position in range(0, POSITIONS, SCORE_VECTORS * lanes):
            columns = [8 * (position + lanes * k) for k in range(SCORE_VECTORS)]

            def step(c: ir.Value, totals: list[ir.Value], columns: list[int] = columns) -> list[ir.Value]:
                row = at(builder, keys, builder.mul(c, I64(8 * POSITIONS)))
                ks = [load(builder, row, vector(F64, lanes), column) for column in columns]
                qs = [_spread(builder, load(builder, q, F64, builder.mul(c, I64(8)))) for q in queries]
                pairs = [(q, k) for q in qs for k in ks]
                return [multiply_add(builder, q, k, total) for (q, k), total in zip(pairs, totals, strict=True)]

            places = [(target, column) for target in targets for column in columns]
            before = [load(builder, target, vector(F64, lanes), column) for target, column in places]
            after = loop(builder, I64(0), count, 1, before, step)
            for total, (target, column) in zip(after, places, strict=True):
                store(builder, total, target, column)
        return context.get_dummy_value()

    return types.void(folded, types.int64, types.int64, panel, types.int64, sums, types.int64), emit


@intrinsic
def add_rows(
    typingctx: Any, weights: Any, query: Any, cache: Any, start: Any, stop: Any, channel: Any, totals: Any
) -> Any:
    """totals[r, c] = fma(weights[r, s], cache[s, c], .) for s in start..stop ascending, a tile of c from `channel` on.

    r is the WEIGH_QUERIES rows from `query` on; the last row stands in for those past the end. cache f32, others f64.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, query, _, start, stop, channel, _ = arguments
        kinds, lanes = signature.args, double_lanes()
        scales = _rows(context, builder, kinds[0], arguments[0], query, I64(0), WEIGH_QUERIES)
        targets = _rows(context, builder, kinds[6], arguments[6], query, channel, WEIGH_QUERIES)
        pitch = builder.mul(array_shape(context, builder, kinds[2], arguments[2])[1], I64(4))
        history = at(builder, array_bytes(context, builder, kinds[2], arguments[2]), builder.mul(channel, I64(4)))

        def step(s: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            row = at(builder, history, builder.mul(s, pitch))
            parts = [load(builder, row, vector(F32, lanes), 4 * lanes * k) for k in range(WEIGH_VECTORS)]
            vs = [builder.fpext(part, vector(F64, lanes)) for part in parts]
            ws = [_spread(builder, load(builder, scale, F64, builder.mul(s, I64(8)))) for scale in scales]
            pairs = [(w, v) for w in ws for v in vs]
            return [multiply_add(builder, w, v, total) for (w, v), total in zip(pairs, sums, strict=True)]

        places = [(target, 8 * lanes * k) for target in targets for k in range(WEIGH_VECTORS)]
        before = [load(builder, target, vector(F64, lanes), column) for target, column in places]
        for total, (target, column) in zip(loop(builder, start, stop, 1, before, step), places, strict=True):
            store(builder, total, target, column)
        return context.get_dummy_value()

    return types.void(weights, types.int64, cache, types.int64, types.int64, types.int64, totals), emit

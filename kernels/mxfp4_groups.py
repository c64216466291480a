"""Inner loops of the MXFP4 kernels as vector IR: four groups of 32 columns against one or four quantised tokens.

A quad is four consecutive groups: 64 bytes of weights, four scale bytes. Twice a weight is an integer in -12..12, a
token's q is three digits of 15 bits, so a group's dot product is three sums of 16-bit products, exact in 32 bits; put
together in double it is still exact (below 2^53), and only then scaled and added. Nothing before that addition
rounds, so the order inside a group is free: this one is chosen for the registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from k3ray.kernels.simd import (
    BYTES,
    F64,
    I8,
    I16,
    I32,
    I64,
    array_bytes,
    array_shape,
    at,
    constants,
    cpu_features,
    llvm_function,
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

TILE = 4  # tokens that share the decoding of a quad
PLANES = 3  # digits of 15 bits, highest first
DIGIT_BITS = 15
QUAD_BYTES = 64
QUAD_GROUPS = 4
WEIGHT_SHIFT = 8  # the decoded weights stand in the high byte of a 16-bit word, so every sum is 2^8 too large

_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PREFETCH_BYTES = 4096
_PLANE_BYTES = 2 * 32 * QUAD_GROUPS
_TOKEN_QUAD_BYTES = PLANES * _PLANE_BYTES
_NO_SCALE = 255  # E8M0 NaN: the group contributes nothing


def _look_up(builder: ir.IRBuilder, nibbles: ir.Value) -> ir.Value:
    """Twice the E2M1 value of 64 nibbles, as bytes: one byte shuffle where the CPU has it, else arithmetic."""
    table = [value & 0xFF for value in _E2M1_TWICE]
    if "avx512bw" in cpu_features():
        return _shuffle_bytes(builder, "llvm.x86.avx512.pshuf.b.512", table, nibbles)
    if "avx2" in cpu_features():
        halves = [shuffle(builder, nibbles, nibbles, range(first, first + 32)) for first in (0, 32)]
        low, high = (_shuffle_bytes(builder, "llvm.x86.avx2.pshuf.b", table, half) for half in halves)
        return shuffle(builder, low, high, range(64))
    return _compute_values(builder, nibbles)


def _shuffle_bytes(builder: ir.IRBuilder, name: str, table: Sequence[int], nibbles: ir.Value) -> ir.Value:
    kind = nibbles.type
    function = llvm_function(builder, name, kind, [kind, kind])
    return builder.call(function, [constants(I8, list(table) * (kind.count // 16)), nibbles])


def _compute_values(builder: ir.IRBuilder, nibbles: ir.Value) -> ir.Value:
    """The same on any CPU: the magnitude m in 0..7 stands for max(m, 2m - 4, 4m - 16), bit 3 for the sign."""
    width = nibbles.type.count
    largest = llvm_function(builder, f"llvm.smax.v{width}i8", nibbles.type, [nibbles.type] * 2)
    m = builder.and_(nibbles, splat(I8, 7, width))
    doubled = builder.sub(builder.add(m, m), splat(I8, 4, width))
    quadrupled = builder.sub(builder.add(doubled, doubled), splat(I8, 8, width))
    value = builder.call(largest, [m, builder.call(largest, [doubled, quadrupled])])
    negative = builder.sext(builder.icmp_signed(">", nibbles, splat(I8, 7, width)), nibbles.type)
    return builder.sub(builder.xor(value, negative), negative)


def _decode_quad(builder: ir.IRBuilder, packed: ir.Value, offset: ir.Value) -> list[ir.Value]:
    """Four vectors of 32 words, 2^9 times the weights: vector c, word 8 g + k is column 4 k + c of group g.

    The low nibble is the even column. A word holds two packed bytes, hence columns 4k, 4k+1 and 4k+2, 4k+3.
    """
    words = vector(I16, QUAD_BYTES // 2)
    raw = load(builder, packed, words, offset)
    shifted = builder.lshr(raw, splat(I16, 4, 32))
    nibbles = [
        builder.and_(builder.bitcast(half, vector(I8, QUAD_BYTES)), splat(I8, 15, QUAD_BYTES))
        for half in (raw, shifted)
    ]
    low, high = (builder.bitcast(_look_up(builder, half), words) for half in nibbles)
    even, odd = splat(I16, 8, 32), splat(I16, 0xFF00, 32)
    return [builder.shl(low, even), builder.shl(high, even), builder.and_(low, odd), builder.and_(high, odd)]


def _add_pairs(builder: ir.IRBuilder, words: ir.Value, others: ir.Value) -> ir.Value:
    """Products of 16-bit words, added two by two: generic IR that becomes one multiply-add instruction."""
    wide = vector(I32, words.type.count)
    products = builder.mul(builder.sext(words, wide), builder.sext(others, wide))
    evens, odds = (range(first, wide.count, 2) for first in (0, 1))
    return builder.add(shuffle(builder, products, products, evens), shuffle(builder, products, products, odds))


def _plane_sum(builder: ir.IRBuilder, weights: Sequence[ir.Value], planes: ir.Value, offset: ir.Value) -> ir.Value:
    """16 partial sums of one plane of one token, four for each group of the quad."""
    pairs = [
        _add_pairs(builder, w, load(builder, planes, w.type, builder.add(offset, I64(64 * c))))
        for c, w in enumerate(weights)
    ]
    return builder.add(builder.add(pairs[0], pairs[1]), builder.add(pairs[2], pairs[3]))


def _interleave(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Within every four lanes: `lanes` names two of them, taken from both in turn; ([0, 1] is a0 b0 a1 b1)."""
    mask = [part * 16 + 4 * group + lane for group in range(QUAD_GROUPS) for lane in lanes for part in (0, 1)]
    return shuffle(builder, first, second, mask)


def _concatenate(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Within every four lanes: the two named lanes of `first`, then those of `second`."""
    mask = [part * 16 + 4 * group + lane for group in range(QUAD_GROUPS) for part in (0, 1) for lane in lanes]
    return shuffle(builder, first, second, mask)


def _sum_fours(builder: ir.IRBuilder, sums: Sequence[ir.Value]) -> ir.Value:
    """Four vectors of four partial sums a group become one: lane 4 g + v is group g's sum of vector v."""
    a, b, c, d = sums
    left, right = (
        builder.add(_interleave(builder, x, y, [0, 1]), _interleave(builder, x, y, [2, 3])) for x, y in ((a, b), (c, d))
    )
    return builder.add(
        _concatenate(builder, left, right, [0, 1]),
        _concatenate(builder, left, right, [2, 3]),
    )


def _dot_products(builder: ir.IRBuilder, planes: Sequence[ir.Value]) -> ir.Value:
    """The exact dot products, times 2^8, from the sums of the three planes."""
    high, middle, low = (builder.sitofp(plane, vector(F64, plane.type.count)) for plane in planes)
    for plane in (middle, low):
        high = multiply_add(builder, high, splat(F64, 2.0**DIGIT_BITS, high.type.count), plane)
    return high


def _factors(builder: ir.IRBuilder, scale_bytes: ir.Value, exponents: ir.Value) -> ir.Value:
    """2^(exponent + scale) made in the exponent field of a double, or zero where there is no scale.

    Any float32 group and any scale byte give a field in 695..1225, far from both ends: see `quantise`.
    """
    lanes = scale_bytes.type.count
    field = builder.shl(builder.zext(scale_bytes, vector(I64, lanes)), splat(I64, 52, lanes))
    factor = builder.bitcast(builder.add(field, exponents), vector(F64, lanes))
    is_scale = builder.icmp_unsigned("!=", scale_bytes, splat(I8, _NO_SCALE, lanes))
    return builder.select(is_scale, factor, zeros(F64, lanes))


def _tile_terms(
    builder: ir.IRBuilder,
    weights: Sequence[ir.Value],
    scales: ir.Value,
    planes: Sequence[ir.Value],
    exponents: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Dot products and factors of a quad for one or four tokens; lane (tokens g + t) is group g of token t."""
    tokens = len(planes)
    offsets = [I64(plane * _PLANE_BYTES) for plane in range(PLANES)]
    if tokens == TILE:
        sums = [_sum_fours(builder, [_plane_sum(builder, weights, t, offset) for t in planes]) for offset in offsets]
    else:
        alone = [_plane_sum(builder, weights, planes[0], offset) for offset in offsets]
        together = _sum_fours(builder, [*alone, zeros(I32, 16)])
        sums = [shuffle(builder, together, together, range(plane, 16, 4)) for plane in range(PLANES)]
    lanes = QUAD_GROUPS * tokens
    spread = shuffle(builder, scales, scales, [lane // tokens for lane in range(lanes)])
    return _dot_products(builder, sums), _factors(builder, spread, load(builder, exponents, vector(I64, lanes)))


def _quads_times(tokens: int) -> Any:
    """The intrinsic for a tile of this many tokens."""

    @intrinsic
    def quads_times(
        typingctx: Any,
        packed: Any,
        scales: Any,
        planes: Any,
        exponents: Any,
        tile: Any,
        start: Any,
        count: Any,
        sums: Any,
    ) -> Any:
        """sums += the tile's terms of `count` quads at the addresses `packed` and `scales`, first quad `start` of x."""

        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            packed, scales = (builder.inttoptr(address, BYTES) for address in arguments[:2])
            tile, start, count = arguments[4:7]
            quads = array_shape(context, builder, signature.args[2], arguments[2])[1]
            plane_bytes = array_bytes(context, builder, signature.args[2], arguments[2])
            exponent_bytes = array_bytes(context, builder, signature.args[3], arguments[3])
            kept = array_bytes(context, builder, signature.args[7], arguments[7])
            lanes = QUAD_GROUPS * tokens

            def x_quad(token: ir.Value, quad: ir.Value) -> ir.Value:
                return builder.add(builder.mul(token, quads), builder.add(start, quad))

            def step(quad: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                offset = builder.mul(quad, I64(QUAD_BYTES))
                prefetch(builder, packed, builder.add(offset, I64(_PREFETCH_BYTES)))
                weights = _decode_quad(builder, packed, offset)
                scale_bytes = load(builder, scales, vector(I8, QUAD_GROUPS), builder.mul(quad, I64(QUAD_GROUPS)))
                first = builder.mul(tile, I64(tokens))
                places = [x_quad(builder.add(first, I64(t)), quad) for t in range(tokens)]
                pointers = [at(builder, plane_bytes, builder.mul(place, I64(_TOKEN_QUAD_BYTES))) for place in places]
                exponents = at(builder, exponent_bytes, builder.mul(x_quad(tile, quad), I64(8 * lanes)))
                dots, factors = _tile_terms(builder, weights, scale_bytes, pointers, exponents)
                return [multiply_add(builder, dots, factors, totals[0])]

            before = [load(builder, kept, vector(F64, lanes))]
            store(builder, loop(builder, I64(0), count, 1, before, step)[0], kept)
            return context.get_dummy_value()

        addresses = (types.intp, types.intp)
        return types.void(*addresses, planes, exponents, types.int64, types.int64, types.int64, sums), emit

    return quads_times


quads_times_one = _quads_times(1)
quads_times_four = _quads_times(TILE)

"""Multi-head latent attention on the cached latents themselves, and the sigmoid gate of its output.

The key rows of kv_b are folded into the query and the value rows applied to the weighted latent, so that a position
costs kv_lora + rope floats and nothing is ever expanded. The unrotated `rope` channels are shared by all heads and
are part of every score. Threads split heads; a token's bits depend on its own query and history alone.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import inlined, kernel, readable, writable
from k3ray.kernels.lanes import lane_dot
from k3ray.kernels.mla_tiles import (
    POSITIONS,
    SCORE_QUERIES,
    WEIGH_QUERIES,
    add_panel,
    add_rows,
    fill_panel,
    weigh_channels,
)
from k3ray.kernels.simd import fma
from k3ray.kernels.threads import RowPool
from k3ray.kernels.vmath import sigmoid64, softmax64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Halves = npt.NDArray[np.uint16]

TOKENS = 32  # of a long batch at a time: bounds the folded queries and the scores that are held
QUERIES = 32  # (head, token) pairs that share one pass over the cache
CHANNELS = 32  # of the panel of keys they share: 16 KB of doubles, so it stays in the first-level cache


@inlined
def _widen_row(kv_b: Halves, row: int, wide: Floats) -> None:
    """One row as float32: a bf16 is its upper half; a float32 comes as two halves, the lower one first."""
    if kv_b.shape[1] == wide.shape[0]:
        for c in range(wide.shape[0]):
            wide[c] = np.uint32(np.uint32(kv_b[row, c]) << 16).view(np.float32)
    else:
        for c in range(wide.shape[0]):
            upper = np.uint32(kv_b[row, 2 * c + 1]) << 16
            wide[c] = np.uint32(np.uint32(kv_b[row, 2 * c]) | upper).view(np.float32)


@kernel(
    types.void(
        readable(types.float32, 2),
        readable(types.uint16, 2),
        types.int64,
        writable(types.float64, 3),
        types.int64,
        types.int64,
    ),
)
def _fold(q: Floats, kv_b: Halves, nope: int, folded: Doubles, low: int, high: int) -> None:
    """folded[h,t,c] = f32(sum_i q[t,h,i] * key_row_i[c]), i ascending from 0.0 in double; then q's rope channels.

    Products of two floats are exact in double; `folded` holds floats as doubles, to be used without widening.
    """
    heads, tokens, channels = folded.shape
    width, rows = q.shape[1] // heads, kv_b.shape[0] // heads
    latent = channels - (width - nope)
    key = np.empty(latent, np.float32)
    for h in range(low, high):
        for t in range(tokens):
            for c in range(latent):
                folded[h, t, c] = 0.0
        for i in range(nope):
            _widen_row(kv_b, h * rows + i, key)
            for t in range(tokens):
                query = np.float64(q[t, h * width + i])
                for c in range(latent):
                    folded[h, t, c] += query * np.float64(key[c])
        for t in range(tokens):
            for c in range(latent):
                folded[h, t, c] = np.float32(folded[h, t, c])
            for c in range(latent, channels):
                folded[h, t, c] = q[t, h * width + nope + c - latent]


@inlined
def _score(folded: Doubles, cache: Floats, end: int, scale: float, panel: Doubles, scores: Doubles) -> None:
    """scores[r,s] = (sum_c folded[r,c] * cache[s,c]) * scale for s < end, c ascending from 0.0 in double.

    `scores` is wide enough for whole panels; nothing beyond `end` is read.
    """
    queries, channels = folded.shape
    for start in range(0, end, POSITIONS):
        stop = min(start + POSITIONS, end)
        for r in range(queries):
            for s in range(start, start + POSITIONS):
                scores[r, s] = 0.0
        for first in range(0, channels, CHANNELS):
            count = min(CHANNELS, channels - first)
            fill_panel(cache, start, end - 1, first, count & ~3, panel)
            for c in range(count & ~3, count):
                for s in range(start, stop):
                    panel[c, s - start] = cache[s, first + c]
            for r in range(0, queries, SCORE_QUERIES):
                add_panel(folded, r, first, panel, count, scores, start)
        for r in range(queries):
            for s in range(start, stop):
                scores[r, s] *= scale


@inlined
def _weigh(scores: Doubles, first_position: int, tokens: int, cache: Floats, total: Doubles) -> None:
    """total[r,c] = sum_s scores[r,s] * cache[s,c], s ascending with fma from 0.0; r = (head, token).

    Token t stops before position first_position + t + 1. Tiles take what all tokens of the batch see.
    """
    queries, latent = total.shape
    tile = weigh_channels()
    whole = latent - latent % tile
    for r in range(queries):
        for c in range(latent):
            total[r, c] = 0.0
    for start in range(0, first_position + tokens, POSITIONS):
        shared = max(start, min(start + POSITIONS, first_position + 1))
        for channel in range(0, whole, tile):
            for r in range(0, queries, WEIGH_QUERIES):
                add_rows(scores, r, cache, start, shared, channel, total)
        for r in range(queries):
            for s in range(start, min(start + POSITIONS, first_position + r % tokens + 1)):
                weight = scores[r, s]
                for c in range(whole if s < shared else 0, latent):
                    total[r, c] = fma(weight, np.float64(cache[s, c]), total[r, c])


@kernel(
    types.void(
        readable(types.float64, 3),
        readable(types.float32, 2),
        types.int64,
        types.float64,
        writable(types.float32, 3),
        types.int64,
        types.int64,
    ),
)
def _attend(
    folded: Doubles, cache: Floats, first_position: int, scale: float, latents: Floats, low: int, high: int
) -> None:
    """latents[h,t] = f32(`_weigh` of softmax64 of `_score`), heads low..high, several to a pass over the cache."""
    tokens, channels, latent = folded.shape[1], folded.shape[2], latents.shape[2]
    together = min(max(1, QUERIES // tokens), high - low)
    end = first_position + tokens
    # whole panels, and one cache line more so that the rows do not fall into the same sets of the cache
    scores = np.empty((together * tokens, (end + POSITIONS - 1) // POSITIONS * POSITIONS + 8))
    panel, total = np.zeros((CHANNELS, POSITIONS)), np.empty((together * tokens, latent))
    for h in range(low, high, together):
        count = min(together, high - h) * tokens
        _score(folded[h : min(h + together, high)].reshape(count, channels), cache, end, scale, panel, scores[:count])
        for r in range(count):
            softmax64(scores[r, : first_position + r % tokens + 1])
        _weigh(scores[:count], first_position, tokens, cache, total[:count])
        for r in range(count):
            for c in range(latent):
                latents[h + r // tokens, r % tokens, c] = np.float32(total[r, c])


@kernel(
    types.void(
        readable(types.float32, 3),
        readable(types.uint16, 2),
        writable(types.float32, 2),
        types.int64,
        types.int64,
        types.int64,
    ),
)
def _apply_values(latents: Floats, kv_b: Halves, out: Floats, first_token: int, low: int, high: int) -> None:
    """out[first_token + t, h, j] = f32(lane_dot(value_row_j, latents[h,t])) for heads low..high."""
    heads, tokens, latent = latents.shape
    value_dim, rows = out.shape[1] // heads, kv_b.shape[0] // heads
    value = np.empty(latent, np.float32)
    for h in range(low, high):
        for j in range(value_dim):
            _widen_row(kv_b, (h + 1) * rows - value_dim + j, value)
            for t in range(tokens):
                out[first_token + t, h * value_dim + j] = np.float32(lane_dot(value, latents[h, t]))


def _heads_per_block(heads: int, threads: int) -> int:
    """Few passes over the cache, and the same work for every thread."""
    share = -(-heads // threads)
    return -(-share // -(-share // QUERIES))


def attend(
    q: Floats,
    cache: Floats,
    first_position: int,
    kv_b: Halves | Floats,
    num_heads: int,
    nope: int,
    rope: int,
    value_dim: int,
    pool: RowPool,
) -> Floats:
    """Causal attention of consecutive tokens of one sequence over its cached latents (MODEL "MLA layer").

    q (tokens, H*(nope+rope)) f32; cache (capacity, kv_lora+rope) f32: normalised latent, then the unrotated channels,
    rows 0..first_position+tokens-1 already written; kv_b (H*(nope+v), kv_lora) bf16 bits (uint16) or f32, per head
    the key rows, then the value rows -> (tokens, H*v) f32, ungated. Token t sees positions 0..first_position+t.
    Scores are over the full width, divided by sqrt(nope+rope). ValueError when the shapes do not fit.
    """
    tokens, latent = q.shape[0], cache.shape[1] - rope
    fits = q.shape[1] == num_heads * (nope + rope) and kv_b.shape == (num_heads * (nope + value_dim), latent)
    if kv_b.dtype not in (np.uint16, np.float32):
        raise ValueError(f"attend: kv_b is {kv_b.dtype}, expected bf16 bits (uint16) or float32")
    if not (fits and latent > 0 and first_position >= 0 and first_position + tokens <= cache.shape[0]):
        raise ValueError(
            f"attend: q {q.shape}, cache {cache.shape} from position {first_position} and kv_b {kv_b.shape} do not fit "
            f"{num_heads} heads of {nope} + {rope} with {value_dim} values"
        )
    out = np.empty((tokens, num_heads * value_dim), np.float32)
    halves = kv_b if kv_b.dtype == np.uint16 else kv_b.view(np.uint16)
    scale, block = 1.0 / math.sqrt(nope + rope), _heads_per_block(num_heads, pool.threads)
    for start in range(0, tokens, TOKENS):
        part = q[start : start + TOKENS]
        folded = np.empty((num_heads, len(part), latent + rope), np.float64)
        latents = np.empty((num_heads, len(part), latent), np.float32)
        pool.run(_fold, num_heads, part, halves, nope, folded)
        pool.run(_attend, num_heads, folded, cache, first_position + start, scale, latents, block_rows=block)
        pool.run(_apply_values, num_heads, latents, halves, out, start)
    return out


@kernel(types.void(readable(types.float32, 2), readable(types.float32, 2), writable(types.float32, 2)))
def _sigmoid_gate(o: Floats, gate: Floats, out: Floats) -> None:
    """out = f32(o * sigmoid(gate)) in double."""
    for t in range(o.shape[0]):
        for i in range(o.shape[1]):
            out[t, i] = np.float32(np.float64(o[t, i]) * sigmoid64(np.float64(gate[t, i])))


def sigmoid_gate(o: Floats, gate: Floats) -> Floats:
    """o * sigmoid(gate), both (tokens, n) f32, rounded once (MODEL "MLA layer"). ValueError when the shapes differ."""
    if o.shape != gate.shape:
        raise ValueError(f"sigmoid_gate: o {o.shape} and gate {gate.shape} differ")
    out = np.empty(o.shape, np.float32)
    _sigmoid_gate(o, gate, out)
    return out

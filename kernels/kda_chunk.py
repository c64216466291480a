"""Kimi delta attention's chunked form: the recurrence of kda.py solved for a chunk of positions at once.

A verification target: it reaches the recurrence's values to rounding, not its bits, so no model is run with it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import inlined, kernel, readable, writable
from k3ray.kernels.kda import L2_EPS, output_shape
from k3ray.kernels.lanes import lane_dot
from k3ray.kernels.simd import fma
from k3ray.kernels.threads import RowPool
from k3ray.kernels.vmath import exp64, log64, sigmoid64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

DEFAULT_CHUNK = 16


@inlined
def _take(
    q: Floats, k: Floats, alpha: Floats, first: int, scale: float, query: Doubles, key: Doubles, gate: Doubles
) -> None:
    """Rows of one head and chunk: unit q (scaled) and k, and gate[t,i] = ln alpha[0,i] + ... + ln alpha[t,i]."""
    width = query.shape[1]
    for t in range(query.shape[0]):
        q_row, k_row = q[t, first : first + width], k[t, first : first + width]
        q_inverse = 1.0 / np.sqrt(lane_dot(q_row, q_row) + L2_EPS)
        k_inverse = 1.0 / np.sqrt(lane_dot(k_row, k_row) + L2_EPS)
        for i in range(width):
            query[t, i] = (np.float64(q_row[i]) * q_inverse) * scale
            key[t, i] = np.float64(k_row[i]) * k_inverse
            fall = log64(np.float64(alpha[t, first + i]))
            gate[t, i] = fall if t == 0 else gate[t - 1, i] + fall


@inlined
def _attention(query: Doubles, key: Doubles, gate: Doubles, beta: Doubles, a_qk: Doubles, a_kk: Doubles) -> None:
    """a_qk[t,s] = sum_i q[t,i] e k[s,i] for s <= t, a_kk[t,s] = beta[t] * sum_i k[t,i] e k[s,i] for s < t.

    e = exp(gate[t,i] - gate[s,i]): the exponent of a difference, never above zero, so that nothing overflows.
    """
    for t in range(query.shape[0]):
        for s in range(t + 1):
            with_query, with_key = 0.0, 0.0
            for i in range(query.shape[1]):
                faded = exp64(gate[t, i] - gate[s, i]) * key[s, i]
                with_query = fma(query[t, i], faded, with_query)
                with_key = fma(key[t, i], faded, with_key)
            a_qk[t, s] = with_query
            if s < t:
                a_kk[t, s] = beta[t] * with_key


@inlined
def _solve(state: Doubles, key: Doubles, gate: Doubles, beta: Doubles, a_kk: Doubles, write: Doubles) -> None:
    """write = (I + a_kk)^-1 (beta * (v - (k exp(gate)) S)), v being in write before: forward substitution."""
    width = state.shape[0]
    for t in range(write.shape[0]):
        for i in range(width):
            faded = exp64(gate[t, i]) * key[t, i]
            for j in range(width):
                write[t, j] = fma(-faded, state[i, j], write[t, j])
        for j in range(width):
            write[t, j] *= beta[t]
        for s in range(t):
            for j in range(width):
                write[t, j] = fma(-a_kk[t, s], write[s, j], write[t, j])


@inlined
def _read(state: Doubles, query: Doubles, gate: Doubles, a_qk: Doubles, write: Doubles, t: int, row: Doubles) -> None:
    """o[t] = (q exp(gate))[t] S + a_qk[t] write."""
    width = state.shape[0]
    for j in range(width):
        row[j] = 0.0
    for i in range(width):
        faded = exp64(gate[t, i]) * query[t, i]
        for j in range(width):
            row[j] = fma(faded, state[i, j], row[j])
    for s in range(t + 1):
        for j in range(width):
            row[j] = fma(a_qk[t, s], write[s, j], row[j])


@inlined
def _carry(state: Doubles, key: Doubles, gate: Doubles, write: Doubles) -> None:
    """S = exp(gate of the last) S + sum_s (k exp(gate of the last - gate))[s] write[s]."""
    width, last = state.shape[0], write.shape[0] - 1
    for i in range(width):
        fade = exp64(gate[last, i])
        for j in range(width):
            state[i, j] *= fade
        for s in range(last + 1):
            faded = exp64(gate[last, i] - gate[s, i]) * key[s, i]
            for j in range(width):
                state[i, j] = fma(faded, write[s, j], state[i, j])


@kernel(
    types.void(
        writable(types.float32, 3),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        types.float64,
        types.int64,
        writable(types.float32, 2),
        types.int64,
        types.int64,
    ),
    on_demand=True,
)
def _chunks(
    state: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    alpha: Floats,
    beta_logits: Floats,
    q_scale: float,
    chunk: int,
    out: Floats,
    low: int,
    high: int,
) -> None:
    """Per head and chunk in double: _take, _attention, _solve, _read, _carry; the state rounded to f32 at the end."""
    width = state.shape[2]
    matrix, row = np.empty((width, width)), np.empty(width)
    for h in range(low, high):
        first = h * width
        for i in range(width):
            for j in range(width):
                matrix[i, j] = state[h, i, j]
        for start in range(0, v.shape[0], chunk):
            size = min(chunk, v.shape[0] - start)
            stop = start + size
            query, key, gate = np.empty((size, width)), np.empty((size, width)), np.empty((size, width))
            write, beta = np.empty((size, width)), np.empty(size)
            a_qk, a_kk = np.zeros((size, size)), np.zeros((size, size))
            for t in range(size):
                beta[t] = sigmoid64(np.float64(beta_logits[start + t, h]))
                for j in range(width):
                    write[t, j] = v[start + t, first + j]
            _take(q[start:stop], k[start:stop], alpha[start:stop], first, q_scale, query, key, gate)
            _attention(query, key, gate, beta, a_qk, a_kk)
            _solve(matrix, key, gate, beta, a_kk, write)
            for t in range(size):
                _read(matrix, query, gate, a_qk, write, t, row)
                for j in range(width):
                    out[start + t, first + j] = np.float32(row[j])
            _carry(matrix, key, gate, write)
        for i in range(width):
            for j in range(width):
                state[h, i, j] = np.float32(matrix[i, j])


def chunked(
    state: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    alpha: Floats,
    beta_logits: Floats,
    pool: RowPool,
    chunk: int = DEFAULT_CHUNK,
) -> Floats:
    """What `kda.recurrence` computes, by the UT transform (MODEL "The chunked form"), `chunk` positions at a time.

    Arguments and result as there: state (H, d, d) f32 IN/OUT, q, k, v, alpha (tokens, H*d) f32, beta_logits
    (tokens, H) f32 -> o (tokens, H*d) f32. Its own difference: the state is rounded once for all tokens, not once a
    position. alpha as `kda.decay` gives it, above zero. ValueError when the shapes do not fit.
    """
    if chunk < 1:
        raise ValueError(f"KDA in chunks of {chunk} positions: expected at least one")
    out = np.empty(output_shape(state, q, k, v, alpha, beta_logits), np.float32)
    heads, width, _ = state.shape
    pool.run(_chunks, heads, state, q, k, v, alpha, beta_logits, 1.0 / math.sqrt(width), chunk, out)
    return out

"""Kimi delta attention: the decay, the recurrence over a head's state, and the gated norm of its output.

Prefill runs the same recurrence token by token, so a prompt's cutting cannot move a bit. Threads split heads.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.lanes import lane_dot
from k3ray.kernels.simd import fma
from k3ray.kernels.threads import RowPool
from k3ray.kernels.vmath import exp64, sigmoid64

Floats = npt.NDArray[np.float32]

L2_EPS = 1e-6  # inside the root of the q and k normalisation, as in the official code


@kernel(
    types.void(
        readable(types.float32, 2),
        readable(types.float32, 1),
        readable(types.float32, 1),
        types.float64,
        writable(types.float32, 2),
    ),
)
def _decay(z: Floats, dt_bias: Floats, a_log: Floats, lower_bound: float, out: Floats) -> None:
    """out = f32(exp(lower_bound * sigmoid(exp(a_log[h]) * (z + dt_bias)))), each step rounded in double."""
    heads = a_log.shape[0]
    width = z.shape[1] // heads
    for h in range(heads):
        rate = exp64(np.float64(a_log[h]))
        for t in range(z.shape[0]):
            for c in range(h * width, (h + 1) * width):
                gate = lower_bound * sigmoid64(rate * (np.float64(z[t, c]) + np.float64(dt_bias[c])))
                out[t, c] = np.float32(exp64(gate))


def decay(z: Floats, dt_bias: Floats, a_log: Floats, lower_bound: float) -> Floats:
    """The per-channel decay alpha = exp(g) of the state (MODEL "KDA layer").

    z (tokens, H*d) f32, dt_bias (H*d,) f32, a_log (H,) f32: one entry a head, without the padding of the checkpoint
    -> alpha (tokens, H*d) f32 in [exp(lower_bound), 1]; both ends are reached by saturation. ValueError when the
    shapes do not fit.
    """
    if a_log.ndim != 1 or z.shape[1:] != dt_bias.shape or not len(a_log) or len(dt_bias) % len(a_log):
        raise ValueError(f"decay: z {z.shape}, dt_bias {dt_bias.shape} and a_log {a_log.shape} do not fit")
    out = np.empty(z.shape, np.float32)
    _decay(z, dt_bias, a_log, lower_bound, out)
    return out


@kernel(
    types.void(
        writable(types.float32, 3),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        readable(types.float32, 2),
        types.float64,
        writable(types.float32, 2),
        types.int64,
        types.int64,
    ),
)
def _recurrence(
    state: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    alpha: Floats,
    beta_logits: Floats,
    q_scale: float,
    out: Floats,
    low: int,
    high: int,
) -> None:
    """Per head and position, sums over i ascending from 0.0, each j by itself, all in double:

    k^ = k * (1 / sqrt(lane_dot(k, k) + L2_EPS)); q^ = (q * (1 / sqrt(lane_dot(q, q) + L2_EPS))) * q_scale;
    s = S[i,j] * alpha[i] (exact); u[j] = fma(s, k^[i], u[j]); w[j] = sigmoid(beta_logit) * (v[j] - u[j]);
    S[i,j] = f32(fma(k^[i], w[j], s)); o[j] = fma(S[i,j], q^[i], o[j]); out[j] = f32(o[j]).
    """
    width = state.shape[2]
    write, read = np.empty(width), np.empty(width)
    for h in range(low, high):
        matrix, first = state[h], h * width
        for t in range(v.shape[0]):
            query, key = q[t, first : first + width], k[t, first : first + width]
            q_inverse = 1.0 / np.sqrt(lane_dot(query, query) + L2_EPS)
            k_inverse = 1.0 / np.sqrt(lane_dot(key, key) + L2_EPS)
            beta = sigmoid64(np.float64(beta_logits[t, h]))
            for j in range(width):
                write[j] = 0.0
                read[j] = 0.0
            for i in range(width):
                row, fade, k_unit = matrix[i], np.float64(alpha[t, first + i]), np.float64(key[i]) * k_inverse
                for j in range(width):
                    write[j] = fma(np.float64(row[j]) * fade, k_unit, write[j])
            for j in range(width):
                write[j] = beta * (np.float64(v[t, first + j]) - write[j])
            for i in range(width):
                row, fade, k_unit = matrix[i], np.float64(alpha[t, first + i]), np.float64(key[i]) * k_inverse
                q_unit = (np.float64(query[i]) * q_inverse) * q_scale
                for j in range(width):
                    updated = np.float32(fma(k_unit, write[j], np.float64(row[j]) * fade))
                    row[j] = updated
                    read[j] = fma(np.float64(updated), q_unit, read[j])
            for j in range(width):
                out[t, first + j] = np.float32(read[j])


def recurrence(
    state: Floats, q: Floats, k: Floats, v: Floats, alpha: Floats, beta_logits: Floats, pool: RowPool
) -> Floats:
    """Carry the state over consecutive positions of one sequence: decay, read, write, output (MODEL "KDA layer").

    state (H, d, d) f32 IN/OUT as [head, i over k, j over v], zero at a sequence's start; q, k, v (tokens, H*d) f32
    after convolution and SiLU, before the L2 norm v / sqrt(sum(v^2) + 1e-6), which happens here, as does q's d^-1/2;
    alpha (tokens, H*d) f32 of `decay`; beta_logits (tokens, H) f32 -> o (tokens, H*d) f32, which reads the state
    already updated. ValueError when the shapes do not fit.
    """
    out = np.empty(output_shape(state, q, k, v, alpha, beta_logits), np.float32)
    heads, width, _ = state.shape
    pool.run(_recurrence, heads, state, q, k, v, alpha, beta_logits, 1.0 / math.sqrt(width), out)
    return out


def output_shape(state: Floats, q: Floats, k: Floats, v: Floats, alpha: Floats, beta_logits: Floats) -> tuple[int, int]:
    """(tokens, H*d) of what `recurrence` gives for these; ValueError when they do not fit together."""
    heads, width, columns = state.shape
    shape = (v.shape[0], heads * width)
    fits = columns == width and beta_logits.shape == (shape[0], heads)
    if not (fits and q.shape == shape and k.shape == shape and v.shape == shape and alpha.shape == shape):
        raise ValueError(
            f"KDA: state {state.shape}, q {q.shape}, k {k.shape}, v {v.shape}, alpha {alpha.shape} "
            f"and beta {beta_logits.shape} do not fit"
        )
    return shape


@kernel(
    types.void(
        readable(types.float32, 2),
        readable(types.float32, 1),
        readable(types.float32, 2),
        types.float64,
        writable(types.float32, 2),
    ),
)
def _gated_norm(o: Floats, weight: Floats, gate: Floats, eps: float, out: Floats) -> None:
    """out = f32(((o * inverse) * weight) * sigmoid(gate)), inverse = 1 / sqrt(lane_dot(o_h, o_h) / d + eps) a head."""
    width = weight.shape[0]
    for t in range(o.shape[0]):
        for start in range(0, o.shape[1], width):
            row = o[t, start : start + width]
            inverse = 1.0 / np.sqrt(lane_dot(row, row) / width + eps)
            for i in range(width):
                normed = (np.float64(row[i]) * inverse) * np.float64(weight[i])
                out[t, start + i] = np.float32(normed * sigmoid64(np.float64(gate[t, start + i])))


def gated_norm(o: Floats, weight: Floats, gate: Floats, eps: float) -> Floats:
    """RMSNorm of each head's output by itself, then the gate: norm first (MODEL "KDA layer").

    o (tokens, H*d) f32, weight (d,) f32, gate (tokens, H*d) f32 logits -> (tokens, H*d) f32. ValueError when the
    shapes do not fit.
    """
    if o.shape != gate.shape or weight.ndim != 1 or not len(weight) or o.shape[1] % len(weight):
        raise ValueError(f"gated_norm: o {o.shape}, weight {weight.shape} and gate {gate.shape} do not fit")
    out = np.empty(o.shape, np.float32)
    _gated_norm(o, weight, gate, eps, out)
    return out

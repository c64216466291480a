"""Twin of Kimi delta attention: decay, recurrence and gated norm."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.lanes import lane_dot
from k3ray.kernels.reference.vmath import as_f32, exp64, fma, sigmoid64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

L2_EPS = 1e-6


def decay(z: Floats, dt_bias: Floats, a_log: Floats, lower_bound: float) -> Floats:
    """The twin of `k3ray.kernels.kda.decay`."""
    rate = np.repeat(exp64(a_log), z.shape[1] // len(a_log))
    gate = lower_bound * sigmoid64(rate * (z.astype(np.float64) + dt_bias.astype(np.float64)))
    return as_f32(exp64(gate))


def _normalised(x: Floats, scale: float) -> Doubles:
    """(..., d): each row times 1 / sqrt(sum of squares + L2_EPS), then times scale."""
    inverse = 1.0 / np.sqrt(lane_dot(x, x) + L2_EPS)
    return np.asarray((x.astype(np.float64) * inverse[..., None]) * scale)


def step(state: Floats, query: Doubles, key: Doubles, value: Doubles, fade: Doubles, beta: Doubles) -> Floats:
    """One position of all heads: state (H, d, d) f32 updated in place, beta (H,), the others (H, d) -> o (H, d) f32.

    query and key as they enter the products: the caller has normalised and scaled them.
    """
    faded = state.astype(np.float64) * fade[:, :, None]
    read = np.zeros(value.shape)
    for i in range(value.shape[1]):
        read = fma(faded[:, i], key[:, i, None], read)
    write = beta[:, None] * (value - read)
    state[:] = as_f32(fma(key[:, :, None], write[:, None, :], faded))
    output = np.zeros(value.shape)
    for i in range(value.shape[1]):
        output = fma(state[:, i], query[:, i, None], output)
    return as_f32(output)


def recurrence(state: Floats, q: Floats, k: Floats, v: Floats, alpha: Floats, beta_logits: Floats) -> Floats:
    """The twin of `k3ray.kernels.kda.recurrence`; all heads at once, `state` is updated in place."""
    heads, width, _ = state.shape
    by_head = (len(v), heads, width)
    query = _normalised(q.reshape(by_head), 1.0 / math.sqrt(width))
    key = _normalised(k.reshape(by_head), 1.0)
    value, fade = v.reshape(by_head).astype(np.float64), alpha.reshape(by_head).astype(np.float64)
    beta = sigmoid64(beta_logits)
    out = np.empty(by_head, np.float32)
    for t in range(len(v)):
        out[t] = step(state, query[t], key[t], value[t], fade[t], beta[t])
    return out.reshape(v.shape)


def gated_norm(o: Floats, weight: Floats, gate: Floats, eps: float) -> Floats:
    """The twin of `k3ray.kernels.kda.gated_norm`."""
    rows = o.reshape(len(o), o.shape[1] // len(weight), len(weight))
    inverse = 1.0 / np.sqrt(lane_dot(rows, rows) / len(weight) + eps)
    normed = (rows.astype(np.float64) * inverse[..., None]) * weight.astype(np.float64)
    return as_f32(normed.reshape(o.shape) * sigmoid64(gate))

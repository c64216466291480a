"""Twin of multi-head latent attention on the cached latents, one token and one head at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.lanes import lane_dot
from k3ray.kernels.reference.vmath import as_f32, fma, sigmoid64, softmax64

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]


def _attend_one(query: Floats, keys: Floats, values: Floats, history: Floats, nope: int) -> Floats:
    """One token, one head: query (nope+rope,), keys (nope, latent), values (v, latent), history (positions, C)."""
    latent = keys.shape[1]
    total = np.zeros(latent)
    for i in range(nope):
        total = total + query[i].astype(np.float64) * keys[i].astype(np.float64)
    folded = np.concatenate([as_f32(total), query[nope:]]).astype(np.float64)
    scores = np.zeros(len(history))
    for c in range(history.shape[1]):
        scores = scores + folded[c] * history[:, c].astype(np.float64)
    weights = softmax64(scores * (1.0 / math.sqrt(len(query))))
    mixed = np.zeros(latent)
    for s in range(len(history)):
        mixed = fma(weights[s], history[s, :latent], mixed)
    return as_f32(lane_dot(values, np.broadcast_to(as_f32(mixed), values.shape)))


def attend(
    q: Floats,
    cache: Floats,
    first_position: int,
    kv_b: Halves | Floats,
    num_heads: int,
    nope: int,
    rope: int,
    value_dim: int,
) -> Floats:
    """The twin of `k3ray.kernels.mla.attend`."""
    wide: Floats = (
        kv_b.view(np.float32) if kv_b.dtype == np.float32 else (kv_b.astype(np.uint32) << 16).view(np.float32)
    )
    by_head = wide.reshape(num_heads, nope + value_dim, cache.shape[1] - rope)
    queries = q.reshape(len(q), num_heads, nope + rope)
    out = np.empty((len(q), num_heads, value_dim), np.float32)
    for t in range(len(q)):
        history = cache[: first_position + t + 1]
        for h in range(num_heads):
            out[t, h] = _attend_one(queries[t, h], by_head[h, :nope], by_head[h, nope:], history, nope)
    return out.reshape(len(q), -1)


def sigmoid_gate(o: Floats, gate: Floats) -> Floats:
    """The twin of `k3ray.kernels.mla.sigmoid_gate`."""
    return as_f32(o.astype(np.float64) * sigmoid64(gate))

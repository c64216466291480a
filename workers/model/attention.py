"""The two kinds of attention over a batch: projections for all tokens at once, history a sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3ray.kernels import convolution, kda, mla
from k3ray.kernels.norm import rmsnorm
from k3ray.kernels.threads import RowPool
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.state import KdaState, MlaState
from k3ray.workers.model.weights import KdaWeights, MlaWeights

Float32Array = npt.NDArray[np.float32]


def kda_attention(
    config: ModelConfig,
    weights: KdaWeights,
    x: Float32Array,
    sequences: Sequence[tuple[KdaState, slice]],
    pool: RowPool,
) -> Float32Array:
    """Return (tokens, hidden) f32 for x (tokens, hidden), and move each sequence's state over its rows of x."""
    q, k, v = weights.q.apply(x), weights.k.apply(x), weights.v.apply(x)
    z = weights.f_b.apply(weights.f_a.apply(x))
    alpha = kda.decay(z, weights.dt_bias, weights.a_log, config.gate_lower_bound)
    beta_logits = weights.beta.apply(x)
    o = np.empty_like(v)
    for state, rows in sequences:
        o[rows] = kda.recurrence(
            state.matrices,
            convolution.short_convolution(q[rows], weights.conv_q, state.tail_q),
            convolution.short_convolution(k[rows], weights.conv_k, state.tail_k),
            convolution.short_convolution(v[rows], weights.conv_v, state.tail_v),
            alpha[rows],
            beta_logits[rows],
            pool,
        )
    y = kda.gated_norm(o, weights.out_norm, weights.gate.apply(x), config.rms_norm_eps)
    return weights.out.apply(y)


def mla_attention(
    config: ModelConfig,
    weights: MlaWeights,
    x: Float32Array,
    sequences: Sequence[tuple[MlaState, int, slice]],
    pool: RowPool,
) -> Float32Array:
    """Return (tokens, hidden) f32 for x (tokens, hidden); each sequence's rows are written at its position first."""
    latent_eps = config.latent_norm_eps
    q = weights.q_b.apply(rmsnorm(weights.q_a.apply(x), weights.q_a_norm, latent_eps))
    compressed = weights.kv_a.apply(x)
    latent_width = config.kv_lora_rank
    latent = rmsnorm(np.ascontiguousarray(compressed[:, :latent_width]), weights.kv_a_norm, latent_eps)
    o = np.empty((len(x), config.num_attention_heads * config.v_head_dim), np.float32)
    kv_b = weights.kv_b.array()
    for state, position, rows in sequences:
        written = slice(position, position + rows.stop - rows.start)
        state.cache[written, :latent_width] = latent[rows]
        state.cache[written, latent_width:] = compressed[rows, latent_width:]
        o[rows] = mla.attend(
            q[rows],
            state.cache,
            position,
            kv_b,
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            pool,
        )
    return weights.out.apply(mla.sigmoid_gate(o, weights.gate.apply(x)))

"""Both kinds of attention against MODEL.md's formulas in float64, over a batch of sequences and several steps.

The formulas here run a whole sequence anew from its first token and keep nothing; the code keeps states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.threads import RowPool
from k3ray.workers.model.attention import kda_attention, mla_attention
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.matrices import ResidentMatrix
from k3ray.workers.model.state import KdaState, MlaState, new_sequence
from k3ray.workers.model.weights import KdaWeights, MlaWeights

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

HIDDEN = 19
POOL = RowPool(1)
STEPS = ((5, 2), (1, 4), (3, 1))  # tokens of the two sequences, step by step
LENGTHS = tuple(sum(counts) for counts in zip(*STEPS, strict=True))


@pytest.fixture(scope="module")
def config(k3b_dir: Path) -> ModelConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "kda_num_heads": 3,
        "kda_head_dim": 6,
        "conv_kernel_size": 4,
        "q_lora_rank": 11,
    }
    sizes |= {"num_attention_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    return replace(read_config(k3b_dir), **sizes | {"v_head_dim": 5})


def normal(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return (generator.standard_normal(shape) * scale).astype(np.float32)


def matrix(generator: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> ResidentMatrix:
    return ResidentMatrix(normal(generator, rows, columns, scale=scale / np.sqrt(columns)), POOL)


def sigmoid(x: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(-x)))


def rms(x: Doubles, weight: Floats, eps: float) -> Doubles:
    return np.asarray(weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def in_steps(apply: Callable[[Floats, list[slice], list[int]], Floats], inputs: Sequence[Floats]) -> list[Floats]:
    """Each sequence's outputs; `apply` gets a step's batch, the rows of each sequence in it, and their positions."""
    done = [0] * len(inputs)
    found: list[list[Floats]] = [[] for _ in inputs]
    for counts in STEPS:
        parts = [x[at : at + count] for x, at, count in zip(inputs, done, counts, strict=True)]
        ends = np.cumsum(counts).tolist()
        rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        out = apply(np.concatenate(parts), rows, list(done))
        for sequence, part in enumerate(rows):
            found[sequence].append(out[part])
        done = [at + count for at, count in zip(done, counts, strict=True)]
    return [np.concatenate(parts) for parts in found]


# --- KDA -----------------------------------------------------------------------------------------------------------


def kda_weights(config: ModelConfig, generator: np.random.Generator) -> KdaWeights:
    heads, d, width = config.kda_num_heads, config.kda_head_dim, config.kda_width
    q, k, v = (matrix(generator, width, HIDDEN, 3) for _ in "qkv")
    conv_q, conv_k, conv_v = (normal(generator, width, config.conv_kernel_size) for _ in "qkv")
    return KdaWeights(
        q=q,
        k=k,
        v=v,
        conv_q=conv_q,
        conv_k=conv_k,
        conv_v=conv_v,
        f_a=matrix(generator, d, HIDDEN),
        f_b=matrix(generator, width, d, 4),
        a_log=normal(generator, heads),
        dt_bias=normal(generator, width),
        beta=matrix(generator, heads, HIDDEN, 2),
        gate=matrix(generator, width, HIDDEN, 2),
        out_norm=normal(generator, d),
        out=matrix(generator, HIDDEN, width),
    )


def convolved(projection: ResidentMatrix, taps: Floats, x: Doubles) -> Doubles:
    """SiLU of the causal convolution: the last tap meets the current token, before the first token all is zero."""
    values = x @ projection.weight.T.astype(np.float64)
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, len(taps))), values])
    sums = np.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(values))])
    return np.asarray(sums * sigmoid(sums))


def kda_formula(config: ModelConfig, weights: KdaWeights, x: Doubles) -> Doubles:
    heads, d = config.kda_num_heads, config.kda_head_dim
    q = convolved(weights.q, weights.conv_q, x).reshape(-1, heads, d)
    k = convolved(weights.k, weights.conv_k, x).reshape(-1, heads, d)
    v = convolved(weights.v, weights.conv_v, x).reshape(-1, heads, d)
    z = ((x @ weights.f_a.weight.T) @ weights.f_b.weight.T + weights.dt_bias).reshape(-1, heads, d)
    g = config.gate_lower_bound * sigmoid(np.exp(weights.a_log.astype(np.float64))[:, None] * z)
    beta = sigmoid(x @ weights.beta.weight.T)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(d)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    state, o = np.zeros((heads, d, d)), np.empty_like(v)
    for t in range(len(x)):
        for h in range(heads):
            state[h] *= np.exp(g[t, h])[:, None]
            state[h] += np.outer(k[t, h], beta[t, h] * (v[t, h] - state[h].T @ k[t, h]))
            o[t, h] = state[h].T @ q[t, h]
    y = rms(o, weights.out_norm, config.rms_norm_eps).reshape(len(x), -1) * sigmoid(x @ weights.gate.weight.T)
    return np.asarray(y @ weights.out.weight.T)


def test_kda_is_the_formula_over_steps_and_sequences(config: ModelConfig) -> None:
    generator = np.random.default_rng(1)
    weights = kda_weights(config, generator)
    inputs = [normal(generator, length, HIDDEN) for length in LENGTHS]
    states: list[Any] = [new_sequence(config, range(1), 1).layers[0] for _ in inputs]
    assert all(isinstance(state, KdaState) for state in states)

    def apply(x: Floats, rows: list[slice], positions: list[int]) -> Floats:
        return kda_attention(config, weights, x, list(zip(states, rows, strict=True)), POOL)

    for found, x in zip(in_steps(apply, inputs), inputs, strict=True):
        np.testing.assert_allclose(found, kda_formula(config, weights, x.astype(np.float64)), rtol=1e-4, atol=1e-5)


# --- MLA -----------------------------------------------------------------------------------------------------------


def mla_weights(config: ModelConfig, generator: np.random.Generator, latent_scale: float) -> MlaWeights:
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    per_head = config.qk_nope_head_dim + config.v_head_dim
    kv_a = normal(generator, config.kv_lora_rank + rope, HIDDEN, scale=1.5 / np.sqrt(HIDDEN))
    kv_a[: config.kv_lora_rank] *= np.float32(latent_scale)
    return MlaWeights(
        q_a=matrix(generator, config.q_lora_rank, HIDDEN, latent_scale),
        q_a_norm=normal(generator, config.q_lora_rank),
        q_b=matrix(generator, heads * (config.qk_nope_head_dim + rope), config.q_lora_rank, 2),
        kv_a=ResidentMatrix(kv_a, POOL),
        kv_a_norm=normal(generator, config.kv_lora_rank),
        kv_b=ResidentMatrix(normal(generator, heads * per_head, config.kv_lora_rank, scale=0.5), POOL),
        gate=matrix(generator, heads * config.v_head_dim, HIDDEN, 2),
        out=matrix(generator, HIDDEN, heads * config.v_head_dim),
    )


def mla_formula(config: ModelConfig, weights: MlaWeights, x: Doubles) -> Doubles:
    """The published order: keys and values expanded from the latents; no rotation; both latent norms with 1e-6."""
    heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    qa = rms(x @ weights.q_a.weight.T, weights.q_a_norm, 1e-6)
    q = (qa @ weights.q_b.weight.T).reshape(len(x), heads, -1)
    c = x @ weights.kv_a.weight.T
    kv = (rms(c[:, :latent], weights.kv_a_norm, 1e-6) @ weights.kv_b.array().T).reshape(len(x), heads, -1)
    shared = np.broadcast_to(c[:, None, latent:], (len(x), heads, config.qk_rope_head_dim))
    keys, values = np.concatenate([kv[..., :nope], shared], axis=2), kv[..., nope:]
    o = np.empty_like(values)
    for t in range(len(x)):
        for h in range(heads):
            scores = keys[: t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1])
            attended = np.exp(scores - scores.max())
            o[t, h] = attended / attended.sum() @ values[: t + 1, h]
    return np.asarray((o.reshape(len(x), -1) * sigmoid(x @ weights.gate.weight.T)) @ weights.out.weight.T)


@pytest.mark.parametrize("latent_scale", [1.0, 1e-3])  # latents around 1e-3 show which eps their norms have
def test_mla_is_the_formula_over_steps_and_sequences(config: ModelConfig, latent_scale: float) -> None:
    generator = np.random.default_rng(2)
    weights = mla_weights(config, generator, latent_scale)
    inputs = [normal(generator, length, HIDDEN) for length in LENGTHS]
    states: list[Any] = [new_sequence(config, range(3, 4), length).layers[3] for length in LENGTHS]
    assert all(isinstance(state, MlaState) for state in states)

    def apply(x: Floats, rows: list[slice], positions: list[int]) -> Floats:
        return mla_attention(config, weights, x, list(zip(states, positions, rows, strict=True)), POOL)

    for found, x in zip(in_steps(apply, inputs), inputs, strict=True):
        np.testing.assert_allclose(found, mla_formula(config, weights, x.astype(np.float64)), rtol=1e-4, atol=1e-5)

"""Which experts a token goes to, with what weights, and the sum of what they answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from k3ray.kernels.compile import kernel, readable, writable
from k3ray.kernels.simd import fma
from k3ray.kernels.vmath import sigmoid64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class NonFiniteScore(ValueError):
    """A router logit or a selection bias is NaN or infinite."""

    def __init__(self, token: int, expert: int) -> None:
        super().__init__(f"the router's score of expert {expert} for token {token} of the batch is not finite")
        self.token = token
        self.expert = expert


@kernel(
    types.int64(
        readable(types.float32, 2),
        readable(types.float32, 1),
        types.boolean,
        types.float64,
        writable(types.int32, 2),
        writable(types.float64, 2),
    ),
)
def _select(
    logits: Floats, bias: Floats, renormalise: bool, scale: float, ids: npt.NDArray[np.int32], weights: Doubles
) -> int:
    """s = sigmoid(logit); the k largest s + bias, descending, ties to the lower index; all in double.

    weight_r = (s / (sum + 1e-20)) * scale, sum over the ranks in order from 0.0, when renormalise and k > 1;
    else s * scale. Returns -1, or token * experts + expert of the first score that is not finite.
    """
    tokens, experts = logits.shape
    k = ids.shape[1]
    scores, best = np.empty(experts), np.empty(k)
    for t in range(tokens):
        for e in range(experts):
            scores[e] = sigmoid64(np.float64(logits[t, e]))
        for e in range(experts):
            selection = scores[e] + np.float64(bias[e])
            if not (np.isfinite(selection) and np.isfinite(logits[t, e])):
                return int(t * experts + e)
            filled = min(e, k)
            if filled == k and not selection > best[k - 1]:
                continue
            rank = min(filled, k - 1)
            while rank > 0 and selection > best[rank - 1]:
                best[rank], ids[t, rank] = best[rank - 1], ids[t, rank - 1]
                rank -= 1
            best[rank], ids[t, rank] = selection, e
        total = 0.0
        for rank in range(k):
            total += scores[ids[t, rank]]
        divisor = total + 1e-20 if renormalise and k > 1 else 1.0
        for rank in range(k):
            weights[t, rank] = (scores[ids[t, rank]] / divisor) * scale
    return -1


def select(
    logits: Floats, bias: Floats, k: int, renormalise: bool, scale: float
) -> tuple[npt.NDArray[np.int32], Doubles]:
    """The k experts of each token and their mixing weights, which do not see the bias (MODEL "MoE layer").

    logits (tokens, E) f32, bias (E,) f32, 1 <= k <= E -> ids (tokens, k) int32 in descending selection score, ties
    to the lower index; weights (tokens, k) f64. NonFiniteScore for a NaN or infinite logit or bias.
    """
    tokens, experts = logits.shape
    if bias.shape != (experts,) or not 1 <= k <= experts:
        raise ValueError(f"select: logits {logits.shape}, bias {bias.shape} and k = {k} do not fit")
    ids, weights = np.empty((tokens, k), np.int32), np.empty((tokens, k), np.float64)
    bad = _select(logits, bias, renormalise, scale, ids, weights)
    if bad >= 0:
        raise NonFiniteScore(*divmod(bad, experts))
    return ids, weights


@kernel(types.void(readable(types.float32, 3), readable(types.float64, 2), writable(types.float32, 2)))
def _combine(outputs: Floats, weights: Doubles, out: Floats) -> None:
    """out[t,j] = f32(sum_r weights[t,r] * outputs[t,r,j]), r ascending with fma from 0.0 in double."""
    tokens, k, width = outputs.shape
    total = np.empty(width)
    for t in range(tokens):
        for j in range(width):
            total[j] = 0.0
        for rank in range(k):
            weight, row = weights[t, rank], outputs[t, rank]
            for j in range(width):
                total[j] = fma(weight, np.float64(row[j]), total[j])
        for j in range(width):
            out[t, j] = np.float32(total[j])


def combine(outputs: Floats, weights: Doubles) -> Floats:
    """The weighted sum of the experts' outputs in the order `select` gave, whoever computed them and when.

    outputs (tokens, k, n) f32, weights (tokens, k) f64 -> (tokens, n) f32, rounded once. ValueError when the shapes
    do not fit.
    """
    if outputs.shape[:2] != weights.shape:
        raise ValueError(f"combine: outputs {outputs.shape} and weights {weights.shape} do not fit")
    out = np.empty((outputs.shape[0], outputs.shape[2]), np.float32)
    _combine(outputs, weights, out)
    return out

"""Twin of Kimi delta attention's chunked form."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from k3ray.kernels.reference.kda import _normalised
from k3ray.kernels.reference.vmath import as_f32, exp64, fma, log64, sigmoid64

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def _dots(rows: Doubles, faded: Doubles) -> Doubles:
    """Sum over i ascending with fma: rows (d,), faded (n, d) -> (n,)."""
    total = np.zeros(len(faded))
    for i in range(len(rows)):
        total = fma(rows[i], faded[:, i], total)
    return total


def _add_rows(total: Doubles, factors: Doubles, rows: Doubles) -> Doubles:
    """total (d,) + factors (n,) times rows (n, d), row by row with fma."""
    for factor, row in zip(factors, rows, strict=True):
        total = fma(factor, row, total)
    return total


def _chunk(state: Doubles, query: Doubles, key: Doubles, value: Doubles, alpha: Floats, beta: Doubles) -> Doubles:
    """One head's chunk: state (d, d) f64 updated in place, the others (t, d), beta (t,) -> o (t, d) f64."""
    size, gate = len(value), log64(alpha)
    for t in range(1, size):
        gate[t] = gate[t - 1] + gate[t]
    start, write, out = exp64(gate), value.copy(), np.empty(value.shape)
    a_qk = []
    for t in range(size):
        faded = exp64(gate[t] - gate[: t + 1]) * key[: t + 1]
        a_qk.append(_dots(query[t], faded))
        a_kk = beta[t] * _dots(key[t], faded[:t])
        write[t] = _add_rows(write[t], -(start[t] * key[t]), state) * beta[t]
        write[t] = _add_rows(write[t], -a_kk, write[:t])
    for t in range(size):
        out[t] = _add_rows(np.zeros(len(state)), start[t] * query[t], state)
        out[t] = _add_rows(out[t], a_qk[t], write[: t + 1])
    faded = exp64(gate[-1] - gate) * key
    state *= start[-1][:, None]
    for s in range(size):
        state[:] = fma(faded[s][:, None], write[s][None], state)
    return out


def chunked(
    state: Floats, q: Floats, k: Floats, v: Floats, alpha: Floats, beta_logits: Floats, chunk: int = 16
) -> Floats:
    """The twin of `k3ray.kernels.kda_chunk.chunked`; `state` is updated in place."""
    heads, width, _ = state.shape
    by_head = (len(v), heads, width)
    query = _normalised(q.reshape(by_head), 1.0 / math.sqrt(width))
    key = _normalised(k.reshape(by_head), 1.0)
    value, fade, beta = v.reshape(by_head).astype(np.float64), alpha.reshape(by_head), sigmoid64(beta_logits)
    out = np.empty(by_head, np.float32)
    for head in range(heads):
        carried = state[head].astype(np.float64)
        for first in range(0, len(v), chunk):
            part = slice(first, first + chunk)
            out[part, head] = as_f32(
                _chunk(carried, *(a[part, head] for a in (query, key, value, fade, beta)))  # type: ignore[arg-type]
            )
        state[head] = as_f32(carried)
    return out.reshape(v.shape)

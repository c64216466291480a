"""The primitives: norm, SiTU, SiLU, the residual mix, MXFP4 by table. Formulas: docs/model.md, "Primitives"."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (*(2.0 ** (byte - 127) for byte in range(255)), 0.0)  # byte 255 is NaN: its group contributes nothing
GROUP = 32  # columns that share a scale
PART = 1 << 20  # elements of a matrix that are widened at a time: 8 MB of float64, memory that is used again


def matmul(weight: Tensor, x: Tensor) -> Tensor:
    """(tokens, rows) = x (tokens, columns) times weight (rows, columns) transposed, widened to x's dtype in parts."""
    step = max(1, PART // weight.shape[1])
    parts = [x @ weight[low : low + step].to(x.dtype).T for low in range(0, len(weight), step)]
    return torch.cat(parts, dim=-1)


def matmul_mxfp4(packed: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    """(tokens, rows) = x (tokens, columns) times the decoded matrix transposed; see decode_mxfp4."""
    step = max(1, PART // x.shape[1])
    ranges = [slice(low, low + step) for low in range(0, len(packed), step)]
    return torch.cat([x @ decode_mxfp4(packed[rows], scales[rows], x.dtype).T for rows in ranges], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last axis."""
    return weight.to(x.dtype) * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """b1*tanh(g/b1)*sigmoid(g) * b2*tanh(u/b2)."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def mix(blocks: Tensor, prefix: Tensor, norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """The softmax-weighted sum of raw rows: blocks (tokens, n, hidden), then prefix (tokens, hidden)."""
    rows = torch.cat([blocks, prefix[:, None]], dim=1)
    scores = rms_norm(rows, norm, eps) @ projection.reshape(-1).to(rows.dtype)
    return torch.einsum("tn,tnd->td", torch.softmax(scores, dim=1), rows)


def decode_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, columns) of E2M1[nibble] * 2^(scale-127): packed (rows, columns/2) u8, scales (rows, columns/32) u8."""
    pairs, powers = _tables(dtype)
    factors = powers.index_select(0, scales.reshape(-1).int())
    values = pairs.index_select(0, packed.reshape(-1).int())
    return (values.reshape(len(factors), GROUP) * factors[:, None]).reshape(len(packed), -1)


@cache
def _tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two values of every byte, columns 2j (low nibble) and 2j + 1 (high nibble), and every scale byte's factor."""
    pairs = [(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=dtype), torch.tensor(E8M0, dtype=dtype)

"""The primitives: norm, SiTU, SiLU, the residual mix, MXFP4 by table. Formulas: docs/model.md, "Primitives"."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (*(2.0 ** (byte - 127) for byte in range(255)), 0.0)  # byte 255 is NaN: its group contributes nothing
GROUP = 32  # columns that share a scale


def matmul(weight: Tensor, x: Tensor) -> Tensor:
    """(tokens, rows) = x (tokens, columns) times weight (rows, columns) transposed, widened to x's dtype in parts."""
    step = max(1, (1 << 26) // weight.shape[1])  # at most 512 MB of float64 at a time
    parts = [x @ weight[low : low + step].to(x.dtype).T for low in range(0, weight.shape[0], step)]
    return torch.cat(parts, dim=-1)


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
    low, high = packed & 15, packed >> 4
    nibbles = torch.stack([low, high], dim=-1).reshape(len(packed), -1)  # byte j: columns 2j, then 2j+1
    values = torch.tensor(E2M1, dtype=torch.float64)[nibbles.long()]
    factors = torch.tensor(E8M0, dtype=torch.float64)[scales.long()].repeat_interleave(GROUP, dim=1)
    return (values * factors).to(dtype)

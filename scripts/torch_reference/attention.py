"""KDA and MLA over one whole sequence that begins at position 0. Formulas: docs/model.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_reference.arithmetic import matmul, rms_norm, silu
from torch_reference.settings import MLA_LATENT_EPS, Settings

L2_EPS = 1e-6
Read = Callable[[str], Tensor]  # a tensor of the layer, as stored, by its name below self_attn.


@dataclass(frozen=True, slots=True)
class Attended:
    """out: (tokens, hidden). state: what the sequence leaves behind, by name."""

    out: Tensor
    state: dict[str, Tensor]


def kda(settings: Settings, read: Read, x: Tensor) -> Attended:
    """Kimi delta attention of x (tokens, hidden).

    state: matrices (heads, key channel, value channel); tail_q, tail_k, tail_v (kernel - 1, heads * d), oldest first.
    """
    heads, width = int(settings.linear["num_heads"]), int(settings.linear["head_dim"])
    kernel = int(settings.linear["short_conv_kernel_size"])
    state: dict[str, Tensor] = {}
    taken = {}
    for part in ("q", "k", "v"):
        projected = matmul(read(f"{part}_proj.weight"), x)
        before = torch.zeros(kernel - 1, heads * width, dtype=x.dtype)
        padded = torch.cat([before, projected])
        state[f"tail_{part}"] = padded[len(padded) - (kernel - 1) :]
        convolved = short_convolution(padded, read(f"{part}_conv1d.weight").to(x.dtype).reshape(-1, kernel))
        taken[part] = silu(convolved).reshape(-1, heads, width)
    z = matmul(read("f_b_proj.weight"), matmul(read("f_a_proj.weight"), x)) + read("dt_bias").to(x.dtype).reshape(-1)
    a = head_decays(read("A_log"), heads).to(x.dtype)
    log_decay = float(settings.linear["gate_lower_bound"]) * torch.sigmoid(
        torch.exp(a)[:, None] * z.reshape(-1, heads, width)
    )
    beta = torch.sigmoid(matmul(read("b_proj.weight"), x))
    matrices = torch.zeros(heads, width, width, dtype=x.dtype)
    q, k = l2_normalised(taken["q"]) * width**-0.5, l2_normalised(taken["k"])
    o, state["matrices"] = recurrence(matrices, q, k, taken["v"], log_decay, beta)
    gate = torch.sigmoid(matmul(read("g_proj.weight"), x)).reshape(o.shape)
    y = rms_norm(o, read("o_norm.weight"), settings.eps) * gate
    return Attended(matmul(read("o_proj.weight"), y.reshape(len(x), -1)), state)


def head_decays(stored: Tensor, heads: int) -> Tensor:
    """Return A_log, one entry a head: of the stored vector the first entries, the rest being padding."""
    flat = stored.reshape(-1)
    if len(flat) < heads or flat[heads:].any():
        raise ValueError(f"A_log has {len(flat)} entries for {heads} heads, or a padding that is not zero")
    return flat[:heads]


def short_convolution(padded: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution: padded (kernel - 1 + tokens, channels), taps (channels, kernel), newest last."""
    kernel = taps.shape[1]
    tokens = len(padded) - (kernel - 1)
    total = torch.zeros_like(padded[:tokens])
    for tap in range(kernel):
        total += padded[tap : tap + tokens] * taps[:, tap]
    return total


def l2_normalised(v: Tensor) -> Tensor:
    """v / sqrt(sum(v^2) + 1e-6) over the last axis: a sum, not a mean."""
    return v / torch.sqrt((v * v).sum(-1, keepdim=True) + L2_EPS)


def recurrence(
    matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule, token by token: decay, read, write, then output of the written state.

    matrices: (heads, key, value). q, k, log_decay: (tokens, heads, key), q and k normalised, q scaled. v: (tokens,
    heads, value). beta: (tokens, heads). Returns o (tokens, heads, value) and the matrices after the last token.
    """
    s = matrices
    outputs = []
    for t in range(len(q)):
        s = s * torch.exp(log_decay[t])[:, :, None]
        u = torch.einsum("hkv,hk->hv", s, k[t])
        s = s + k[t][:, :, None] * (beta[t][:, None] * (v[t] - u))[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", s, q[t]))
    return torch.stack(outputs), s


def mla(settings: Settings, read: Read, x: Tensor) -> Attended:
    """Latent attention of x (tokens, hidden) with expanded keys and values.

    state: cache (tokens, kv_lora + rope), a position's normed latent and its shared channels; keys (heads, tokens,
    nope + rope) and values (heads, tokens, v).
    """
    heads, rope = int(settings["num_attention_heads"]), int(settings["qk_rope_head_dim"])
    nope, value, rank = (int(settings[name]) for name in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    tokens = len(x)
    q_latent = rms_norm(matmul(read("q_a_proj.weight"), x), read("q_a_layernorm.weight"), MLA_LATENT_EPS)
    q = matmul(read("q_b_proj.weight"), q_latent).reshape(tokens, heads, nope + rope)
    compressed = matmul(read("kv_a_proj_with_mqa.weight"), x)
    latent = rms_norm(compressed[:, :rank], read("kv_a_layernorm.weight"), MLA_LATENT_EPS)
    shared = compressed[:, rank:]  # one for all heads; not normed and never rotated
    kv = matmul(read("kv_b_proj.weight"), latent).reshape(tokens, heads, nope + value)
    keys = torch.cat([kv[..., :nope], shared[:, None].expand(tokens, heads, rope)], dim=-1)
    values = kv[..., nope:]
    scores = torch.einsum("thd,shd->hts", q, keys) * (nope + rope) ** -0.5
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    attention = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    o = torch.einsum("hts,shv->thv", attention, values).reshape(tokens, -1)
    y = o * torch.sigmoid(matmul(read("g_proj.weight"), x))
    state = {"cache": torch.cat([latent, shared], 1), "keys": keys.transpose(0, 1), "values": values.transpose(0, 1)}
    return Attended(matmul(read("o_proj.weight"), y), state)

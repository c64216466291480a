"""Every way to be fluently wrong that the model's description names, put into our side and into the reference.

Each must fail on either side, and the same array must be named first: a mistake cannot be hidden by where it is made.
The chunked form's own three stand in tests/kernels/test_kda_chunk_formulas.py: conform never runs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.conform.comparison import compare
from k3ray.conform.inputs import random_inputs
from k3ray.conform.own_side import OwnModel
from k3ray.conform.reference import Reference
from k3ray.conform.report import log_lines
from k3ray.workers.failure import Failure
from k3ray.workers.model import config as model_config
from k3ray.workers.model.config import ModelConfig
from tests.conforming import ALL_KINDS, KDA_DENSE, KDA_MOE, LAST, MLA_MOE, failed_arrays, reports_of, torch_part

pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install 'k3ray[reference]'")


pytestmark = pytest.mark.usefixtures("bare_environment")

Patch = pytest.MonkeyPatch
HEADS, WIDTH = ALL_KINDS.kda_num_heads, ALL_KINDS.kda_head_dim
NOPE, ROPE = ALL_KINDS.qk_nope_head_dim, ALL_KINDS.qk_rope_head_dim
PIECE = 4  # of the nine tokens, ours are given this many first


def own_part(name: str) -> Any:
    """A module of the product, to put mistakes into."""
    return importlib.import_module(f"k3ray.{name}")


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


# --- A_log per channel


def own_a_log_per_channel(patch: Patch) -> None:
    def decay(z: Any, dt_bias: Any, a_log: Any, lower_bound: float) -> Any:
        rate = np.exp(np.tile(np.pad(a_log, (0, WIDTH - HEADS)), HEADS))
        return np.exp(lower_bound * sigmoid(rate * (z + dt_bias))).astype(np.float32)

    patch.setattr(own_part("kernels.kda"), "decay", decay)


def their_a_log_per_channel(patch: Patch) -> None:
    patch.setattr(torch_part("attention"), "head_decays", lambda stored, heads: stored.reshape(-1)[None, :WIDTH])


# --- MLA without the unrotated channels, with another scale, or with a rotation


def own_queries(change: Callable[[Any, int], Any]) -> Callable[[Patch], None]:
    """Queries (tokens, heads, nope + rope) as change makes them, given the position of the first."""

    def apply(patch: Patch) -> None:
        part = own_part("kernels.mla")
        attend = part.attend

        def changed(q: Any, cache: Any, position: int, *rest: Any) -> Any:
            by_head = q.reshape(len(q), -1, NOPE + ROPE).astype(np.float64)
            return attend(change(by_head, position).reshape(q.shape).astype(np.float32), cache, position, *rest)

        patch.setattr(part, "attend", changed)

    return apply


def their_queries(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Rows of q_b_proj as change makes them, (heads, nope + rope, columns)."""

    def apply(patch: Patch) -> None:
        part = torch_part("model")
        mla = part.mla

        def changed(settings: Any, read: Any, x: Any) -> Any:
            def reading(name: str) -> Any:
                weight = read(name)
                if name != "q_b_proj.weight":
                    return weight
                return change(weight.double().reshape(-1, NOPE + ROPE, weight.shape[1])).reshape(weight.shape)

            return mla(settings, reading, x)

        patch.setattr(part, "mla", changed)

    return apply


def without_rope(values: Any, *_: Any) -> Any:
    """Head width nope: neither the channels nor their share of the scale."""
    kept = values.copy() if isinstance(values, np.ndarray) else values.clone()
    if isinstance(values, np.ndarray):
        kept[..., NOPE:] = 0
    else:
        kept[:, NOPE:] = 0
    return kept * ((NOPE + ROPE) / NOPE) ** 0.5


def scaled_by_nope(values: Any, *_: Any) -> Any:
    return values * ((NOPE + ROPE) / NOPE) ** 0.5


def own_rotated(q: Any, position: int) -> Any:
    """The last channels turned by the position, as models that rotate do it; only the query, so that it shows."""
    half = ROPE // 2
    angles = (position + np.arange(len(q)))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = q[..., NOPE : NOPE + half].copy(), q[..., NOPE + half :].copy()
    q[..., NOPE : NOPE + half], q[..., NOPE + half :] = (
        a * np.cos(angles) - b * np.sin(angles),
        a * np.sin(angles) + b * np.cos(angles),
    )
    return q


def their_rotated(patch: Patch) -> None:
    import torch

    part = torch_part("attention")
    matmul = part.matmul

    def rotating(weight: Any, x: Any) -> Any:
        out = matmul(weight, x)
        if weight.shape != (ALL_KINDS.num_attention_heads * (NOPE + ROPE), ALL_KINDS.q_lora_rank):
            return out
        return torch.from_numpy(own_rotated(out.reshape(len(x), -1, NOPE + ROPE).numpy().copy(), 0)).reshape(out.shape)

    patch.setattr(part, "matmul", rotating)


# --- the router and the experts


def own_bias_in_weights(patch: Patch) -> None:
    part = own_part("kernels.router")
    select = part.select

    def biased(logits: Any, bias: Any, k: int, renormalise: bool, scale: float) -> Any:
        ids, _ = select(logits, bias, k, renormalise, scale)
        weights = np.take_along_axis(sigmoid(logits) + bias, ids, 1)
        return ids, weights / weights.sum(1, keepdims=True) * scale

    patch.setattr(part, "select", biased)


def their_bias_in_weights(patch: Patch) -> None:
    scores_of = torch_part("feed_forward").scores_of
    patch.setattr(torch_part("model"), "scores_of", lambda read, x: (scores_of(read, x)[1],) * 2)


def own_without_bias(patch: Patch) -> None:
    part = own_part("kernels.router")
    select = part.select
    patch.setattr(part, "select", lambda logits, bias, *rest: select(logits, np.zeros_like(bias), *rest))


def their_selection_without_bias(patch: Patch) -> None:
    scores_of = torch_part("feed_forward").scores_of
    patch.setattr(torch_part("model"), "scores_of", lambda read, x: (scores_of(read, x)[0],) * 2)


def own_not_renormalised(patch: Patch) -> None:
    part = own_part("kernels.router")
    select = part.select
    patch.setattr(part, "select", lambda logits, bias, k, renormalise, scale: select(logits, bias, k, False, scale))


def their_not_renormalised(patch: Patch) -> None:
    part = torch_part("settings").Settings
    patch.setattr(part, "__getitem__", lambda s, name: s.config[name] if name != "moe_renormalize" else False)


def own_nibbles(patch: Patch) -> None:
    part = own_part("kernels.mxfp4")
    matmul = part.matmul
    patch.setattr(part, "matmul", lambda packed, *rest: matmul(((packed >> 4) | (packed << 4)).astype(np.uint8), *rest))


def their_nibbles(patch: Patch) -> None:
    part = torch_part("feed_forward")
    matmul = part.matmul_mxfp4
    patch.setattr(part, "matmul_mxfp4", lambda packed, *rest: matmul((packed >> 4) | ((packed & 15) << 4), *rest))


def exchanged(part: Any, patch: Patch) -> None:
    situ = part.situ
    patch.setattr(part, "situ", lambda gate, up, *betas: situ(up, gate, *betas))


def own_gate_and_up_of_experts(patch: Patch) -> None:
    exchanged(own_part("workers.experts"), patch)


def own_gate_and_up_of_mlp(patch: Patch) -> None:
    exchanged(own_part("workers.model.feed_forward"), patch)


def their_gate_and_up(patch: Patch) -> None:
    exchanged(torch_part("feed_forward"), patch)


def own_norm_per_expert(patch: Patch) -> None:
    """Each expert's answer normed before the sum, and the sum not: the norm's weight distributes over it."""
    combine = own_part("kernels.router").combine

    def of_normed(outputs: Any, weights: Any) -> Any:
        rms = np.sqrt(np.square(outputs.astype(np.float64)).mean(2, keepdims=True) + ALL_KINDS.rms_norm_eps)
        return combine((outputs / rms).astype(np.float32), weights)

    patch.setattr(own_part("kernels.router"), "combine", of_normed)
    patch.setattr(own_part("workers.model.feed_forward"), "rmsnorm", lambda x, weight, eps: x * weight)


def their_norm_per_expert(patch: Patch) -> None:
    part, rms_norm = torch_part("feed_forward"), torch_part("arithmetic").rms_norm
    expert = part._expert

    def normed(settings: Any, read: Any, number: int, x: Any) -> Any:
        return rms_norm(expert(settings, read, number, x), read("routed_expert_norm.weight"), settings.eps)

    patch.setattr(part, "_expert", normed)
    patch.setattr(part, "rms_norm", lambda x, weight, eps: x)


def own_weighted_shared(patch: Patch) -> None:
    part = own_part("workers.model.feed_forward")
    mlp = part.mlp
    patch.setattr(part, "mlp", lambda config, weights, x: 0.5 * mlp(config, weights, x))


def their_weighted_shared(patch: Patch) -> None:
    part = torch_part("feed_forward")
    mlp = part.mlp
    patch.setattr(part, "mlp", lambda *arguments: 0.5 * mlp(*arguments))


# --- the residual's blocks, the convolutions' history


def sum_goes_on(part: Any, patch: Patch) -> None:
    """The second mix of the layer that begins the second block sees the old sum in the new one."""
    mix = part.mix
    patch.setattr(
        part, "mix", lambda blocks, p, *rest: mix(blocks, p + blocks[:, -1] if blocks.shape[1] == 2 else p, *rest)
    )


def own_sum_goes_on(patch: Patch) -> None:
    sum_goes_on(own_part("kernels.attnres"), patch)


def their_sum_goes_on(patch: Patch) -> None:
    sum_goes_on(torch_part("model"), patch)


def own_history_forgotten(patch: Patch) -> None:
    part = own_part("kernels.convolution")
    convolve = part.short_convolution
    patch.setattr(part, "short_convolution", lambda x, taps, tail: convolve(x, taps, np.zeros_like(tail)))


def their_history_forgotten(patch: Patch) -> None:
    import torch

    part = torch_part("attention")
    convolve = part.short_convolution

    def in_two(padded: Any, taps: Any) -> Any:
        before = taps.shape[1] - 1
        later = torch.cat([torch.zeros_like(padded[:before]), padded[before + PIECE :]])
        return torch.cat([convolve(padded[: before + PIECE], taps), convolve(later, taps)])

    patch.setattr(part, "short_convolution", in_two)


def other_eps(part: Any, name: str, patch: Patch) -> None:
    norm = getattr(part, name)
    patch.setattr(part, name, lambda x, weight, eps: norm(x, weight, 1e-6))


def own_eps(patch: Patch) -> None:
    other_eps(own_part("workers.model.slice"), "rmsnorm", patch)


def their_eps(patch: Patch) -> None:
    other_eps(torch_part("model"), "rms_norm", patch)


# --- KDA's output


def own_norm_over_all_heads(patch: Patch) -> None:
    part = own_part("kernels.kda")
    norm = part.gated_norm
    patch.setattr(part, "gated_norm", lambda o, weight, gate, eps: norm(o, np.tile(weight, HEADS), gate, eps))


def their_norm_over_all_heads(patch: Patch) -> None:
    part, rms_norm = torch_part("attention"), torch_part("arithmetic").rms_norm

    def over_all(x: Any, weight: Any, eps: float) -> Any:
        return rms_norm(x.reshape(len(x), -1), weight.repeat(HEADS), eps).reshape(x.shape)

    patch.setattr(part, "rms_norm", over_all)


def own_lower_bound(patch: Patch) -> None:
    part = own_part("kernels.kda")
    decay = part.decay
    patch.setattr(part, "decay", lambda z, dt_bias, a_log, bound: decay(z, dt_bias, a_log, bound + 1))


def their_lower_bound(patch: Patch) -> None:
    part = torch_part("attention")
    sigmoid = part.torch.sigmoid
    patch.setattr(part.torch, "sigmoid", lambda x: sigmoid(x) * 0.8 if x.shape[1:] == (HEADS, WIDTH) else sigmoid(x))


Seed = Callable[[Patch], None]
WAYS: list[tuple[str, Seed, Seed, int, str]] = [
    ("A_log per channel", own_a_log_per_channel, their_a_log_per_channel, KDA_DENSE, "attn_out"),
    ("rope channels dropped", own_queries(without_rope), their_queries(without_rope), MLA_MOE, "attn_out"),
    ("scale of nope alone", own_queries(scaled_by_nope), their_queries(scaled_by_nope), LAST, "attn_out"),
    ("rope channels rotated", own_queries(own_rotated), their_rotated, MLA_MOE, "attn_out"),
    ("bias in the weights", own_bias_in_weights, their_bias_in_weights, KDA_MOE, "router_weights"),
    ("not renormalised", own_not_renormalised, their_not_renormalised, LAST, "router_weights"),
    ("nibbles swapped", own_nibbles, their_nibbles, KDA_MOE, "latent_aggregate"),
    ("experts' gate and up", own_gate_and_up_of_experts, their_gate_and_up, MLA_MOE, "latent_aggregate"),
    ("the MLP's gate and up", own_gate_and_up_of_mlp, their_gate_and_up, KDA_DENSE, "mlp_out"),
    ("norm per expert", own_norm_per_expert, their_norm_per_expert, KDA_MOE, "latent_aggregate"),
    ("shared experts weighted", own_weighted_shared, their_weighted_shared, KDA_MOE, "shared_out"),
    ("block sums not reset", own_sum_goes_on, their_sum_goes_on, MLA_MOE, "mlp_in"),
    ("convolutions' history", own_history_forgotten, their_history_forgotten, KDA_DENSE, "attn_out"),
    ("another eps in the layer's norms", own_eps, their_eps, KDA_DENSE, "attn_normed"),
    ("norm over all heads", own_norm_over_all_heads, their_norm_over_all_heads, KDA_MOE, "attn_out"),
    ("another lower bound", own_lower_bound, their_lower_bound, KDA_MOE, "attn_out"),
]


@pytest.mark.parametrize("side", ["ours", "reference"])
@pytest.mark.parametrize(("seeds", "layer", "first"), [pytest.param(w[1:3], *w[3:], id=w[0]) for w in WAYS])
def test_each_way_is_seen_on_either_side(
    own: OwnModel,
    reference: Reference,
    monkeypatch: Patch,
    seeds: tuple[Seed, Seed],
    layer: int,
    first: str,
    side: str,
) -> None:
    seeds[side == "reference"](monkeypatch)
    (report,) = reports_of(own, reference, layer)
    assert not report.passed and failed_arrays(report)[0] == first, log_lines(report)
    assert report.failures[0].max_rel > 500 * report.failures[0].tolerance, "a mistake of meaning is no rounding"


def own_latent_eps(patch: Patch) -> None:
    patch.setattr(ModelConfig, "latent_norm_eps", property(lambda config: 1e-5))


def their_latent_eps(patch: Patch) -> None:
    patch.setattr(torch_part("attention"), "MLA_LATENT_EPS", 1e-5)


@pytest.mark.parametrize("seed", [own_eps, their_eps], ids=["ours", "reference"])
def test_the_eps_of_the_final_norm_is_seen_in_logits(
    own: OwnModel, reference: Reference, monkeypatch: Patch, seed: Seed
) -> None:
    """The last norm alone: no layer runs."""
    streams = random_inputs(own.config, ALL_KINDS.num_hidden_layers, 3, 0)
    sound = compare("logits", *(side.logits(streams.prefix, streams.blocks) for side in (own, reference)), 5e-4)
    seed(monkeypatch)
    other = compare("logits", *(side.logits(streams.prefix, streams.blocks) for side in (own, reference)), 5e-4)
    assert sound.max_rel < 1e-6 and not other.passed


@pytest.mark.parametrize("seed", [own_latent_eps, their_latent_eps], ids=["ours", "reference"])
def test_the_released_eps_in_the_latent_norms(
    own: OwnModel, reference: Reference, monkeypatch: Patch, seed: Seed
) -> None:
    """The smallest of all: it is what the tolerance of float64 was chosen for."""
    seed(monkeypatch)
    (report,) = reports_of(own, reference, MLA_MOE)
    assert failed_arrays(report)[0] == "attn_out" and report.failures[0].max_rel > 1.3 * report.failures[0].tolerance


@pytest.mark.parametrize("seed", [own_without_bias, their_selection_without_bias], ids=["ours", "reference"])
def test_a_selection_without_the_bias_is_other_experts(
    own: OwnModel, reference: Reference, monkeypatch: Patch, seed: Seed
) -> None:
    seed(monkeypatch)
    (report,) = reports_of(own, reference, KDA_MOE)
    assert not report.passed and report.experts is not None and report.experts.wrong


def test_zero_based_layer_lists_do_not_even_bind(model_dir: Path, monkeypatch: Patch) -> None:
    """On our side; the reference's fails on its missing tensors (test_conform.py)."""
    lists = model_config.read_layer_lists

    def zero_based(document: Any, layers: int | None) -> Any:
        found = lists(document, layers)
        return found and tuple(tuple(sorted((layer + 1) % 4 for layer in part)) for part in found)

    monkeypatch.setattr(model_config, "read_layer_lists", zero_based)
    with pytest.raises(Failure, match=r"layers\.[0-3]\.self_attn"):
        OwnModel(model_dir, None, 1)

"""The operator fixtures of another project's torch reference: every one within its manifest's tolerance.

Single operators first, then whole layers put together from the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3ray.kernels import attnres, convolution, kda, mla, norm, router, situ
from k3ray.kernels.dense import matmul
from k3ray.kernels.reference.kda import step
from k3ray.kernels.threads import RowPool
from tests.op_fixtures import Fixture, Floats

POOL = RowPool(1)


@pytest.fixture
def fixture(shared_data: Path) -> Callable[[str], Fixture]:
    return lambda name: Fixture(shared_data / "ops" / f"{name}.json")


Load = Callable[[str], Fixture]


def test_rmsnorm(fixture: Load) -> None:
    f = fixture("rmsnorm")
    f.check(norm.rmsnorm(f["in"], f["weight"], f["eps"]), "out")


def test_situ(fixture: Load) -> None:
    f = fixture("situ_glu")
    rows = np.array(f["in"])
    gate, up = (np.ascontiguousarray(half) for half in np.split(rows, 2, axis=1))
    f.check(situ.situ(gate, up, f["beta"], f["linear_beta"]), "out")


def test_short_convolution_and_the_step_after_it(fixture: Load) -> None:
    f = fixture("shortconv")
    weight, tail = (
        f["weight"].reshape(f["channels"], f["kernel"]),
        np.zeros((f["kernel"] - 1, f["channels"]), np.float32),
    )
    f.check(convolution.short_convolution(f.rows("in"), weight, tail), "out")
    np.testing.assert_array_equal(tail.T, f["state_after"][0])
    f.check(convolution.short_convolution(f.rows("in_next"), weight, tail), "out_next")


def test_kda_decay(fixture: Load) -> None:
    f = fixture("kda_decay")
    f.check(kda.decay(f.rows("z"), f["dt_bias"], f["A_log"], f["lower_bound"]), "alpha")


@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
def test_kda_recurrence(fixture: Load, name: str) -> None:
    """Its q and k are not normalised, so it is the twin's step that can take them; test_kda ties it to the kernel."""
    f = fixture(name)
    q, k, v, alpha, beta = (f[part].astype(np.float64) for part in ("q", "k", "v", "alpha", "beta"))
    state = np.zeros((f["H"], f["d_k"], f["d_v"]), np.float32)
    out = [step(state, q[t] * f["q_scale"], k[t], v[t], alpha[t], beta[t]) for t in range(f["T"])]
    f.check(np.stack(out), "out")
    f.check(state, "state_out")


def test_router(fixture: Load) -> None:
    f = fixture("router")
    ids, weights = router.select(matmul(f["gate_weight"], f["in"], POOL), f["bias"], f["top_k"], True, 1.0)
    expected_ids, expected = f["topk_idx"].astype(int), f["topk_weight"]
    for row, expected_row in zip(zip(ids, weights, strict=True), zip(expected_ids, expected, strict=True), strict=True):
        mine, theirs = (dict(zip(*(part.tolist() for part in pair), strict=True)) for pair in (row, expected_row))
        assert mine.keys() == theirs.keys()
        for expert, weight in theirs.items():
            assert abs(mine[expert] - weight) <= f.atol + f.rtol * weight


def test_attnres(fixture: Load) -> None:
    f = fixture("attnres")
    fold = f["norm_weight"] * f["proj_weight"]
    f.check(fold, "fold_hint")
    f.check(attnres.mix(f["block_residual"], f["prefix_sum"], fold, f["eps"]), "out")


def kda_attention(x: Floats, weight: Callable[[str], Floats], eps: float) -> tuple[Floats, Floats]:
    """(output, state) of a KDA layer's attention from an empty state."""
    heads, width = len(weight("A_log")), len(weight("o_norm_weight"))

    def convolved(part: str) -> Floats:
        taps = weight(f"{part}_conv1d_weight").reshape(heads * width, -1)
        tail = np.zeros((taps.shape[1] - 1, heads * width), np.float32)
        return convolution.short_convolution(matmul(weight(f"{part}_proj_weight"), x, POOL), taps, tail)

    z = matmul(weight("f_b_proj_weight"), matmul(weight("f_a_proj_weight"), x, POOL), POOL)
    alpha = kda.decay(z, weight("dt_bias"), weight("A_log"), -5.0)
    state = np.zeros((heads, width, width), np.float32)
    beta_logits = matmul(weight("b_proj_weight"), x, POOL)
    o = kda.recurrence(state, *(convolved(part) for part in "qkv"), alpha, beta_logits, POOL)
    gate = matmul(weight("g_proj_weight"), x, POOL)
    return matmul(weight("o_proj_weight"), kda.gated_norm(o, weight("o_norm_weight"), gate, eps), POOL), state


@pytest.mark.parametrize("name", ["kda_layer1", "kda_layer8"])
def test_kda_attention(fixture: Load, name: str) -> None:
    f = fixture(name)
    short = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm_weight": "o_norm", "b_proj_weight": "b_proj"}
    short |= {f"{part}_conv1d_weight": f"{part}_conv" for part in "qkv"}
    short |= {f"{part}_proj_weight": f"{part}_proj" for part in "qkvgo"}
    short |= {"f_a_proj_weight": "f_a", "f_b_proj_weight": "f_b"}
    out, state = kda_attention(f.rows("in"), lambda part: np.asarray(f[short[part]]), f["rms_eps"])
    f.check(out, "out")
    f.check(state, "state_out")


def mla_attention(
    x: Floats, weight: Callable[[str], Floats], rope: int, heads: int, eps: float
) -> tuple[Floats, Floats]:
    """(output, cache) of an MLA layer's attention; `eps` is that of the two latent norms."""
    latent = len(weight("kv_a_layernorm_weight"))
    qa = norm.rmsnorm(matmul(weight("q_a_proj_weight"), x, POOL), weight("q_a_layernorm_weight"), eps)
    q = matmul(weight("q_b_proj_weight"), qa, POOL)
    c = matmul(weight("kv_a_proj_with_mqa_weight"), x, POOL)
    normed = norm.rmsnorm(np.ascontiguousarray(c[:, :latent]), weight("kv_a_layernorm_weight"), eps)
    cache = np.concatenate([normed, c[:, latent:]], axis=1)
    nope, value = q.shape[1] // heads - rope, weight("o_proj_weight").shape[1] // heads
    o = mla.attend(q, cache, 0, weight("kv_b_proj_weight"), heads, nope, rope, value, POOL)
    gated = mla.sigmoid_gate(o, matmul(weight("g_proj_weight"), x, POOL))
    return matmul(weight("o_proj_weight"), gated, POOL), cache


def test_mla_attention(fixture: Load) -> None:
    f = fixture("mla")
    out, cache = mla_attention(f.rows("in"), f.part(""), f["qk_rope"], f["n_heads"], eps=1e-5)
    f.check(cache[:, : f["kv_lora"]], "kv_latent")
    f.check(cache[:, f["kv_lora"] :], "k_rope")
    f.check(out, "out")


def mlp(x: Floats, weight: Callable[[str], Floats], part: str) -> Floats:
    """w2 SiTU(w1 x, w3 x)."""
    gate, up = (matmul(weight(f"{part}_{name}_weight"), x, POOL) for name in ("w1", "w3"))
    return matmul(weight(f"{part}_w2_weight"), situ.situ(gate, up, 4.0, 25.0), POOL)


def moe(x: Floats, weight: Callable[[str], Floats], eps: float) -> Floats:
    """A MoE layer of top 2 with float32 experts."""
    logits = matmul(weight("gate_weight"), x, POOL)
    ids, weights = router.select(logits, weight("e_score_correction_bias"), 2, True, 1.0)
    latents = matmul(weight("down_weight"), x, POOL)
    outputs = np.stack(
        [
            np.concatenate([mlp(latents[t : t + 1], weight, f"experts_{expert}") for expert in ids[t]])
            for t in range(len(x))
        ]
    )
    normed = norm.rmsnorm(router.combine(outputs, weights), weight("norm_weight"), eps)
    return matmul(weight("up_weight"), normed, POOL) + mlp(x, weight, "shared")


def test_moe(fixture: Load) -> None:
    """Elements up to 120; the same formulas in float64 are 1.2e-5 from the fixture's float32 at an element of 0.013."""
    f = fixture("moe")
    f.check_sum(moe(f.rows("in"), f.part(""), f["rms_eps"]), "out")


@pytest.mark.parametrize("name", ["layer_kda", "layer_mla"])
def test_a_whole_layer(fixture: Load, name: str) -> None:
    f = fixture(name)
    eps, p, blocks = f["rms_eps"], f.rows("in"), f["block_residual_in"]

    def mixed(kind: str) -> Floats:
        fold = f[f"{kind}_norm_weight"] * f[f"{kind}_proj_weight"][0]
        return attnres.mix(blocks, p, fold, eps)

    x = norm.rmsnorm(mixed("self_attention_res"), f["input_layernorm_weight"], eps)
    starts_block = f["layer_idx"] % f["attn_res_block_size"] == 0
    if starts_block:
        blocks = np.concatenate([blocks, p[:, None]], axis=1)
    if f["is_mla"]:
        attention = mla_attention(x, f.part("self_attn_"), 8, 4, eps=1e-5)[0]
    else:
        attention = kda_attention(x, f.part("self_attn_"), eps)[0]
    p = attention if starts_block else p + attention
    p = p + moe(norm.rmsnorm(mixed("mlp_res"), f["post_attention_layernorm_weight"], eps), f.part("mlp_"), eps)
    f.check(p, "out")
    f.check(blocks, "block_residual_out")

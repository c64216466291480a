"""KDA's chunked form against formulas written here in plain float64, token by token and as matrices.

What is expected comes from no kernel but for the rounding of alpha to float32, which is checked by itself against z,
dt_bias and A_log; an error is measured in the row of one token and head, so that none hides behind a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.audit.kda_cases import SHAPES, WIDTH, KdaShape
from k3ray.kernels.kda import decay
from k3ray.kernels.kda_chunk import chunked
from k3ray.kernels.threads import RowPool

Doubles = npt.NDArray[np.float64]
BOUND = 1e-7  # of the row's largest element: the answers are rounded to float32 once, by 6e-8 at most
LOWER_BOUND = -5.0
SETTINGS = list(product((-3.0, 0.0, 3.0), np.log([0.01, 1.0, 16.0, 200.0]), (False, True)))
CORNERS = list(product((-3.0, 3.0), np.log([0.01, 200.0]), (False, True)))


@dataclass(frozen=True)
class Raw:
    """What a layer hands on: q, k, v, z (tokens, heads, d), beta logits (tokens, heads), state; all float32."""

    q: npt.NDArray[np.float32]
    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]
    z: npt.NDArray[np.float32]
    beta: npt.NDArray[np.float32]
    state: npt.NDArray[np.float32]
    dt_bias: npt.NDArray[np.float32]
    a_log: npt.NDArray[np.float32]


def make(tokens: int, heads: int, setting: tuple[float, float, bool], seed: int) -> Raw:
    dt_bias, a_log, repeated = setting
    rng = np.random.default_rng([seed, tokens, heads])
    q, k, v, z = (rng.standard_normal((tokens, heads, WIDTH), dtype=np.float32) for _ in range(4))
    if repeated:
        k[:] = k[0]
    k[tokens // 2, 0] *= 1e-4  # nearly nothing to normalise: the eps in the root shows
    beta = 3 * rng.standard_normal((tokens, heads), dtype=np.float32)
    state = rng.standard_normal((heads, WIDTH, WIDTH), dtype=np.float32)
    bias = np.full((heads, WIDTH), dt_bias, np.float32) + rng.uniform(-0.5, 0.5, (heads, WIDTH)).astype(np.float32)
    return Raw(q, k, v, z, beta, state, bias, np.full(heads, a_log, np.float32))


def sigmoid(x: Doubles) -> Doubles:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def alphas(raw: Raw) -> npt.NDArray[np.float32]:
    """exp(g) in float32, (tokens, heads, d): the kernel's, after a look at every one of them."""
    exact = np.exp(
        LOWER_BOUND * sigmoid(np.exp(raw.a_log.astype(np.float64))[:, None] * (raw.z + raw.dt_bias.astype(float)))
    )
    alpha = decay(raw.z.reshape(len(raw.z), -1), raw.dt_bias.reshape(-1), raw.a_log, LOWER_BOUND).reshape(raw.z.shape)
    assert (np.abs(alpha - exact) <= 2.0**-23 * exact).all()
    return alpha


def prepared(raw: Raw) -> tuple[Doubles, Doubles, Doubles, Doubles, Doubles]:
    """q, k, v, ln alpha and beta as the recurrence takes them."""
    q, k, v = (values.astype(np.float64) for values in (raw.q, raw.k, raw.v))
    unit_q, unit_k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return unit_q * WIDTH**-0.5, unit_k, v, np.log(alphas(raw).astype(np.float64)), sigmoid(raw.beta.astype(np.float64))


def token_by_token(raw: Raw) -> tuple[Doubles, Doubles]:
    q, k, v, g, beta = prepared(raw)
    state, out = raw.state.astype(np.float64), np.empty(v.shape)
    for t in range(len(q)):
        state *= np.exp(g[t])[:, :, None]
        u = (state * k[t][:, :, None]).sum(1)
        state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - u))[:, None, :]
        out[t] = (state * q[t][:, :, None]).sum(1)
    return out, state


def as_matrices(raw: Raw, sign: float = 1.0, qk_below: int = 0, kk_below: int = -1) -> tuple[Doubles, Doubles]:
    """The whole sequence as one chunk: W = (I + A_kk)^-1 beta (V - (K e^G) S), O = (Q e^G) S + A_qk W.

    sign of A_kk, and up to which diagonal A_qk and A_kk are kept: other values are the mistakes.
    """
    q, k, v, g, beta = prepared(raw)
    out, last = np.empty(v.shape), raw.state.astype(np.float64)
    for h in range(q.shape[1]):
        fall = np.cumsum(g[:, h], axis=0)
        faded = np.exp(np.minimum(fall[:, None] - fall[None], 0.0)) * k[None, :, h]  # (t, s, i)
        a_qk = np.tril(np.einsum("ti,tsi->ts", q[:, h], faded), qk_below)
        a_kk = np.tril(beta[:, h, None] * np.einsum("ti,tsi->ts", k[:, h], faded), kk_below)
        before = beta[:, h, None] * (v[:, h] - (k[:, h] * np.exp(fall)) @ last[h])
        written = np.linalg.solve(np.eye(len(q)) + sign * a_kk, before)
        out[:, h] = (q[:, h] * np.exp(fall)) @ last[h] + a_qk @ written
        last[h] = np.exp(fall[-1])[:, None] * last[h] + (np.exp(fall[-1] - fall) * k[:, h]).T @ written
    return out, last


def of_kernel(raw: Raw, pool: RowPool) -> tuple[Doubles, Doubles]:
    tokens, heads, _ = raw.q.shape
    flat = (tokens, heads * WIDTH)
    q, k, v, alpha = (values.reshape(flat) for values in (raw.q, raw.k, raw.v, alphas(raw)))
    state = raw.state.copy()
    out = chunked(state, q, k, v, alpha, raw.beta, pool)
    return out.reshape(raw.q.shape).astype(np.float64), state.astype(np.float64)


def error(found: tuple[Doubles, Doubles], expected: tuple[Doubles, Doubles]) -> float:
    """The largest difference in a row of one token and head, or in a head's state, over the largest element there."""
    o, state = np.abs(found[0] - expected[0]).max(-1), np.abs(found[1] - expected[1]).max((1, 2))
    relative = [(o / np.abs(expected[0]).max(-1)).max(), (state / np.abs(expected[1]).max((1, 2))).max()]
    return float(np.nan_to_num(max(relative), nan=np.inf))


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_the_six_shapes_from_the_raw_gates(shape: KdaShape) -> None:
    with RowPool(2) as pool:
        for number, setting in enumerate(CORNERS[::3] if shape.heads > 2 else SETTINGS):
            for tokens in shape.lengths:
                raw = make(tokens, shape.heads, setting, number)
                assert error(of_kernel(raw, pool), token_by_token(raw)) < BOUND, (setting, tokens)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 65])
def test_lengths_around_the_chunk(tokens: int) -> None:
    with RowPool(1) as pool:
        for number, setting in enumerate(SETTINGS):
            raw = make(tokens, 1, setting, number)
            expected = token_by_token(raw)
            assert error(of_kernel(raw, pool), expected) < BOUND, setting
            assert error(as_matrices(raw), expected) < 1e-10, "the transform as it is written down"


def test_gates_at_their_lower_bound_for_many_tokens() -> None:
    """Every gate within 1e-4 of -5 for 80 tokens: sums of -400, whose exponentials leave nothing and no infinity."""
    raw = make(80, 1, (3.0, float(np.log(200.0)), False), 1)
    raw.z[:] = np.abs(raw.z)
    assert np.cumsum(prepared(raw)[3], axis=0)[-1].max() < -399
    with RowPool(1) as pool:
        assert error(of_kernel(raw, pool), token_by_token(raw)) < BOUND


@pytest.mark.parametrize(
    ("mistake", "only_with"),
    [({"sign": -1.0}, 2), ({"qk_below": -1}, 1), ({"kk_below": 0}, 1)],
    ids=["(I - A_kk)^-1", "A_qk without its diagonal", "A_kk with its diagonal"],
)
def test_the_transforms_three_mistakes_are_far_beyond_the_bound(mistake: dict[str, float], only_with: int) -> None:
    """In every setting, from the first length on at which they make a difference at all."""
    for number, setting in enumerate(SETTINGS):
        for tokens in (only_with, 17):
            raw = make(tokens, 1, setting, number)
            assert error(as_matrices(raw, **mistake), token_by_token(raw)) > 5 * BOUND, (setting, tokens)  # type: ignore[arg-type]

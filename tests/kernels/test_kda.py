"""KDA: the twin's bits, any cutting and any threads, and the values against two other ways to compute them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.kda import decay, gated_norm, recurrence
from k3ray.kernels.reference import kda as twin
from k3ray.kernels.threads import RowPool

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one sequence of one layer."""

    state: Floats
    q: Floats
    k: Floats
    v: Floats
    alpha: Floats
    beta_logits: Floats

    def run(self, threads: int = 1, cut: int | None = None) -> tuple[Floats, Floats]:
        """(o, state after), computed in pieces of `cut` tokens."""
        state, step = self.state.copy(), cut or max(1, len(self.q))
        with RowPool(threads) as pool:
            parts = [
                recurrence(
                    state, *(a[t : t + step] for a in (self.q, self.k, self.v, self.alpha, self.beta_logits)), pool
                )
                for t in range(0, len(self.q), step)
            ]
        return np.concatenate(parts), state

    def plain(self) -> tuple[Doubles, Doubles]:
        """The formulas of MODEL.md in float64, one head and token at a time."""
        heads, d, _ = self.state.shape
        state, out = self.state.astype(np.float64), np.empty(self.q.shape)
        for t in range(len(self.q)):
            for h in range(heads):
                part = slice(h * d, (h + 1) * d)
                q, k, v, alpha = (a[t, part].astype(np.float64) for a in (self.q, self.k, self.v, self.alpha))
                q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(d)
                k = k / np.sqrt((k * k).sum() + 1e-6)
                beta = 1 / (1 + np.exp(-float(self.beta_logits[t, h])))
                state[h] *= alpha[:, None]
                state[h] += np.outer(k, beta * (v - state[h].T @ k))
                out[t, part] = state[h].T @ q
        return out, state


def make(tokens: int, heads: int, d: int, seed: int = 0, empty: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, heads * d), dtype=np.float32) for _ in range(3))
    alpha = rng.uniform(0.01, 1.0, (tokens, heads * d)).astype(np.float32)
    state = np.zeros((heads, d, d), np.float32) if empty else rng.standard_normal((heads, d, d), dtype=np.float32)
    return Case(state, q, k, v, alpha, rng.standard_normal((tokens, heads), dtype=np.float32) * 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "d"), [(1, 1, 1), (5, 3, 19), (4, 4, 16), (3, 2, 33), (2, 1, 128), (1, 96, 8)]
)
def test_the_twin_has_the_same_bits(tokens: int, heads: int, d: int) -> None:
    case = make(tokens, heads, d)
    out, state = case.run(threads=2)
    theirs = case.state.copy()
    twin_out = twin.recurrence(theirs, case.q, case.k, case.v, case.alpha, case.beta_logits)
    assert out.tobytes() == twin_out.tobytes() and state.tobytes() == theirs.tobytes()


def test_the_twin_has_the_same_bits_where_the_roundings_show() -> None:
    """Sums that cancel leave only rounding errors, which tell a fused step from two and one order from another."""
    rng = np.random.default_rng(12)
    heads, d = 8, 32
    state, pairs = rng.standard_normal((heads, d, d), dtype=np.float32), np.tile([1, -1], d // 2)
    state[:, 1::2] = state[:, ::2]
    state[:, 4:8] = 0  # rows without a past show what is written
    twins = np.repeat(rng.standard_normal((1, heads * d // 2), dtype=np.float32), 2, axis=1)
    alternating = (twins.reshape(heads, d) * pairs).astype(np.float32).reshape(1, -1)
    ones, zeros = np.ones((1, heads * d), np.float32), np.zeros((1, heads * d), np.float32)
    for k in (zeros, alternating):  # without a write o cancels, with one u does
        case = Case(state, alternating, k, zeros, ones, np.zeros((1, heads), np.float32))
        out, after = case.run()
        theirs = case.state.copy()
        assert out.tobytes() == twin.recurrence(theirs, case.q, k, zeros, ones, case.beta_logits).tobytes()
        assert after.tobytes() == theirs.tobytes()
        assert 0 < np.abs(out).max() < 1e-3 if k is zeros else 0 < np.abs(after[:, 4]).max() < 1e-14


def test_the_twin_has_the_same_bits_where_the_write_cancels_the_state() -> None:
    case = make(1, 40, 32, seed=13)
    v = np.empty_like(case.v)
    for h in range(40):  # w * k[0] is as close to -S[0,j] as a float32 v can bring it
        k = case.k[0, 32 * h : 32 * h + 32].astype(np.float64)
        k = k / np.sqrt((k * k).sum() + 1e-6)
        faded = case.state[h] * case.alpha[0, 32 * h : 32 * h + 32, None].astype(np.float64)
        beta = 1 / (1 + np.exp(-float(case.beta_logits[0, h])))
        v[0, 32 * h : 32 * h + 32] = faded.T @ k - faded[0] / (k[0] * beta)
    case = Case(case.state, case.q, case.k, v, case.alpha, case.beta_logits)
    out, state = case.run()
    theirs = case.state.copy()
    assert out.tobytes() == twin.recurrence(theirs, case.q, case.k, v, case.alpha, case.beta_logits).tobytes()
    assert state.tobytes() == theirs.tobytes() and np.abs(state[:, 0]).max() < 1e-4


@pytest.mark.parametrize("cut", [1, 7, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_cutting_and_no_number_of_threads_moves_a_bit(cut: int, threads: int) -> None:
    case = make(33, 5, 24)
    whole, part = case.run(), case.run(threads, cut)
    assert whole[0].tobytes() == part[0].tobytes() and whole[1].tobytes() == part[1].tobytes()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 65])
def test_the_values_agree_with_plain_double(tokens: int) -> None:
    case = make(tokens, 2, 16, seed=tokens, empty=True)
    out, state = case.run()
    plain_out, plain_state = case.plain()
    np.testing.assert_allclose(out, plain_out, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(state, plain_state, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dt_bias", [-8.0, -3.0, -1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 1.0, 16.0, 200.0])
@pytest.mark.parametrize("repeated", [False, True])
def test_real_decays_and_repeated_keys(dt_bias: float, rate: float, repeated: bool) -> None:
    case = make(65, 2, 12, seed=3, empty=True)
    z = np.random.default_rng(4).standard_normal((65, 24), dtype=np.float32)
    alpha = decay(z, np.full(24, dt_bias, np.float32), np.full(2, np.log(rate), np.float32), -5.0)
    k = np.repeat(case.k[:1], 65, axis=0) if repeated else case.k
    case = Case(case.state, case.q, k, case.v, alpha, case.beta_logits)
    out, state = case.run()
    plain_out, plain_state = case.plain()
    np.testing.assert_allclose(out, plain_out, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(state, plain_state, rtol=1e-4, atol=2e-6)


def test_gates_saturated_at_both_ends_for_many_tokens_stay_finite() -> None:
    case = make(130, 2, 16)
    for z in (-1e4, 1e4, -3e38, 3e38):
        full = np.full(case.q.shape, z, np.float32)
        alpha = decay(full, np.zeros(32, np.float32), np.full(2, np.log(200), np.float32), -5.0)
        assert (alpha == (np.float32(np.exp(-5.0)) if z > 0 else 1.0)).all()
        out, state = Case(case.state, case.q, case.k, case.v, alpha, case.beta_logits).run()
        assert np.isfinite(out).all() and np.isfinite(state).all()


def test_the_decays_twin_has_the_same_bits_and_the_formula() -> None:
    rng = np.random.default_rng(8)
    z, bias = rng.standard_normal((7, 57), dtype=np.float32) * 20, rng.uniform(-8, 3, 57).astype(np.float32)
    a_log = np.log(np.array([0.01, 3, 200])).astype(np.float32)
    alpha = decay(z, bias, a_log, -5.0)
    assert alpha.tobytes() == twin.decay(z, bias, a_log, -5.0).tobytes()
    with np.errstate(over="ignore"):
        gate = -5 / (1 + np.exp(-np.repeat(np.exp(a_log.astype(np.float64)), 19) * (z.astype(np.float64) + bias)))
    np.testing.assert_allclose(alpha, np.exp(gate), rtol=2e-7)


def test_a_log_is_one_entry_a_head_not_one_a_channel() -> None:
    rng = np.random.default_rng(9)
    z, bias = rng.standard_normal((2, 16), dtype=np.float32), np.zeros(16, np.float32)
    a_log = np.array([-2, 2, 0, 0], np.float32)  # four heads of four channels: both readings have the same length
    per_channel = np.exp(-5 / (1 + np.exp(-np.tile(np.exp(a_log), 4) * z)))
    alpha = decay(z, bias, a_log, -5.0)
    assert np.abs(alpha - per_channel).max() > 0.05
    for h in range(4):
        part = slice(4 * h, 4 * h + 4)
        alone = decay(z[:, part].copy(), bias[part], a_log[h : h + 1], -5.0)
        assert alone.tobytes() == alpha[:, part].tobytes()


def test_rows_near_zero_are_normalised_with_the_stated_eps() -> None:
    for size in (0.0, 1e-20, 1e-5, 1e-3):
        case = make(1, 1, 16, empty=True)
        row = np.full((1, 16), size, np.float32)
        out, state = Case(case.state, row, row, case.v, case.alpha, case.beta_logits).run()
        unit = size / np.sqrt(16 * size**2 + 1e-6)
        beta = 1 / (1 + np.exp(-float(case.beta_logits[0, 0])))
        np.testing.assert_allclose(state[0], np.outer(np.full(16, unit), beta * case.v[0]), rtol=1e-5, atol=1e-37)
        np.testing.assert_allclose(out[0], 16 * unit**2 / 4 * beta * case.v[0], rtol=1e-5, atol=1e-37)


def test_nan_reaches_the_output() -> None:
    case = make(2, 2, 8)
    case.v[0, 3] = np.nan
    out, _ = case.run()
    assert np.isnan(out[:, 3]).all() and np.isfinite(np.delete(out, 3, axis=1)).all()


@pytest.mark.parametrize(("tokens", "heads", "d"), [(1, 1, 1), (3, 3, 19), (2, 4, 128), (0, 2, 4)])
def test_the_gated_norms_twin_has_the_same_bits(tokens: int, heads: int, d: int) -> None:
    rng = np.random.default_rng(d)
    o, gate = (rng.standard_normal((tokens, heads * d), dtype=np.float32) for _ in range(2))
    weight = rng.standard_normal(d, dtype=np.float32)
    assert gated_norm(o, weight, gate, 1e-5).tobytes() == twin.gated_norm(o, weight, gate, 1e-5).tobytes()


def test_the_gated_norm_is_per_head_and_norms_before_it_gates() -> None:
    rng = np.random.default_rng(10)
    o = rng.standard_normal((1, 24), dtype=np.float32) * np.repeat([0.1, 1, 10], 8).astype(np.float32)
    weight, gate = rng.standard_normal(8, dtype=np.float32), rng.standard_normal((1, 24), dtype=np.float32)
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    rows = o.reshape(3, 8).astype(np.float64)
    expected = (rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5) * weight).ravel() * sigmoid[0]
    got = gated_norm(o, weight, gate, 1e-5)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    as_one_row = (rows / np.sqrt((rows**2).mean() + 1e-5) * weight).ravel() * sigmoid[0]
    assert np.abs(got - as_one_row).max() > 0.1


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make(2, 2, 8)
    with RowPool(1) as pool, pytest.raises(ValueError, match="do not fit"):
        recurrence(case.state, case.q, case.k, case.v, case.alpha, case.beta_logits[:, :1].copy(), pool)
    with RowPool(1) as pool, pytest.raises(ValueError, match="do not fit"):
        recurrence(case.state, case.q[:, :8].copy(), case.k, case.v, case.alpha, case.beta_logits, pool)
    with pytest.raises(ValueError, match="do not fit"):
        decay(case.q, np.zeros(16, np.float32), np.zeros(3, np.float32), -5.0)
    with pytest.raises(ValueError, match="do not fit"):
        gated_norm(case.q, np.ones(5, np.float32), case.k, 1e-5)

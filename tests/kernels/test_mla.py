"""MLA on latents: the twin's bits, any cutting and threads, and the published form with expanded keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.mla import attend, sigmoid_gate
from k3ray.kernels.reference import mla as twin
from k3ray.kernels.threads import RowPool

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """A sequence's cache, the queries of its last tokens, and the layer's kv_b."""

    q: Floats
    cache: Floats
    first: int
    kv_b: npt.NDArray[np.uint16] | Floats
    heads: int
    nope: int
    rope: int
    value: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.heads, self.nope, self.rope, self.value

    def run(self, threads: int = 1, cut: int | None = None) -> Floats:
        """The output, computed in pieces of `cut` tokens."""
        step = cut or max(1, len(self.q))
        with RowPool(threads) as pool:
            parts = [
                attend(self.q[t : t + step], self.cache, self.first + t, self.kv_b, *self.sizes, pool)
                for t in range(0, len(self.q), step)
            ]
        return np.concatenate(parts)

    def twin(self) -> Floats:
        return twin.attend(self.q, self.cache, self.first, self.kv_b, *self.sizes)

    def published(self, rope: bool = True) -> Doubles:
        """Keys and values expanded, in float64; `rope` False leaves the shared channels out, as one may by mistake."""
        latent = self.cache.shape[1] - self.rope
        wide = self.kv_b if self.kv_b.dtype == np.float32 else (self.kv_b.astype(np.uint32) << 16).view(np.float32)
        kv = wide.astype(np.float64).reshape(self.heads, self.nope + self.value, latent)
        cache = self.cache.astype(np.float64)
        expanded = np.einsum("hrl,tl->htr", kv, cache[:, :latent])
        shared = np.broadcast_to(cache[:, latent:], (self.heads, len(cache), self.rope))
        keys = np.concatenate([expanded[:, :, : self.nope], shared], axis=2)
        q = self.q.astype(np.float64).reshape(len(self.q), self.heads, -1)
        width = self.nope + self.rope if rope else self.nope
        out = np.empty((len(q), self.heads, self.value))
        for t in range(len(q)):
            end = self.first + t + 1
            scores = np.einsum("hc,hsc->hs", q[t, :, :width], keys[:, :end, :width]) / np.sqrt(width)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[t] = np.einsum("hs,hsv->hv", weights, expanded[:, :end, self.nope :])
        return out.reshape(len(q), -1)


def make(tokens: int, first: int, heads: int = 3, latent: int = 41, bf16: bool = True, seed: int = 0) -> Case:
    nope, rope, value = 24, 7, 17
    rng = np.random.default_rng(seed)
    kv_b: npt.NDArray[np.uint16] | Floats = rng.standard_normal((heads * (nope + value), latent), dtype=np.float32)
    kv_b *= np.float32(0.3)
    if bf16:
        kv_b = (kv_b.view(np.uint32) >> 16).astype(np.uint16)
    cache = rng.standard_normal((first + tokens + 2, latent + rope), dtype=np.float32)
    cache[first + tokens :] = np.nan  # nobody's yet
    q = rng.standard_normal((tokens, heads * (nope + rope)), dtype=np.float32)
    return Case(q, cache, first, kv_b, heads, nope, rope, value)


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (1, 63), (1, 64), (1, 130), (5, 61), (33, 2), (7, 0), (1, 2050)])
@pytest.mark.parametrize("bf16", [True, False])
def test_the_twin_has_the_same_bits(tokens: int, first: int, bf16: bool) -> None:
    case = make(tokens, first, bf16=bf16)
    assert case.run(threads=2).tobytes() == case.twin().tobytes()


@pytest.mark.parametrize(("heads", "latent"), [(1, 1), (2, 16), (5, 40), (4, 64), (37, 33)])
def test_the_twin_has_the_same_bits_at_other_widths(heads: int, latent: int) -> None:
    case = make(2, 66, heads, latent)
    assert case.run(threads=2).tobytes() == case.twin().tobytes()


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_the_twin_has_the_same_bits_where_the_weighted_sum_cancels(tokens: int) -> None:
    case = make(tokens, 72, latent=40)
    case.q[:] = 0  # equal weights
    case.cache[1:72:2] = -case.cache[:72:2]
    case.cache[72 : 72 + tokens] = 0
    out = case.run(threads=2)
    assert out.tobytes() == case.twin().tobytes()
    assert 0 < np.abs(out).max() < 1e-13  # only rounding errors are left


def test_the_twin_has_the_same_bits_where_the_order_of_a_score_shows() -> None:
    rng = np.random.default_rng(5)
    latent, rope = 76, 7
    kv_b = np.concatenate([np.eye(latent), rng.standard_normal((2, latent))]).astype(np.float32)  # folds q to itself
    large = 2.0 ** rng.integers(50, 56, 32)
    parts = np.concatenate([large, -large, rng.standard_normal(latent + rope - 64)]).astype(np.float32)
    cache = np.stack([rng.permutation(parts) for _ in range(70)])
    q = np.full((1, latent + rope), 0.01, np.float32)
    case = Case(q, cache, 69, kv_b, 1, latent, rope, 2)
    assert case.run().tobytes() == case.twin().tobytes()
    order = np.concatenate([np.arange(latent)[::-1], latent + np.arange(rope)])
    backwards = Case(q, cache[:, order].copy(), 69, kv_b[:, order[:latent]].copy(), 1, latent, rope, 2)
    assert not np.allclose(case.run(), backwards.run(), rtol=1e-5)


def test_the_fold_adds_key_rows_in_ascending_order() -> None:
    rng = np.random.default_rng(6)
    kv_b = np.concatenate([np.diag([1.0, 1, 1, 1]), np.ones((2, 4))]).astype(np.float32)
    kv_b[:4, 0] = [2.0**54, 1.5, -(2.0**54), 0.25]
    cache = rng.standard_normal((9, 7), dtype=np.float32)
    case = Case(np.ones((1, 7), np.float32), cache, 8, kv_b, 1, 4, 3, 2)
    assert case.run().tobytes() == case.twin().tobytes()
    swapped = kv_b[[0, 2, 1, 3, 4, 5]].copy()
    assert case.run().tobytes() != Case(case.q, cache, 8, swapped, 1, 4, 3, 2).run().tobytes()


@pytest.mark.parametrize("cut", [1, 7, 16, 32, 33])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_cutting_and_no_number_of_threads_moves_a_bit(cut: int, threads: int) -> None:
    case = make(70, 40, heads=5)
    assert case.run(threads, cut).tobytes() == case.run().tobytes()


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (6, 0), (40, 90)])
def test_the_values_are_the_published_ones_to_rounding(tokens: int, first: int) -> None:
    case = make(tokens, first)
    np.testing.assert_allclose(case.run(), case.published(), rtol=1e-5, atol=1e-6)


def test_leaving_out_the_shared_channels_or_the_history_is_far_away() -> None:
    case = make(3, 50)
    out = case.run()
    assert np.abs(out - case.published(rope=False)).max() > 0.1
    forgetful = Case(case.q, case.cache[case.first :].copy(), 0, case.kv_b, *case.sizes)
    assert np.abs(out - forgetful.run()).max() > 0.1


def test_what_comes_later_in_the_cache_is_not_seen() -> None:
    case = make(6, 60)
    later = case.cache.copy()
    later[case.first + 3 :] = np.nan
    seen = Case(case.q, later, case.first, case.kv_b, *case.sizes).run()
    assert seen[:3].tobytes() == case.run()[:3].tobytes()
    assert np.isnan(seen[3:]).all()  # and what is there is not swallowed


def test_large_scores_choose_one_position() -> None:
    case = make(1, 20, heads=1)
    case.q[:] *= 1000
    np.testing.assert_allclose(case.run(), case.published(), rtol=1e-5, atol=1e-6)


def test_a_history_of_32768_positions() -> None:
    case = make(1, 32767, heads=2, latent=16)
    np.testing.assert_allclose(case.run(threads=2), case.published(), rtol=1e-5, atol=1e-7)


def test_no_tokens_and_shapes_that_do_not_fit() -> None:
    case = make(2, 3)
    with RowPool(1) as pool:
        assert attend(case.q[:0], case.cache, 5, case.kv_b, *case.sizes, pool).shape == (0, 3 * 17)
        with pytest.raises(ValueError, match="do not fit"):
            attend(case.q, case.cache, len(case.cache) - 1, case.kv_b, *case.sizes, pool)  # past the capacity
        with pytest.raises(ValueError, match="do not fit"):
            attend(case.q, case.cache, 0, case.kv_b[1:], *case.sizes, pool)
        with pytest.raises(ValueError, match="expected bf16 bits"):
            attend(case.q, case.cache, 0, case.kv_b.astype(np.float64), *case.sizes, pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 1), (3, 77), (2, 640), (0, 5)])
def test_the_gates_twin_has_the_same_bits(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    o, gate = rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32) * 30
    assert sigmoid_gate(o, gate).tobytes() == twin.sigmoid_gate(o, gate).tobytes()


def test_the_gate_saturates_and_refuses_other_shapes() -> None:
    o = np.full((1, 4), 3.0, np.float32)
    out = sigmoid_gate(o, np.array([[0, 200, -200, 3e38]], np.float32))
    np.testing.assert_allclose(out[0], [1.5, 3.0, 3 * np.exp(-200), 3.0], atol=1e-40)
    with pytest.raises(ValueError, match="differ"):
        sigmoid_gate(o, o[:, :3].copy())

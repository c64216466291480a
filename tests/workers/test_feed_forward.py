"""The dense MLP and the mixture of experts against MODEL.md's formulas in float64, where mistakes show.

The routed aggregate is small here, so that the norm on it cancels no wrong weight; the experts are plain matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.threads import RowPool
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.feed_forward import mixture_of_experts, mlp
from k3ray.workers.model.matrices import ResidentMatrix
from k3ray.workers.model.weights import MlpWeights, MoeWeights

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

TOKENS, HIDDEN, LATENT, INNER, EXPERTS = 5, 21, 13, 18, 7
POOL = RowPool(1)


class StubExperts:
    """Expert e answers matrices[e] @ latent, and remembers what was asked."""

    def __init__(self, matrices: Floats) -> None:
        self.matrices = matrices
        self.layer = -1

    def begin(self, layer: int, expert_ids: Ids, latents: Floats) -> Callable[[], Floats]:
        self.layer = layer
        asked = expert_ids.copy()

        def answer() -> Floats:
            return np.asarray(np.einsum("tkij,tj->tki", self.matrices[asked], latents), np.float32)

        return answer


def ignore(name: str, layer: int, values: npt.NDArray[np.generic]) -> None:
    """An observer that looks at nothing."""


@pytest.fixture(scope="module")
def config(k3b_dir: Path) -> ModelConfig:
    return replace(
        read_config(k3b_dir),
        num_experts=EXPERTS,
        num_experts_per_token=3,
        moe_renormalize=True,
        routed_scaling_factor=2.5,
    )


def matrix(generator: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> ResidentMatrix:
    return ResidentMatrix(
        (generator.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32), POOL
    )


def mlp_weights(generator: np.random.Generator) -> MlpWeights:
    return MlpWeights(
        matrix(generator, INNER, HIDDEN, 6), matrix(generator, INNER, HIDDEN, 6), matrix(generator, HIDDEN, INNER)
    )


def moe_weights(generator: np.random.Generator) -> MoeWeights:
    return MoeWeights(
        router=matrix(generator, EXPERTS, HIDDEN, 2),
        bias=generator.standard_normal(EXPERTS).astype(np.float32),
        down=matrix(generator, LATENT, HIDDEN),
        norm=generator.standard_normal(LATENT).astype(np.float32),
        up=matrix(generator, HIDDEN, LATENT),
        shared=mlp_weights(generator),
    )


def make(seed: int, expert_scale: float = 3e-3) -> tuple[MoeWeights, StubExperts, Floats]:
    generator = np.random.default_rng(seed)
    experts = (generator.standard_normal((EXPERTS, LATENT, LATENT)) * expert_scale / np.sqrt(LATENT)).astype(np.float32)
    x = generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return moe_weights(generator), StubExperts(experts), x


def sigmoid(x: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(-x)))


def mlp_formula(config: ModelConfig, weights: MlpWeights, x: Doubles) -> Doubles:
    g, u = x @ weights.gate.weight.T, x @ weights.up.weight.T
    b1, b2 = config.situ_beta, config.situ_linear_beta
    return np.asarray((b1 * np.tanh(g / b1) * sigmoid(g) * b2 * np.tanh(u / b2)) @ weights.down.weight.T)


def moe_formula(config: ModelConfig, weights: MoeWeights, experts: Floats, x: Doubles) -> Doubles:
    out = np.empty_like(x)
    for t, row in enumerate(x):
        scores = sigmoid(row @ weights.router.weight.T)
        chosen = np.argsort(-(scores + weights.bias), kind="stable")[: config.num_experts_per_token]
        mixing = scores[chosen]
        if config.moe_renormalize:
            mixing = mixing / (mixing.sum() + 1e-20)
        latent = row @ weights.down.weight.T
        y = config.routed_scaling_factor * (mixing @ (experts[chosen].astype(np.float64) @ latent))
        if weights.norm is not None:
            y = weights.norm * y / np.sqrt((y * y).mean() + config.rms_norm_eps)
        out[t] = y @ weights.up.weight.T
    return out + mlp_formula(config, weights.shared, x)


def test_the_mlp_is_the_formula(config: ModelConfig) -> None:
    generator = np.random.default_rng(1)
    weights, x = mlp_weights(generator), generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    expected = mlp_formula(config, weights, x.astype(np.float64))
    np.testing.assert_allclose(mlp(config, weights, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normed", [True, False])
def test_the_mixture_is_the_formula(config: ModelConfig, renormalise: bool, scale: float, normed: bool) -> None:
    config = replace(config, moe_renormalize=renormalise, routed_scaling_factor=scale)
    weights, experts, x = make(2)
    weights = weights if normed else replace(weights, norm=None)
    found = mixture_of_experts(config, weights, 6, x, experts, ignore)
    expected = moe_formula(config, weights, experts.matrices, x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert experts.layer == 6


def test_the_small_aggregate_shows_weights_and_scale(config: ModelConfig) -> None:
    """What the test above rests on: here the norm's eps does not let a wrong factor cancel."""
    weights, experts, x = make(2)
    right = moe_formula(config, weights, experts.matrices, x.astype(np.float64))
    for wrong in (replace(config, routed_scaling_factor=1.0), replace(config, moe_renormalize=False)):
        assert np.abs(moe_formula(wrong, weights, experts.matrices, x.astype(np.float64)) - right).max() > 0.05


def test_experts_are_summed_by_descending_score_not_by_index(config: ModelConfig) -> None:
    """Scores are equal and the bias orders the experts 5, 1, 3: only in that order does the small output survive."""
    config = replace(config, moe_renormalize=False, routed_scaling_factor=1.0)
    weights, experts, _ = make(3)
    bias = np.full(EXPERTS, -1, np.float32)
    bias[[5, 1, 3]] = 3, 2, 1
    weights = replace(
        weights, router=ResidentMatrix(np.zeros((EXPERTS, HIDDEN), np.float32), POOL), bias=bias, norm=None
    )
    weights = replace(weights, down=ResidentMatrix(np.eye(LATENT, HIDDEN, dtype=np.float32), POOL))
    for expert, factor in ((5, 2.0**60), (1, -(2.0**60)), (3, 1.0)):
        experts.matrices[expert] = np.eye(LATENT, dtype=np.float32) * np.float32(factor)
    seen: dict[str, npt.NDArray[np.generic]] = {}

    def observe(name: str, layer: int, values: npt.NDArray[np.generic]) -> None:
        seen[name] = values.copy()

    mixture_of_experts(config, weights, 1, np.ones((2, HIDDEN), np.float32), experts, observe)
    assert seen["router_ids"].tolist() == [[5, 1, 3]] * 2
    assert np.array_equal(seen["latent_aggregate"], np.full((2, LATENT), 0.5, np.float32))

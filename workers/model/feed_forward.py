"""The dense MLP and the mixture of experts over a batch; who computes the routed experts is not known here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from k3ray.kernels import router
from k3ray.kernels.norm import rmsnorm
from k3ray.kernels.situ import situ
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.weights import MlpWeights, MoeWeights

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Observe = Callable[[str, int, npt.NDArray[np.generic]], None]


class RoutedExperts(Protocol):
    """Whoever computes routed experts: in this process or in others."""

    def begin(self, layer: int, expert_ids: Int32Array, latents: Float32Array) -> Callable[[], Float32Array]:
        """Start the work for expert_ids (tokens, k) on latents (tokens, latent).

        Returns the call that waits for the outputs (tokens, k, latent) f32, one a pair, unweighted.
        """
        ...


def mlp(config: ModelConfig, weights: MlpWeights, x: Float32Array) -> Float32Array:
    """Return down(SiTU(gate x, up x)), (tokens, hidden) f32."""
    inner = situ(weights.gate.apply(x), weights.up.apply(x), config.situ_beta, config.situ_linear_beta)
    return weights.down.apply(inner)


def mixture_of_experts(
    config: ModelConfig, weights: MoeWeights, layer: int, x: Float32Array, experts: RoutedExperts, observe: Observe
) -> Float32Array:
    """Return (tokens, hidden) f32: the routed experts' normed aggregate projected up, plus the shared experts.

    The shared experts run while the routed ones are being computed elsewhere; the sum's order does not depend on it.
    """
    expert_ids, expert_weights = router.select(
        weights.router.apply(x),
        weights.bias,
        config.num_experts_per_token,
        config.moe_renormalize,
        config.routed_scaling_factor,
    )
    observe("router_ids", layer, expert_ids)
    observe("router_weights", layer, expert_weights)
    latents = weights.down.apply(x)
    observe("latent_in", layer, latents)
    outputs = experts.begin(layer, expert_ids, latents)
    shared = None if weights.shared is None else mlp(config, weights.shared, x)
    aggregate = router.combine(outputs(), expert_weights)
    observe("latent_aggregate", layer, aggregate)
    if weights.norm is not None:
        aggregate = rmsnorm(aggregate, weights.norm, config.rms_norm_eps)
        observe("latent_normed", layer, aggregate)
    routed = weights.up.apply(aggregate)
    if shared is None:
        return routed
    observe("shared_out", layer, shared)
    return routed + shared

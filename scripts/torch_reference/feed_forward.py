"""The dense MLP and the mixture of experts over tokens. Formulas: docs/model.md."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_reference.arithmetic import matmul, matmul_mxfp4, rms_norm, situ
from torch_reference.settings import Settings

Read = Callable[[str], Tensor]  # a tensor of the layer, as stored, by its short name


def mlp(settings: Settings, read: Read, name: str, x: Tensor) -> Tensor:
    """down(SiTU(gate x, up x)) with the three matrices below `name`."""
    gate, up = matmul(read(f"{name}.gate_proj.weight"), x), matmul(read(f"{name}.up_proj.weight"), x)
    return matmul(read(f"{name}.down_proj.weight"), _situ(settings, gate, up))


def scores_of(read: Read, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens, experts) sigmoid scores, and the same with the correction bias: what selection compares."""
    scores = torch.sigmoid(matmul(read("gate.weight"), x))
    return scores, scores + read("gate.e_score_correction_bias").to(x.dtype)


def select(selection: Tensor, top_k: int) -> Tensor:
    """Return (tokens, k) ids by descending selection score, ties to the lower id."""
    return torch.sort(selection, dim=1, descending=True, stable=True).indices[:, :top_k]


def mixture(settings: Settings, read: Read, x: Tensor, expert_ids: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The experts' weighted sum, normed and projected up, plus the shared experts; every stage of it by name."""
    weights = scores.gather(1, expert_ids)
    if settings["moe_renormalize"] and expert_ids.shape[1] > 1:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights * float(settings["routed_scaling_factor"])
    latent = matmul(read("routed_expert_down_proj.weight"), x)
    aggregate = torch.zeros_like(latent)
    for expert in torch.unique(expert_ids).tolist():
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        aggregate[tokens] += weights[tokens, places][:, None] * _expert(settings, read, expert, latent[tokens])
    stages = {"router_weights": weights, "latent_in": latent, "latent_aggregate": aggregate}
    normed = aggregate
    if settings["latent_moe_use_norm"]:
        normed = rms_norm(aggregate, read("routed_expert_norm.weight"), settings.eps)
        stages["latent_normed"] = normed
    out = matmul(read("routed_expert_up_proj.weight"), normed)
    if settings["num_shared_experts"]:
        stages["shared_out"] = mlp(settings, read, "shared_experts", x)
        out = out + stages["shared_out"]
    return {**stages, "mlp_out": out}


def _expert(settings: Settings, read: Read, expert: int, x: Tensor) -> Tensor:
    """W2 SiTU(W1 x, W3 x): w1 is the gate, w3 the up and w2 the down projection."""

    def apply(part: str, x: Tensor) -> Tensor:
        name = f"experts.{expert}.{part}"
        return matmul_mxfp4(read(f"{name}.weight_packed"), read(f"{name}.weight_scale"), x)

    return apply("w2", _situ(settings, apply("w1", x), apply("w3", x)))


def _situ(settings: Settings, gate: Tensor, up: Tensor) -> Tensor:
    return situ(gate, up, float(settings["activation_situ_beta"]), float(settings["activation_situ_linear_beta"]))

"""Checkpoints may differ in what their config is allowed to vary: each runs, and the same on one process and many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3ray.cluster.plan import make_plan
from k3ray.driver import Driver
from k3ray.proof import trace
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec

VARIANTS: dict[str, dict[str, Any]] = {
    "no shared experts": {"num_shared_experts": 0},
    "no norm on the aggregate": {"latent_moe_use_norm": False},
    "not renormalised, scaled": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "one expert a token": {"num_experts_per_token": 1},
    "every expert": {"num_experts": 4, "num_experts_per_token": 4},
    "no dense layer": {"first_k_dense_replace": 0},
    "only dense layers": {"first_k_dense_replace": 5},
    "short convolution": {"conv_kernel_size": 2},
    "long convolution": {"conv_kernel_size": 7},
    "no convolution history": {"conv_kernel_size": 1},
    "every layer ends a block": {"attn_res_block_size": 1},
    "one block": {"attn_res_block_size": 12},
    "a wide dense layer": {"intermediate_size": 2048},
    "only KDA": {"mla_layers": ()},
    "only MLA": {"mla_layers": (0, 1, 2, 3, 4)},
    "odd widths": {"hidden_size": 75, "q_lora_rank": 21, "kv_lora_rank": 17, "qk_rope_head_dim": 5, "v_head_dim": 9},
    "groups that fill no quad": {"routed_expert_hidden_size": 96, "moe_intermediate_size": 160},
    "other betas": {"situ_beta": 1.5, "situ_linear_beta": 3.0, "gate_lower_bound": -1.0, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_one_answer(variant: str, tmp_path: Path) -> None:
    spec = replace(SyntheticSpec(), **VARIANTS[variant])
    write_checkpoint(tmp_path / "model", spec, seed=1)
    checkpoint = CheckpointSpec(tmp_path / "model", None, spec.num_hidden_layers)
    prompt, answers = [5, 300, 77, 5, 9, 411, 0], []
    for stages, shards, chunk in ((1, 0, 64), (3, 2, 3)):
        plan = make_plan(checkpoint, stages, shards, 1, ())
        ids, logits = trace(Driver(start_in_process(plan.stages, plan.shards), chunk), prompt, 4)
        answers.append((ids, logits.tobytes()))
    assert answers[0] == answers[1]
    assert len(set(answers[0][0])) > 1, "a model that repeats one id proves little"

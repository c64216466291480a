"""The released model's plan against the published facts, and against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.cluster import memory_parts
from k3ray.cluster.budget import MemoryFailure, plan_budget, resident_plan, smallest_plan
from k3ray.cluster.budget_plan import EXPERTS, HostRun
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.wishes import Wishes
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import plan_layout

PLENTY = MemoryLimits(1 << 50, "MemAvailable", 1 << 50)
GB = 10**9


@pytest.fixture(scope="module")
def released(shared_data: Path) -> ModelConfig:
    return read_config(shared_data / "k3-release")


@pytest.fixture(scope="module")
def released_run(released: ModelConfig) -> HostRun:
    return HostRun(released, plan_layout(released), (0, 93), 0, threads=8, positions=4096)


def test_without_a_tape_the_trunk_is_held_and_pack_is_advised(released: ModelConfig) -> None:
    run = HostRun(released, None, (0, 93), 0, threads=8, positions=64)
    with pytest.raises(MemoryFailure, match="k3ray pack MODEL_DIR OUT") as failure:
        plan_budget(run, Wishes(total_bytes=64 * GB), PLENTY)
    assert "trunk in memory 111.11 GB" in str(failure.value)
    plan = plan_budget(run, Wishes(total_bytes=128 * GB), PLENTY)
    assert plan.trunk_bytes_per_token == 0 and plan.stages[0].pinned_chunks == plan.stages[0].ring_chunks == 0
    with pytest.raises(MemoryFailure, match="--trunk-gb 6: without a tape"):
        plan_budget(run, Wishes(trunk_bytes=6 * GB), PLENTY)


def test_more_positions_are_counted_and_refused(released_run: HostRun) -> None:
    longest = replace(released_run, positions=released_run.positions + 1_000_000)
    more = smallest_plan(longest).total_bytes - smallest_plan(released_run).total_bytes
    assert more >= 55_296 * 1_000_000
    with pytest.raises(MemoryFailure, match=r"state and latents 55\.99 GB"):
        plan_budget(longest, Wishes(total_bytes=16 * GB), PLENTY)


def test_the_released_model_by_count(released_run: HostRun) -> None:
    """Against the published facts and against counting by hand."""
    config = released_run.config
    layers = range(93)
    head = 163_840 * 7168 * 2
    kda = 2 * (4 * 12288 * 7168 + 7168 * 12288 + 96 * 7168 + 128 * 7168 + 12288 * 128)
    mla = 2 * (1536 * 7168 + 18432 * 1536 + 576 * 7168 + 24576 * 512 + 12288 * 7168 + 7168 * 12288)
    moe = 2 * (896 * 7168 + 2 * 3584 * 7168 + 3 * 6144 * 7168)
    by_hand = 69 * kda + 24 * mla + 92 * moe + 2 * 3 * 33792 * 7168
    assert memory_parts.trunk_bytes(config, layers, head=False) == by_hand
    norms, latent_norms, biases = 6 * 7168 * 93, (1536 + 512) * 24, (896 + 3584) * 92
    kda_small = (3 * 12288 * 4 + 12288 + 128 + 128) * 69  # float32 in the checkpoint too
    assert memory_parts.small_tensor_bytes(config, layers) == 4 * (norms + latent_norms + biases + kda_small)
    stored = 2 * (norms + latent_norms + 3584 * 92) + 4 * (896 * 92 + kda_small)
    assert round((by_hand + stored) / 1e9, 2) == 108.81
    assert memory_parts.trunk_bytes(config, layers, head=True) == by_hand + head
    assert memory_parts.expert_bytes(config) == 17_547_264
    assert expert_slot_bytes(config) == 17_547_264 + 6 * 4096
    assert memory_parts.position_bytes(config) * len(config.mla_layers) == 55_296
    assert len(config.mla_layers) == 24 and len(config.kda_layers) == 69
    kda_state = 4 * (96 * 128 * 128 + 3 * 3 * 12288)
    assert memory_parts.state_bytes(config, layers, 10) == 69 * kda_state + 10 * 55_296
    assert memory_parts.index_bytes(config) == 24 * (497_220 - 168)  # all but vision and projector

    plan = smallest_plan(released_run)
    assert plan.trunk_bytes_per_token == plan.trunk_bytes == by_hand + head
    assert plan.expert_bytes_per_token == 1_472 * 17_547_264 and round(plan.expert_bytes_per_token / 1e9, 2) == 25.83
    assert plan.cache_slots == 16 and plan.owned_experts == 82_432
    assert plan.total_bytes < 4 * GB
    everything = resident_plan(released_run)
    assert everything.bytes_per_token == 0 and everything.cache_slots == 82_432
    assert everything.parts()[EXPERTS] == 82_432 * (17_547_264 + 24_576)


@pytest.mark.parametrize(("preset", "trunk", "experts", "slots"), [
    ("ultra", 111_107_440_640, 25_829_572_608, 16), ("workstation", 0, 25_829_572_608, None),
    ("server", 0, 25_829_572_608, None), ("max", 0, 0, 82_432),
])  # fmt: skip
def test_presets_of_the_released_model(
    released_run: HostRun, preset: str, trunk: int, experts: int, slots: int | None
) -> None:
    plan = plan_budget(released_run, Wishes(preset=preset), PLENTY)
    assert (plan.trunk_bytes_per_token, plan.expert_bytes_per_token) == (trunk, experts)
    assert slots is None or plan.cache_slots == slots
    assert plan.total_bytes <= plan.limit_bytes


def test_a_gigabyte_of_trunk_saves_a_gigabyte_a_token(released_run: HostRun) -> None:
    plans = [plan_budget(released_run, Wishes(total_bytes=total * GB), PLENTY) for total in (8, 9, 40)]
    saved = [plans[0].trunk_bytes_per_token - plan.trunk_bytes_per_token for plan in plans[1:]]
    assert saved[0] == pytest.approx(1e9, rel=0.01) and saved[1] == pytest.approx(32e9, rel=0.001)
    assert all(plan.cache_slots == 16 for plan in plans)


def test_stages_pin_in_step(released_run: HostRun) -> None:
    run = replace(released_run, cuts=(0, 23, 46, 69, 93), num_shards=4)
    plan = plan_budget(run, Wishes(preset="desktop"), PLENTY)
    shares = [stage.pinned_chunks / len(chunks) for stage, chunks in zip(plan.stages, run.stage_chunks, strict=True)]
    assert max(shares) - min(shares) < 0.001 and 0.2 < min(shares) < 0.25
    assert plan.total_bytes <= plan.limit_bytes


def test_the_line_before_a_run_has_the_numbers(released_run: HostRun) -> None:
    line = plan_budget(released_run, Wishes(preset="laptop"), PLENTY).describe()
    for words in ("planned of 12.00 GB (--preset laptop)", "111.11 GB", "16 of 82,432 experts", "at most 25.83 GB"):
        assert words in line

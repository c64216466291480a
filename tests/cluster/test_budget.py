"""The division of memory: kept, used, the same every time, and never worse with more; the released model by count."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster import memory_parts
from k3ray.cluster.budget import MemoryFailure, plan_budget, resident_plan, smallest_plan
from k3ray.cluster.budget_plan import EXPERTS, PINNED, BudgetPlan, HostRun, host_run
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.plan import make_plan
from k3ray.cluster.wishes import Wishes
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.residency import fixed_residency

PLENTY = MemoryLimits(1 << 50, "MemAvailable", 1 << 50)
GB = 10**9


@pytest.fixture(scope="module")
def released(shared_data: Path) -> ModelConfig:
    return read_config(shared_data / "k3-release")


@pytest.fixture(scope="module")
def released_run(released: ModelConfig) -> HostRun:
    return HostRun(released, plan_layout(released), (0, 93), 0, threads=8, positions=4096)


@pytest.fixture(scope="module")
def small(k3b_dir: Path) -> ModelConfig:
    return read_config(k3b_dir)


@pytest.fixture(scope="module")
def small_layout(small: ModelConfig) -> TapeLayout:
    return plan_layout(small, 32 << 10)


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """(cuts of nine layers, shards, positions)."""
    inner = draw(st.sets(st.integers(1, 8), max_size=4))
    return (0, *sorted(inner), 9), draw(st.integers(0, 5)), draw(st.integers(1, 2000))


def run_of(
    config: ModelConfig, layout: TapeLayout | None, placement: tuple[tuple[int, ...], int, int], ring: int = 4
) -> HostRun:
    cuts, shards, positions = placement
    return HostRun(config, layout, cuts, shards, threads=2, positions=positions, ring_chunks=ring)


def check_division(run: HostRun, plan: BudgetPlan) -> None:
    """What holds for every plan, whatever was wished: parts and counts say the same, and every chunk has one fate."""
    assert plan.total_bytes <= plan.limit_bytes
    assert plan.total_bytes == sum(plan.parts().values()) and min(plan.parts().values()) >= 0
    assert run.layout is not None
    streamed = 0
    for stage, chunks in zip(plan.stages, run.stage_chunks, strict=True):
        residency = fixed_residency(run.layout, chunks, stage.pinned_chunks, stage.ring_chunks)
        assert stage.parts[PINNED] == residency.pinned_bytes
        trunk = sum(stage.parts.get(part, 0) for part in (PINNED, "tape ring", "matrix in one piece"))
        assert trunk == residency.memory_bytes
        assert stage.streamed_bytes == sum(run.layout.chunks[n].nbytes for n in chunks[stage.pinned_chunks :])
        streamed += stage.streamed_bytes
    assert sum(len(chunks) for chunks in run.stage_chunks) == len(run.layout.chunks)
    assert plan.trunk_bytes_per_token == streamed
    assert plan.trunk_bytes == sum(chunk.nbytes for chunk in run.layout.chunks)
    owners = plan.shards or plan.stages
    slot = memory_parts.expert_slot_bytes(run.config)
    for owner, owned in zip(owners, run.owned_experts, strict=True):
        assert min(owned, run.config.num_experts_per_token) <= owner.cache_slots <= owned == owner.owned_experts
        assert owner.parts.get(EXPERTS, 0) == owner.cache_slots * slot
    assert sum(run.owned_experts) == len(run.config.moe_layers) * run.config.num_experts


@given(placement=placements(), ring=st.integers(1, 300), parts=st.tuples(*[st.integers(0, 10_000)] * 4))
def test_a_total_is_kept_and_more_never_reads_more(
    small: ModelConfig,
    small_layout: TapeLayout,
    placement: tuple[tuple[int, ...], int, int],
    ring: int,
    parts: tuple[int, ...],
) -> None:
    run = run_of(small, small_layout, placement, ring)
    least, most = smallest_plan(run).total_bytes, resident_plan(run).total_bytes
    assert least <= most
    before: BudgetPlan | None = None
    for share in sorted(parts):
        total = least + (most - least) * share // 9_000
        plan = plan_budget(run, Wishes(total_bytes=total), PLENTY)
        assert plan == plan_budget(run, Wishes(total_bytes=total), PLENTY)
        check_division(run, plan)
        if before is not None:
            assert plan.trunk_bytes_per_token <= before.trunk_bytes_per_token
            assert plan.bytes_per_token <= before.bytes_per_token
            owners = zip(before.shards or before.stages, plan.shards or plan.stages, strict=True)
            assert all(earlier.cache_slots <= later.cache_slots for earlier, later in owners)
        if total >= most:
            assert plan.bytes_per_token == 0
        elif plan.trunk_bytes_per_token:
            assert plan.total_bytes + 2 * small_layout.chunk_bytes * (1 + ring) * run.num_stages > total
        before = plan


@given(placement=placements(), trunk=st.integers(0, 6_000_000), cache=st.integers(0, 3_000_000))
def test_the_parts_that_were_asked_for_are_given(
    small: ModelConfig,
    small_layout: TapeLayout,
    placement: tuple[tuple[int, ...], int, int],
    trunk: int,
    cache: int,
) -> None:
    run = run_of(small, small_layout, placement)
    plan = plan_budget(run, Wishes(trunk_bytes=trunk, cache_bytes=cache), PLENTY)
    check_division(run, plan)
    pinned, slots = plan.parts().get(PINNED, 0), plan.cache_slots
    assert pinned <= trunk and (pinned + small_layout.chunk_bytes > trunk or not plan.trunk_bytes_per_token)
    floors = sum(min(owned, small.num_experts_per_token) for owned in run.owned_experts)
    asked = cache // memory_parts.expert_slot_bytes(small)
    assert slots == min(sum(run.owned_experts), max(floors, asked))
    total = plan.total_bytes
    only_trunk = plan_budget(run, Wishes(total_bytes=total, trunk_bytes=trunk), PLENTY)
    check_division(run, only_trunk)
    assert only_trunk.parts().get(PINNED, 0) == pinned and only_trunk.cache_slots >= slots
    only_cache = plan_budget(run, Wishes(total_bytes=total, cache_bytes=cache), PLENTY)
    check_division(run, only_cache)
    assert only_cache.cache_slots == slots and only_cache.parts().get(PINNED, 0) >= pinned


@given(placement=placements(), short=st.integers(1, 50_000_000), tape=st.booleans())
def test_what_cannot_hold_is_refused_with_the_numbers(
    small: ModelConfig, small_layout: TapeLayout, placement: tuple[tuple[int, ...], int, int], short: int, tape: bool
) -> None:
    run = run_of(small, small_layout if tape else None, placement)
    least = smallest_plan(run)
    total = least.total_bytes - short
    with pytest.raises(MemoryFailure, match="this run needs at least") as failure:
        plan_budget(run, Wishes(total_bytes=total), PLENTY)
    for number in (least.total_bytes, total, *least.parts().values()):
        assert f"{number / 1e9:,.2f} GB" in str(failure.value)
    assert plan_budget(run, Wishes(total_bytes=least.total_bytes), PLENTY).total_bytes <= least.total_bytes


@given(placement=placements(), available=st.integers(0, 800_000_000))
def test_without_wishes_everything_if_it_fits_else_a_share_of_what_is_there(
    small: ModelConfig, small_layout: TapeLayout, placement: tuple[tuple[int, ...], int, int], available: int
) -> None:
    run = run_of(small, small_layout, placement)
    limits = MemoryLimits(available, "/sys/fs/cgroup/memory.max", 1 << 40)
    try:
        plan = plan_budget(run, Wishes(), limits)
    except MemoryFailure as failure:
        assert smallest_plan(run).total_bytes > available * 9 // 10
        assert "90%" in str(failure) and "/sys/fs/cgroup/memory.max" in str(failure)
        return
    check_division(run, plan)
    assert plan.total_bytes <= available
    if resident_plan(run).total_bytes <= available:
        assert plan.bytes_per_token == 0
    else:
        assert plan.total_bytes <= available * 9 // 10


def test_a_plan_above_what_is_available_names_the_limit(small: ModelConfig, small_layout: TapeLayout) -> None:
    run = run_of(small, small_layout, ((0, 9), 0, 100))
    limits = MemoryLimits(400_000_000, "/sys/fs/cgroup/a/memory.max", 1 << 40)
    with pytest.raises(MemoryFailure, match=r"0\.40 GB are available now \(/sys/fs/cgroup/a/memory\.max\)"):
        plan_budget(run, Wishes(preset="max"), limits)
    assert plan_budget(run, Wishes(preset="laptop"), PLENTY).bytes_per_token == 0


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
    assert memory_parts.expert_slot_bytes(config) == 17_547_264 + 6 * 4096
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
    check_division(released_run, plan)


def test_a_gigabyte_of_trunk_saves_a_gigabyte_a_token(released_run: HostRun) -> None:
    plans = [plan_budget(released_run, Wishes(total_bytes=total * GB), PLENTY) for total in (8, 9, 40)]
    saved = [plans[0].trunk_bytes_per_token - plan.trunk_bytes_per_token for plan in plans[1:]]
    assert saved[0] == pytest.approx(1e9, rel=0.01) and saved[1] == pytest.approx(32e9, rel=0.001)
    assert all(plan.cache_slots == 16 for plan in plans)


def test_shards_that_hold_all_their_experts_cost_nothing(small: ModelConfig, small_layout: TapeLayout) -> None:
    """16 experts on three shards, top-4 of them: 6, 5 and 5 a layer."""
    run = run_of(small, small_layout, ((0, 9), 3, 50))
    moe, expert = len(small.moe_layers), memory_parts.expert_bytes(small)
    slot = memory_parts.expert_slot_bytes(small)
    assert run.owned_experts == (6 * moe, 5 * moe, 5 * moe)
    everything = resident_plan(run)
    one_short = everything.total_bytes - slot
    plan = plan_budget(run, Wishes(total_bytes=one_short), PLENTY)
    assert [shard.owned_experts - shard.cache_slots for shard in plan.shards].count(1) == 1
    assert plan.expert_bytes_per_token == moe * 4 * expert
    assert plan.trunk_bytes_per_token == 0


def test_stages_pin_in_step(released_run: HostRun) -> None:
    run = replace(released_run, cuts=(0, 23, 46, 69, 93), num_shards=4)
    plan = plan_budget(run, Wishes(preset="desktop"), PLENTY)
    shares = [stage.pinned_chunks / len(chunks) for stage, chunks in zip(plan.stages, run.stage_chunks, strict=True)]
    assert max(shares) - min(shares) < 0.001 and 0.2 < min(shares) < 0.25
    check_division(run, plan)


def test_a_run_is_taken_from_the_placement(small: ModelConfig, small_layout: TapeLayout) -> None:
    placement = make_plan(CheckpointSpec(Path("model"), None, 9), 4, 2, 7, range(8))
    run = host_run(small, placement, small_layout, positions=12, starts_ray=False)
    assert run.cuts == (0, 2, 4, 6, 9) and run.num_shards == 2 and run.threads == 2
    assert "Ray's daemons" not in smallest_plan(run).parts()
    assert "Ray's daemons" in smallest_plan(replace(run, starts_ray=True)).parts()


def test_a_truncated_model_uses_its_part_of_the_whole_tape(small: ModelConfig, small_layout: TapeLayout) -> None:
    run = HostRun(small.truncated(4), small_layout, (0, 4), 0, threads=1, positions=10)
    plan = smallest_plan(replace(run, ring_chunks=1))
    wanted = small_layout.chunks_of(0, 4, True)
    assert plan.trunk_bytes == sum(small_layout.chunks[number].nbytes for number in wanted)
    assert asdict(plan)["trunk_bytes"] == plan.trunk_bytes


def test_the_line_before_a_run_has_the_numbers(released_run: HostRun) -> None:
    line = plan_budget(released_run, Wishes(preset="laptop"), PLENTY).describe()
    for words in ("planned of 12.00 GB (--preset laptop)", "111.11 GB", "16 of 82,432 experts", "at most 25.83 GB"):
        assert words in line

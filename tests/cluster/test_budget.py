"""The division of memory: kept, used, the same every time, and never worse with more."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster import memory_parts
from k3ray.cluster.budget import MemoryFailure, plan_budget, resident_plan, smallest_plan
from k3ray.cluster.budget_plan import COPY, EXPERTS, PINNED, RING, BudgetPlan, HostRun, gigabytes, host_run
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.plan import make_plan
from k3ray.cluster.trunk_dial import trunk_dial
from k3ray.cluster.wishes import Wishes
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout
from k3ray.workers.tape.residency import fixed_residency, pinning_order

PLENTY = MemoryLimits(1 << 50, "MemAvailable", 1 << 50)
GB = 10**9
Placement = tuple[tuple[int, ...], int, int]


# Nine layers in small chunks. No fixture: hypothesis would print it with every failure.
SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
SMALL_LAYOUT = plan_layout(SMALL, 32 << 10)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """(cuts of nine layers, shards, positions)."""
    inner = draw(st.sets(st.integers(1, 8), max_size=4))
    return (0, *sorted(inner), 9), draw(st.integers(0, 5)), draw(st.integers(1, 2000))


def run_of(placement: Placement, ring: int = 4, tape: bool = True) -> HostRun:
    cuts, shards, positions = placement
    layout = SMALL_LAYOUT if tape else None
    return HostRun(SMALL, layout, cuts, shards, threads=2, positions=positions, ring_chunks=ring)


def check_division(run: HostRun, plan: BudgetPlan) -> None:
    """What holds for every plan, whatever was wished: parts and counts say the same, and every chunk has one fate."""
    assert plan.total_bytes <= plan.limit_bytes
    assert plan.total_bytes == sum(plan.parts().values()) and min(plan.parts().values()) >= 0
    assert run.layout is not None
    streamed = 0
    for stage, chunks in zip(plan.stages, run.stage_chunks, strict=True):
        residency = fixed_residency(run.layout, chunks, stage.pinned_chunks, stage.ring_chunks)
        assert stage.parts.get(PINNED, 0) == residency.pinned_bytes
        trunk = sum(stage.parts.get(part, 0) for part in (PINNED, RING, COPY))
        assert trunk == residency.memory_bytes
        passing = pinning_order(len(chunks))[stage.pinned_chunks :]
        assert stage.streamed_bytes == sum(run.layout.chunks[chunks[place]].nbytes for place in passing)
        streamed += stage.streamed_bytes
    assert sum(len(chunks) for chunks in run.stage_chunks) == len(run.layout.chunks)
    assert plan.trunk_bytes_per_token == streamed
    assert plan.trunk_bytes == sum(chunk.nbytes for chunk in run.layout.chunks)
    owners = plan.shards or plan.stages
    slot = expert_slot_bytes(run.config)
    for owner, owned in zip(owners, run.owned_experts, strict=True):
        assert min(owned, run.config.num_experts_per_token) <= owner.cache_slots <= owned == owner.owned_experts
        assert owner.parts.get(EXPERTS, 0) == owner.cache_slots * slot
    assert sum(run.owned_experts) == len(run.config.moe_layers) * run.config.num_experts


@given(placement=placements(), ring=st.integers(1, 300), parts=st.tuples(*[st.integers(0, 10_000)] * 4))
def test_a_total_is_kept_and_more_never_reads_more(
    placement: Placement,
    ring: int,
    parts: tuple[int, ...],
) -> None:
    run = run_of(placement, ring)
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
            assert plan.total_bytes + 2 * SMALL_LAYOUT.chunk_bytes * (1 + ring) * run.num_stages > total
        before = plan


@given(placement=placements(), trunk=st.integers(0, 6_000_000), cache=st.integers(0, 3_000_000))
def test_the_parts_that_were_asked_for_are_given(
    placement: Placement,
    trunk: int,
    cache: int,
) -> None:
    run = run_of(placement)
    plan = plan_budget(run, Wishes(trunk_bytes=trunk, cache_bytes=cache), PLENTY)
    check_division(run, plan)
    pinned, slots = plan.parts().get(PINNED, 0), plan.cache_slots
    assert pinned <= trunk and (pinned + SMALL_LAYOUT.chunk_bytes > trunk or not plan.trunk_bytes_per_token)
    floors = sum(min(owned, SMALL.num_experts_per_token) for owned in run.owned_experts)
    asked = cache // expert_slot_bytes(SMALL)
    assert slots == min(sum(run.owned_experts), max(floors, asked))
    total = plan.total_bytes
    only_trunk = plan_budget(run, Wishes(total_bytes=total, trunk_bytes=trunk), PLENTY)
    check_division(run, only_trunk)
    assert only_trunk.parts().get(PINNED, 0) == pinned and only_trunk.cache_slots >= slots
    only_cache = plan_budget(run, Wishes(total_bytes=total, cache_bytes=cache), PLENTY)
    check_division(run, only_cache)
    assert only_cache.cache_slots == slots and only_cache.parts().get(PINNED, 0) >= pinned


@given(placement=placements(), short=st.integers(1, 50_000_000), tape=st.booleans())
def test_what_cannot_hold_is_refused_with_the_numbers(placement: Placement, short: int, tape: bool) -> None:
    run = run_of(placement, tape=tape)
    least = smallest_plan(run)
    total = least.total_bytes - short
    with pytest.raises(MemoryFailure, match="this run needs at least") as failure:
        plan_budget(run, Wishes(total_bytes=total), PLENTY)
    assert f"needs at least {least.total_bytes / 1e9:.2f} GB" in str(failure.value)
    assert f"found {total / 1e9:.2f} GB (--memory)" in str(failure.value)
    for part, nbytes in least.parts().items():
        assert nbytes == 0 or f"{part} {gigabytes(nbytes)}" in str(failure.value)
    assert plan_budget(run, Wishes(total_bytes=least.total_bytes), PLENTY).total_bytes <= least.total_bytes


@given(placement=placements(), share=st.integers(-100, 1200))
def test_without_wishes_everything_if_it_fits_else_a_share_of_what_is_there(placement: Placement, share: int) -> None:
    run = run_of(placement)
    least, most = smallest_plan(run).total_bytes, resident_plan(run).total_bytes
    available = least + (most - least) * share // 100
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


def test_a_plan_above_what_is_available_names_the_limit() -> None:
    run = run_of(((0, 9), 0, 100))
    limits = MemoryLimits(400_000_000, "/sys/fs/cgroup/a/memory.max", 1 << 40)
    with pytest.raises(MemoryFailure, match=r"0\.40 GB are available now \(/sys/fs/cgroup/a/memory\.max\)"):
        plan_budget(run, Wishes(preset="max"), limits)
    assert plan_budget(run, Wishes(preset="laptop"), PLENTY).bytes_per_token == 0


def test_shards_that_hold_all_their_experts_cost_nothing() -> None:
    """16 experts on three shards, top-4 of them: 6, 5 and 5 a layer."""
    run = run_of(((0, 9), 3, 50))
    moe, expert = len(SMALL.moe_layers), memory_parts.expert_bytes(SMALL)
    slot = expert_slot_bytes(SMALL)
    assert run.owned_experts == (6 * moe, 5 * moe, 5 * moe)
    everything = resident_plan(run)
    one_short = everything.total_bytes - slot
    plan = plan_budget(run, Wishes(total_bytes=one_short), PLENTY)
    assert [shard.owned_experts - shard.cache_slots for shard in plan.shards].count(1) == 1
    assert plan.expert_bytes_per_token == moe * 4 * expert
    assert plan.trunk_bytes_per_token == 0


def test_a_run_is_taken_from_the_placement() -> None:
    placement = make_plan(CheckpointSpec(Path("model"), None, 9), 4, 2, 7, range(8))
    run = host_run(SMALL, placement, SMALL_LAYOUT, positions=12, starts_ray=False)
    assert run.cuts == (0, 2, 4, 6, 9) and run.num_shards == 2 and run.threads == 2
    assert "Ray's daemons" not in smallest_plan(run).parts()
    assert "Ray's daemons" in smallest_plan(replace(run, starts_ray=True)).parts()


def test_a_truncated_model_uses_its_part_of_the_whole_tape() -> None:
    run = HostRun(SMALL.truncated(4), SMALL_LAYOUT, (0, 4), 0, threads=1, positions=10)
    plan = smallest_plan(replace(run, ring_chunks=1))
    wanted = SMALL_LAYOUT.chunks_of(0, 4, True)
    assert plan.trunk_bytes == sum(SMALL_LAYOUT.chunks[number].nbytes for number in wanted)
    assert asdict(plan)["trunk_bytes"] == plan.trunk_bytes


@given(placement=placements(), ring=st.integers(1, 300), pages=st.sampled_from([1, 2, 3, 8, 40]))
def test_the_dial_counts_as_the_tape_will_map(placement: Placement, ring: int, pages: int) -> None:
    layout = plan_layout(SMALL, pages << 12)
    run = replace(run_of(placement, ring), layout=layout)
    dial = trunk_dial(run)
    assert dial.last == len(layout.chunks) and len(dial.order) == dial.last
    for notch in {0, 1, dial.last // 3, dial.last - 1, dial.last}:
        mapped = [
            fixed_residency(layout, chunks, pinned, ring)
            for chunks, pinned in zip(run.stage_chunks, dial.pinned_chunks(notch), strict=True)
        ]
        assert dial.memory_bytes[notch] == sum(residency.memory_bytes for residency in mapped)
        assert dial.pinned_bytes[notch] == sum(residency.pinned_bytes for residency in mapped)

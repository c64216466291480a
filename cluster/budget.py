"""Dividing a host's memory between trunk and experts: a pure function, done before the first byte is loaded.

Trunk first. A byte of pinned trunk is a byte that no token reads again; a byte of expert slots saves what the router
happens to ask for again, a fraction of that (docs/memory.md). More memory never makes a token read more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3ray.cluster.budget_plan import (
    COPY,
    EXPERTS,
    PINNED,
    RING,
    ActorBudget,
    BudgetPlan,
    HostRun,
    fixed_parts,
    gigabytes,
)
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.memory_parts import expert_bytes, trunk_bytes
from k3ray.cluster.presets import AVAILABLE_SHARE, PRESETS
from k3ray.cluster.trunk_dial import TrunkDial, trunk_dial
from k3ray.cluster.wishes import AUTO, Wishes
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.failure import Failure
from k3ray.workers.tape.layout import plan_layout
from k3ray.workers.tape.residency import fixed_residency

ROUNDING = 50_000_000  # what a refusal recommends is a whole number of these


class MemoryFailure(Failure):
    """A run that does not fit into the memory it may have."""


def plan_budget(run: HostRun, wishes: Wishes, limits: MemoryLimits) -> BudgetPlan:
    """Divide what the wishes allow; with none, everything is resident if it fits in what is available, else auto.

    Raises MemoryFailure with the numbers when the run cannot be held, or when the plan is more than is available.
    """
    if wishes == Wishes():
        plan = resident_plan(run, limits.available_bytes, "available")
        if plan.total_bytes <= limits.available_bytes:
            return plan
        wishes = Wishes(preset=AUTO)
    total, said = _total(run, wishes, limits)
    plan = _divide(run, wishes, total, said)
    if plan.total_bytes > limits.available_bytes:
        raise MemoryFailure(
            f"{wishes.said}: the plan takes {gigabytes(plan.total_bytes)} and {gigabytes(limits.available_bytes)} are "
            f"available now ({limits.decided_by}); ask for less, or for --preset auto, or end other programs"
        )
    return plan


def smallest_plan(run: HostRun) -> BudgetPlan:
    """The least that the arithmetic allows: the trunk streamed where that takes less, and one token's experts."""
    dial = trunk_dial(run)
    return _plan(run, dial, min(range(dial.last + 1), key=dial.memory_bytes.__getitem__), _floors(run), 0, "the least")


def resident_plan(run: HostRun, limit_bytes: int = 0, limit_said: str = "everything") -> BudgetPlan:
    """Everything in memory: nothing is read after loading."""
    dial = trunk_dial(run)
    return _plan(run, dial, dial.last, run.owned_experts, limit_bytes, limit_said)


def _total(run: HostRun, wishes: Wishes, limits: MemoryLimits) -> tuple[int, str]:
    """(bytes of all processes, why so many)."""
    if wishes.total_bytes is not None:
        return wishes.total_bytes, "--memory"
    name = wishes.preset or AUTO
    if wishes.preset is None and wishes.trunk_bytes is not None and wishes.cache_bytes is not None:
        return limits.available_bytes, "available"
    fixed = PRESETS[name].total_bytes
    if fixed is not None:
        return fixed, f"--preset {name}"
    if name == AUTO:
        share = f"{AVAILABLE_SHARE:.0%} of the {gigabytes(limits.available_bytes)} available, {limits.decided_by}"
        return int(limits.available_bytes * AVAILABLE_SHARE), share
    plan = smallest_plan(run) if name == "ultra" else resident_plan(run)
    return plan.total_bytes, f"--preset {name}"


def _divide(run: HostRun, wishes: Wishes, total: int, said: str) -> BudgetPlan:
    dial, slot = trunk_dial(run), expert_slot_bytes(run.config)
    slots = _floors(run)
    if wishes.cache_bytes is not None:
        slots = _share_slots(run, slots, wishes.cache_bytes // slot - sum(slots))
    room = total - smallest_fixed(run) - slot * sum(slots)
    notch = dial.highest(room)
    if wishes.trunk_bytes is not None:
        notch = _asked_notch(run, dial, wishes.trunk_bytes)
    if notch is None or dial.memory_bytes[notch] > room:
        least = notch if notch is not None else min(range(dial.last + 1), key=dial.memory_bytes.__getitem__)
        raise _refusal(run, _plan(run, dial, least, slots, total, said), wishes)
    if wishes.cache_bytes is None and (notch == dial.last or wishes.trunk_bytes is not None):
        slots = _share_slots(run, slots, (room - dial.memory_bytes[notch]) // slot)
    return _plan(run, dial, notch, slots, total, said)


def smallest_fixed(run: HostRun) -> int:
    """Bytes of everything but trunk and experts."""
    host, stages, shards = fixed_parts(run)
    return sum(sum(parts.values()) for parts in (host, *stages, *shards))


def _asked_notch(run: HostRun, dial: TrunkDial, pinned_bytes: int) -> int:
    if run.layout is None and pinned_bytes < dial.pinned_bytes[0]:
        raise MemoryFailure(
            f"--trunk-gb {pinned_bytes / 1e9:g}: without a tape all {gigabytes(dial.pinned_bytes[0])} of the trunk "
            "stay in memory; make one with `k3ray pack MODEL_DIR OUT`"
        )
    return dial.of_pinned(pinned_bytes)


def _floors(run: HostRun) -> tuple[int, ...]:
    """The fewest slots of every owner: one token's experts of a layer, so that they can be read all at once."""
    return tuple(min(owned, run.config.num_experts_per_token) for owned in run.owned_experts)


def _share_slots(run: HostRun, floors: Sequence[int], extra: int) -> tuple[int, ...]:
    """The floors and up to `extra` slots more, dealt out one at a time to the owner that lacks the largest share.

    An owner never has fewer slots for a larger `extra`, and none has more than it owns experts.
    """
    slots = list(floors)
    lacking = [owned - floor for owned, floor in zip(run.owned_experts, floors, strict=True)]
    extra, total = max(0, min(extra, sum(lacking))), sum(lacking)
    shares = [extra * count // total for count in lacking] if total else [0] * len(lacking)
    while sum(shares) < extra:
        open_owners = [owner for owner, count in enumerate(lacking) if shares[owner] < count]
        shares[min(open_owners, key=lambda owner: ((shares[owner] + 1) / lacking[owner], owner))] += 1
    return tuple(floor + share for floor, share in zip(slots, shares, strict=True))


def _plan(
    run: HostRun, dial: TrunkDial, notch: int, slots: Sequence[int], limit_bytes: int, limit_said: str
) -> BudgetPlan:
    """Write the division down, process by process."""
    host, stage_parts, shard_parts = fixed_parts(run)
    slot = expert_slot_bytes(run.config)
    pinned = dial.pinned_chunks(notch)
    stages = []
    for stage, parts in enumerate(stage_parts):
        parts, ring_chunks, streamed = _trunk_parts(run, stage, pinned[stage], parts)
        cache_slots, owned = (0, 0) if run.num_shards else (slots[stage], run.owned_experts[stage])
        layers = run.layers(stage)
        name = f"layers {layers.start}..{layers.stop - 1}"
        parts = {**parts, **({EXPERTS: cache_slots * slot} if cache_slots else {})}
        stages.append(ActorBudget(name, pinned[stage], ring_chunks, streamed, cache_slots, owned, parts))
    shards = [
        ActorBudget(
            f"shard {shard} of {run.num_shards}", 0, 0, 0, slots[shard], run.owned_experts[shard],
            {**parts, EXPERTS: slots[shard] * slot},
        )
        for shard, parts in enumerate(shard_parts)
    ]  # fmt: skip
    return BudgetPlan(
        limit_bytes=limit_bytes,
        limit_said=limit_said,
        host_parts=host,
        stages=tuple(stages),
        shards=tuple(shards),
        trunk_bytes=dial.pinned_bytes[dial.last],
        trunk_bytes_per_token=sum(stage.streamed_bytes for stage in stages),
        expert_bytes_per_token=_expert_bytes_per_token(run, slots),
    )


def _trunk_parts(run: HostRun, stage: int, pinned: int, parts: dict[str, int]) -> tuple[dict[str, int], int, int]:
    """(the stage's parts with its trunk, chunks of its ring, bytes streamed a step)."""
    if run.layout is None:
        return {**parts, PINNED: trunk_bytes(run.config, run.layers(stage), run.has_head(stage))}, 0, 0
    chunks = run.stage_chunks[stage]
    residency = fixed_residency(run.layout, chunks, pinned, run.ring_chunks)
    trunk = {PINNED: residency.pinned_bytes, RING: residency.ring_bytes, COPY: residency.whole_bytes}
    present = {name: nbytes for name, nbytes in trunk.items() if nbytes}
    return {**parts, **present}, residency.ring_chunks, residency.streamed_bytes


def _expert_bytes_per_token(run: HostRun, slots: Sequence[int]) -> int:
    """What one token's routed experts cost at most: those of owners that hold all they own cost nothing."""
    config = run.config
    short = [owned > held for owned, held in zip(run.owned_experts, slots, strict=True)]
    if run.num_shards:
        a_layer = [owned // max(1, len(config.moe_layers)) for owned in run.owned_experts]
        missing = sum(count for count, lacks in zip(a_layer, short, strict=True) if lacks)
        experts = len(config.moe_layers) * min(config.num_experts_per_token, missing)
    else:
        layers = sum(run.moe_layers(stage) for stage, lacks in enumerate(short) if lacks)
        experts = layers * config.num_experts_per_token
    return experts * expert_bytes(config)


def _refusal(run: HostRun, least: BudgetPlan, wishes: Wishes) -> MemoryFailure:
    """Why not even the least that the wishes allow fits, with the arithmetic and what to do."""
    parts = ", ".join(f"{name} {gigabytes(nbytes)}" for name, nbytes in least.parts().items() if nbytes)
    enough = -(-least.total_bytes // ROUNDING) * ROUNDING
    advice = f"give at least {enough / 1e9:g}G"
    if wishes.trunk_bytes is not None or wishes.cache_bytes is not None:
        advice += ", or less to --trunk-gb and --cache-gb"
    if run.layout is None:
        streamed = smallest_plan(replace(run, layout=plan_layout(run.config))).total_bytes
        if streamed < least.total_bytes:
            advice = (
                f"make a tape of the trunk, once, with `k3ray pack MODEL_DIR OUT`: then {gigabytes(streamed)} are "
                f"enough; or {advice}"
            )
    return MemoryFailure(
        f"this run needs at least {gigabytes(least.total_bytes)}: {parts} (for {run.positions:,} positions); found "
        f"{gigabytes(least.limit_bytes)} ({least.limit_said}): {advice}, or ask for fewer tokens, stages or shards"
    )

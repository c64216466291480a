"""What a stage or a shard of a placement takes, from what it has: one arithmetic for planning and for checking."""

from __future__ import annotations

from k3ray.cluster.budget_plan import EXPERTS, ActorBudget
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.workers.expert_reader import expert_slot_bytes


def stage_budget(
    costs: LayerCosts, run: range, threads: int, remote: bool, pinned_chunks: int, slots: int
) -> ActorBudget:
    """The budget of a stage with a run of layers, of whose chunks pinned_chunks stay. remote: shards hold the experts.

    slots: of experts, 0 where shards hold them.
    """
    first, stop, config = run.start, run.stop, costs.config
    alone = len(run) == config.num_hidden_layers
    parts = costs.stage_parts(first, stop, threads, remote, alone) | costs.trunk_parts(first, stop, pinned_chunks)
    if slots:
        parts[EXPERTS] = slots * expert_slot_bytes(config)
    return ActorBudget(
        f"layers {first}..{stop - 1}",
        pinned_chunks,
        costs.ring_chunks(first, stop, pinned_chunks),
        costs.streamed_bytes(first, stop, pinned_chunks),
        slots,
        0 if remote else sum(config.is_moe(layer) for layer in run) * config.num_experts,
        parts,
    )


def shard_budget(costs: LayerCosts, number: int, num_shards: int, owned: int, slots: int) -> ActorBudget:
    """The budget of a shard that owns so many experts, of which `slots` find room at a time."""
    parts = {**costs.shard_parts(), EXPERTS: slots * expert_slot_bytes(costs.config)}
    return ActorBudget(f"shard {number} of {num_shards}", 0, 0, 0, slots, owned, parts)

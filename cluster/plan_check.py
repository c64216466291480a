"""Whether a placement that comes from a file is one that the planner could have made: every layer and expert once, and
every byte what the arithmetic of the plan gives for it, so that nothing is held that was not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3ray.cluster.budget_plan import ActorBudget
from k3ray.cluster.part_budgets import shard_budget, stage_budget
from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import MAX_POSITIONS
from k3ray.workers.counted import counted
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import ChunkSizeFailure, plan_layout

Problem = tuple[str, str]  # what was found, what was expected


def find_problems(plan: Placement, config: ModelConfig) -> Iterator[Problem]:
    """Every rule that the plan breaks; its bytes are looked at only where the rest is sound. config: of its layers."""
    found = [*_layer_problems(plan, config), *_expert_problems(plan, config), *_actor_problems(plan)]
    yield from found or _byte_problems(plan, config)


def _layer_problems(plan: Placement, config: ModelConfig) -> Iterator[Problem]:
    ends = [0, *(stage.stop for stage in plan.stages)]
    begins = [*(stage.first for stage in plan.stages), config.num_hidden_layers]
    if ends != begins or any(stage.first >= stage.stop for stage in plan.stages):
        listed = ", ".join(f"{stage.first}..{stage.stop - 1}" for stage in plan.stages)
        yield f"stages with the layers {listed}", f"0..{config.num_hidden_layers - 1}, each once, in order"
    if (plan.num_layers, plan.num_experts) != (config.num_hidden_layers, config.num_experts):
        yield f"num_layers {plan.num_layers}, num_experts {plan.num_experts}", "those of the model"
    if any((shard.first, shard.stop) != (0, 0) for shard in plan.shards):
        yield "a shard with layers", "first and stop 0 of every shard"


def _expert_problems(plan: Placement, config: ModelConfig) -> Iterator[Problem]:
    dealt = sorted(layer for group in plan.experts for layer in group.layers)
    if dealt != (list(config.moe_layers) if plan.shards else []):
        yield (
            f"experts of {counted(len(dealt), 'layer')} dealt out",
            "those of every MoE layer once, if there are shards",
        )
    for group in plan.experts:
        whole = len(group.layers) * config.num_experts
        if len(group.counts) != len(plan.shards) or min(group.counts, default=0) < 0 or sum(group.counts) != whole:
            yield (
                f"{counted(sum(group.counts), 'expert')} over {counted(len(group.counts), 'shard')}",
                f"{whole} over all shards",
            )
    for number, shard in enumerate(plan.shards):
        owned = sum(group.counts[number] for group in plan.experts if number < len(group.counts))
        if shard.budget.owned_experts != owned:
            yield f"shard {number} with {counted(shard.budget.owned_experts, 'expert')}", f"{owned}, as they are dealt"


def _actor_problems(plan: Placement) -> Iterator[Problem]:
    for actor in (*plan.stages, *plan.shards):
        budget = actor.budget
        numbers = (actor.node, actor.threads - 1, budget.pinned_chunks, budget.ring_chunks, budget.streamed_bytes,
                   budget.cache_slots, *actor.cores, *budget.parts.values())  # fmt: skip
        if min(numbers) < 0 or actor.node >= len(plan.nodes) or budget.cache_slots > budget.owned_experts:
            yield f"numbers of the actor {budget.name!r} that cannot be", "a node of the plan, nothing negative"
        if len(set(actor.cores)) < len(actor.cores) or len(actor.cores) > actor.threads:
            cores = f"{counted(actor.threads, 'thread')} on the cores {list(actor.cores)}"
            yield f"{cores} of {budget.name!r}", "every core once, and no more of them than threads"


def _byte_problems(plan: Placement, config: ModelConfig) -> Iterator[Problem]:
    """What the plan says that something takes, and is not what it takes."""
    if not 1 <= plan.positions <= MAX_POSITIONS:
        yield f"positions {plan.positions}", f"1 to {MAX_POSITIONS}"
        return
    try:
        costs = LayerCosts(config, plan_layout(config, plan.chunk_bytes), plan.positions)
    except ChunkSizeFailure as failure:
        yield f"chunk_bytes {plan.chunk_bytes}", str(failure)
        return
    for stage in plan.stages:
        yield from _stage_problems(plan, stage, costs)
    for number, shard in enumerate(plan.shards):
        budget = shard.budget
        expected = shard_budget(costs, number, len(plan.shards), budget.owned_experts, budget.cache_slots)
        yield from _budget_problems(budget, expected, config)
    yield from _node_problems(plan, costs)


def _stage_problems(plan: Placement, stage: ActorPlacement, costs: LayerCosts) -> Iterator[Problem]:
    budget, run = stage.budget, range(stage.first, stage.stop)
    chunks = costs.all_chunks(stage.first, stage.stop)
    if budget.pinned_chunks > chunks:
        yield f"{budget.name!r} with {counted(budget.pinned_chunks, 'chunk')} in memory", f"at most its {chunks}"
        return
    expected = stage_budget(costs, run, stage.threads, bool(plan.shards), budget.pinned_chunks, budget.cache_slots)
    yield from _budget_problems(budget, expected, costs.config)


def _budget_problems(found: ActorBudget, expected: ActorBudget, config: ModelConfig) -> Iterator[Problem]:
    least = min(expected.owned_experts, config.num_experts_per_token)
    if found.cache_slots < least:
        yield (
            f"{found.name!r} with room for {counted(found.cache_slots, 'expert')}",
            f"at least the {least} of one token",
        )
    for name in ("name", "ring_chunks", "streamed_bytes", "owned_experts"):
        if getattr(found, name) != getattr(expected, name):
            yield f"{name} {getattr(found, name)!r} of {found.name!r}", f"{getattr(expected, name)!r}"
    yield from _part_problems(found.name, dict(found.parts), dict(expected.parts))


def _node_problems(plan: Placement, costs: LayerCosts) -> Iterator[Problem]:
    with_driver = [number for number, node in enumerate(plan.nodes) if costs.driver_parts().keys() & node.parts.keys()]
    if len(with_driver) != 1:
        yield f"{counted(len(with_driver), 'node')} with the driver's memory", "one"
    for number, node in enumerate(plan.nodes):
        expected = costs.once_parts() | (costs.driver_parts() if number in with_driver else {})
        yield from _part_problems(f"node {node.name}", dict(node.parts), expected)
        if plan.node_bytes(number) > node.budget_bytes:
            yield f"{plan.node_bytes(number):,} bytes on node {node.name}", f"at most {node.budget_bytes:,}"


def _part_problems(owner: str, found: dict[str, int], expected: dict[str, int]) -> Iterator[Problem]:
    for part in {**expected, **found}:
        if found.get(part) != expected.get(part):
            yield f"{_size(found.get(part))} for {part!r} of {owner!r}", f"{_size(expected.get(part))}, as k3ray plans"


def _size(nbytes: int | None) -> str:
    return "nothing" if nbytes is None else f"{nbytes:,} bytes"

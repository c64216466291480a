"""A placement as a run's memory budget: what is planned in all and by part, and a few lines that say who gets what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3ray.cluster.budget_plan import EXPERTS, PINNED, ActorBudget, gigabytes
from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.workers.counted import counted


@dataclass(frozen=True, slots=True)
class PlacedBudget:
    """The memory of all nodes of a placement."""

    placement: Placement

    @property
    def total_bytes(self) -> int:
        """Everything of all processes on all nodes."""
        return sum(self.placement.node_bytes(number) for number in range(len(self.placement.nodes)))

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, over all nodes."""
        total: dict[str, int] = {}
        shares = [*(node.parts for node in self.placement.nodes), *(actor.budget.parts for actor in self._actors())]
        for parts in shares:
            for name, nbytes in parts.items():
                total[name] = total.get(name, 0) + nbytes
        return total

    def describe(self) -> str:
        """The plan in a line for all and one for each node."""
        return "\n".join(self._lines())

    def _actors(self) -> tuple[ActorPlacement, ...]:
        return (*self.placement.stages, *self.placement.shards)

    def _lines(self) -> Iterator[str]:
        expected, plan = self.placement.prediction, self.placement
        reads = f"{gigabytes(expected.trunk_bytes)} of trunk and {gigabytes(expected.expert_bytes)} of experts"
        read = reads if expected.read_bytes else "nothing"
        yield (
            f"plan: {counted(len(plan.stages), 'stage')} and {counted(len(plan.shards), 'expert shard')} on "
            f"{counted(len(plan.nodes), 'node')}, {gigabytes(self.total_bytes)} in all; "
            f"a token reads {read} and sends {expected.network_bytes:,} bytes between nodes"
        )
        for number, node in enumerate(plan.nodes):
            actors = ", ".join(_held(actor.budget) for actor in plan.actors_of(number)) or "nothing"
            whole = f"{gigabytes(plan.node_bytes(number))} of {gigabytes(node.budget_bytes)}"
            yield f"  {node.name}: {actors}; {whole}"


def _held(budget: ActorBudget) -> str:
    """One actor: what of the trunk stays there and what of its experts."""
    if not budget.owned_experts:
        experts = ""
    else:
        experts = f"room for {budget.cache_slots:,} of {budget.owned_experts:,} experts"
        experts += f" ({gigabytes(budget.parts[EXPERTS])})" if budget.parts.get(EXPERTS) else ""
    trunk = f"{gigabytes(budget.parts[PINNED])} of trunk" if budget.parts.get(PINNED) else ""
    trunk += f"{' and ' if trunk else ''}{gigabytes(budget.streamed_bytes)} streamed" if budget.streamed_bytes else ""
    return f"{budget.name} ({', '.join(part for part in (trunk, experts) if part)})"

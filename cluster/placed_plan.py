"""From a placement and the nodes that were looked at to what each actor is told: its node, folders, cores and bytes.

Pure. Every reason why a placement cannot run on these nodes is found here, before anything is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.placement import ActorPlacement, NodePlacement, Placement
from k3ray.cluster.plan import Plan
from k3ray.cluster.seats import PlacementFailure
from k3ray.cluster.topology import NodeFacts, Verdict
from k3ray.workers.specs import CheckpointSpec, ShardSpec, StageSpec, TapeSpec

FEW_LISTED = 8
Spec = TypeVar("Spec", StageSpec, ShardSpec)


class PlacementRefused(PlacementFailure):
    """A placement that the nodes at hand cannot run; the message has every reason."""


def nodes_of(placement: Placement, verdicts: Sequence[Verdict]) -> list[NodeFacts]:
    """The facts of every node of a placement, found by name, else by address; each may be found once.

    Raises PlacementRefused for a node that is not there or cannot take part.
    """
    found, problems = [], []
    for node in placement.nodes:
        verdict = _find(node, verdicts)
        if verdict is None:
            names = ", ".join(one.node.name for one in verdicts)
            problems.append(f"node {node.name}: not in the cluster, which has {names}: start Ray there, or plan again")
        elif not verdict.usable:
            problems.append(f"node {node.name}: {'; '.join(verdict.reasons)}")
        else:
            found.append(verdict.node)
    twice = [name for name, count in Counter(node.name for node in found).items() if count > 1]
    problems += [f"node {name}: two nodes of the plan are this one: plan again" for name in twice]
    _refuse(problems)
    return found


def check_nodes(placement: Placement, nodes: Sequence[NodeFacts]) -> None:
    """Refuse nodes without the memory, cores, layers or tape that the placement takes there, with the arithmetic."""
    problems: list[str] = []
    for number, node in enumerate(nodes):
        needed = placement.node_bytes(number)
        if needed > node.available_bytes:
            parts = [f"{name} {gigabytes(size)}" for name, size in placement.nodes[number].parts.items()]
            parts += [
                f"{actor.budget.name} {gigabytes(actor.budget.total_bytes)}" for actor in placement.actors_of(number)
            ]
            problems.append(
                f"node {node.name}: the plan takes {gigabytes(needed)} ({', '.join(parts)}), and "
                f"{gigabytes(node.available_bytes)} are available there ({node.decided_by})"
            )
    for actor in (*placement.stages, *placement.shards):
        problems += _lacks(placement, actor, nodes[actor.node])
    has_driver = [number for number, node in enumerate(nodes) if node.driver]
    for number in has_driver:
        if "driver" not in placement.nodes[number].parts:
            carrier = next(node.name for node in placement.nodes if "driver" in node.parts)
            problems.append(f"node {nodes[number].name}: the plan has this command run on {carrier}: run it there")
    _refuse(problems)


def placed_plan(placement: Placement, nodes: Sequence[NodeFacts], checkpoint: CheckpointSpec, joined: bool) -> Plan:
    """What each actor is told. checkpoint: with the driver's config, whose folders are replaced by those of its node.

    joined: the nodes are those of a joined cluster, which is told what each actor takes.
    """
    on_numa: Counter[tuple[int, int | None]] = Counter()
    for actor in (*placement.stages, *placement.shards):
        on_numa[actor.node, actor.numa] += actor.budget.total_bytes

    def put(spec: Spec, actor: ActorPlacement) -> Spec:
        """With what stages and shards have in common."""
        return replace(
            spec,
            cache_slots=actor.budget.cache_slots if actor.budget.owned_experts else None,
            experts=placement.experts,
            node_id=nodes[actor.node].node_id if joined else None,
            numa=actor.numa,
            numa_bytes=None if actor.numa is None else on_numa[actor.node, actor.numa],
            memory_bytes=actor.budget.total_bytes if joined else None,
        )

    stages, shards = [], []
    for stage in placement.stages:
        where, tape = model_on(checkpoint, nodes[stage.node]), _tape(stage, nodes[stage.node])
        stages.append(put(StageSpec(where, stage.first, stage.stop, stage.threads, stage.cores, tape), stage))
    for number, shard in enumerate(placement.shards):
        where = model_on(checkpoint, nodes[shard.node])
        shards.append(put(ShardSpec(where, number, len(placement.shards), shard.threads, shard.cores), shard))
    return Plan(tuple(stages), tuple(shards))


def model_on(checkpoint: CheckpointSpec, node: NodeFacts) -> CheckpointSpec:
    """The model as a node has it, in one folder or in parts in several."""
    first, *others = (Path(copy.path) for copy in node.models if not copy.problem)
    return replace(checkpoint, model_dir=first, mirrors=tuple(others), config_path=None, partial=True)


def _find(node: NodePlacement, verdicts: Sequence[Verdict]) -> Verdict | None:
    """By name; else by an address that only one node has."""
    named = [verdict for verdict in verdicts if verdict.node.name == node.name]
    there = [verdict for verdict in verdicts if node.address and verdict.node.address == node.address]
    found = named or there
    return found[0] if len(found) == 1 else None


def _lacks(placement: Placement, actor: ActorPlacement, node: NodeFacts) -> Iterator[str]:
    where = f"node {node.name}: {actor.budget.name}"
    needed = set(_layers(placement, actor))
    missing = sorted(needed - node.layers)
    if missing:
        listed = ", ".join(map(str, missing[:FEW_LISTED])) + (", ..." if len(missing) > FEW_LISTED else "")
        yield f"{where} needs layers {listed}, whole in no folder there: copy their shards, or plan again"
    if actor.stop and (actor.first == 0 or actor.stop == placement.num_layers) and not node.top:
        yield f"{where} needs the embedding or the head, which no folder there has: copy their shards, or plan again"
    strangers = sorted(set(actor.cores) - set(node.cores))
    if strangers:
        yield f"{where} is planned for the cores {strangers}, which it may not use there (allowed: {list(node.cores)})"
    if actor.numa is not None and actor.numa not in {place.number for place in node.numa}:
        yield f"{where} is planned for memory node {actor.numa}, which is not there"
    if not actor.stop:
        return
    tape = next((tape for tape in node.tapes if not tape.problem), None)
    if tape is None and actor.budget.streamed_bytes:
        yield (
            f"{where} streams {gigabytes(actor.budget.streamed_bytes)} a token and there is no tape: make one with "
            "`k3ray pack`, copy it there and name it with --tape or in --roots, or give the node more memory"
        )
    elif tape is not None and tape.chunk_bytes != placement.chunk_bytes:
        yield (
            f"{where} is planned for a tape with chunks of {placement.chunk_bytes} bytes, {tape.path} has "
            f"{tape.chunk_bytes}: plan again with this --tape"
        )


def _layers(placement: Placement, actor: ActorPlacement) -> Iterator[int]:
    """The layers that an actor reads anything of."""
    yield from range(actor.first, actor.stop)
    for number, shard in enumerate(placement.shards):
        if shard is actor:
            for group in placement.experts:
                yield from group.layers if group.counts[number] else ()


def _tape(stage: ActorPlacement, node: NodeFacts) -> TapeSpec | None:
    """None: everything is read whole from the shards, which takes no more memory than the same chunks."""
    folder = next((tape.path for tape in node.tapes if not tape.problem), None)
    return None if folder is None else TapeSpec(Path(folder), stage.budget.pinned_chunks, stage.budget.ring_chunks)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise PlacementRefused(f"the plan cannot run on the nodes at hand:{listed}")

"""Links that are cut between two nodes which the driver both reaches: what is believed of them, and who has to move.

Pure functions of what stages say and of where the actors are; living_nodes.py acts on them. A frame from stage to stage
goes round such a link through the driver (flights.py); a shard has to be where all stages reach it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.workers.stage_sign import StageSign

Pair = frozenset[str]  # two nodes, by their ids


@dataclass(frozen=True, slots=True)
class CutLink:
    """Two actors that both live, and of which `asker` does not reach, or is not reached by, `other`."""

    asker: ActorId
    other: ActorId
    what: str


@dataclass(frozen=True, slots=True)
class Sign:
    """The last answer of an actor to a question. asked_at: monotonic seconds. said: nothing in particular by shards."""

    asked_at: float
    said: StageSign


def cut_off(
    signs: Mapping[ActorId, Sign],
    linked_at: Mapping[ActorId, float],
    now: float,
    settings: RecoverySettings,
    links_held: bool = True,
) -> list[CutLink]:
    """Return the shards that a stage has not reached for silent_s, while the driver hears both.

    linked_at: when the stages were told of a shard's new process: what they said before is not of that. links_held: all
    stages have reached their shards once; before that, a shard that a stage has never reached is not cut off: its port
    may be closed, and the stage says so.
    """
    fresh = {actor: sign for actor, sign in signs.items() if now - sign.asked_at <= settings.sign_s}
    found = {}
    for stage, sign in sorted(fresh.items()):
        for one in sign.said.unreached:
            shard = ActorId("shard", one.shard)
            known = shard in fresh and sign.asked_at > linked_at.get(shard, 0.0)
            if known and (links_held or one.before) and one.seconds > settings.silent_s and shard not in found:
                what = f"{stage} has not reached {shard} for {one.seconds:.0f} s: {one.refused}"
                found[shard] = CutLink(stage, shard, what)
    return list(found.values())


def is_left_idle(sign: Sign | None, asked_since: float, now: float, settings: RecoverySettings) -> bool:
    """Decide whether a stage that was asked something at asked_since does not get it: it lives, and has no work."""
    if sign is None or now - sign.asked_at > settings.sign_s:
        return False
    return min(sign.said.idle_s, sign.asked_at - asked_since) > settings.frame_s


def crossing(where: Mapping[ActorId, str], cuts: Collection[Pair]) -> set[ActorId]:
    """Return the shards that some stage does not reach. where: each actor's node."""
    stages = {node for actor, node in where.items() if actor.kind == "stage"}
    return {
        actor
        for actor, node in where.items()
        if actor.kind == "shard" and any(frozenset((node, stage)) in cuts for stage in stages)
    }


def ways_round(where: Mapping[ActorId, str], cuts: Collection[Pair]) -> list[frozenset[ActorId]]:
    """Return the sets of actors that may move so that every stage reaches every shard, the best first.

    The shards alone, which costs no state; else all actors of one of the nodes at the ends, as if that were gone.
    """
    shards = crossing(where, cuts)
    ends = {node for pair in cuts for node in pair if len(pair & set(where.values())) == 2}
    nodes = [frozenset(actor for actor, node in where.items() if node == end) for end in sorted(ends)]
    ways = [frozenset(shards), *sorted(nodes, key=lambda actors: (len(actors), sorted(actors)))] if shards else []

    def is_enough(moving: frozenset[ActorId]) -> bool:
        return not crossing({actor: node for actor, node in where.items() if actor not in moving}, cuts)

    return [way for way in dict.fromkeys(ways) if is_enough(way)]


def barred_nodes(
    actor: ActorId, moving: Collection[ActorId], where: Mapping[ActorId, str], cuts: Collection[Pair]
) -> frozenset[str]:
    """Return the nodes where an actor would not reach those that it works with and that stay."""
    staying = {node for one, node in where.items() if one.kind != actor.kind and one not in moving}
    return frozenset(node for pair in cuts for node in pair if (pair - {node}) & staying)


def describe_cuts(pairs: Iterable[Sequence[str]]) -> str:
    """Return the links, given the names of their ends, in words."""
    return ", ".join(f"the link between {' and '.join(sorted(names))}" for names in pairs)

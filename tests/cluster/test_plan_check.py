"""A plan that was edited by hand: whatever it says that its parts do not take is refused, never run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.placement import ActorPlacement, Placement, place
from k3ray.cluster.plan_check import find_problems
from k3ray.cluster.seats import ClusterWishes
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")


def placed(shards: int | None, memory_bytes: int = 10**9) -> Placement:
    layers = tuple(range(9))
    nodes = [
        described_node(name, memory_bytes, 4, described_speeds(50, 2), layers, driver=name == "a") for name in "ab"
    ]
    return place(SMALL, plan_layout(SMALL, 32 << 10), nodes, ClusterWishes(shards=shards, positions=64))


WITH_SHARDS, WITHOUT = placed(None), placed(0)


def stage(plan: Placement, change: Callable[[ActorPlacement], ActorPlacement]) -> Placement:
    return replace(plan, stages=(change(plan.stages[0]), *plan.stages[1:]))


def budget(**values: Any) -> Callable[[ActorPlacement], ActorPlacement]:
    return lambda actor: replace(actor, budget=replace(actor.budget, **values))


def parts(**values: int) -> Callable[[ActorPlacement], ActorPlacement]:
    return lambda actor: replace(actor, budget=replace(actor.budget, parts={**actor.budget.parts, **values}))


@pytest.mark.parametrize("plan", [WITH_SHARDS, WITHOUT, placed(None, 783_000_000)])
def test_what_the_planner_makes_is_sound(plan: Placement) -> None:
    assert list(find_problems(plan, SMALL)) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (stage(WITHOUT, budget(pinned_chunks=1)), "ring_chunks"),
        (stage(WITHOUT, budget(pinned_chunks=10**6)), "chunks in memory"),
        (stage(WITHOUT, budget(ring_chunks=1)), "ring_chunks 1"),
        (stage(WITHOUT, budget(streamed_bytes=7)), "streamed_bytes 7"),
        (stage(WITHOUT, budget(cache_slots=0)), "room for 0 experts"),
        (stage(WITHOUT, budget(cache_slots=3)), "room for 3 experts"),
        (stage(WITHOUT, budget(cache_slots=900, owned_experts=900)), "owned_experts 900"),
        (stage(WITHOUT, budget(parts={})), "nothing for 'process'"),
        (stage(WITHOUT, parts(process=0)), "0 bytes for 'process'"),
        (stage(WITHOUT, parts(extra=1)), "1 bytes for 'extra'"),
        (stage(WITHOUT, budget(name="stage 0")), "name 'stage 0'"),
        (stage(WITHOUT, lambda actor: replace(actor, threads=64)), "activations"),
        (stage(WITHOUT, lambda actor: replace(actor, cores=(0, 0))), "every core once"),
        (stage(WITHOUT, lambda actor: replace(actor, cores=tuple(range(9)))), "no more of them than threads"),
        (replace(WITHOUT, stages=(*WITHOUT.stages[:-1], replace(WITHOUT.stages[-1], stop=10))), "each once, in order"),
        (replace(WITHOUT, stages=WITHOUT.stages[::-1]), "each once, in order"),
        (replace(WITHOUT, positions=10**6), "state and latents"),
        (replace(WITHOUT, positions=0), "positions 0"),
        (replace(WITHOUT, positions=1 << 40), "positions"),
        (replace(WITHOUT, chunk_bytes=0), "chunk_bytes 0"),
        (replace(WITHOUT, chunk_bytes=5000), "chunk_bytes 5000"),
        (replace(WITHOUT, nodes=(replace(WITHOUT.nodes[0], parts={}), WITHOUT.nodes[1])), "0 nodes with the driver"),
        (replace(WITHOUT, nodes=(WITHOUT.nodes[0], replace(WITHOUT.nodes[1], parts={}))), "libraries, once"),
        (replace(WITHOUT, nodes=(WITHOUT.nodes[0],) * 2), "2 nodes with the driver"),
        (replace(WITH_SHARDS, shards=WITH_SHARDS.shards[::-1]), "shard"),
        (
            replace(WITH_SHARDS, shards=(replace(WITH_SHARDS.shards[0], first=0, stop=4), WITH_SHARDS.shards[1])),
            "a shard with layers",
        ),
    ],
)  # fmt: skip
def test_what_was_changed_by_hand_is_found(plan: Placement, said: str) -> None:
    found = list(find_problems(plan, SMALL))
    assert any(said in text for problem in found for text in problem)


WAS = WITHOUT.stages[0].budget


@given(
    pinned=st.just(WAS.pinned_chunks) | st.integers(0, 200),
    slots=st.just(WAS.cache_slots) | st.integers(0, 300),
    more=st.integers(-5, 5),
)
def test_no_byte_is_held_that_is_not_counted(pinned: int, slots: int, more: int) -> None:
    """Whatever of chunks and slots a plan says: it is found, or it is exactly what the planner counts for them."""
    changed = {**WAS.parts, "expert slots": WAS.parts["expert slots"] + more}
    found = list(find_problems(stage(WITHOUT, budget(pinned_chunks=pinned, cache_slots=slots, parts=changed)), SMALL))
    assert bool(found) == ((pinned, slots, more) != (WAS.pinned_chunks, WAS.cache_slots, 0))

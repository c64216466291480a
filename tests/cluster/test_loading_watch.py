"""Actors that load: as they come, with their failures, and none is waited for that has fallen silent."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from k3ray.cluster.actor_calls import ActorGone, ActorId, ActorLost
from k3ray.cluster.loading_watch import loaded_in_turn
from k3ray.cluster.plan import make_plan
from k3ray.workers.loading import CheckpointSpec
from tests.fake_actors import FakeActors, Fault, How

ACTORS = [ActorId("shard", 0), ActorId("stage", 0), ActorId("stage", 1)]


def loading(k3b_dir: Path, how: How | None) -> list[tuple[ActorId, object]]:
    """All of them loaded a second time, and what happens to the first stage then."""
    faults = [] if how is None else [Fault(ACTORS[1], "load", 2, how)]
    actors = FakeActors(make_plan(CheckpointSpec(k3b_dir, None, 9), 2, 1, 1, ()), faults)
    looks = count()

    def clock() -> float:
        """Half a second a look; never so many that somebody waits."""
        look = next(looks)
        assert look < 100, "it is still waited for"
        return look / 2

    return list(loaded_in_turn(actors, {actor: actors.start(actor) for actor in ACTORS}, 9.0, clock))


def test_all_of_them_are_loaded(k3b_dir: Path) -> None:
    assert sorted(loading(k3b_dir, None)) == [(actor, "loaded") for actor in ACTORS]


def test_one_that_is_stopped_ends_the_wait(k3b_dir: Path) -> None:
    with pytest.raises(ActorLost, match=r"stage 0 does not answer for 9 s while it loads") as lost:
        loading(k3b_dir, "hangs")
    assert lost.value.exit_code == 3


def test_one_that_dies_ends_the_wait(k3b_dir: Path) -> None:
    with pytest.raises(ActorGone):
        loading(k3b_dir, "dies before")

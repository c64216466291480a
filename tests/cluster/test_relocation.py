"""Where lost actors go: never over a budget, only where their part can be read, always the same answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.relocation import LostPart, Move, NoRoom, PartCosts, Room, relocate
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

K3B = Path(__file__).resolve().parents[1] / "data" / "k3b"
LAYERS = 9
CHUNK_BYTES = 1 << 16
LOTS = 10**10


@cache
def model() -> PartCosts:
    config = read_config(K3B)
    return PartCosts(LayerCosts(config, plan_layout(config, CHUNK_BYTES), 64))


def stage(number: int, first: int, stop: int, pinned: int | None = 0, slots: int = 0) -> LostPart:
    layers = frozenset(range(first, stop))
    return LostPart(ActorId("stage", number), first, stop, 2, layers, first == 0 or stop == LAYERS, 0, slots, pinned)


def shard(number: int, owned: int, slots: int) -> LostPart:
    return LostPart(ActorId("shard", number), 0, 0, 2, frozenset(range(1, LAYERS)), False, owned, slots, None)


def room(name: str, free_bytes: int, tape: bool = True, layers: range = range(LAYERS), top: bool = True) -> Room:
    return Room(name, name, free_bytes, 2, frozenset(layers), top, tape)


def least(part: LostPart, place: Room) -> int:
    return sum(model().least(part, place).values())


def planned(part: LostPart, move: Move) -> int:
    """What a move takes, added up anew."""
    costs, total = model().costs, sum(model().fixed(part, move.threads).values())
    if part.actor.kind == "stage":
        chunks = model().all_chunks(part)
        total += costs.trunk_memory(part.first, part.stop, chunks if move.pinned_chunks is None else move.pinned_chunks)
    return total + move.slots * model().slot_bytes


PARTS = st.lists(
    st.one_of(
        st.builds(
            lambda first, length, pinned: (first, min(LAYERS, first + length), pinned),
            st.integers(0, LAYERS - 1), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 40)),
        ),
        st.tuples(st.integers(1, 200), st.integers(1, 200)),
    ),
    min_size=1, max_size=4,
)  # fmt: skip
ROOMS = st.lists(
    st.tuples(st.integers(0, 600_000_000), st.booleans(), st.integers(0, LAYERS), st.booleans()), min_size=0, max_size=4
)


def parts_of(drawn: list[tuple[int, ...]]) -> list[LostPart]:
    found = []
    for number, one in enumerate(drawn):
        if len(one) == 3:
            part = stage(number, one[0], one[1])
            chunks = model().all_chunks(part)
            found.append(replace(part, pinned_chunks=None if one[2] is None else min(one[2], chunks)))
        else:
            found.append(shard(number, one[0], one[1]))
    return found


@settings(deadline=None)
@given(PARTS, ROOMS)
def test_no_node_is_ever_over_what_it_has_free(
    drawn: list[tuple[int, ...]], places: list[tuple[int, bool, int, bool]]
) -> None:
    parts = parts_of(drawn)
    rooms = [
        room(f"node-{number}", free, tape, range(LAYERS - missing), top)
        for number, (free, tape, missing, top) in enumerate(places)
    ]
    try:
        moves = relocate(parts, rooms, model().costs)
    except NoRoom as refusal:
        assert refusal.exit_code == 3 and all(str(part.actor) in str(refusal) for part in parts)
        return
    assert moves == relocate(parts, rooms, model().costs)
    assert set(moves) == {part.actor for part in parts}
    by_name = {one.node_id: one for one in rooms}
    taken = dict.fromkeys(by_name, 0)
    for part in parts:
        move = moves[part.actor]
        place = by_name[move.node_id]
        assert part.disk_layers <= place.layers and (place.top or not part.top)
        assert move.planned_bytes == planned(part, move) and 0 <= move.slots <= min(part.owned, part.slots)
        assert (move.pinned_chunks is None) == (part.actor.kind == "shard" or not place.tape)
        if part.pinned_chunks is not None and move.pinned_chunks is not None:
            assert move.pinned_chunks <= part.pinned_chunks
        taken[move.node_id] += move.planned_bytes
    assert all(taken[name] <= by_name[name].free_bytes for name in taken)


def test_with_room_enough_a_part_is_what_it_was() -> None:
    lost = [stage(1, 3, 6, pinned=5), shard(1, 64, 40)]
    moves = relocate(lost, [room("a", LOTS)], model().costs)
    assert moves[lost[0].actor].pinned_chunks == 5 and moves[lost[1].actor].slots == 40


def test_what_does_not_fit_is_made_smaller_the_trunk_kept_first() -> None:
    whole = replace(stage(1, 3, 6), pinned_chunks=model().all_chunks(stage(1, 3, 6)))
    other = shard(1, 64, 40)
    place = room("a", 0)
    exact = least(whole, place) + least(other, place)
    moves = relocate([whole, other], [replace(place, free_bytes=exact)], model().costs)
    top_k = model().costs.config.num_experts_per_token
    assert (moves[whole.actor].pinned_chunks, moves[other.actor].slots) == (0, top_k)
    assert sum(move.planned_bytes for move in moves.values()) == exact
    more = model().trunk(whole, None) - model().trunk(whole, 0) + 3 * model().slot_bytes
    moves = relocate([whole, other], [replace(place, free_bytes=exact + more)], model().costs)
    assert moves[whole.actor].pinned_chunks == whole.pinned_chunks and moves[other.actor].slots == top_k + 3


def test_two_that_fit_only_apart_are_put_apart() -> None:
    lost = [stage(0, 0, 3), stage(1, 3, 6)]
    rooms = [room("a", 0), room("b", 0)]
    free = max(least(part, rooms[0]) for part in lost)
    moves = relocate(lost, [replace(one, free_bytes=free) for one in rooms], model().costs)
    assert {move.node_id for move in moves.values()} == {"a", "b"}
    with pytest.raises(NoRoom, match=r"stage 0, layers 0\.\.2: .* stage 1, layers 3\.\.5: a has .* are needed there"):
        relocate(lost, [replace(rooms[0], free_bytes=free)], model().costs)


def test_the_first_choice_is_given_up_where_it_leaves_no_room_for_the_rest() -> None:
    """The large one would go to the emptiest node, which alone has the disk of the other one."""
    large, small = stage(0, 0, 6), stage(2, 7, 8)
    a = room("a", 0)
    b = room("b", 0, layers=range(6))
    rooms = [replace(a, free_bytes=least(large, a) + 1), replace(b, free_bytes=least(large, b))]
    moves = relocate([large, small], rooms, model().costs)
    assert moves[large.actor].node_id == "b" and moves[small.actor].node_id == "a"


def test_a_stage_without_a_tape_there_holds_everything_or_is_refused() -> None:
    lost = stage(1, 3, 6, pinned=0)
    bare = room("bare", LOTS, tape=False)
    assert relocate([lost], [bare], model().costs)[lost.actor].pinned_chunks is None
    with pytest.raises(NoRoom):
        relocate([lost], [replace(bare, free_bytes=least(lost, bare) - 1)], model().costs)
    held = stage(1, 3, 6, pinned=None)  # and one that held everything may stream from a tape
    tight = room("tight", least(held, room("x", 0)))
    assert relocate([held], [tight], model().costs)[held.actor].pinned_chunks == 0


def test_a_node_that_does_not_have_the_layers_says_so() -> None:
    with pytest.raises(NoRoom, match="half does not have that part of the model on its disks") as caught:
        relocate([stage(1, 3, 6)], [room("half", LOTS, layers=range(5))], model().costs)
    assert isinstance(caught.value, ActorLost)
    with pytest.raises(NoRoom, match="no node is left"):
        relocate([stage(1, 3, 6)], [], model().costs)


def test_a_room_that_a_later_part_needs_is_left_to_it() -> None:
    """Two nodes with the same room are not alike where one of them is barred to a part."""
    first, second = stage(1, 1, 5), replace(stage(2, 5, 8), barred=frozenset("y"))
    rooms = [room(name, least(first, room(name, 0))) for name in "xy"]
    homes = {actor.number: move.node_id for actor, move in relocate([first, second], rooms, model().costs).items()}
    assert homes == {1: "y", 2: "x"}
    with pytest.raises(NoRoom, match=r"stage 2, layers 5\.\.7: y does not reach those that it works with"):
        relocate([second], rooms[1:], model().costs)

"""What every policy of the expert cache promises, on requests of any kind; and what each one evicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.cache.policy import CachePolicy, CacheTooSmall, LruPolicy
from k3ray.workers.cache.reuse import ReuseEstimate, ReuseMemory

Make = Callable[[int], CachePolicy]
both = pytest.mark.parametrize("make", [LruPolicy, CirclePolicy])
NUM_LAYERS, NUM_EXPERTS = 4, 12


def check(policy: CachePolicy, held: dict[tuple[int, int], int], layer: int, experts: list[int]) -> None:
    """Make a request and hold the policy to its promises. held: what is resident before, brought up to date."""
    before = dict(held)
    placements = policy.request(layer, experts)
    assert [placement.expert for placement in placements] == experts
    for placement in placements:
        key = (layer, placement.expert)
        assert placement.hit == (key in before)
        assert 0 <= placement.slot < policy.slots
        if placement.hit:
            assert placement.slot == before[key]  # an expert never moves
    used = {placement.slot for placement in placements}
    assert len(used) == len(experts)
    misses = [placement for placement in placements if not placement.hit]
    taken = {placement.slot for placement in misses}
    free = policy.slots - len(before)
    evicted = [key for key, slot in before.items() if slot in taken]
    assert len(evicted) == max(len(misses) - free, 0)  # a free slot is used first
    assert not any(key == (layer, expert) for key in evicted for expert in experts)
    for key in evicted:
        del held[key]
        assert policy.resident(*key) is None
    held.update({(layer, placement.expert): placement.slot for placement in placements})
    for at in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            assert policy.resident(at, expert) == held.get((at, expert))


requests = st.tuples(
    st.integers(0, NUM_LAYERS - 1), st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=0, max_size=5, unique=True)
)
forgotten = st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(0, NUM_EXPERTS - 1))


@both
@given(
    slots=st.integers(5, 30),
    actions=st.lists(st.one_of(requests, forgotten, st.integers(0, 3)), max_size=60),
)
def test_promises(make: Make, slots: int, actions: list[tuple[int, list[int]] | tuple[int, int] | int]) -> None:
    policy, held = make(slots), dict[tuple[int, int], int]()
    for action in actions:
        if isinstance(action, int):  # a token: every layer in turn
            for layer in range(NUM_LAYERS):
                check(
                    policy, held, layer, [(action + layer) % NUM_EXPERTS, (3 * action + 5) % 7 + 5 - (action > 1)][:1]
                )
        elif isinstance(action[1], list):
            check(policy, held, action[0], action[1])
        else:
            policy.forget(*action)
            held.pop(action, None)
            assert policy.resident(*action) is None


@both
def test_the_same_requests_give_the_same_slots(make: Make) -> None:
    stream = [(step % 5, [(step * step + 3 * i) % 31 for i in range(6)]) for step in range(200)]
    assert all(len(set(experts)) == 6 for _, experts in stream)
    first, second = make(40), make(40)
    assert [first.request(*one) for one in stream] == [second.request(*one) for one in stream]


@both
def test_a_request_larger_than_the_cache_is_refused_and_changes_nothing(make: Make) -> None:
    policy = make(3)
    slots = [placement.slot for placement in policy.request(1, [7, 8, 9])]
    with pytest.raises(CacheTooSmall, match="4 experts at once does not fit into 3 slots") as caught:
        policy.request(1, [1, 2, 3, 4])
    assert caught.value.exit_code == 2
    assert [policy.resident(1, expert) for expert in (7, 8, 9)] == slots
    assert [placement.hit for placement in policy.request(1, [9, 8, 7])] == [True] * 3


@both
def test_an_expert_whose_read_failed_is_asked_for_again(make: Make) -> None:
    policy = make(4)
    failed = policy.request(1, [5, 6])[1].slot
    policy.forget(1, 6)
    policy.forget(1, 6)
    policy.forget(2, 5)  # never requested
    again = policy.request(1, [5, 6])
    assert [placement.hit for placement in again] == [True, False]
    assert again[1].slot == failed
    assert len({placement.slot for layer in (1, 2) for placement in policy.request(layer, [5, 6])}) == 4


def test_least_recently_used_goes_first() -> None:
    policy = LruPolicy(3)
    for expert in (1, 2, 3, 1):
        policy.request(0, [expert])
    policy.request(0, [4])
    assert policy.resident(0, 2) is None
    policy.request(0, [5, 3])  # 3 is the longest unused, and needed now
    assert policy.resident(0, 1) is None and policy.resident(0, 3) is not None


def token(policy: CachePolicy, chosen: dict[int, list[int]]) -> int:
    return sum(placement.hit for layer, experts in chosen.items() for placement in policy.request(layer, experts))


def test_circle_keeps_the_best_scored_of_every_layer() -> None:
    """Ten layers of four experts, the first of which comes back: with room for two of them, it stays everywhere."""
    policy, lru = CirclePolicy(24), LruPolicy(24)
    hits = lru_hits = 0
    for step in range(12):
        chosen = {layer: [0, *(1 + 3 * step + i for i in range(3))] for layer in range(10)}
        hits = token(policy, chosen)
        lru_hits += token(lru, chosen)
    assert hits == 10  # the most there is
    assert lru_hits == 0


def test_circle_learns_which_experts_come_back_in_the_long_run() -> None:
    """The last scored one of every layer is always the same: only a long memory shows that it is worth a slot."""
    policy = CirclePolicy(20)
    hits = [
        token(policy, {layer: [*((5 * step + layer + i) % 90 for i in range(4)), 99] for layer in range(10)})
        for step in range(60)
    ]
    assert hits[0] == 0
    assert hits[-1] == 10


def test_circle_evicts_what_is_needed_last_when_everything_comes_back() -> None:
    """A fixed set of 40 experts in turn, 30 slots: the optimum misses ten and a few a turn, LRU all of them."""
    policy = CirclePolicy(30)
    turn = {layer: [0, 1, 2, 3] for layer in range(10)}
    hits = [token(policy, turn) for _ in range(20)]
    assert hits[-1] >= 40 - 10 - 4
    lru = LruPolicy(30)
    assert sum(token(lru, turn) for _ in range(20)) == 0


def test_circle_keeps_a_layers_experts_while_it_computes_several_tokens() -> None:
    """A prompt computed layer by layer, its tokens one after the other: a layer's experts serve all of them."""
    policy = CirclePolicy(16)
    hits = 0
    for layer in range(10):
        for step in range(6):
            hits += token(policy, {layer: [(step + i) % 8 for i in range(4)]})
    first = CirclePolicy(16)
    of_first_layer = sum(token(first, {0: [(step + i) % 8 for i in range(4)]}) for step in range(6))
    assert of_first_layer == 24 - 8
    assert hits >= 9 * of_first_layer


def test_the_view_that_finds_more_takes_the_lead() -> None:
    """Expert 0 comes every second time, all others once: the last request shows nothing, the long memory shows it."""
    estimate = ReuseEstimate(ReuseMemory(paces=(0.0, 0.99), views=((1, 0), (0, 1))))
    for step in range(40):
        estimate.observe(3, [0, 100 + step] if step % 2 else [200 + step, 300 + step], 4)
    assert estimate.leader == 1
    often, once = estimate.values(3, [0, 139])
    assert often > once > 0


def test_the_first_view_leads_while_none_is_clearly_better() -> None:
    estimate = ReuseEstimate(ReuseMemory(paces=(0.0, 0.99), views=((1, 0), (0, 1))))
    for step in range(40):
        estimate.observe(3, [0, 100 + step], 1)
        assert estimate.leader == 0


def test_values_are_shares_of_the_requests() -> None:
    estimate = ReuseEstimate(ReuseMemory(paces=(0.5, 0.9), views=((1, 1),), last_weight=0.25))
    for step in range(200):
        estimate.observe(0, [7, 8 + step], 2)
    always, last, before = estimate.values(0, [7, 207, 206])
    assert always == pytest.approx(2.0)
    assert last == pytest.approx(0.25 * (0.5 + 0.1))
    assert before == pytest.approx(0.25 * (0.5 * 0.5 + 0.1 * 0.9))


def test_one_odd_token_proves_nothing_however_many_layers_it_has() -> None:
    estimate = ReuseEstimate(ReuseMemory(paces=(0.0, 0.99), views=((1, 0), (0, 1))))
    odd_ones = 0
    for step in range(12):
        odd = step in (6, 9)  # only the long memory can foresee these
        for layer in range(50):
            estimate.observe(layer, [0] if odd or step < 3 else [1 + step], 1)
        odd_ones += odd
        assert estimate.leader == 0, step
    assert odd_ones == 2


def test_the_past_that_views_are_judged_by_fades() -> None:
    """After 3,000 requests that a long memory foresees, 500 that only a short one foresees change the leader."""
    estimate = ReuseEstimate(ReuseMemory(paces=(0.0, 0.99), views=((1, 0), (0, 1)), window=100))
    for step in range(3000):
        estimate.observe(0, [step % 2], 1 if step % 2 else 2)
    assert estimate.leader == 1
    for step in range(500):
        estimate.observe(0, [2 + step // 2], 1)
    assert estimate.leader == 0

"""The simulator against the published figures, against brute force, and against the policy's own claims."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.commands.simulate_cache import SimulationFailure, run
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.cache.policy import CacheTooSmall, LruPolicy
from k3ray.workers.cache.simulate import OPTIMUM, Replay, optimum_hits, replay, simulate
from k3ray.workers.cache.trace import ExpertRequest, decoding_order, encode_trace, read_trace, recorded_order
from k3ray.workers.failure import Failure

EXPERT_BYTES = 17_547_264
GB = 10**9


def percent(found: Replay, policy: str) -> float:
    return round(100 * found.hit_rate(policy), 1)


@pytest.fixture(scope="module")
def decoding(shared_data: Path) -> dict[int, Replay]:
    requests = decoding_order(read_trace(shared_data / "trace" / "expert_trace.bin"))
    sizes = [4, 8, 13, 16, 24, 26, 32, 64, 128, 192]
    return dict(zip(sizes, simulate(requests, [size * GB for size in sizes], EXPERT_BYTES), strict=True))


@pytest.fixture(scope="module")
def recorded(shared_data: Path) -> dict[int, Replay]:
    requests = recorded_order(read_trace(shared_data / "trace" / "expert_trace.bin"))
    sizes = [8, 32, 64, 128, 192]
    return dict(zip(sizes, simulate(requests, [size * GB for size in sizes], EXPERT_BYTES), strict=True))


def test_published_figures_in_decoding_order(decoding: dict[int, Replay]) -> None:
    sizes = (4, 8, 13, 16, 24)
    assert [decoding[size].hits["lru"] for size in sizes] == [0] * 5
    assert [percent(decoding[size], OPTIMUM) for size in sizes] == [13.8, 25.3, 33.3, 35.8, 39.8]
    assert decoding[4].tokens == 12 and decoding[4].requests == 17_664
    assert round(decoding[24].bytes_per_token("lru") / GB, 2) == 25.83


def test_published_figures_of_the_whole_trace(recorded: dict[int, Replay]) -> None:
    assert [percent(found, "lru") for found in recorded.values()] == [36.2, 36.2, 36.2, 49.2, 90.0]
    assert [percent(found, OPTIMUM) for found in recorded.values()] == [39.4, 49.0, 61.7, 84.6, 90.0]
    assert recorded[8].tokens == 68


def test_circle_beats_the_sketch_at_every_size(decoding: dict[int, Replay]) -> None:
    sketch = {4: 7.2, 8: 12.1, 13: 20.7, 16: 22.4, 24: 29.4}
    found = {size: 100 * decoding[size].hit_rate("circle") for size in sketch}
    assert all(found[size] > sketch[size] + 0.2 for size in sketch), found


def test_circle_is_never_behind_lru_where_lru_works(decoding: dict[int, Replay], recorded: dict[int, Replay]) -> None:
    for found in [decoding[size] for size in (32, 64, 128, 192)] + list(recorded.values()):
        assert found.hit_rate("circle") >= found.hit_rate("lru") - 0.005, found


def test_no_policy_exceeds_the_optimum(decoding: dict[int, Replay], recorded: dict[int, Replay]) -> None:
    for found in [*decoding.values(), *recorded.values()]:
        assert max(found.hits.values()) == found.hits[OPTIMUM]


def best_of_all(keys: Sequence[int], slots: int) -> int:
    """Try everything: each request may keep any of what it held and asked for."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for key in keys:
        following: dict[frozenset[int], int] = {}
        for held, hits in reachable.items():
            gained = hits + (key in held)
            for count in range(slots + 1):
                for kept in itertools.combinations(held | {key}, count):
                    following[frozenset(kept)] = max(following.get(frozenset(kept), 0), gained)
        reachable = following
    return max(reachable.values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 3))
def test_the_optimum_is_what_trying_everything_finds(keys: list[int], slots: int) -> None:
    requests = [ExpertRequest(0, (key,)) for key in keys]
    best = best_of_all(keys, slots)
    assert optimum_hits(requests, slots) == best
    assert replay(requests, LruPolicy(slots)) <= best
    assert replay(requests, CirclePolicy(slots)) <= best


LEAST_OF_OPTIMUM = {"uniform": 0.08, "zipf": 0.4, "drift": 0.4, "turns": 0.25}


def routed(kind: str, tokens: int = 60, layers: int = 12, experts: int = 96, top_k: int = 6) -> list[ExpertRequest]:
    """Return the requests of a synthetic router, in decoding order. Scores are logits plus Gumbel noise."""
    random = np.random.default_rng(7)
    popularity = -np.log1p(np.stack([random.permutation(experts) for _ in range(layers)]))  # Zipf
    topics = random.standard_normal((2 if kind == "turns" else 1, layers, experts))
    found = []
    for token in range(tokens):
        noise = random.gumbel(size=(layers, experts))
        topic = topics[token % len(topics)]
        topic[:] = 0.8 * topic + 0.6 * random.standard_normal((layers, experts))
        drift = 2 * topic + popularity / 2 - 0.7 * noise
        logits = {"uniform": 0 * noise, "zipf": popularity, "drift": drift, "turns": drift}[kind]
        order = np.argsort(-(logits + noise), axis=1, kind="stable")[:, :top_k]
        found += [ExpertRequest(layer, tuple(order[layer].tolist())) for layer in range(layers)]
    return found


@pytest.mark.parametrize("kind", ["uniform", "zipf", "drift", "turns"])
def test_circle_on_synthetic_routers(kind: str) -> None:
    """Whatever the router is like: far ahead of LRU below one token's experts, and not behind above."""
    requests = routed(kind)
    for share in (0.3, 0.6, 0.9, 1.2, 2.0, 4.0):
        slots = int(share * 12 * 6)
        lru, circle = replay(requests, LruPolicy(slots)), replay(requests, CirclePolicy(slots))
        num_requests = len(requests) * 6
        assert circle >= lru - 0.005 * num_requests, share
        if share < 1:
            assert lru < 0.01 * num_requests
            assert circle > LEAST_OF_OPTIMUM[kind] * optimum_hits(requests, slots), share


def small_trace(path: Path) -> Path:
    path.write_bytes(encode_trace(routed("drift", tokens=10, layers=3, experts=20, top_k=4)))
    return path


def test_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace(tmp_path / "t.bin")
    run(trace, ["12kB", "6kB"], expert_bytes=1000, as_json=True)
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [one["slots"] for one in found["capacities"]] == [6, 12]
    assert (found["tokens"], found["requests"], found["experts_per_token"], found["layers"]) == (10, 120, 4, 3)
    for one in found["capacities"]:
        for name, hits in one["hits"].items():
            assert math.isclose(one["bytes_per_token"][name], (120 - hits) * 1000 / 10)
    assert "120 requests" in captured.err
    run(trace, ["12kB"], order="recorded", expert_bytes=1000)
    assert "optimum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"capacities": ["3kB"]}, CacheTooSmall, "holds 3 experts.*one request needs 4"),
        ({"capacities": ["4"]}, Failure, "--capacity: found '4'"),
        ({"order": "random"}, SimulationFailure, "--order: found 'random'"),
        ({"expert_bytes": 0}, SimulationFailure, "--expert-bytes: found 0"),
        ({"experts_per_token": 5}, Failure, "for 5 different experts"),
        ({"plot": "no/such/folder/p.png"}, Failure, "--plot .*does not exist"),
    ],
)
def test_command_refuses(tmp_path: Path, arguments: dict[str, object], kind: type[Failure], message: str) -> None:
    trace = small_trace(tmp_path / "t.bin")
    settings = {"capacities": ["9kB"], "expert_bytes": 1000} | arguments
    if "plot" in settings:
        settings["plot"] = tmp_path / str(settings["plot"])
    with pytest.raises(kind, match=message) as caught:
        run(trace, **settings)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2


def test_plot_without_matplotlib_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SimulationFailure, match="--plot needs matplotlib"):
        run(tmp_path / "not even there", [], plot=tmp_path / "p.png")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot is optional")
    run(small_trace(tmp_path / "t.bin"), ["6kB", "12kB"], expert_bytes=1000, plot=tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

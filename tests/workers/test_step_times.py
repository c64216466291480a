"""Where a step's time went: the parts are counted, each once, and are no more than the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3ray.driver import Driver
from k3ray.workers import step_times
from k3ray.workers.hop_link import HopCounts
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec
from k3ray.workers.step_times import StepClock, StepTimes


class Clock:
    """Time that goes on by one second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


def test_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "time", Clock())
    clock = StepClock()
    clock.begin()  # 1
    for name in ("attn_in", "attn_normed", "attn_out", "mlp_in", "router_ids", "mlp_out", "layer_out"):  # 2 to 5
        clock.observed(name)
    clock.begin_head()  # 6
    clock.end(with_head=True)  # 7
    assert clock.times == StepTimes(steps=1, stage_s=6.0, attention_s=1.0, feed_forward_s=1.0, head_s=1.0)
    clock.begin()
    clock.begin_head()
    clock.end(with_head=False)
    assert clock.times == StepTimes(steps=2, stage_s=8.0, attention_s=1.0, feed_forward_s=1.0, head_s=1.0)


def test_times_are_added_and_taken_away() -> None:
    one, two = StepTimes(1, 2.0, 0.5, 0.25), StepTimes.of_hops(HopCounts(trips=3, send_s=1.0, wait_s=5.0, hop_s=2.0))
    assert (two.expert_answer_s, two.hop_s, two.trips) == (6.0, 3.0, 3)
    assert (one + two) - two == one and one + StepTimes() == one


def test_parts_sum_up_to_the_wall_clock() -> None:
    times = StepTimes(2, 10.0, 2.0, 6.0, 0.5, expert_answer_s=4.0, hop_s=1.0, trips=7, shard_s=5.0)
    parts = times.parts(12.0)
    assert parts == {
        **{"attention": 2.0, "feed_forward": 2.0, "experts": 3.0, "hops": 1.0},
        **{"head": 0.5, "other": 1.5, "driver": 2.0},
    }
    assert sum(parts.values()) == 12.0
    assert times.parts(5.0)["driver"] == 0.0


def test_a_real_run_counts_every_stage(k3b_dir: Path) -> None:
    spec = CheckpointSpec(k3b_dir, None, 9)
    chain = start_in_process([StageSpec(spec, 0, 4, 1, ()), StageSpec(spec, 4, 9, 1, ())], [])
    driver = Driver(chain)
    session = driver.open(8)
    for token in (5, 6, 7):
        driver.forward({session: np.array([token]).tolist()})
    times = chain.counts().times
    chain.close()
    assert times.steps == 6  # two stages, three tokens
    assert min(times.attention_s, times.feed_forward_s, times.head_s) > 0
    assert times.attention_s + times.feed_forward_s + times.head_s < times.stage_s
    assert (times.trips, times.expert_answer_s, times.shard_s) == (0, 0.0, 0.0)

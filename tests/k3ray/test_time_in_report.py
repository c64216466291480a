"""Where a run's time went, as its report tells: over stages and shards on Ray, the parts sum up to the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3ray.api import open_model


@pytest.mark.ray
def test_the_parts_of_a_run_over_stages_and_shards(k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with open_model(k3b_dir, stages=2, expert_shards=2, threads=1, context=16) as model:
        first = model.generate(ids=[5, 6, 7], gen=2, ignore_eos=True)
        found = model.generate(ids=[5, 6, 7], gen=4, ignore_eos=True)
    assert found.generated_ids[:2] == first.generated_ids
    assert found.io is not None
    times, parts = found.io.times, found.time_parts
    assert times.steps == 2 * 4  # stages x steps, of this generation alone
    assert 0 < times.trips <= 8 * 2 * 4  # MoE layers x shards x steps; a shard may have none of a layer's experts
    assert min(parts["attention"], parts["feed_forward"], parts["hops"], parts["head"], parts["driver"]) > 0
    assert sum(parts.values()) == pytest.approx(sum(found.step_seconds), rel=1e-6)
    assert found.as_json()["time_parts_s"] == parts
    line = found.time_line()
    assert line.startswith("time: ") and "% attention, " in line and "% hops to them" in line


@pytest.mark.ray
def test_a_run_without_shards_has_no_hops(k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with open_model(k3b_dir, threads=1) as model:
        found = model.generate(ids=[5, 6, 7], gen=2, ignore_eos=True)
    assert found.time_parts["hops"] == found.time_parts["experts"] == 0
    assert "hops" not in found.time_line() and "shards" not in found.time_line()

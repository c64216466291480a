"""The plan's bytes are the bytes that are read: every streamed chunk once a step, whatever the budget and the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.cluster.plan import make_plan
from k3ray.cluster.wishes import Wishes, merge_wishes
from k3ray.driver import Driver
from k3ray.memory import MemoryWish, TapeChoice, choose_tape, plan_memory
from k3ray.proof import trace
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import Checkpoint, CheckpointSpec, open_checkpoint
from tests.tapes import opened_model

PROMPT = [84, 197, 179, 385, 423, 346, 143]


@pytest.fixture(scope="module")
def checkpoint(k3b_dir: Path) -> Checkpoint:
    return open_checkpoint(CheckpointSpec(k3b_dir, None, 9))


@pytest.fixture(scope="module")
def tape(k3b_dir: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TapeChoice]:
    out = tmp_path_factory.mktemp("tape") / "k3b"
    with opened_model(k3b_dir) as model:
        model.pack(out)
    yield choose_tape(checkpoint, out)


@pytest.fixture(scope="module")
def resident(k3b_dir: Path) -> bytes:
    plan = make_plan(CheckpointSpec(k3b_dir, None, 9), 1, 0, 1, ())
    return trace(Driver(start_in_process(plan.stages, plan.shards)), PROMPT, 4)[1].tobytes()


@pytest.mark.parametrize("ring", [1, 2, 3, 1000])
@pytest.mark.parametrize(("stages", "shards"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("wishes", [
    Wishes(preset="ultra"),
    merge_wishes([("--trunk-gb", "0.001"), ("--cache-gb", "0.002")]),
    merge_wishes([("--trunk-gb", "0.003"), ("--cache-gb", "0")]),
    Wishes(preset="max"),
])  # fmt: skip
def test_a_step_reads_what_was_planned(
    checkpoint: Checkpoint, tape: TapeChoice, resident: bytes, wishes: Wishes, stages: int, shards: int, ring: int
) -> None:
    plan = make_plan(CheckpointSpec(checkpoint.reader.index.directory, None, 9), stages, shards, 1, ())
    planned, budget = plan_memory(checkpoint, plan, MemoryWish(tape, wishes, None), 64, True)
    specs = [replace(stage, tape=replace(stage.tape, ring_chunks=ring)) for stage in planned.stages if stage.tape]
    chain = start_in_process(specs, planned.shards)
    steps = 4
    assert trace(Driver(chain), PROMPT, steps)[1].tobytes() == resident
    counts = chain.counts()
    assert counts.trunk_bytes - counts.trunk_ahead_bytes == steps * budget.trunk_bytes_per_token
    chain.close()


def test_a_budget_without_a_tape_says_what_to_do(checkpoint: Checkpoint) -> None:
    plan = make_plan(CheckpointSpec(checkpoint.reader.index.directory, None, 9), 1, 0, 1, ())
    with pytest.raises(Exception, match="k3ray pack"):
        plan_memory(checkpoint, plan, MemoryWish(None, merge_wishes([("--trunk-gb", "0.001")]), None), 64, True)

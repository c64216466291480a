"""A stage's actor counts what crosses between nodes by where the others are, without Ray: its class is a plain one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from k3ray.cluster.plan import make_plan
from k3ray.workers.actors import LayerStageActor
from k3ray.workers.frames import ActivationFrame, encode_activations
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.message_counts import FarEnds


def frame(step: int) -> pa.Buffer:
    return encode_activations(
        ActivationFrame(
            step=step,
            sessions=np.array([0], np.int64),
            positions=np.array([step - 1], np.int64),
            ids=np.array([3 + step], np.int32),
            wants_logits=np.array([True]),
            prefix=np.zeros((1, 0), np.float32),
            blocks=np.zeros((1, 0, 0), np.float32),
        )
    )


@pytest.fixture(scope="module")
def loaded(k3b_dir: Path) -> LayerStageActor:
    plan = make_plan(CheckpointSpec(k3b_dir, None, 9), 2, 0, 2, ())
    actor = LayerStageActor()
    actor.following_is(1, True)  # while it loads: said again behind the load
    actor.load(plan.stages[0], [], FarEnds(driver=True))
    actor.open_sequence(0, 8)
    return actor


def test_a_following_stage_that_moves_away_and_back(loaded: LayerStageActor) -> None:
    def crossed(step: int) -> tuple[int, int, int]:
        """(bytes that crossed in a step, of the frame in, of the frame out)"""
        before, message = loaded.counts().messages.between_bytes, frame(step)
        answer = loaded.apply(message)
        return loaded.counts().messages.between_bytes - before, message.size, answer.size

    found, came, _ = crossed(1)
    assert found == came > 0  # from the driver, as load was told
    loaded.following_is(1, True)
    found, came, went = crossed(2)
    assert found == came + went and went > 0
    loaded.following_is(2, False)
    loaded.following_is(1, True)  # late
    found, came, _ = crossed(3)
    assert found == came

"""Exactly once: a stage applies a frame at the position it expects, and never twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from k3ray.workers.frames import ActivationFrame, decode_logits, encode_activations
from k3ray.workers.loading import CheckpointSpec, StageSpec, load_stage
from k3ray.workers.model.config import read_config
from k3ray.workers.model.slice import NonFiniteActivation
from k3ray.workers.model.state import SequenceFailure
from k3ray.workers.stage import LayerStage, StepConflict


def message(step: int, first: int, ids: Sequence[int], session: int = 0) -> pa.Buffer:
    count = len(ids)
    return encode_activations(
        ActivationFrame(
            step=step,
            sessions=np.full(count, session, np.int64),
            positions=np.arange(first, first + count),
            ids=np.array(ids, np.int32),
            wants_logits=np.ones(count, np.bool_),
            prefix=np.zeros((count, 0), np.float32),
            blocks=np.zeros((count, 0, 0), np.float32),
        )
    )


@pytest.fixture
def stage(k3b_dir: Path) -> LayerStage:
    layers = read_config(k3b_dir).num_hidden_layers
    loaded, _ = load_stage(StageSpec(CheckpointSpec(k3b_dir, None, layers), 0, layers, 1, ()), [])
    loaded.open_sequence(0, 16)
    return loaded


def logits(answer: pa.Buffer) -> bytes:
    return decode_logits(answer).logits.tobytes()


def test_a_frame_sent_again_gets_the_recorded_answer_and_changes_nothing(stage: LayerStage, k3b_dir: Path) -> None:
    first = message(1, 0, [5, 6, 7])
    answer = stage.apply(first)
    assert logits(stage.apply(first)) == logits(answer)
    after_repeat = logits(stage.apply(message(2, 3, [8])))

    layers = read_config(k3b_dir).num_hidden_layers
    once, _ = load_stage(StageSpec(CheckpointSpec(k3b_dir, None, layers), 0, layers, 1, ()), [])
    once.open_sequence(0, 16)
    once.apply(first)
    assert logits(once.apply(message(2, 3, [8]))) == after_repeat


@pytest.mark.parametrize("position", [0, 2, 4])
def test_any_other_position_is_an_error(stage: LayerStage, position: int) -> None:
    stage.apply(message(1, 0, [5, 6, 7]))
    with pytest.raises(SequenceFailure, match=f"position {position} arrived where position 3 is expected"):
        stage.apply(message(2, position, [8]))
    stage.apply(message(3, 3, [8]))  # the refusal touched nothing


def test_the_same_step_with_other_contents_is_an_error(stage: LayerStage) -> None:
    stage.apply(message(1, 0, [5, 6, 7]))
    with pytest.raises(StepConflict, match="step 1 arrived twice"):
        stage.apply(message(1, 0, [5, 6, 8]))


def test_a_sequence_does_not_outgrow_its_capacity(stage: LayerStage) -> None:
    with pytest.raises(SequenceFailure, match="does not fit in the 16 positions"):
        stage.apply(message(1, 0, list(range(17))))


def test_unknown_and_reopened_sessions_are_errors(stage: LayerStage) -> None:
    with pytest.raises(SequenceFailure, match="session 9 is not open"):
        stage.apply(message(1, 0, [5], session=9))
    with pytest.raises(SequenceFailure, match="session 0 is open already"):
        stage.open_sequence(0, 4)
    stage.close_sequence(0)
    stage.close_sequence(0)
    stage.open_sequence(0, 4)
    stage.apply(message(2, 0, [5]))


def test_a_step_that_failed_half_way_cannot_be_followed(stage: LayerStage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.apply(message(1, 0, [5, 6]))
    with monkeypatch.context() as patched:
        patched.setattr("k3ray.workers.model.slice.mlp", lambda *_: np.full((1, 160), np.nan, np.float32))
        with pytest.raises(NonFiniteActivation, match=r"layer 0 \(dense MLP\), position 2"):
            stage.apply(message(2, 2, [7]))
    with pytest.raises(SequenceFailure, match="a step failed half way"):
        stage.apply(message(3, 2, [7]))


def test_a_new_sequence_is_not_answered_from_the_record_of_an_old_one(stage: LayerStage) -> None:
    first = message(1, 0, [5, 6, 7])
    answer = logits(stage.apply(first))
    stage.close_sequence(0)
    stage.open_sequence(0, 16)  # another driver, which counts its steps from 1 again
    assert logits(stage.apply(first)) == answer
    stage.apply(message(2, 3, [8]))  # the state has moved: the frame was applied, not remembered

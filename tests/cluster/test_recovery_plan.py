"""Decisions about lost actors, as functions; and the log against a model of what stages know."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.recovery_plan import (
    Look,
    Pace,
    RecoveryRefused,
    RecoverySettings,
    agrees,
    count_layer_steps,
    may_recover,
    plan_replays,
    silent_actors,
    snapshot_is_due,
)
from k3ray.cluster.snapshot_files import SnapshotFile
from k3ray.cluster.step_log import Closed, Loaded, Opened, Replayed, Restored, StepLog, Stepped
from k3ray.workers.frames import ActivationFrame, encode_activations

NUM_STAGES = 3
STAGE = ActorId("stage", 1)


def frame(step: int, sessions: list[int]) -> pa.Buffer:
    rows = np.array(sorted(sessions), np.int64)
    nothing = np.zeros((len(rows), 0), np.float32)
    wants = np.zeros(len(rows), np.bool_)
    return encode_activations(
        ActivationFrame(step, rows, rows, rows.astype(np.int32), wants, nothing, nothing.reshape(len(rows), 0, 0))
    )


class StageModel:
    """What a stage remembers of each open sequence: the steps that it applied, in order."""

    def __init__(self) -> None:
        self.sequences: dict[int, list[int]] = {}

    def tell(self, told: Replayed, stage: int) -> None:
        if isinstance(told, Restored):
            assert told.session not in self.sequences
            self.sequences[told.session] = list(told.snapshot)
        elif isinstance(told, Opened):
            assert told.session not in self.sequences
            self.sequences[told.session] = []
        elif isinstance(told, Closed):
            assert self.sequences.pop(told.session, None) is not None
        else:
            assert told.inputs[stage] is not None
            for session in told.sessions:
                assert session in self.sequences
                self.sequences[session].append(told.place)


@given(st.data())
def test_a_replay_makes_any_stage_what_it_was(data: st.DataObject) -> None:
    """Sequences come, step together and go; snapshots are asked and arrive later, per stage: replays stay right."""
    log, stages = StepLog(NUM_STAGES), [StageModel() for _ in range(NUM_STAGES)]
    asked: dict[int, tuple[int, dict[int, Restored]]] = {}
    for number in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(["open", "load", "step", "step", "close", "ask", "arrive"]))
        stage = data.draw(st.integers(0, NUM_STAGES - 1))
        if action == "open":
            log.opened(number, 10)
            for model in stages:
                model.sequences[number] = []
        elif action == "load":
            log.loaded(number, 10, tuple([-1, one] for one in range(NUM_STAGES)))
            for one, model in enumerate(stages):
                model.sequences[number] = [-1, one]
        elif action == "step" and log.open:
            sessions = data.draw(st.lists(st.sampled_from(sorted(log.open)), min_size=1, unique=True))
            step = log.stepped(frame(number, sessions))
            for one, model in enumerate(stages):
                if one:
                    log.learned(step, one, pa.py_buffer(b"answer"))
                model.tell(Stepped(step.place, 1, frozenset(sessions), [pa.py_buffer(b"")] * NUM_STAGES), one)
        elif action == "close" and log.open:
            session = data.draw(st.sampled_from(sorted(log.open)))
            log.closed(session)
            for model in stages:
                del model.sequences[session]
        elif action == "ask":
            known = stages[stage].sequences
            changed = log.changed_since_point(stage)
            asked[stage] = log.place, {one: Restored(one, log.open[one], tuple(known[one])) for one in changed}
        elif action == "arrive" and stage in asked:
            log.keep_point(stage, *asked.pop(stage))
    for number, model in enumerate(stages):
        again = StageModel()
        for told in log.replay(number):
            again.tell(told, number)
        assert again.sequences == model.sequences
    if not log.open:
        assert log.held_bytes() == 0 and not log.events


def test_an_idle_sequence_stays_in_the_restore_point() -> None:
    log = StepLog(1)
    log.opened(0, 10)
    log.opened(1, 10)
    log.stepped(frame(0, [0, 1]))
    assert log.changed_since_point(0) == [0, 1]
    log.keep_point(0, log.place, {session: Restored(session, 10, "both") for session in (0, 1)})
    log.stepped(frame(1, [1]))
    assert log.changed_since_point(0) == [1]
    log.keep_point(0, log.place, {1: Restored(1, 10, "one")})
    assert log.replay(0) == (Restored(0, 10, "both"), Restored(1, 10, "one")) and not log.events


def test_a_snapshot_that_arrives_late_is_followed_by_the_steps_since() -> None:
    log = StepLog(1)
    log.opened(0, 10)
    log.stepped(frame(0, [0]))
    asked_at = log.place
    later = log.stepped(frame(1, [0]))
    log.keep_point(0, asked_at, {0: Restored(0, 10, "then")})
    assert log.replay(0) == (Restored(0, 10, "then"), later)


def test_steps_that_a_stage_has_not_answered_are_no_part_of_its_replay() -> None:
    log = StepLog(NUM_STAGES)
    log.opened(0, 10)
    steps = [log.stepped(frame(number, [0])) for number in range(3)]
    for step in steps[:2]:
        log.learned(step, 1, pa.py_buffer(b"input"))
    answered = {steps[1].place: 1, steps[2].place: 0}
    replays = plan_replays([0, 1, 2], log, answered)
    assert [count_layer_steps(replays[stage], range(4)) for stage in range(3)] == [8, 4, 0]
    assert replays[1] == (log.events[0], steps[0])


def test_answers_are_compared_while_they_are_known() -> None:
    log = StepLog(NUM_STAGES)
    log.opened(0, 10)
    step = log.stepped(frame(0, [0]))
    assert agrees(step, 0, pa.py_buffer(b"one"))
    log.learned(step, 1, pa.py_buffer(b"one"))
    assert agrees(step, 0, pa.py_buffer(b"one")) and not agrees(step, 0, pa.py_buffer(b"two"))
    assert agrees(step, NUM_STAGES - 1, pa.py_buffer(b"logits are not kept"))
    assert isinstance(log.events[0], Opened) and not isinstance(log.events[0], Loaded)


def test_snapshots_by_steps_and_by_bytes() -> None:
    settings = RecoverySettings(snapshot_every=3, log_bytes=10_000)
    log = StepLog(1)
    log.opened(0, 10)
    due = []
    for number in range(4):
        log.stepped(frame(number, [0]))
        due.append(snapshot_is_due(log, 0, settings))
    assert due == [False, False, True, True] and not snapshot_is_due(log, log.place, settings)
    assert not snapshot_is_due(log, 0, RecoverySettings(snapshot_every=0))
    assert snapshot_is_due(log, log.place - 1, RecoverySettings(snapshot_every=100, log_bytes=log.held_bytes() - 1))
    log.keeps_everything = True
    assert not snapshot_is_due(log, 0, settings)


def test_the_bound() -> None:
    settings = RecoverySettings(max_recoveries=2)
    may_recover(1, {STAGE}, settings)
    with pytest.raises(ActorLost, match=r"shard 0, stage 1 ended .* 2 times already \(--max-recoveries 2\)") as caught:
        may_recover(2, {STAGE, ActorId("shard", 0)}, settings)
    assert caught.value.exit_code == 3
    with pytest.raises(RecoveryRefused, match="--snapshot-every: found -1"):
        RecoverySettings(snapshot_every=-1)


def test_silence_is_longer_allowed_to_a_process_that_starts() -> None:
    settings = RecoverySettings(silent_s=20, start_s=300)
    looks = {STAGE: Look(100.0, 1), ActorId("stage", 2): Look(100.0, 0)}
    assert silent_actors(looks, 119.0, settings) == set()
    assert silent_actors(looks, 121.0, settings) == {STAGE}
    assert silent_actors(looks, 401.0, settings) == set(looks)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(1, 64)), min_size=1), st.integers(1, 64))
def test_a_deadline_is_never_shorter_than_what_was_seen(seen: list[tuple[float, int]], tokens: int) -> None:
    settings, pace = RecoverySettings(), Pace()
    assert pace.deadline_s(tokens, settings) == max(3600, 60 * tokens)
    for seconds, count in seen:
        pace = pace.after(seconds, count)
    for seconds, count in seen:
        deadline_s = pace.deadline_s(count, settings)
        assert deadline_s >= max(seconds * 2.9, settings.shortest_deadline_s)


def test_a_snapshot_file_gives_back_its_pieces_any_number_of_times() -> None:
    pieces = [pa.py_buffer(b"one"), pa.py_buffer(b""), pa.py_buffer(bytes(range(256)) * 999)]
    file = SnapshotFile(pieces[:2])
    file.add(pieces[2])
    assert [piece.to_pybytes() for piece in file.pieces()] == [piece.to_pybytes() for piece in pieces]
    assert next(file.pieces()).equals(pieces[0]) and len(list(file.pieces())) == 3

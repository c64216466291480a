"""A saved sequence goes on with the bits of one that never stopped, whatever ran it before and runs it now."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from k3ray.continuation import Continuation
from k3ray.driver import Driver
from k3ray.files import OutputFailure
from k3ray.generation import generate
from k3ray.state_file import open_state
from k3ray.workers.failure import Failure
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec, TapeSpec
from tests.goldens import read_golden
from tests.placed import GEN, PROMPT, Bits, Place, Placed, places, run
from tests.tapes import opened_model


@pytest.fixture(scope="module")
def place(k3b_dir: Path) -> Place:
    return places(k3b_dir)


@pytest.fixture(scope="module")
def expected(place: Place) -> Bits:
    """The uninterrupted generation: every id and the bits of its logits."""
    return [(step.token_id, step.logits.tobytes()) for step in generate(place(1, 0).driver, PROMPT, 2 * GEN)]


@pytest.fixture
def saved(place: Place, tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    run(place(3, 2), ids=PROMPT, save=path)
    return path


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize(("stages", "shards", "threads"), [(1, 0, 1), (5, 1, 1), (9, 0, 1), (2, 2, 2)])
def test_the_same_bits_on_any_other_plan(
    place: Place, saved: Path, expected: Bits, stages: int, shards: int, threads: int, incremental: bool
) -> None:
    assert open_state(saved).document.num_committed == len(PROMPT) + GEN - 1
    assert run(place(stages, shards, threads), [], load=saved, incremental=incremental) == expected[GEN:]


def test_the_golden_ids_in_two_parts(place: Place, k3b_dir: Path, tmp_path: Path) -> None:
    golden = read_golden(k3b_dir)
    path = tmp_path / "state"
    found = run(place(2, 0), golden.ids(2), save=path, gen=9)
    while len(found) < 32:
        found += run(place(1, 0), [], load=path, save=path, gen=min(9, 32 - len(found)))
    assert [token_id for token_id, _ in found] == golden.arrays["p2_greedy"].tolist()


def test_new_ids_come_after_the_saved_ones(place: Place, saved: Path) -> None:
    ids = open_state(saved).ids
    assert ids[: len(PROMPT)] == PROMPT
    uninterrupted = [
        (step.token_id, step.logits.tobytes()) for step in generate(place(1, 0).driver, [*ids, 7, 400, 7], GEN)
    ]
    assert run(place(5, 0), [7, 400, 7], load=saved) == uninterrupted


def test_the_state_of_a_run_on_a_tape(k3b_dir: Path, place: Place, saved: Path, expected: Bits, tmp_path: Path) -> None:
    checkpoint = place(1, 0).checkpoint
    folder = tmp_path / "tape"
    with opened_model(k3b_dir) as model:
        model.pack(folder)
    spec = CheckpointSpec(k3b_dir, None, 9)
    stages = [StageSpec(spec, 0, 4, 1, (), TapeSpec(folder, 1, 2), 4), StageSpec(spec, 4, 9, 1, (), None, 2)]
    chain = start_in_process(stages, [])
    assert run(Placed(checkpoint, Driver(chain), chain), [], load=saved) == expected[GEN:]
    chain.close()


@pytest.mark.parametrize("interrupted_call", [1, 2, 3, 6, 7, 9])
@pytest.mark.parametrize("sent", [True, False])
def test_an_interruption_anywhere(
    place: Place, expected: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_call: int, sent: bool
) -> None:
    """Ctrl-C in the prompt's steps (of 4 tokens: calls 1 to 5) or in those after it, before or after it was sent."""
    placed, path = place(3, 0, 1, 4), tmp_path / "state"
    name = "collect" if sent else "submit"
    calls, original = iter(range(1, 100)), getattr(placed.chain, name)

    def interrupt(argument: Any) -> Any:
        if next(calls) == interrupted_call:
            raise KeyboardInterrupt
        return original(argument)

    state = Continuation(placed.checkpoint, None, path, lambda line: None)
    found: Bits = []
    with state.begin(placed.driver, PROMPT, GEN, True) as sequence:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as interruption:
            patched.setattr(placed.chain, name, interrupt)
            for step in sequence.steps(GEN):
                found.append((step.token_id, step.logits.tobytes()))
        state.save_after(interruption.value, placed.driver, sequence)
    assert len(found) < GEN
    document = open_state(path).document
    assert document.prompt_ids == PROMPT and document.generated_ids == [token_id for token_id, _ in found]
    if sent:  # what was under way has been waited for
        assert document.num_committed > 0
    assert found + run(place(2, 0), [], load=path, gen=GEN - len(found)) == expected[:GEN]


def test_an_interruption_while_a_step_is_sent_does_not_lose_it(
    place: Place, expected: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the stages have the step and the driver does not yet know that it sent it."""
    placed, path = place(3, 0, 1, 4), tmp_path / "state"
    calls, original = iter(range(1, 100)), placed.chain.submit

    def interrupt(message: Any) -> Any:
        ticket = original(message)
        if next(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        return ticket

    state = Continuation(placed.checkpoint, None, path, lambda line: None)
    found: Bits = []
    with state.begin(placed.driver, PROMPT, GEN, True) as sequence:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as interruption:
            patched.setattr(placed.chain, "submit", interrupt)
            for step in sequence.steps(GEN):
                found.append((step.token_id, step.logits.tobytes()))
        state.save_after(interruption.value, placed.driver, sequence)
    assert 0 < len(found) < GEN
    assert open_state(path).document.num_committed == len(PROMPT) + len(found)
    assert found + run(place(2, 0), [], load=path, gen=GEN - len(found)) == expected[:GEN]


def test_after_a_failure_the_ids_are_saved(place: Place, expected: Bits, tmp_path: Path) -> None:
    placed, path = place(3, 0), tmp_path / "state"
    state = Continuation(placed.checkpoint, None, path, lambda line: None)
    with state.begin(placed.driver, PROMPT, GEN, True) as sequence:
        steps = sequence.steps(GEN)
        state.save_after(Failure("lost"), placed.driver, sequence)
        assert not path.exists()  # nothing was generated that could be lost
        found = [(step.token_id, step.logits.tobytes()) for step in (next(steps), next(steps))]
        state.save_after(Failure("lost"), placed.driver, sequence)
    assert open_state(path).document.num_committed == 0
    assert found + run(place(1, 0), [], load=path, gen=GEN - 2) == expected[:GEN]


def test_a_second_interruption_saves_the_ids(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, path = place(3, 0), tmp_path / "state"
    state = Continuation(placed.checkpoint, None, path, lambda line: None)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with state.begin(placed.driver, PROMPT, GEN, True) as sequence:
        next(sequence.steps(GEN))
        monkeypatch.setattr(placed.driver, "settle", interrupt)
        state.save_after(KeyboardInterrupt(), placed.driver, sequence)
    assert open_state(path).document.num_committed == 0 and len(open_state(path).ids) == len(PROMPT) + 1


def test_places_that_cannot_be_saved_to(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = place(1, 0).checkpoint
    with pytest.raises(OutputFailure, match=r"--save-state /nowhere/state: the folder /nowhere does not exist"):
        Continuation(checkpoint, None, Path("/nowhere/state"), lambda line: None)
    state = Continuation(checkpoint, None, tmp_path / "state", lambda line: None)
    state.check_room(10)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OutputFailure, match=r"found 1\.000 kB free"):
        state.check_room(10)


def test_a_full_disk_leaves_the_old_state(place: Place, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputFailure, match="No space left on device; nothing was saved"):
        run(place(1, 0), PROMPT, save=saved)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_no_more_than_two_pieces_are_held_at_a_time(place: Place, saved: Path) -> None:
    state, driver = open_state(saved), place(1, 0).driver
    given_out: list[weakref.ref[Any]] = []

    def watched() -> Iterator[tuple[int, pa.Buffer]]:
        for layer, piece in state.pieces():
            assert sum(reference() is not None for reference in given_out) <= 1  # the one before this
            given_out.append(weakref.ref(piece))
            yield layer, piece
            del piece

    driver.close(driver.restore(state.ids[:-1], watched(), 40))
    assert len(given_out) == len(state.document.pieces)


def test_logits_of_an_interrupted_step_are_kept_to_the_bit(place: Place, tmp_path: Path, expected: Bits) -> None:
    """Everything is committed when the step in progress was the last thing asked: the next id needs no work."""
    placed, path = place(1, 0), tmp_path / "state"
    state = Continuation(placed.checkpoint, None, path, lambda line: None)
    with state.begin(placed.driver, PROMPT, GEN, True) as sequence:
        placed.driver.forward({sequence.session: PROMPT})  # interrupted before its answer was used
        sequence.settle()
        state.save(placed.driver, sequence)
    found = open_state(path)
    assert found.document.num_committed == len(PROMPT) and found.logits is not None
    assert found.logits.dtype == np.float32 and found.logits.tobytes() == expected[0][1]
    assert run(place(3, 2), [], load=path) == expected[:GEN]

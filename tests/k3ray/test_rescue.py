"""What is saved of a sequence whose actors are lost for good, and after Ctrl-C in a long step: the bits go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.plan import make_plan
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.continuation import Continuation
from k3ray.driver import Driver
from k3ray.generation import generate
from k3ray.state_file import open_state
from k3ray.workers.hop_link import ShardUnreachable
from k3ray.workers.loading import CheckpointSpec
from tests.fake_actors import FakeActors, Fault, Ticket
from tests.placed import PROMPT, Bits, Place, places, run

GEN = 8
SETTINGS = RecoverySettings(snapshot_every=3, max_recoveries=0, look_s=0.02, settle_s=0.05, silent_s=0.2)


@pytest.fixture(scope="module")
def place(k3b_dir: Path) -> Place:
    return places(k3b_dir)


@pytest.fixture(scope="module")
def expected(place: Place) -> Bits:
    return [(step.token_id, step.logits.tobytes()) for step in generate(place(1, 0).driver, PROMPT, GEN)]


class Interrupting(FakeActors):
    """Ctrl-C while the nth step of a stage is awaited, which then never ends."""

    def is_done(self, ticket: Ticket, timeout_s: float) -> bool:
        stuck = self.calls[ActorId("stage", 1), "apply"] >= self.nth
        if stuck and not super().is_done(ticket, timeout_s) and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().is_done(ticket, timeout_s)

    nth, interrupted = 8, False


def ended(place: Place, k3b_dir: Path, kind: type[FakeActors], faults: list[Fault], error: type[BaseException],
          **where: Any) -> Continuation:  # fmt: skip
    """A generation over three stages that does not end by itself, and what was saved of it."""
    actors = kind(make_plan(CheckpointSpec(k3b_dir, None, 9), 3, 0, 1, ()), faults)
    driver = Driver(RecoveringChain(actors, SETTINGS))
    state = Continuation(place(1, 0).checkpoint, None, where.get("save"), lambda line: None, where.get("rescue"))
    with state.begin(driver, PROMPT, GEN, True) as sequence:
        with pytest.raises(error) as caught:
            list(sequence.steps(GEN))
        state.save_after(caught.value, driver, sequence)
    return state


def check(place: Place, path: Path, expected: Bits, committed: int) -> None:
    """The file goes on as if nothing had happened, on another plan."""
    saved = open_state(path)
    assert saved.document.num_committed == committed
    done = len(saved.document.generated_ids)
    assert run(place(2, 0), [], load=path, gen=GEN - done) == expected[done:]


@pytest.mark.parametrize(("nth", "committed"), [(2, 0), (8, len(PROMPT) + 5)], ids=["no snapshot yet", "snapshots"])
def test_past_the_bound_the_last_kept_state_is_saved(
    place: Place, k3b_dir: Path, tmp_path: Path, expected: Bits, nth: int, committed: int
) -> None:
    path = tmp_path / "saved"
    state = ended(place, k3b_dir, FakeActors, [Fault(ActorId("stage", 1), "apply", nth)], ActorLost, save=path)
    check(place, path, expected, committed)
    assert state.saved.endswith(f"next: --load-state {path}")


def test_without_save_state_it_is_rescued_and_the_command_is_said(
    place: Place, k3b_dir: Path, tmp_path: Path, expected: Bits
) -> None:
    folder = tmp_path / "state" / "k3ray"
    state = ended(place, k3b_dir, FakeActors, [Fault(ActorId("stage", 1), "apply", 8)], ActorLost, rescue=folder)
    (path,) = folder.iterdir()
    check(place, path, expected, len(PROMPT) + 5)
    assert f"next: k3ray generate {k3b_dir} --load-state {path}" in state.saved


class Unreachable(FakeActors):
    """A stage that lives and cannot reach its shard, which lives as well: for good, at the nth step of stage 1."""

    def result(self, ticket: Ticket) -> Any:
        if self.calls[ActorId("stage", 1), "apply"] >= 8:
            raise ShardUnreachable("an expert shard's process lives, but a firewall is in the way")
        return super().result(ticket)


def test_a_shard_that_no_stage_reaches_costs_no_sequence_either(
    place: Place, k3b_dir: Path, tmp_path: Path, expected: Bits
) -> None:
    """It ends with exit code 3 as any loss for good does, and a sequence is saved with that."""
    folder = tmp_path / "state" / "k3ray"
    state = ended(place, k3b_dir, Unreachable, [], ShardUnreachable, rescue=folder)
    assert folder.is_dir(), "nothing was saved"
    (path,) = folder.iterdir()
    check(place, path, expected, open_state(path).document.num_committed)
    assert open_state(path).document.num_committed and f"--load-state {path}" in state.saved


def test_a_rescue_that_fails_is_said_and_nothing_else(place: Place, k3b_dir: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    faults = [Fault(ActorId("stage", 1), "apply", 8)]
    state = ended(place, k3b_dir, FakeActors, faults, ActorLost, rescue=blocked / "k3ray")
    assert state.saved.startswith(f"the sequence could not be saved in {blocked}/k3ray: ")


def test_ctrl_c_in_a_step_that_does_not_end(place: Place, k3b_dir: Path, tmp_path: Path, expected: Bits) -> None:
    path, began = tmp_path / "saved", time.monotonic()
    faults = [Fault(ActorId("stage", 1), "apply", 8, "is stuck")]
    ended(place, k3b_dir, Interrupting, faults, KeyboardInterrupt, save=path)
    check(place, path, expected, len(PROMPT) + 5)
    assert time.monotonic() - began < 60


def test_ctrl_c_does_not_wait_for_a_replacement(place: Place, k3b_dir: Path, tmp_path: Path, expected: Bits) -> None:
    path = tmp_path / "saved"
    faults = [Fault(ActorId("stage", 1), "apply", 8, "hangs")]
    ended(place, k3b_dir, Interrupting, faults, KeyboardInterrupt, save=path)
    check(place, path, expected, len(PROMPT) + 5)

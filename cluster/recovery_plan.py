"""What is decided when an actor is lost, as pure functions of what is known; recovering_chain.py acts on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.step_log import Replayed, StepLog, Stepped
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure


class RecoveryRefused(Failure):
    """Settings that make no sense."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """When to take snapshots, and when an actor that does not answer is lost.

    snapshot_every: steps; 0: no snapshots, a replacement begins at position 0. log_bytes: of kept messages, after
    which a snapshot is due whatever the number of steps. look_s: an answer that takes longer makes us look at the
    actors; silent_s: one that does not answer a look within it is hung, and a shard that a stage has not reached for as
    long is cut off from it; sign_s: the same for one whose last answer was lost on the way; frame_s: a stage that has
    had nothing to do for so long does not get what it was sent; start_s: the same for a process that has
    never answered and whose node can be reached. A stage that answers looks and not its step is hung after slow_factor
    times the time that such a step took at most, within shortest_deadline_s and longest_deadline_s; unless a shard
    works on one request for blamed_share of that: then the shard is.
    """

    snapshot_every: int = 64
    max_recoveries: int = 3
    log_bytes: int = 32 << 20
    look_s: float = 0.5
    settle_s: float = 0.2
    sign_s: float = 5.0
    frame_s: float = 30.0
    silent_s: float = 20.0
    start_s: float = 300.0
    slow_factor: float = 20.0
    shortest_deadline_s: float = 60.0
    longest_deadline_s: float = 3600.0
    blamed_share: float = 0.5

    def __post_init__(self) -> None:
        for option, value in (("--snapshot-every", self.snapshot_every), ("--max-recoveries", self.max_recoveries)):
            if value < 0:
                raise RecoveryRefused(f"{option}: found {value}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was lost, how long the run stood still for it, and what was computed again.

    step: how many steps had been sent. layer_steps: layers times steps that the replacements computed again. restored:
    how many of their sequences began from a snapshot, of restored_bytes together. pulled_bytes: of snapshots that had
    come from other hosts since the recovery before. places: on several hosts, where each of `lost` was and is. cuts:
    links between actors that lived, because of which they were replaced.
    """

    lost: tuple[str, ...]
    step: int
    seconds: float
    layer_steps: int
    restored: int
    places: tuple[str, ...] = ()
    restored_bytes: int = 0
    pulled_bytes: int = 0
    cuts: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line about it."""
        again = f"{self.layer_steps} layer-steps computed again" if self.layer_steps else "nothing computed again"
        began = f" after {self.restored} snapshots ({_size(self.restored_bytes)})" if self.restored else ""
        places = f" ({'; '.join(self.places)})" if self.places else ""
        pulled = f"; {_size(self.pulled_bytes)} of snapshots had come from other hosts" if self.pulled_bytes else ""
        return (
            f"recovered: lost {', '.join(self.lost)}{places} at step {self.step}; {self.seconds:.2f} s, "
            f"{again}{began}{pulled}{''.join(f'; {cut}' for cut in self.cuts)}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 100_000 else f"{nbytes:,} bytes"


def describe_place(before: str, after: str) -> str:
    """Return where an actor of several hosts was and is, in words; empty on one host."""
    if not before and not after:
        return ""
    return f"{before}, started again there" if before == after else f"{before} -> {after}"


def plan_replays(stages: Iterable[int], log: StepLog, answered: Mapping[int, int]) -> dict[int, tuple[Replayed, ...]]:
    """Decide what each new stage is told before it goes on.

    answered: for every step on its way (by its place) how many stages have answered it. Those answers are known, so a
    new stage repeats the steps that its predecessor answered; the others reach it again as steps on their way.
    """
    return {
        stage: log.replay(stage, {place for place, count in answered.items() if count <= stage}) for stage in stages
    }


def count_layer_steps(replay: Sequence[Replayed], layers: range) -> int:
    """Return the layers times the steps of one stage's replay."""
    return len(layers) * sum(isinstance(told, Stepped) for told in replay)


def agrees(told: Replayed, stage: int, answer: Any) -> bool:
    """Decide whether a repeated answer has the bits of the first one, where that is still known."""
    if not isinstance(told, Stepped) or stage + 1 == len(told.inputs):
        return True
    first = told.inputs[stage + 1]
    return first is None or bool(first.read().equals(answer))


def may_recover(recoveries: int, lost: Iterable[ActorId], settings: RecoverySettings) -> None:
    """Raise ActorLost when the run has been recovered as often as it may be."""
    if recoveries >= settings.max_recoveries:
        names = ", ".join(str(actor) for actor in sorted(lost))
        raise ActorLost(
            f"{names} ended or did not answer, and this run was recovered {counted(recoveries, 'time')} already "
            f"(--max-recoveries {settings.max_recoveries}); look for the reason (memory? disk?), then start it again"
        )


def snapshot_is_due(log: StepLog, since: int, settings: RecoverySettings) -> bool:
    """Decide whether to take snapshots now, the last ones having been taken at the place `since`."""
    if not settings.snapshot_every or log.keeps_everything or log.place == since:
        return False
    return log.steps_since(since) >= settings.snapshot_every or log.held_bytes() > settings.log_bytes


@dataclass(frozen=True, slots=True)
class Look:
    """A question to an actor that any living process answers at once. answers: how many it has answered before."""

    asked_at: float
    answers: int


def silent_actors(
    looks: Mapping[ActorId, Look], now: float, settings: RecoverySettings, unreachable: Collection[ActorId] = ()
) -> set[ActorId]:
    """Return the actors whose looks are unanswered for too long. unreachable: those whose nodes cannot be reached."""

    def allowed_s(actor: ActorId, look: Look) -> float:
        return settings.silent_s if look.answers or actor in unreachable else settings.start_s

    return {actor for actor, look in looks.items() if now - look.asked_at > allowed_s(actor, look)}


def hung_shards(busy_s: Mapping[ActorId, float], deadline_s: float, settings: RecoverySettings) -> set[ActorId]:
    """Return the shards for which a stage has waited in vain: they work on one request for most of its deadline."""
    return {shard for shard, seconds in busy_s.items() if seconds > settings.blamed_share * deadline_s}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a stage takes for a token, at most, in the steps seen so far. None: none was seen."""

    seconds_per_token: float | None = None

    def after(self, seconds: float, tokens: int) -> Pace:
        """Return the pace with one more step of one stage."""
        return Pace(max(self.seconds_per_token or 0.0, seconds / tokens))

    def deadline_s(self, tokens: int, settings: RecoverySettings) -> float:
        """Return how long a stage may take for a step of so many tokens.

        A step of many tokens takes at most as long as that many steps. What was seen is never too long; while nothing
        was seen, a step has the longest time.
        """
        if self.seconds_per_token is None:
            return max(settings.longest_deadline_s, settings.shortest_deadline_s * tokens)
        expected = self.seconds_per_token * tokens
        bounded = min(expected * settings.slow_factor, settings.longest_deadline_s)
        return max(bounded, settings.shortest_deadline_s, 3 * expected)

"""Models placed in this process in several ways, for tests of saved sequences: each is loaded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3ray.cluster.plan import make_plan
from k3ray.continuation import Continuation
from k3ray.driver import Driver
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import Checkpoint, CheckpointSpec, open_checkpoint

PROMPT = [84, 197, 179, 385, 423, 346, 143, 141, 51, 271, 456, 276, 75, 451, 84, 340, 82, 293, 85]
GEN = 6
Bits = list[tuple[int, bytes]]  # of every step the id and its logits


@dataclass(frozen=True, slots=True)
class Placed:
    """A model somewhere: its checkpoint and what runs it."""

    checkpoint: Checkpoint
    driver: Driver
    chain: InProcessChain


Place = Callable[..., Placed]


def places(model_dir: Path) -> Place:
    """Return place(stages, shards, threads, chunk, layers), which starts each model once."""

    @cache
    def start(stages: int, shards: int, threads: int = 1, chunk: int = 64, layers: int = 9) -> Placed:
        spec = CheckpointSpec(model_dir, None, layers)
        plan = make_plan(spec, stages, shards, threads * (stages + shards), ())
        chain = start_in_process(plan.stages, plan.shards)
        return Placed(open_checkpoint(spec), Driver(chain, chunk), chain)

    return start


def run(
    placed: Placed,
    ids: list[int],
    load: Path | None = None,
    save: Path | None = None,
    gen: int = GEN,
    incremental: bool = True,
) -> Bits:
    """One generation as Model.generate runs it."""
    state = Continuation(placed.checkpoint, load, save, lambda line: None)
    prompt = state.whole_prompt(ids)
    with state.begin(placed.driver, prompt, gen, incremental) as sequence:
        found = [(step.token_id, step.logits.tobytes()) for step in sequence.steps(gen)]
        state.save(placed.driver, sequence)
    return found

"""A plan run as a plan's user would, token by token, with everything that its actors count over the decoded tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.replayed_experts import Routing
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.actor_peaks import peak_memory
from k3ray.cluster.placed_plan import placed_plan
from k3ray.cluster.placement import Placement
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.topology import NodeFacts
from k3ray.driver import Driver
from k3ray.workers.frames import STEP_TOKENS
from k3ray.workers.in_process import InProcessChain
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import ModelConfig

PROMPT = 192  # tokens, so that every expert has been asked for
WARM_UP = 3
PARTS = 3  # of the tokens, before each of which there is a pause


@dataclass(frozen=True, slots=True)
class Decoded:
    """Of the tokens after prompt and warm-up. first_step: the driver's number of the first of them."""

    seconds: tuple[float, ...]
    counts: IoCounts
    routing: Routing
    first_step: int
    peaks: dict[str, int]

    @property
    def trunk_used(self) -> int:
        """Bytes of trunk that were read for these tokens."""
        return self.counts.trunk_bytes - self.counts.trunk_ahead_bytes


def decode(
    placement: Placement,
    node: NodeFacts,
    model: Path,
    config: ModelConfig,
    gen: int,
    pause: Callable[[], None] = lambda: None,
) -> Decoded:
    """Run the plan on a Ray of its own. pause: called before each part of the tokens that count."""
    spec = CheckpointSpec(model, None, config.num_hidden_layers, config=config)
    plan = placed_plan(placement, [node], spec, joined=False)
    with ExitStack() as ending:
        workers = len(plan.stages) + len(plan.shards)
        runtime = ending.enter_context(ray_runtime(RaySettings("local", workers=workers)))
        actors = ActorChain(plan, runtime.actor_options)
        ending.callback(actors.stop)
        actors.load()
        driver = Driver(RecoveringChain(actors, RecoverySettings(snapshot_every=0)))
        return replace(decoded(driver, actors, config, gen, pause), peaks=peak_memory(actors))


def decoded(
    driver: Driver,
    chain: ActorChain | InProcessChain,
    config: ModelConfig,
    gen: int,
    pause: Callable[[], None] = lambda: None,
) -> Decoded:
    """A prompt, a few tokens, and `gen` that count. chain: what the driver drives, just loaded."""
    chain.record_routing()
    session = driver.open(PROMPT + WARM_UP + gen + 1)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, PROMPT).tolist()
    for low in range(0, PROMPT, STEP_TOKENS):  # step by step: stages that work at once ask in an order of their own
        logits = driver.forward({session: prompt[low : low + STEP_TOKENS]})[session]
    seconds, before = [], IoCounts()
    for number in range(WARM_UP + gen):
        if number == WARM_UP:
            before = chain.counts()
        if number >= WARM_UP and (number - WARM_UP) % -(-gen // PARTS) == 0:
            pause()
        started = time.perf_counter()
        logits = driver.forward({session: [int(np.argmax(logits[0]))]})[session]
        seconds.append(time.perf_counter() - started)
    counts, first_step = chain.counts() - before, -(-PROMPT // STEP_TOKENS) + WARM_UP + 1
    return Decoded(tuple(seconds[WARM_UP:]), counts, chain.recorded_routing(), first_step, {})

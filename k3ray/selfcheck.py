"""The proof that a newcomer runs: one sequence under many settings on real actors, gate by gate, bits as bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.budget import plan_budget
from k3ray.cluster.budget_plan import host_run
from k3ray.cluster.machine import memory_limits, physical_cores
from k3ray.cluster.plan import Plan, make_plan
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.wishes import Wishes
from k3ray.driver import Driver
from k3ray.environment import read_environment
from k3ray.generation import generate, greedy
from k3ray.model_source import find_model
from k3ray.proof import logits_hash, trace
from k3ray.workers.counted import counted
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.config import ModelConfig, read_config

# The embedded model's logits in this check: any CPU with IEEE fma must give these bits.
EMBEDDED_LOGITS = "e3c61eb8fafdf63fe8659135410aa23c"
STAGES_SHARDS = ((1, 0), (2, 0), (3, 2), (1, 2))
THREADS = (1, 2)
CHUNKS = (1, 7, 1000)
PROMPT_LENGTH, GEN = 19, 5


@dataclass(frozen=True, slots=True)
class Gate:
    """One statement and whether it holds. counted: on what it rests."""

    name: str
    passed: bool
    counted: str


@dataclass(frozen=True, slots=True)
class Reference:
    """The sequence everything is compared with: one stage, one thread, the prompt in one step."""

    prompt: list[int]
    ids: list[int]
    logits: npt.NDArray[np.float32]

    @property
    def hash(self) -> str:
        """The hash of the logits' bits."""
        return logits_hash(self.logits)


def selfcheck(model_dir: Path | None, say: Callable[[str], None]) -> Iterator[Gate]:
    """Start the actors once, load them under every plan, and yield each gate as it is decided."""
    environment = read_environment()
    source = find_model(model_dir, None, environment)
    say(source.describe())
    config = read_config(source.model_dir)
    spec = CheckpointSpec(source.model_dir, None, config.num_hidden_layers)
    open_checkpoint(spec)
    settings = [(stages, shards) for stages, shards in STAGES_SHARDS if stages <= config.num_hidden_layers]
    most = tuple(max(counts) for counts in zip(*settings, strict=True))
    largest = make_plan(spec, most[0], most[1], 1, ())
    plan_budget(host_run(config, largest, None, 2 * PROMPT_LENGTH), Wishes(preset="max"), memory_limits())
    with ray_runtime(RaySettings(environment.ray_address, workers=largest.num_processes)) as runtime:
        say(runtime.describe())
        chain = ActorChain(largest, runtime.actor_options)
        try:
            embedded = source.said_by.startswith("the embedded model")
            yield from _gates(config, chain, spec, settings, embedded)
        finally:
            chain.stop()


def _gates(
    config: ModelConfig, chain: ActorChain, spec: CheckpointSpec, settings: list[tuple[int, int]], embedded: bool
) -> Iterator[Gate]:
    chain.load(make_plan(spec, 1, 0, 1, ()))
    prompt = prompt_ids(config.vocab_size)
    reference = Reference(prompt, *trace(Driver(chain, max(CHUNKS)), prompt, GEN))
    if embedded:
        yield Gate(
            "recorded bits", reference.hash == EMBEDDED_LOGITS, f"the hash shipped with k3ray, {EMBEDDED_LOGITS}"
        )
    yield _teacher_forcing(chain, reference)
    yield _greedy_decode(chain, reference)
    yield _full_recompute(chain, reference)
    yield from (_one_hash(config, chain, spec, stages, shards, reference) for stages, shards in settings)


def prompt_ids(vocab_size: int) -> list[int]:
    """Return the check's prompt: a fixed walk through the vocabulary."""
    return [(7 + 61 * place * place) % vocab_size for place in range(PROMPT_LENGTH)]


def _teacher_forcing(chain: ActorChain, reference: Reference) -> Gate:
    """Give the sequence one id at a time: every position's logits must have the bits of the one-step prompt."""
    driver = Driver(chain)
    ids = reference.prompt + reference.ids[:-1]
    session = driver.open(len(ids))
    rows = [driver.forward({session: [token_id]})[session][0] for token_id in ids]
    driver.close(session)
    equal = [row.tobytes() == expected.tobytes() for row, expected in zip(rows, reference.logits, strict=True)]
    return Gate("teacher forcing", all(equal), f"{sum(equal)} of {len(equal)} positions equal in every bit")


def _greedy_decode(chain: ActorChain, reference: Reference) -> Gate:
    """Generate as `k3ray generate` does: the ids must be the largest logits of the reference."""
    steps = list(generate(Driver(chain), reference.prompt, GEN))
    expected = [greedy(row) for row in reference.logits[len(reference.prompt) - 1 :]]
    equal = [step.token_id == token_id for step, token_id in zip(steps, expected, strict=True)]
    return Gate("greedy decode", all(equal), f"{sum(equal)} of {len(equal)} ids equal")


def _full_recompute(chain: ActorChain, reference: Reference) -> Gate:
    """Run the whole sequence anew for each token."""
    _, logits = trace(Driver(chain), reference.prompt, GEN, incremental=False)
    equal = int((logits.view(np.uint32) == reference.logits.view(np.uint32)).sum())
    return Gate("incremental = full recompute", equal == logits.size, f"{equal} of {logits.size} logits equal in bits")


def _one_hash(
    config: ModelConfig, chain: ActorChain, spec: CheckpointSpec, stages: int, shards: int, reference: Reference
) -> Gate:
    """Run one placement with every number of threads, cut of the prompt, alone and in company."""
    companions = [prompt_ids(config.vocab_size)[:length] for length in (1, 5, 8, 13)]
    hashes = []
    for threads in THREADS:
        plan: Plan = make_plan(spec, stages, shards, threads * (stages + shards), physical_cores())
        chain.load(plan)
        for chunk in CHUNKS:
            for others in ([], companions):
                hashes.append(logits_hash(trace(Driver(chain, chunk), reference.prompt, GEN, others)[1]))
    equal = hashes.count(reference.hash)
    name = f"one hash: {counted(stages, 'stage')}, {counted(shards, 'shard')}"
    return Gate(name, equal == len(hashes), f"{equal} of {len(hashes)} settings have {reference.hash}")

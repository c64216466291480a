"""One hash of all logits, however the work is cut: stages, shards, threads, prompt chunks, recompute, company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from k3ray.cluster.plan import make_plan
from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config

STAGES = (1, 2, 3, 5, 7)
SHARDS = (0, 1, 3)
THREADS = (1, 2)
CHUNKS = (1, 7, 16, 1000)
PROMPT = [84, 197, 179, 385, 423, 346, 143, 141, 51, 271, 456, 276, 75, 451, 84, 340, 82, 293, 85]
COMPANIONS = [[5], [9, 9, 9, 9, 9, 9, 9], list(range(30, 53)), [480, 101]]
GEN = 3


@pytest.fixture(scope="module")
def chain_of(k3b_dir: Path) -> Callable[[int, int, int], InProcessChain]:
    layers = read_config(k3b_dir).num_hidden_layers

    @cache
    def start(stages: int, shards: int, threads: int) -> InProcessChain:
        plan = make_plan(CheckpointSpec(k3b_dir, None, layers), stages, shards, threads * (stages + shards), ())
        return start_in_process(plan.stages, plan.shards)

    return start


def hash_of(chain: InProcessChain, chunk: int, incremental: bool, accompanied: bool) -> str:
    companions = COMPANIONS if accompanied else []
    return logits_hash(trace(Driver(chain, chunk), PROMPT, GEN, companions, incremental)[1])


@pytest.fixture(scope="module")
def reference(chain_of: Callable[[int, int, int], InProcessChain]) -> str:
    return hash_of(chain_of(1, 0, 1), 1000, True, False)


@pytest.mark.parametrize("accompanied", [False, True])
@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("stages", STAGES)
def test_one_hash(
    chain_of: Callable[[int, int, int], InProcessChain],
    reference: str,
    stages: int,
    shards: int,
    threads: int,
    chunk: int,
    incremental: bool,
    accompanied: bool,
) -> None:
    assert hash_of(chain_of(stages, shards, threads), chunk, incremental, accompanied) == reference


def test_the_hash_can_differ(chain_of: Callable[[int, int, int], InProcessChain], reference: str) -> None:
    _, logits = trace(Driver(chain_of(1, 0, 1)), [*PROMPT[:-1], PROMPT[-1] ^ 1], GEN)
    assert logits_hash(logits) != reference

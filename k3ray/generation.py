"""Greedy generation: which id comes next, when to stop, and what each step cost."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.driver import Driver

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. seconds: the step's wall time; the first includes the prompt. logits: (vocab,) f32."""

    token_id: int
    seconds: float
    logits: Float32Array
    is_end: bool


def greedy(logits: Float32Array) -> int:
    """Return the id with the largest logit (vocab,) f32; ties go to the lower id."""
    return int(np.argmax(logits))


def generate(
    driver: Driver,
    prompt_ids: Sequence[int],
    gen: int,
    end_ids: Collection[int] = (),
    incremental: bool = True,
) -> Iterator[Step]:
    """Yield up to gen steps, stopping after one of end_ids.

    incremental: keep the sequence's state between steps; otherwise every step runs the whole sequence anew. The
    bits are the same.
    """
    ids = list(prompt_ids)
    capacity = len(ids) + gen
    session = driver.open(capacity)
    fresh = list(ids)
    try:
        for _ in range(gen):
            started = time.perf_counter()
            if not incremental and driver.committed(session):
                driver.close(session)
                session, fresh = driver.open(capacity), list(ids)
            logits = driver.forward({session: fresh})[session][0]
            token_id = greedy(logits)
            ids.append(token_id)
            fresh = [token_id]
            yield Step(token_id, time.perf_counter() - started, logits, token_id in end_ids)
            if token_id in end_ids:
                return
    finally:
        driver.close(session)

"""The bit contract as something that can be run: the logits of one sequence under any settings, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3ray.driver import Driver
from k3ray.generation import greedy

Float32Array = npt.NDArray[np.float32]


def trace(
    driver: Driver,
    prompt: Sequence[int],
    gen: int,
    companions: Sequence[Sequence[int]] = (),
    incremental: bool = True,
) -> tuple[list[int], Float32Array]:
    """Generate gen ids greedily and return them with the logits of every position, prompt included.

    companions: prompts of other sequences that share every step. The array is (len(prompt) + gen - 1, vocab) f32.
    """
    sequences = [list(prompt), *(list(ids) for ids in companions)]
    lengths = [len(ids) + gen for ids in sequences]
    sessions = [driver.open(length) for length in lengths]
    fresh = [list(ids) for ids in sequences]
    rows: list[Float32Array] = []
    for step in range(gen):
        if step and not incremental:
            _close(driver, sessions)
            sessions = [driver.open(length) for length in lengths]
            fresh, rows = [list(ids) for ids in sequences], []
        answers = driver.forward(dict(zip(sessions, fresh, strict=True)), every_position=True)
        rows.append(answers[sessions[0]])
        fresh = [[greedy(answers[session][-1])] for session in sessions]
        for ids, new in zip(sequences, fresh, strict=True):
            ids.extend(new)
    _close(driver, sessions)
    return sequences[0][len(prompt) :], np.concatenate(rows)


def logits_hash(logits: Float32Array) -> str:
    """Return a hash of the bits (little-endian float32, row by row)."""
    return hashlib.blake2b(np.ascontiguousarray(logits, "<f4").tobytes(), digest_size=16).hexdigest()


def _close(driver: Driver, sessions: Sequence[int]) -> None:
    for session in sessions:
        driver.close(session)

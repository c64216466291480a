"""Greedy generation: which id comes next, when to stop, and what each step cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


@dataclass(frozen=True, slots=True)
class Resumption:
    """The saved state of a sequence that begins with what is resumed.

    num_committed: how many of its ids the state has applied. pieces: the state, as (layer, piece)s, when it is called.
    logits: (vocab,) f32 of the last saved id, where every saved id is committed.
    """

    num_committed: int
    pieces: Callable[[], Iterable[tuple[int, pa.Buffer]]]
    logits: Float32Array | None


class GreedySequence:
    """One sequence that grows by its likeliest id; it is open in the driver until the end of its `with`.

    incremental: keep the sequence's state between steps; otherwise every step runs the whole sequence anew. The bits
    are the same. resumption: state that was saved before; only used when incremental.
    """

    def __init__(
        self,
        driver: Driver,
        ids: Sequence[int],
        gen: int,
        incremental: bool = True,
        resumption: Resumption | None = None,
    ) -> None:
        self.ids = list(ids)
        self._driver = driver
        self._incremental = incremental
        self._capacity = len(self.ids) + gen
        self._logits: Float32Array | None = None  # of the last id, when every id is committed
        if resumption is None or not incremental or not resumption.num_committed:
            self.session = driver.open(self._capacity)
            return
        committed = self.ids[: resumption.num_committed]
        self.session = driver.restore(committed, resumption.pieces(), self._capacity)
        if len(committed) == len(self.ids):
            self._logits = resumption.logits

    def __enter__(self) -> GreedySequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.close(self.session)

    @property
    def num_committed(self) -> int:
        """How many of the ids every stage has applied."""
        return len(self._driver.committed(self.session))

    @property
    def logits(self) -> Float32Array | None:
        """(vocab,) f32 of the last id when every id is committed and they are known, else None."""
        return self._logits if self.num_committed == len(self.ids) else None

    def steps(self, gen: int, end_ids: Collection[int] = ()) -> Iterator[Step]:
        """Yield up to gen steps, stopping after one of end_ids."""
        for _ in range(gen):
            started = time.perf_counter()
            logits = self._next_logits()
            token_id = greedy(logits)
            self.ids.append(token_id)
            yield Step(token_id, time.perf_counter() - started, logits, token_id in end_ids)
            if token_id in end_ids:
                return

    def settle(self) -> None:
        """Wait for what an interrupted step has sent: afterwards the state is that of num_committed ids."""
        self._logits = self._driver.settle(self.session)

    def _next_logits(self) -> Float32Array:
        if not self._incremental and self.num_committed:
            self._driver.close(self.session)
            self.session = self._driver.open(self._capacity)
        fresh = self.ids[self.num_committed :]
        if fresh:
            logits: Float32Array = self._driver.forward({self.session: fresh})[self.session][0]
            return logits
        assert self._logits is not None, "all ids are committed, and the logits of the last one are lost"
        return self._logits


def generate(
    driver: Driver,
    prompt_ids: Sequence[int],
    gen: int,
    end_ids: Collection[int] = (),
    incremental: bool = True,
) -> Iterator[Step]:
    """Yield up to gen steps of a sequence of its own, stopping after one of end_ids; see GreedySequence."""
    with GreedySequence(driver, prompt_ids, gen, incremental) as sequence:
        yield from sequence.steps(gen, end_ids)

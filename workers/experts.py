"""Routed experts of this process: a cache of slots, and the work on (token, expert) pairs as the experts arrive.

It does not know which experts a token chose for what reason, nor their weights in the sum.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.kernels import mxfp4
from k3ray.kernels.situ import situ
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.policy import CachePolicy, Placement
from k3ray.workers.expert_reader import Expert, ExpertReader, expert_slot_bytes
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.finite import NonFiniteProduct, require_finite_product

Bytes = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
QUEUE_DEPTH = 8  # reads at work at once: one alone leaves an NVMe half idle


class MissingExpert(Failure):
    """An expert was asked of a process that does not own it: the plan and the request disagree."""


class NonFiniteExpert(Failure):
    """An expert gave NaN or infinity: its scales are damaged, or what it was given is too large for it."""

    def __init__(self, layer: int, expert: int, part: str) -> None:
        super().__init__(
            f"layer {layer} expert {expert}: a NaN or infinite value in what its {part} gives; nothing was sampled "
            "from it. A weight is damaged or the config does not fit this checkpoint: run `k3ray verify`"
        )


@dataclass(slots=True)
class ExpertCounts:
    """What the cache did. hits: experts that were resident when they were asked for, before anything was read.

    wait_s: time in which the arithmetic had nothing to do but wait for the disk.
    """

    requests: int = 0
    hits: int = 0
    wait_s: float = 0.0


def expert_arena(config: ModelConfig, slots: int) -> Bytes:
    """Map memory for `slots` experts, (slots, slot bytes) u8; a page comes into being when it is first used."""
    width = expert_slot_bytes(config)
    memory = mmap.mmap(-1, slots * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).reshape(slots, width)


class ExpertStore:
    """The experts that this process owns, as many of them resident as the policy has slots for."""

    def __init__(
        self,
        config: ModelConfig,
        reader: ExpertReader,
        policy: CachePolicy,
        pool: RowPool,
        owns: Callable[[int, int], bool] = lambda layer, expert: True,
    ) -> None:
        self._config = config
        self.reader = reader
        self._policy = policy
        self._pool = pool
        self._owns = owns
        self._arena = expert_arena(config, policy.slots)
        self._resident: dict[int, Expert] = {}
        self._readers = ThreadPoolExecutor(QUEUE_DEPTH, thread_name_prefix="k3ray-experts")
        self._damaged_met: set[tuple[int, int]] = set()
        self.counts = ExpertCounts()

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every expert used so far that has a NaN scale byte, sorted."""
        return sorted(self._damaged_met)

    def damaged_among(self, layer: int, experts: Int32Array) -> tuple[int, ...]:
        """Return which of experts that were used are damaged, sorted: the same however often they were used before."""
        if not self._damaged_met:
            return ()
        return tuple(
            sorted(expert for expert in set(experts.reshape(-1).tolist()) if (layer, expert) in self._damaged_met)
        )

    def compute(self, layer: int, latents: Float32Array, token_rows: Int32Array, experts: Int32Array) -> Float32Array:
        """Return (pairs, latent) f32: expert experts[i] on latents[token_rows[i]].

        Each distinct expert is read at most once for all its pairs. Raises MissingExpert, ExpertUnreadable,
        NonFiniteExpert, NonFiniteInput; then no output leaves.
        """
        outputs = np.empty((len(experts), latents.shape[1]), np.float32)
        pairs_of: dict[int, list[int]] = {}
        for pair in np.argsort(-token_rows, kind="stable").tolist():  # the last token's choice first: see CachePolicy
            pairs_of.setdefault(int(experts[pair]), []).append(pair)
        for expert in pairs_of:
            if not self._owns(layer, expert):
                raise MissingExpert(f"layer {layer} expert {expert} is not owned by this process")
        distinct, slots = list(pairs_of), self._policy.slots
        for first in reversed(range(0, len(distinct), slots)):  # what is most worth keeping comes last, and stays
            for number, expert_bytes in self._arriving(layer, distinct[first : first + slots]):
                pairs = pairs_of[number]
                if expert_bytes.damaged:
                    self._damaged_met.add((layer, number))
                try:
                    outputs[pairs] = self._apply(expert_bytes, latents[token_rows[pairs]])
                except NonFiniteProduct as error:
                    raise NonFiniteExpert(layer, number, error.short) from None
        return outputs

    def close(self) -> None:
        """End the reading threads and close the files."""
        self._readers.shutdown()
        self.reader.close()

    def _arriving(self, layer: int, wanted: Sequence[int]) -> Iterator[tuple[int, Expert]]:
        """Yield the experts, resident ones first, the others as their bytes arrive."""
        placements = self._policy.request(layer, wanted)
        hits = [placement for placement in placements if placement.hit]
        self.counts.requests += len(placements)
        self.counts.hits += len(hits)
        pending = {
            self._readers.submit(self.reader.read, layer, placement.expert, self._arena[placement.slot]): placement
            for placement in placements
            if not placement.hit
        }
        try:
            for placement in hits:
                yield placement.expert, self._resident[placement.slot]
            for arrived in self._waiting(pending):
                placement = pending[arrived]
                self._resident[placement.slot] = arrived.result()
                yield placement.expert, self._resident[placement.slot]
        except BaseException:
            self._abandon(layer, pending)
            raise

    def _waiting(self, pending: dict[Future[Expert], Placement]) -> Iterator[Future[Expert]]:
        arriving = as_completed(pending)
        while True:
            started = time.perf_counter()
            arrived = next(arriving, None)
            self.counts.wait_s += time.perf_counter() - started
            if arrived is None:
                return
            yield arrived

    def _abandon(self, layer: int, pending: dict[Future[Expert], Placement]) -> None:
        """After a failure nothing that was being read counts as resident, and no thread still writes into a slot."""
        for future in pending:
            future.cancel()
        wait(pending)
        for placement in pending.values():
            self._policy.forget(layer, placement.expert)
            self._resident.pop(placement.slot, None)

    def _apply(self, expert: Expert, latents: Float32Array) -> Float32Array:
        x = mxfp4.quantise(latents)
        gate = mxfp4.matmul(expert.w1.packed, expert.w1.scales, x, self._pool)
        up = mxfp4.matmul(expert.w3.packed, expert.w3.scales, x, self._pool)
        require_finite_product("w1", gate)  # situ makes a finite number of an infinite one
        require_finite_product("w3", up)
        inner = situ(gate, up, self._config.situ_beta, self._config.situ_linear_beta)
        down = mxfp4.matmul(expert.w2.packed, expert.w2.scales, mxfp4.quantise(inner), self._pool)
        require_finite_product("w2", down)
        return down


class LocalExperts:
    """Routed experts computed in the stage's own process."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def begin(self, layer: int, expert_ids: Int32Array, latents: Float32Array) -> Callable[[], Float32Array]:
        """Return the call that computes the outputs (tokens, k, latent) f32."""
        tokens, top_k = expert_ids.shape
        token_rows = np.repeat(np.arange(tokens, dtype=np.int32), top_k)

        def compute() -> Float32Array:
            outputs = self._store.compute(layer, latents, token_rows, expert_ids.reshape(-1))
            return outputs.reshape(tokens, top_k, -1)

        return compute

    def damaged_among(self, layer: int, experts: Int32Array) -> tuple[int, ...]:
        """See ExpertStore.damaged_among."""
        return self._store.damaged_among(layer, experts)

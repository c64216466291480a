"""Routed experts held in this process: their bytes, and the work on (token, expert) pairs.

It does not know which experts a token chose for what reason, nor their weights in the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.kernels import mxfp4
from k3ray.kernels.situ import situ
from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
NAN_SCALE = 255


class MissingExpert(Failure):
    """An expert was asked of a process that does not hold it: the plan and the request disagree."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """packed: (rows, columns / 2) u8, low nibble first. scales: (rows, columns / 32) u8, E8M0."""

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    def apply(self, x: mxfp4.QuantisedInput, pool: RowPool) -> Float32Array:
        """Return (tokens, rows) f32 in the contract's order."""
        return mxfp4.matmul(self.packed, self.scales, x, pool)


@dataclass(frozen=True, slots=True)
class Expert:
    """w1 gate, w3 up: latent -> inner. w2 down: inner -> latent. damaged: a scale byte is NaN."""

    w1: Mxfp4Matrix
    w2: Mxfp4Matrix
    w3: Mxfp4Matrix
    damaged: bool


def read_expert(binding: Binding, reader: TensorReader, layer: int, expert: int) -> Expert:
    """Read one expert's six tensors into memory of this process."""
    names = binding.expert_tensors(layer, expert)

    def matrix(part: str) -> Mxfp4Matrix:
        packed, scales = (reader.read(names[f"{part}.weight_{kind}"]) for kind in ("packed", "scale"))
        return Mxfp4Matrix(packed, scales)

    w1, w2, w3 = matrix("w1"), matrix("w2"), matrix("w3")
    return Expert(w1, w2, w3, damaged=any((found.scales == NAN_SCALE).any() for found in (w1, w2, w3)))


class ExpertStore:
    """The experts that this process holds, all resident."""

    def __init__(self, config: ModelConfig, pool: RowPool) -> None:
        self._config = config
        self._pool = pool
        self._experts: dict[tuple[int, int], Expert] = {}
        self._damaged_met: set[tuple[int, int]] = set()

    def load(self, binding: Binding, reader: TensorReader, wanted: Iterable[tuple[int, int]]) -> None:
        """Read the experts (layer, expert) that this process is to hold."""
        for layer, expert in wanted:
            self._experts[layer, expert] = read_expert(binding, reader, layer, expert)

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every expert used so far that has a NaN scale byte, sorted."""
        return sorted(self._damaged_met)

    def compute(self, layer: int, latents: Float32Array, token_rows: Int32Array, experts: Int32Array) -> Float32Array:
        """Return (pairs, latent) f32: expert experts[i] on latents[token_rows[i]], each expert's bytes read once."""
        outputs = np.empty((len(experts), latents.shape[1]), np.float32)
        order = np.argsort(experts, kind="stable")
        cuts = np.flatnonzero(np.diff(experts[order])) + 1
        for pairs in np.split(order, cuts) if len(order) else []:
            outputs[pairs] = self._apply(layer, int(experts[pairs[0]]), latents[token_rows[pairs]])
        return outputs

    def _apply(self, layer: int, number: int, latents: Float32Array) -> Float32Array:
        expert = self._experts.get((layer, number))
        if expert is None:
            raise MissingExpert(f"layer {layer} expert {number} is not held by this process")
        if expert.damaged:
            self._damaged_met.add((layer, number))
        x = mxfp4.quantise(latents)
        gate, up = expert.w1.apply(x, self._pool), expert.w3.apply(x, self._pool)
        inner = situ(gate, up, self._config.situ_beta, self._config.situ_linear_beta)
        return expert.w2.apply(mxfp4.quantise(inner), self._pool)


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

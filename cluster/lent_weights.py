"""Weights of a model's shapes without their values, for measuring: all lie in one piece of memory, lent in a circle."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.tensors import ARRAY_DTYPES
from k3ray.workers.expert_reader import MATRICES, Expert, ExpertReader, Mxfp4Matrix
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.direct_io import Bytes, prefaulted
from k3ray.workers.tape.order import TapeTensor, tape_tensors

Float32Array = npt.NDArray[np.float32]
FILLED = 0x3A  # small ordinary numbers as bf16, as float32, as nibbles and as scales
ALIGNED = 64


class LentMemory:
    """One piece of memory given out in a circle: what was used last comes again after all the rest."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = prefaulted(nbytes)
        self._bytes[:] = FILLED
        self._next = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return len(self._bytes)

    def lend(self, nbytes: int) -> Bytes:
        """The next bytes, (nbytes,) u8; at most all there are."""
        if self._next + nbytes > len(self._bytes):
            self._next = 0
        begin = self._next
        self._next += -(-nbytes // ALIGNED) * ALIGNED
        return self._bytes[begin : begin + nbytes]


class LentMatrix:
    """A Matrix of the model's shape without bytes of its own; one larger than the memory is used in pieces."""

    def __init__(self, memory: LentMemory, tensor: TapeTensor, pool: RowPool) -> None:
        self._memory, self._tensor, self._pool = memory, tensor, pool

    def apply(self, x: Float32Array) -> Float32Array:
        """See Matrix."""
        tensor = self._tensor
        out = np.empty((len(x), tensor.rows), np.float32)
        most = max(1, self._memory.nbytes // tensor.row_bytes)
        for low in range(0, tensor.rows, most):
            rows = min(most, tensor.rows - low)
            dense.matmul(self._rows(rows), x, self._pool, out=out[:, low : low + rows])
        return out

    def array(self) -> npt.NDArray[np.generic]:
        """See Matrix."""
        return self._rows(self._tensor.rows)

    def _rows(self, rows: int) -> npt.NDArray[np.generic]:
        lent = self._memory.lend(rows * self._tensor.row_bytes)
        return lent.view(ARRAY_DTYPES[self._tensor.dtype]).reshape(rows, self._tensor.columns)


class LentMatrices:
    """Matrices for layers of the model."""

    def __init__(self, memory: LentMemory, config: ModelConfig) -> None:
        self._memory = memory
        self._tensors = {(tensor.layer, tensor.short): tensor for tensor in tape_tensors(config)}

    def matrix(self, layer: int, short: str, pool: RowPool) -> LentMatrix:
        """See Matrices."""
        return LentMatrix(self._memory, self._tensors[layer, short], pool)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's matrices, or the head's."""
        return sum(tensor.nbytes for tensor in self._tensors.values() if tensor.layer == layer)


class LentExperts(ExpertReader):
    """Experts without a disk under them."""

    def __init__(self, memory: LentMemory, config: ModelConfig) -> None:
        super().__init__([])
        self._memory = memory
        self._tensors = {short: shape for short, (_, shape) in shapes.expert_tensors(config).items()}

    def read(self, layer: int, expert: int, slot: Bytes) -> Expert:
        """See ExpertReader.read; the slot is not touched."""
        w1, w2, w3 = (Mxfp4Matrix(self._lent(f"{one}.weight_packed"), self._lent(f"{one}.weight_scale"))
                      for one in MATRICES)  # fmt: skip
        return Expert(w1, w2, w3, damaged=False)

    def _lent(self, short: str) -> Bytes:
        shape = self._tensors[short]
        return self._memory.lend(prod(shape)).reshape(shape)

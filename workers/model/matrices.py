"""What a layer knows of a matrix: that it can be applied to tokens, and where a slice takes its matrices from.

Whether the rows lie in memory or are being read from a tape (workers/tape/source.py) is not the layers' to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader

Float32Array = npt.NDArray[np.float32]


class Matrix(Protocol):
    """A dense matrix (rows, columns), bf16 bits or float32."""

    def apply(self, x: Float32Array) -> Float32Array:
        """Return (tokens, rows) f32 for x (tokens, columns) f32, in the contract's order."""
        ...

    def array(self) -> npt.NDArray[Any]:
        """Return the whole matrix as stored; it may be gone when another matrix is used."""
        ...


class Matrices(Protocol):
    """Where the matrices of a slice come from."""

    def matrix(self, layer: int, short: str, pool: RowPool) -> Matrix:
        """Return a matrix by its layer (the head's: one past the last layer) and short name."""
        ...


@dataclass(frozen=True, slots=True)
class ResidentMatrix:
    """A matrix in memory, and the threads that share its rows."""

    weight: npt.NDArray[Any]
    pool: RowPool

    def apply(self, x: Float32Array) -> Float32Array:
        """Return (tokens, rows) f32 for x (tokens, columns) f32, in the contract's order."""
        return dense.matmul(self.weight, x, self.pool)

    def array(self) -> npt.NDArray[Any]:
        """Return the whole matrix as stored."""
        return self.weight


@dataclass(frozen=True, slots=True)
class ShardMatrices:
    """Matrices read whole from the shards."""

    binding: Binding
    reader: TensorReader

    def matrix(self, layer: int, short: str, pool: RowPool) -> Matrix:
        """Read a matrix into memory."""
        is_head = layer == self.binding.config.num_hidden_layers
        names = self.binding.top if is_head else self.binding.layer_tensors(layer)
        return ResidentMatrix(self.reader.read(names[short]), pool)

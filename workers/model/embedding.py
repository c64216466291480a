"""The embedding, read from the checkpoint a row at a time: the table itself is never loaded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.failure import Failure
from k3ray.workers.model.weights import widen


class TokenIdFailure(Failure):
    """A token id that the model's vocabulary does not have."""

    exit_code = 2


class Embedding:
    """Rows of the embedding matrix (vocab, hidden) by token id."""

    def __init__(self, reader: TensorReader, name: str, vocab_size: int) -> None:
        self._reader = reader
        self._name = name
        self._vocab_size = vocab_size

    def rows(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return (tokens, hidden) f32, the exact widening of what is stored; TokenIdFailure for an id out of range."""
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            last = self._vocab_size - 1
            raise TokenIdFailure(f"token id {int(outside[0])} is not in the model's vocabulary 0..{last}")
        distinct, where = np.unique(ids, return_inverse=True)
        rows = np.stack([widen(self._reader.read_row(self._name, int(row))) for row in distinct])
        return np.ascontiguousarray(rows[where])

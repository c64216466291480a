"""The matrices of one stage, taken from its tape: resident ones in one piece, streamed ones row block by row block."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.tensors import ARRAY_DTYPES
from k3ray.workers.tape.direct_io import Bytes, prefaulted
from k3ray.workers.tape.order import TapeTensor
from k3ray.workers.tape.residency import Residency
from k3ray.workers.tape.ring import RingStatistics
from k3ray.workers.tape.stage_chunks import StageChunks
from k3ray.workers.tape.tape import Tape

DEFAULT_READERS = 2
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one matrix in the chunk at `place`. last: nothing of this chunk is used after them."""

    place: int
    first_row: int
    rows: int
    offset: int
    nbytes: int
    last: bool


class TapeMatrix:
    """A dense matrix (rows, columns) of the tape, used where its turn in the tape's order comes."""

    __slots__ = ("_chunks", "_dtype", "_pieces", "_pool", "_scratch", "_tensor", "_whole")

    def __init__(
        self, tensor: TapeTensor, pieces: list[Piece], chunks: StageChunks, scratch: Bytes, pool: RowPool
    ) -> None:
        self._tensor = tensor
        self._dtype = ARRAY_DTYPES[tensor.dtype]
        self._pieces = pieces
        self._chunks = chunks
        self._scratch = scratch
        self._pool = pool
        run = chunks.pinned_run([(piece.place, piece.offset, piece.nbytes) for piece in pieces])
        self._whole = None if run is None else self._shaped(run)

    def apply(self, x: Float32Array) -> Float32Array:
        """Return (tokens, rows) f32 for x (tokens, columns) f32: the bits of a resident matrix.

        Raises DiskReadFailure or TapeError when the tape cannot be read; the step is lost then, the source is not.
        """
        if self._whole is not None:
            return dense.matmul(self._whole, x, self._pool)
        out = np.empty((len(x), self._tensor.rows), np.float32)
        for piece in self._pieces:
            weight = self._shaped(self._chunks.take(piece.place)[piece.offset : piece.offset + piece.nbytes])
            columns = slice(piece.first_row, piece.first_row + piece.rows)
            if len(x) == 1:
                dense.matmul(weight, x, self._pool, out=out[:, columns])
            else:
                out[:, columns] = dense.matmul(weight, x, self._pool)
            if piece.last:
                self._chunks.release(piece.place)
        return out

    def array(self) -> npt.NDArray[Any]:
        """Return the whole matrix as stored, (rows, columns) bf16 bits or f32; it stays until the next call of any.

        Only for matrices that residency.py plans memory for.
        """
        if self._whole is not None:
            return self._whole
        target = self._scratch[: self._tensor.nbytes]
        row_bytes = self._tensor.row_bytes
        for piece in self._pieces:
            begin = piece.first_row * row_bytes
            chunk = self._chunks.take(piece.place)
            target[begin : begin + piece.nbytes] = chunk[piece.offset : piece.offset + piece.nbytes]
            if piece.last:
                self._chunks.release(piece.place)
        return self._shaped(target)

    def _shaped(self, data: Bytes) -> npt.NDArray[Any]:
        return data.view(self._dtype).reshape(-1, self._tensor.columns)


class TapeSource:
    """One stage's tape. Its matrices are used in the tape's order, step after step, by one thread.

    Everything of residency.memory_bytes is mapped and the pinned part read when this returns. A step that is given up
    needs no word: when the first streamed matrix is used again, the tape begins again.
    """

    def __init__(self, tape: Tape, residency: Residency, readers: int = DEFAULT_READERS) -> None:
        self.residency = residency
        self.head_layer = tape.layout.head_layer
        self._tensors = {(tensor.layer, tensor.short): tensor for tensor in tape.layout.tensors}
        self._pieces: dict[tuple[int, str], list[Piece]] = {}
        for place, number in enumerate(residency.chunks):
            segments = tape.layout.chunks[number].segments
            for segment in segments:
                tensor = tape.layout.tensors[segment.tensor]
                nbytes = segment.rows * tensor.row_bytes
                self._pieces.setdefault((tensor.layer, tensor.short), []).append(
                    Piece(place, segment.first_row, segment.rows, segment.offset, nbytes, segment is segments[-1])
                )
        self._scratch = prefaulted(residency.whole_bytes)
        self._chunks = StageChunks(tape, residency, readers)

    def matrix(self, layer: int, short: str, pool: RowPool) -> TapeMatrix:
        """A matrix of this stage by its layer (head_layer for the head) and short name; KeyError for any other."""
        key = (layer, short)
        return TapeMatrix(self._tensors[key], self._pieces[key], self._chunks, self._scratch, pool)

    def restart(self) -> None:
        """Give up the step at once, so that the next one's first chunks are read meanwhile."""
        self._chunks.restart()

    def statistics(self) -> RingStatistics:
        """What was streamed so far; the pinned part is not in it."""
        return self._chunks.statistics()

    def close(self) -> None:
        """End the reader threads; the matrices cannot be used any more."""
        self._chunks.close()

    def __enter__(self) -> TapeSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

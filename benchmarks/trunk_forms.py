"""The trunk in fewer bits: what a matrix becomes when it is stored as int8 or grouped int4 and read back.

Symmetric: q = round(w / scale), scale = max |w| / qmax over a row or a group of consecutive columns; with an offset:
q = round((w - min) / scale), scale = (max - min) / (2^bits - 1). Scales and offsets are kept in float32, which flatters
them a little: stored in bf16 they would be rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.model.matrices import Matrices, Matrix
from k3ray.workers.model.weights import widen

Floats = npt.NDArray[np.float32]
BLOCK_BYTES = 64 << 20  # of float32 at a time


@dataclass(frozen=True, slots=True)
class TrunkForm:
    """How a matrix is stored. group: columns that share a scale; None: the whole row."""

    name: str
    bits: int
    group: int | None
    offset: bool = False

    @property
    def bits_per_weight(self) -> float:
        """With a bf16 scale (and offset) a group; a row's scale costs nothing."""
        return self.bits + (0 if self.group is None else 16 * (1 + self.offset) / self.group)

    def stored(self, rows: Floats) -> Floats:
        """Return (rows, columns) f32 as they are after storing; columns that fill no group share a scale as well."""
        width = rows.shape[1]
        group = width if self.group is None else min(self.group, width)
        whole = width // group * group
        parts = [self._groups(rows[:, :whole].reshape(len(rows), -1, group)).reshape(len(rows), whole)]
        if whole < width:
            parts.append(self._groups(rows[:, None, whole:])[:, 0])
        return np.concatenate(parts, axis=1)

    def _groups(self, groups: Floats) -> Floats:
        """(rows, groups, columns) f32, each group by itself."""
        if self.offset:
            low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
            scale = _not_zero((high - low) / np.float32(2**self.bits - 1))
            return np.asarray(np.round((groups - low) / scale) * scale + low)
        most = np.float32(2 ** (self.bits - 1) - 1)
        scale = _not_zero(np.abs(groups).max(axis=2, keepdims=True) / most)
        return np.asarray(np.clip(np.round(groups / scale), -most, most) * scale)


FORMS = (
    TrunkForm("int8, a scale a row", 8, None),
    TrunkForm("int8, groups of 128", 8, 128),
    TrunkForm("int4, groups of 128", 4, 128),
    TrunkForm("int4, groups of 32", 4, 32),
    TrunkForm("int4, groups of 32, offset", 4, 32, True),
)


@dataclass(slots=True)
class WeightError:
    """Sums over all matrices of one kind: of squared differences, of squared weights; and the count."""

    difference: float = 0.0
    weight: float = 0.0
    count: int = 0

    def add(self, exact: Floats, stored: Floats) -> None:
        """Count a block of rows."""
        self.difference += float(np.square(stored.astype(np.float64) - exact).sum())
        self.weight += float(np.square(exact.astype(np.float64)).sum())
        self.count += exact.size

    @property
    def relative(self) -> float:
        """The root of their ratio: |W' - W| / |W| in the Frobenius norm."""
        return float(np.sqrt(self.difference / self.weight)) if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that is stored in another form: a block of rows at a time is read back for the arithmetic."""

    weight: npt.NDArray[Any]
    form: TrunkForm
    pool: RowPool

    def apply(self, x: Floats) -> Floats:
        """Return (tokens, rows) f32 for x (tokens, columns) f32."""
        blocks = row_blocks(self.weight)
        return np.concatenate([dense.matmul(self.form.stored(rows), x, self.pool) for rows in blocks], axis=1)

    def array(self) -> Floats:
        """Return the whole matrix as it is after storing."""
        return np.concatenate([self.form.stored(rows) for rows in row_blocks(self.weight)])


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The matrices of a checkpoint with those of the chosen layers and short names in another form."""

    exact: Matrices
    form: TrunkForm
    chosen: frozenset[tuple[int, str]]

    def matrix(self, layer: int, short: str, pool: RowPool) -> Matrix:
        """Return a matrix by its layer (the head's: one past the last layer) and short name."""
        found = self.exact.matrix(layer, short, pool)
        return StoredMatrix(found.array(), self.form, pool) if (layer, short) in self.chosen else found


def row_blocks(weight: npt.NDArray[Any]) -> list[Floats]:
    """The rows of a matrix widened to f32, in blocks that are small in memory."""
    step = max(1, BLOCK_BYTES // (4 * weight.shape[1]))
    return [widen(np.ascontiguousarray(weight[low : low + step])) for low in range(0, len(weight), step)]


def _not_zero(scale: Floats) -> Floats:
    return np.where(scale == 0, np.float32(1), scale)

"""Weights and products that are finite, or refused: an infinity that a saturating function swallows is found here.

sigmoid, tanh and softmax make a plausible number of an infinite one, so looking at a layer's output is not enough: what
a matrix gives is looked at before anything is made of it, and what lies in memory as a vector when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.model.matrices import Matrix

Float32Array = npt.NDArray[np.float32]


class NonFiniteProduct(ArithmeticError):
    """A matrix gave NaN or infinity. row: of its output, so the token's place in the batch."""

    def __init__(self, short: str, row: int) -> None:
        super().__init__(f"a NaN or infinite value in what {short} gives")
        self.short = short
        self.row = row


@dataclass(frozen=True, slots=True)
class CheckedMatrix:
    """A matrix whose every output is looked at: rows compares for rows times columns products.

    short: its name in its layer, for the message.
    """

    short: str
    matrix: Matrix

    def apply(self, x: Float32Array) -> Float32Array:
        """Return (tokens, rows) f32 for x (tokens, columns) f32; NonFiniteProduct."""
        out = self.matrix.apply(x)
        require_finite_product(self.short, out)
        return out

    def array(self) -> npt.NDArray[Any]:
        """Return the whole matrix as stored; its values are not looked at."""
        return self.matrix.array()


def require_finite_product(short: str, out: Float32Array) -> None:
    """Raise NonFiniteProduct unless every value of out (tokens, rows) f32 is finite."""
    row = first_not_finite(out)
    if row is not None:
        raise NonFiniteProduct(short, row)


def first_not_finite(values: npt.NDArray[np.floating[Any]]) -> int | None:
    """The index along the first axis of the first NaN or infinity; None when every value is finite."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    return int(np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1))[0])

"""How far two arrays of logits are from each other: pure functions, all arithmetic in double.

The rows are compared one by one; ties between logits go to the lower id, as greedy decoding has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

Floats = npt.NDArray[np.floating[Any]]
TOP = 5


class LogitsMismatch(Failure):
    """Two files that cannot be compared: other shapes, or values that are no logits."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row. top_ids: A's ids with the largest logits, best first; ranks: where each of them stands in B, from 0.

    kl_ab: KL(A||B) in nats of the softmaxes; kl_ba: KL(B||A). top_shared: how many of A's top 5 are in B's top 5.
    """

    row: int
    max_abs: float
    max_rel: float
    worst_id: int
    kl_ab: float
    kl_ba: float
    top_ids: tuple[int, ...]
    ranks: tuple[int, ...]
    top_shared: int

    @property
    def same_top(self) -> bool:
        """Whether both rows have the same largest logit."""
        return self.ranks[0] == 0


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """All rows. bitwise: the same dtype and the same bits."""

    shape: tuple[int, ...]
    bitwise: bool
    differing: int
    rows: tuple[RowDifference, ...]

    @property
    def max_abs(self) -> float:
        """The largest difference of two logits."""
        return max(row.max_abs for row in self.rows)

    @property
    def max_rel(self) -> float:
        """The largest, over rows, of the largest difference divided by the row's largest |A|."""
        return max(row.max_rel for row in self.rows)

    @property
    def max_kl(self) -> float:
        """The largest divergence of any row in either direction, in nats."""
        return max(max(row.kl_ab, row.kl_ba) for row in self.rows)

    @property
    def same_top(self) -> int:
        """Rows whose largest logit is the same id."""
        return sum(row.same_top for row in self.rows)

    @property
    def worst(self) -> RowDifference:
        """The row with the largest difference."""
        return max(self.rows, key=lambda row: row.max_abs)


def compare_logits(a: Floats, b: Floats) -> LogitsDifference:
    """Compare two arrays (vocab,) or (rows, vocab); LogitsMismatch for other shapes, and for NaN and infinity."""
    a_rows, b_rows = np.atleast_2d(a), np.atleast_2d(b)
    if a_rows.shape != b_rows.shape:
        raise LogitsMismatch(f"A has the shape {a.shape}, B {b.shape}: they are not logits of the same positions")
    if a.ndim not in (1, 2) or b.ndim not in (1, 2) or not a_rows.size:
        raise LogitsMismatch(f"found the shape {a.shape}, expected (vocab,) or (rows, vocab) with something in it")
    for name, rows in (("A", a_rows), ("B", b_rows)):
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            row, token_id = bad[0].tolist()
            raise LogitsMismatch(
                f"{name} has {len(bad)} values that are NaN or infinite, the first in row {row} at id {token_id}: such "
                "logits are never sampled from and cannot be compared"
            )
    bitwise = a_rows.dtype == b_rows.dtype and a_rows.tobytes() == b_rows.tobytes()
    doubles = a_rows.astype(np.float64), b_rows.astype(np.float64)
    rows_found = tuple(_compare_row(row, *pair) for row, pair in enumerate(zip(*doubles, strict=True)))
    return LogitsDifference(a.shape, bitwise, int((doubles[0] != doubles[1]).sum()), rows_found)


def _compare_row(row: int, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> RowDifference:
    with np.errstate(over="ignore"):  # doubles near their largest: infinitely far, which no tolerance lets pass
        difference = np.abs(a - b)
    worst = int(difference.argmax())
    largest = float(np.abs(a).max())
    max_abs = float(difference[worst])
    log_a, log_b = log_softmax(a), log_softmax(b)
    top_a, top_b = (np.argsort(-values, kind="stable")[:TOP].tolist() for values in (a, b))
    return RowDifference(
        row=row,
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else (np.inf if max_abs else 0.0),
        worst_id=worst,
        kl_ab=divergence(log_a, log_b),
        kl_ba=divergence(log_b, log_a),
        top_ids=tuple(top_a),
        ranks=tuple(rank(b, token_id) for token_id in top_a),
        top_shared=len(set(top_a) & set(top_b)),
    )


def log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x - max - log(sum(exp(x - max)))."""
    with np.errstate(over="ignore"):
        shifted = values - values.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def divergence(log_p: npt.NDArray[np.float64], log_q: npt.NDArray[np.float64]) -> float:
    """sum p (log p - log q) in nats; rounding can leave a tiny negative number, which is zero.

    Infinite where the logarithms are: logits that far apart have no finite divergence.
    """
    with np.errstate(invalid="ignore"):
        found = float((np.exp(log_p) * (log_p - log_q)).sum())
    return max(0.0, found) if np.isfinite(found) else np.inf


def rank(values: npt.NDArray[np.float64], token_id: int) -> int:
    """How many ids come before this one: larger logits, and equal ones with a lower id."""
    value = values[token_id]
    return int((values > value).sum() + (values[:token_id] == value).sum())

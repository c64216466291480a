"""How two answers for one layer are compared: pure functions over arrays, and the records they give.

An error is measured within its row (a token's vector, a head's matrix) against the row's largest element, so that one
large token cannot hide a wrong small one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One array against another. row: of the largest relative error (token, head or position); column: within it.

    max_rel: the largest over all rows of (largest difference in the row / largest expected element of the row).
    """

    name: str
    against: str
    max_abs: float
    max_rel: float
    row: int
    column: int
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the relative error is within the tolerance; NaN is not."""
        return self.max_rel <= self.tolerance

    @property
    def used(self) -> float:
        """How much of the tolerance is used up; over 1 is a failure."""
        if self.tolerance:
            return self.max_rel / self.tolerance
        return np.inf if self.max_rel else 0.0


@dataclass(frozen=True, slots=True)
class ChosenOtherwise:
    """A token for which other experts were chosen.

    ours, theirs: the experts that only one side chose. margin: by how much the reference's own scores prefer theirs.
    """

    token: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    margin: float


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The chosen experts of one layer, token by token.

    near_ties: other experts, but the reference's scores differ by no more than tie_margin. wrong: by more.
    closest: the smallest difference between the last chosen and the first expert that was not.
    """

    tokens: int
    near_ties: tuple[ChosenOtherwise, ...]
    wrong: tuple[ChosenOtherwise, ...]
    closest: float
    tie_margin: float

    @property
    def equal(self) -> int:
        """How many tokens chose the same experts."""
        return self.tokens - len(self.near_ties) - len(self.wrong)

    def describe(self) -> str:
        """Return a cell of the table: 12/12, or 11/12 and one near tie."""
        ties = f" ({len(self.near_ties)} near tie{'s' if len(self.near_ties) > 1 else ''})" if self.near_ties else ""
        return f"{self.equal}/{self.tokens}{ties}"


def compare(name: str, found: Floats, expected: Floats, tolerance: float, against: str = "reference") -> Comparison:
    """Compare two arrays row by row (the first axis); a shape that differs, or a NaN, is an infinite error."""
    if found.shape != expected.shape:
        return Comparison(name, against, np.inf, np.inf, 0, 0, tolerance)
    if not found.size:
        return Comparison(name, against, 0.0, 0.0, 0, 0, tolerance)
    a, b = (values.astype(np.float64).reshape(len(values), -1) for values in (found, expected))
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    difference[~np.isfinite(difference)] = np.inf
    largest = np.abs(b).max(axis=1)
    errors = difference.max(axis=1)
    measurable = (largest > 0) & np.isfinite(largest) & np.isfinite(errors)
    relative = np.divide(errors, largest, out=np.where(errors > 0, np.inf, 0.0), where=measurable)
    row = int(relative.argmax())
    return Comparison(
        name, against, float(errors.max()), float(relative[row]), row, int(difference[row].argmax()), tolerance
    )


def compare_all(
    names: tuple[str, ...],
    found: Mapping[str, Floats],
    expected: Mapping[str, Floats],
    tolerance: float,
    against: str = "reference",
) -> Iterator[Comparison]:
    """Compare the named arrays that either side has, in the order of names; one that only one side has is a failure."""
    missing = np.empty((0, 0))
    for name in names:
        if name in found or name in expected:
            ours, theirs = found.get(name, missing), expected.get(name, missing)
            yield compare(name, ours, theirs, tolerance, against)


def judge_choice(chosen: Ids, selection: Floats, tie_margin: float) -> ExpertChoice:
    """Compare chosen (tokens, k) with what selection (tokens, experts), the reference's scores, chooses."""
    top_k = chosen.shape[1]
    order = np.argsort(-selection, axis=1, kind="stable")
    near: list[ChosenOtherwise] = []
    wrong: list[ChosenOtherwise] = []
    for token, ids in enumerate(chosen.tolist()):
        best = order[token, :top_k].tolist()
        ours, theirs = sorted(set(ids) - set(best)), sorted(set(best) - set(ids))
        scores = selection[token]
        if len(set(ids)) != top_k:
            wrong.append(ChosenOtherwise(token, tuple(ids), tuple(best), np.inf))
        elif ours:
            margin = float(scores[theirs].max() - scores[ours].min())
            other = ChosenOtherwise(token, tuple(ours), tuple(theirs), margin)
            (near if margin <= tie_margin else wrong).append(other)
    return ExpertChoice(len(chosen), tuple(near), tuple(wrong), _closest(selection, order, top_k), tie_margin)


def settle_ties(chosen: Ids, selection: Floats, ids: Ids, tie_margin: float) -> Ids:
    """Return ids (tokens, k), with our choice in the rows of near ties, so that what follows can still be compared."""
    settled = ids.copy()
    for tie in judge_choice(chosen, selection, tie_margin).near_ties:
        settled[tie.token] = chosen[tie.token]
    return settled


def aligned(weights: Floats, ids: Ids) -> Floats:
    """Return (tokens, k) weights in the order of the experts' numbers."""
    return np.take_along_axis(weights, np.argsort(ids, axis=1, kind="stable"), axis=1)


def cut(tokens: int) -> tuple[int, ...]:
    """How a sequence is handed to our side: a prompt, two single tokens, the rest, so that state is carried on."""
    first = max(1, tokens // 2)
    sizes = (first, *[size for size in (1, 1, tokens - first - 2) if size > 0])
    pieces: list[int] = []
    for size in sizes:
        pieces.append(min(size, tokens - sum(pieces)))
    return tuple(size for size in pieces if size)


def spans(pieces: tuple[int, ...]) -> Iterator[slice]:
    """Yield the rows of each piece."""
    for low, high in itertools.pairwise((0, *itertools.accumulate(pieces))):
        yield slice(low, high)


def _closest(selection: Floats, order: Ids, top_k: int) -> float:
    if selection.shape[1] == top_k:
        return float("inf")
    ordered = np.take_along_axis(selection, order, axis=1)
    return float((ordered[:, top_k - 1] - ordered[:, top_k]).min())

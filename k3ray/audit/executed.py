"""What the audit executes on this machine: the chunked KDA form's cases, and a golden's logits where one is at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.audit.kda_cases import KdaCase
from k3ray.audit.snapshot import Statement
from k3ray.driver import Driver
from k3ray.proof import trace
from k3ray.workers.failure import Failure
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec
from k3ray.workers.model.config import read_config

GOLDEN_ARRAYS, GOLDEN_RECORD = "golden.npz", "golden.json"
GOLDEN_TOLERANCE = 2e-3  # on logits: the goldens' own; float32 noise is far below, mistakes of meaning far above
KDA_TOLERANCE = 1e-5  # of the largest element: float32's rounding over a few dozen steps stays a decade below


class GoldenError(Failure):
    """A golden beside the checkpoint that cannot be read."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One result of something that ran here. difference: the largest, in `measure`; at most `tolerance` is right."""

    id: str
    subject: str
    difference: float
    tolerance: float
    measure: str
    source: str
    note: str = ""

    def statement(self) -> Statement:
        """As the snapshot says it."""
        found = f"{self.difference:.3g} {self.measure}" + (f"; {self.note}" if self.note else "")
        agrees = bool(np.isfinite(self.difference)) and self.difference <= self.tolerance
        expected = f"at most {self.tolerance:g}"
        return Statement(self.id, "boundary", "X", "k3ray", self.subject, found, expected, agrees, self.source)


def kda_statements(cases: Sequence[KdaCase]) -> list[Statement]:
    """The chunked form against the recurrence, a statement for each shape."""
    results = [
        Executed(
            id=f"kda.chunked.{number}",
            subject=f"chunked KDA against the recurrence, {case.shape.name}, d = 128",
            difference=max(case.relative_output, case.relative_state),
            tolerance=KDA_TOLERANCE,
            measure="of the largest element",
            source=f"{case.settings} settings of decay and keys, executed on this machine",
            note=f"absolute: output {case.output:.3g}, state {case.state:.3g}; worst at {case.worst}",
        )
        for number, case in enumerate(cases, 1)
    ]
    return [result.statement() for result in results]


def has_golden(directory: Path) -> bool:
    """Whether a golden's record and arrays lie beside the checkpoint."""
    return (directory / GOLDEN_ARRAYS).is_file() and (directory / GOLDEN_RECORD).is_file()


def golden_statements(directory: Path) -> list[Statement]:
    """A statement for each recorded prompt; where the golden cannot be run, one that says so and disagrees: nothing was
    executed, so it is U.
    """
    subject, source = "logits against the golden beside the checkpoint", GOLDEN_ARRAYS
    try:
        return [result.statement() for result in golden_results(directory)]
    except Failure as failure:
        found = f"not executed: {str(failure).splitlines()[0]}"
        expected = f"at most {GOLDEN_TOLERANCE:g}"
        return [Statement("golden.logits.0", "boundary", "U", "k3ray", subject, found, expected, False, source)]


def golden_results(directory: Path) -> tuple[Executed, ...]:
    """The logits of every recorded prompt position against those beside the checkpoint; raises Failure."""
    recorded = read_golden_logits(directory)
    layers = read_config(directory).num_hidden_layers
    spec = StageSpec(CheckpointSpec(directory, None, layers), 0, layers, 1, ())
    driver = Driver(start_in_process([spec], []))
    results = []
    for number, (ids, logits) in enumerate(recorded):
        _, ours = trace(driver, ids.tolist(), 1)
        same = ours.shape == logits.shape
        difference = float(np.abs(ours.astype(np.float64) - logits).max()) if same else float("inf")
        note = "" if same else f"computed {list(ours.shape)}, recorded {list(logits.shape)}"
        results.append(
            Executed(
                id=f"golden.logits.{number}",
                subject=f"logits of golden prompt {number}, {len(ids)} positions, against the recorded ones",
                difference=difference,
                tolerance=GOLDEN_TOLERANCE,
                measure="largest absolute difference",
                source=f"{GOLDEN_ARRAYS} beside the checkpoint; executed on this machine in one process",
                note=note,
            )
        )
    return tuple(results)


def read_golden_logits(directory: Path) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The recorded prompts' ids (T,) and logits (T, vocab); raises GoldenError."""
    try:
        count = len(json.loads((directory / GOLDEN_RECORD).read_bytes())["prompts"])
        with np.load(directory / GOLDEN_ARRAYS, allow_pickle=False) as archive:
            found = [(archive[f"p{number}_ids"], archive[f"p{number}_logits"]) for number in range(count)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{directory}: found a golden that cannot be read ({error}), expected the prompts' ids and logits"
        raise GoldenError(f"{message}; move {GOLDEN_ARRAYS} away or fetch it again") from error
    if not found or not all(ids.ndim == 1 and ids.size and logits.ndim == 2 for ids, logits in found):
        raise GoldenError(f"{directory}/{GOLDEN_ARRAYS}: found no prompt with ids (T,) and logits (T, vocab)")
    return found

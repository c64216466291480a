"""The audit's statistics are those of plain formulas, and recorded figures are never mixed with ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3ray.audit.making import AuditOptions, make_audit
from k3ray.audit.recorded import compare_recorded, recorded_statistics
from k3ray.audit.snapshot import Snapshot
from k3ray.audit.source_files import DirectoryFiles
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from tests.audit_sample import released_config

PREFIX = "language_model.model.layers."


def audited(folder: Path, layers: str | None = None) -> Snapshot:
    return make_audit(DirectoryFiles(folder), AuditOptions(layers, threads=0))


def test_statistics_are_those_of_the_plain_formulas(k3b_dir: Path) -> None:
    """Percentiles, exp(A_log), norms and correlation, computed otherwise from the tensors as a run reads them."""
    rows = {row.subject: row for row in audited(k3b_dir, "1-2").statistics}
    with TensorReader(open_index(k3b_dir)) as reader:
        a_log = np.sort(reader.read(f"{PREFIX}1.self_attn.A_log")[:3].astype(np.float64))
        bits = reader.read(f"{PREFIX}2.block_sparse_moe.gate.weight")
        bias = reader.read(f"{PREFIX}2.block_sparse_moe.gate.e_score_correction_bias").astype(np.float64)
    row = rows["layer 1 KDA A_log, 3 heads"]
    assert (row.minimum, row.median, row.maximum, row.count) == (a_log[0], a_log[1], a_log[2], 3)
    # rank 0.1 * 2: a fifth of the way from the first to the second
    assert row.p10 == pytest.approx(a_log[0] + 0.2 * (a_log[1] - a_log[0]), rel=1e-14)
    rate = rows["layer 1 KDA exp(A_log), 3 heads"]
    assert (row.letter, rate.letter) == ("O", "D")
    assert rate.median == pytest.approx(np.exp(a_log[1]), rel=1e-14)
    # exp of the percentile is not the percentile of exp
    assert rate.p90 == pytest.approx(np.exp(a_log[1]) + 0.8 * (np.exp(a_log[2]) - np.exp(a_log[1])), rel=1e-14)
    weight = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    norms = np.array([sum(value * value for value in line) ** 0.5 for line in weight.tolist()])
    row = rows["layer 2 router row L2 norm"]
    assert (row.count, row.by, row.letter) == (16, "k3ray", "D")
    assert row.median == pytest.approx(np.mean(np.sort(norms)[7:9]), rel=1e-12)
    assert row.extra["Pearson with the correction bias"] == pytest.approx(np.corrcoef(norms, bias)[0, 1], rel=1e-9)
    assert rows["layer 2 router correction bias"].minimum == bias.min()


def test_recorded_figures_are_never_ours(k3b_dir: Path) -> None:
    recorded = [row for row in audited(k3b_dir).statistics if row.subject.startswith("released weights")]
    assert len(recorded) == 4
    assert {row.by for row in recorded} == {"recorded by others"}
    norms = next(row for row in recorded if "row L2 norm" in row.subject)
    assert (norms.median, norms.p10, norms.extra) == (5.0364, None, {"Pearson with the correction bias": 0.4567})


def test_recorded_figures_are_compared_with_those_of_the_same_thing() -> None:
    """A_log and exp(A_log) are of one tensor: what others recorded of A_log is compared with A_log."""
    config = released_config()
    theirs = recorded_statistics()
    mine = [replace(row, by="k3ray", subject=row.subject.removeprefix("released weights: ")) for row in theirs]
    rate = replace(mine[0], subject="exp(A_log)", letter="D", median=0.85, minimum=0.47, maximum=11.8)
    found = compare_recorded(config, [*mine, rate])
    assert [(one.kind, "to their last digit" in one.found) for one in found] == [
        ("O", True), ("O", True), ("O", True), ("D", True),
    ]  # fmt: skip
    other = replace(mine[3], extra={"Pearson with the correction bias": 0.4568})
    found = compare_recorded(config, [*mine[:3], other])
    assert ["other weights" in one.found for one in found] == [False, False, False, True]
    assert compare_recorded(config, [rate]) == []

"""Statistics of the small tensors that were read: A_log and its exponential, dt_bias, the routers' rows and biases."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3ray.audit.artifact import Artifact
from k3ray.audit.chosen_tensors import DT_BIAS, ROUTER, ROUTER_BIAS, Values
from k3ray.audit.snapshot import StatisticRow
from k3ray.workers.checkpoint import shapes

Doubles = npt.NDArray[np.float64]

PERCENTILES = "linear interpolation between the sorted values, at rank p x (count - 1); in double"


def statistic_rows(artifact: Artifact, values: Values) -> tuple[StatisticRow, ...]:
    """A row for everything that was read and is finite."""
    rows: list[StatisticRow | None] = []
    heads = artifact.config.kda_num_heads
    shown = set(values.layers_of(DT_BIAS))
    a_logs = {
        layer: values.widened(layer, shapes.A_LOG).reshape(-1)[:heads] for layer in values.layers_of(shapes.A_LOG)
    }
    if len(a_logs) > 1:
        everything = np.concatenate(list(a_logs.values()))
        subject = f"A_log of {len(a_logs)} KDA layers, {heads} heads each"
        rows.append(_row(artifact, subject, None, shapes.A_LOG, everything, _rates(everything)))
    for layer, a_log in a_logs.items():
        if layer in shown:
            subject = f"layer {layer} KDA A_log, {heads} heads"
            rows.append(_row(artifact, subject, layer, shapes.A_LOG, a_log, _rates(a_log)))
    for layer in values.layers_of(DT_BIAS):
        rows.append(_row(artifact, f"layer {layer} KDA dt_bias", layer, DT_BIAS, values.widened(layer, DT_BIAS), {}))
    for layer in values.layers_of(ROUTER_BIAS):
        bias = values.widened(layer, ROUTER_BIAS)
        rows.append(_row(artifact, f"layer {layer} router correction bias", layer, ROUTER_BIAS, bias, {}))
    for layer in values.layers_of(ROUTER):
        if values.arrays[layer, ROUTER].ndim != 2:
            continue
        norms = row_norms(values.widened(layer, ROUTER))
        extra = {}
        if (layer, ROUTER_BIAS) in values.arrays:
            correlation = pearson(norms, values.widened(layer, ROUTER_BIAS))
            extra = {} if correlation is None else {"Pearson with the correction bias": correlation}
        rows.append(_row(artifact, f"layer {layer} router row L2 norm", layer, ROUTER, norms, extra))
    return tuple(row for row in rows if row is not None)


def row_norms(matrix: Doubles) -> Doubles:
    """The L2 norm of every row, in double."""
    norms: Doubles = np.sqrt(np.einsum("ij,ij->i", matrix, matrix))
    return norms


def pearson(first: Doubles, second: Doubles) -> float | None:
    """Pearson's correlation; None where it is not defined: other lengths, or one of them constant or not finite."""
    if first.shape != second.shape or not (np.isfinite(first).all() and np.isfinite(second).all()):
        return None
    one, other = first - first.mean(), second - second.mean()
    scale = float(np.sqrt(one @ one) * np.sqrt(other @ other))
    return float(one @ other) / scale if np.isfinite(scale) and scale > 0 else None


def _rates(a_log: Doubles) -> dict[str, float]:
    """exp(A_log): how steeply a head forgets."""
    with np.errstate(over="ignore", invalid="ignore"):
        rates = np.exp(a_log)
    if not np.isfinite(rates).all():
        return {}
    low, median, high = np.percentile(rates, (10, 50, 90)).tolist()
    return {
        "exp(A_log) median": median,
        "exp(A_log) p10": low,
        "exp(A_log) p90": high,
        "exp(A_log) minimum": float(rates.min()),
        "exp(A_log) maximum": float(rates.max()),
    }


def _row(
    artifact: Artifact, subject: str, layer: int | None, short: str, values: Doubles, extra: dict[str, float]
) -> StatisticRow | None:
    if not values.size or not np.isfinite(values).all():
        return None
    p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
    name = shapes.layer_name(artifact.prefix, 0 if layer is None else layer, short)
    name = name if layer is not None else name.replace(".0.", ".#.", 1)
    entry = artifact.find(name) if layer is not None else None
    source = f"read from {entry.path.name}" if entry is not None else "read from their shards"
    return StatisticRow(
        subject, name, int(values.size), median, p10, p90, float(values.min()), float(values.max()), extra, "O",
        "k3ray", source,
    )  # fmt: skip

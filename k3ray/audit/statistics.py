"""Statistics of the small tensors that were read: A_log and its exponential, dt_bias, the routers' rows and biases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from k3ray.audit.artifact import Artifact
from k3ray.audit.chosen_tensors import DT_BIAS, ROUTER, ROUTER_BIAS, Values
from k3ray.audit.snapshot import Letter, StatisticRow
from k3ray.workers.checkpoint import shapes

Doubles = npt.NDArray[np.float64]

PERCENTILES = "linear interpolation between the sorted values, at rank p x (count - 1); in double"


def statistic_rows(artifact: Artifact, values: Values) -> tuple[StatisticRow, ...]:
    """A row for everything that was read and is finite.

    Values as stored are O; what is computed of each value before it is summed up (exponentials, norms) is D.
    """
    rows = [*_a_log_rows(artifact, values)]
    for layer in values.layers_of(DT_BIAS):
        rows.append(_row(artifact, f"layer {layer} KDA dt_bias", layer, DT_BIAS, values.widened(layer, DT_BIAS)))
    for layer in values.layers_of(ROUTER_BIAS):
        bias = values.widened(layer, ROUTER_BIAS)
        rows.append(_row(artifact, f"layer {layer} router correction bias", layer, ROUTER_BIAS, bias))
    for layer in values.layers_of(ROUTER):
        if values.arrays[layer, ROUTER].ndim != 2:
            continue
        norms = row_norms(values.widened(layer, ROUTER))
        extra = {}
        if (layer, ROUTER_BIAS) in values.arrays:
            correlation = pearson(norms, values.widened(layer, ROUTER_BIAS))
            extra = {} if correlation is None else {"Pearson with the correction bias": correlation}
        rows.append(_row(artifact, f"layer {layer} router row L2 norm", layer, ROUTER, norms, "D", extra))
    return tuple(row for row in rows if row is not None)


def _a_log_rows(artifact: Artifact, values: Values) -> Iterator[StatisticRow | None]:
    """A_log without its padding, and exp(A_log), how steeply a head forgets: of all layers read, then of the chosen."""
    heads = artifact.config.kda_num_heads
    a_logs = {
        layer: values.widened(layer, shapes.A_LOG).reshape(-1)[:heads] for layer in values.layers_of(shapes.A_LOG)
    }
    shown = set(values.layers_of(DT_BIAS))
    chosen: list[tuple[str, int | None, Doubles]] = []
    if len(a_logs) > 1:
        chosen.append((f"{{}} of {len(a_logs)} KDA layers", None, np.concatenate(list(a_logs.values()))))
    chosen += [(f"layer {layer} KDA {{}}", layer, a_log) for layer, a_log in a_logs.items() if layer in shown]
    for subject, layer, a_log in chosen:
        yield _row(artifact, f"{subject.format('A_log')}, {heads} heads", layer, shapes.A_LOG, a_log)
    for subject, layer, a_log in chosen:
        with np.errstate(over="ignore", invalid="ignore"):
            rates = np.exp(a_log)
        yield _row(artifact, f"{subject.format('exp(A_log)')}, {heads} heads", layer, shapes.A_LOG, rates, "D")


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


def _row(
    artifact: Artifact,
    subject: str,
    layer: int | None,
    short: str,
    values: Doubles,
    letter: Letter = "O",
    extra: dict[str, float] | None = None,
) -> StatisticRow | None:
    """A row of values (layer None: of several layers); None where there are none or one is not finite."""
    if not values.size or not np.isfinite(values).all():
        return None
    p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
    name = shapes.layer_name(artifact.prefix, 0 if layer is None else layer, short)
    name = name if layer is not None else name.replace(".0.", ".#.", 1)
    entry = artifact.find(name) if layer is not None else None
    source = f"read from {entry.path.name}" if entry is not None else "read from their shards"
    return StatisticRow(
        subject, name, int(values.size), median, p10, p90, float(values.min()), float(values.max()), extra or {},
        letter, "k3ray", source,
    )  # fmt: skip

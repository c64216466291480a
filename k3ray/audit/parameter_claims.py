"""The parameter audit's statements: A_log's shape against config and code, its tail, and whether values are finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3ray.audit.artifact import Artifact
from k3ray.audit.chosen_tensors import Values, show_left_out
from k3ray.audit.claims import compared, number, ranges, said
from k3ray.audit.recorded import a_log_readers
from k3ray.audit.snapshot import KindRow, Statement
from k3ray.audit.statistics import PERCENTILES
from k3ray.workers.checkpoint import shapes
from k3ray.workers.counted import counted

_RULE = "g[h, i] = lower_bound * sigmoid(exp(A_log[h]) * (z[h, i] + dt_bias[h, i])): one A_log a head"


def parameter_statements(artifact: Artifact, rows: Sequence[KindRow], values: Values | None) -> list[Statement]:
    """Everything that is said about parameters; values: None where no bytes are there."""
    subject = "where A_log is used"
    found = [
        *_a_log_shape(artifact, rows),
        *_a_log_bytes(artifact, rows),
        said("a_log.rule", "parameters", "D", subject, _RULE, "the model's formulas, docs/model.md"),
        *a_log_readers(),
    ]
    if values is None:
        why = "not read: the shards are not here"
        unread = said("values.read", "parameters", "U", "values of the small tensors", why, "config and index only")
        return [*found, _unread_tail(why), unread]
    found += [_tail(artifact, values), _finite(values)]
    found.append(said("values.percentiles", "parameters", "D", "percentiles and medians", PERCENTILES, "definition"))
    if values.left_out:
        what = f"{show_left_out(values)}: beyond the share of bytes that is read unasked; name them with --layers"
        found.append(said("values.left_out", "parameters", "U", "chosen tensors that were not read", what, ""))
    return found


def _a_log_shape(artifact: Artifact, rows: Sequence[KindRow]) -> list[Statement]:
    """The mismatch between config, code and checkpoint, as an observation."""
    heads, kda = artifact.config.kda_num_heads, len(artifact.config.kda_layers)
    mine = [row for row in rows if row.kind.endswith(f".{shapes.A_LOG}") and row.entries]
    if not kda or not mine:
        return []
    by_headers = artifact.index.has_shapes
    stored = "; ".join(f"{row.dtype} {list(row.shape)} in {row.entries} of {kda} KDA layers" for row in mine)
    found = stored if by_headers else f"{stored}, by the layout's rules: the headers are not here"
    expected = f"[{heads}], one value a head: config.json has num_heads {heads}, and the code indexes A_log by head"
    subject = "A_log: its stored shape, against the config's heads and the code's rule"
    source = "the headers, config.json, docs/model.md" if by_headers else "the rules, config.json, docs/model.md"
    id = "a_log.shape"
    if by_headers and all(row.shape in ((heads,), (1, 1, heads, 1)) for row in mine):
        dtype, shape = mine[0].dtype, list(mine[0].shape)
        whole = f"{dtype} {shape} in {kda} of {kda} KDA layers"
        return [compared(id, "parameters", "O", subject, stored, whole, source, True)]
    return [said(id, "parameters", "O" if by_headers else "D", subject, found, source, expected, main=True)]


def _a_log_bytes(artifact: Artifact, rows: Sequence[KindRow]) -> list[Statement]:
    """Without headers: that the index's total closes with the stored length, and not with one entry a head."""
    heads = artifact.config.kda_num_heads
    mine = [row for row in rows if row.kind.endswith(f".{shapes.A_LOG}") and row.entries]
    total = sum(row.bytes or 0 for row in rows)
    stated = artifact.stated.stated_bytes if artifact.stated is not None else None
    spare = sum(4 * row.entries * (row.shape[0] - heads) for row in mine if len(row.shape) == 1)
    if artifact.index.has_shapes or stated != total or not spare:
        return []
    found = f"with {list(mine[0].shape)} they are total_size to the byte; with [{heads}], {number(spare)} bytes fewer"
    subject = "the rules' bytes of all tensors, by the length of A_log"
    return [said("a_log.bytes", "parameters", "D", subject, found, "the index file's total_size against the rules")]


def _unread_tail(why: str) -> Statement:
    return said("a_log.tail", "parameters", "U", "A_log's entries after the heads", why, "config and index only")


def _tail(artifact: Artifact, values: Values) -> Statement:
    """Whether everything after the heads is zero: otherwise the entries are not one a head, and a run refuses them."""
    heads = artifact.config.kda_num_heads
    layers = values.layers_of(shapes.A_LOG)
    subject = "A_log's entries after the heads"
    if not layers:
        return said("a_log.tail", "parameters", "U", subject, "no A_log was read", "the shards")
    sizes = {values.arrays[layer, shapes.A_LOG].size for layer in layers}
    full = [layer for layer in layers if np.any(values.widened(layer, shapes.A_LOG).reshape(-1)[heads:] != 0)]
    if max(sizes) <= heads:
        return said("a_log.tail", "parameters", "O", subject, "there are none", "A_log of the layers read")
    what = f"{heads}-{max(sizes) - 1}"
    found = f"entries {what} are zero in {len(layers) - len(full)} of {len(layers)} layers read"
    found += f"; not in layers {ranges(full)}" if full else ""
    expected = f"entries {what} are zero in {len(layers)} of {len(layers)} layers read"
    return compared("a_log.tail", "parameters", "O", subject, found, expected, "A_log of the layers read", main=True)


def _finite(values: Values) -> Statement:
    if not values.arrays:
        return said("values.finite", "parameters", "U", "the values that were read", "none were read", "the shards")
    count = sum(array.size for array in values.arrays.values())
    wrong = [
        f"{short} of layer {layer}"
        for (layer, short) in sorted(values.arrays)
        if not np.isfinite(values.widened(layer, short)).all()
    ]
    found = f"{counted(count, 'value')} of {counted(len(values.arrays), 'tensor')} are finite"
    expected = found
    if wrong:
        found = f"values that are NaN or infinite in {', '.join(wrong)}"
    return compared("values.finite", "parameters", "O", "the values that were read", found, expected, "the shards")

"""The recorded trace of expert requests: its file, read strictly, and the orders in which it can be replayed.

The file is pairs of little-endian int32, layer and expert, in the order in which they were asked for: pass by pass,
within a pass layer by layer, within a layer token by token, each token's experts in descending selection score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

Int32Array = npt.NDArray[np.int32]
LIMIT = 1 << 16  # of layer and expert numbers: beyond any model, and small enough to count in arrays
RECORD = np.dtype([("layer", "<i4"), ("expert", "<i4")])


class TraceError(Failure):
    """A trace that cannot be what it is said to be."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """What one token asks of one layer: experts in descending selection score, all needed at once."""

    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """One descent through the layers. chosen: for each layer in turn, (tokens, experts a token) int32."""

    chosen: tuple[tuple[int, Int32Array], ...]

    @property
    def num_tokens(self) -> int:
        """The tokens that the pass computed: the most that a layer saw."""
        return max(len(experts) for _, experts in self.chosen)

    def layer_by_layer(self) -> Iterator[ExpertRequest]:
        """Yield the requests as they were recorded: a layer's for every token, then the next layer's."""
        for layer, experts in self.chosen:
            yield from (ExpertRequest(layer, tuple(row)) for row in experts.tolist())

    def token_by_token(self) -> Iterator[ExpertRequest]:
        """Yield the requests as decoding makes them: a token's in every layer, then the next token's."""
        for token in range(self.num_tokens):
            for layer, experts in self.chosen:
                if token < len(experts):
                    yield ExpertRequest(layer, tuple(experts[token].tolist()))

    def begins_with(self, other: Pass) -> bool:
        """Whether this pass computed the other one's tokens again, before its own."""
        return len(self.chosen) == len(other.chosen) and all(
            mine == its and np.array_equal(experts[: len(before)], before)
            for (mine, experts), (its, before) in zip(self.chosen, other.chosen, strict=True)
        )


def read_trace(path: Path, experts_per_token: int | None = None) -> list[Pass]:
    """Return the passes of a recorded trace; experts_per_token is found out when it is not given.

    Raises TraceError when the file is no whole number of pairs, is empty, names a layer or expert that no model has,
    or cannot be cut into requests of one size whose experts are all different.
    """
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; name a trace that --dump-cache-trace wrote") from None
    if not contents or len(contents) % RECORD.itemsize:
        raise TraceError(
            f"{path}: found {len(contents):,} bytes, expected pairs of int32 (layer, expert), {RECORD.itemsize} bytes "
            "each; the file is truncated or is no trace"
        )
    records = np.frombuffer(contents, RECORD)
    layers, experts = records["layer"].astype(np.int32), records["expert"].astype(np.int32)
    wrong = np.flatnonzero((np.minimum(layers, experts) < 0) | (np.maximum(layers, experts) >= LIMIT))
    if wrong.size:
        at = int(wrong[0])
        raise TraceError(
            f"{path}: offset {at * RECORD.itemsize}: found layer {layers[at]}, expert {experts[at]}, expected numbers "
            f"from 0 to {LIMIT - 1}; this is no trace, or of another byte order"
        )
    runs = [(int(layers[low]), experts[low:high]) for low, high in _runs(layers)]
    width = _experts_per_token(path, runs, experts_per_token)
    return list(_passes([(layer, run.reshape(-1, width)) for layer, run in runs]))


def encode_trace(requests: Iterable[ExpertRequest]) -> bytes:
    """Return requests in their order as the file's bytes."""
    pairs = [(request.layer, expert) for request in requests for expert in request.experts]
    return np.array(pairs, RECORD).tobytes()


def recorded_order(passes: Sequence[Pass]) -> list[ExpertRequest]:
    """Return every request, as it was recorded."""
    return [request for one in passes for request in one.layer_by_layer()]


def decoding_order(passes: Sequence[Pass]) -> list[ExpertRequest]:
    """Return the requests of every token once, token by token.

    A pass that the next one computed again before its own tokens is left out: an engine without state between
    tokens runs the whole sequence for each.
    """
    again = [later.begins_with(earlier) for earlier, later in pairwise(passes)]
    kept = [one for one, superseded in zip(passes, [*again, False], strict=True) if not superseded]
    return [request for one in kept for request in one.token_by_token()]


def _runs(layers: Int32Array) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of every longest stretch of one layer."""
    borders = [0, *(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    yield from pairwise(borders)


def _experts_per_token(path: Path, runs: Sequence[tuple[int, Int32Array]], given: int | None) -> int:
    """Return the given width when the runs fit it, else the largest that they fit."""
    shared = math.gcd(*(len(experts) for _, experts in runs))
    widths = [given] if given is not None else [width for width in range(shared, 1, -1) if shared % width == 0] + [1]
    for width in widths:
        if width > 0 and shared % width == 0 and all(_distinct(experts.reshape(-1, width)) for _, experts in runs):
            return width
    raise TraceError(
        f"{path}: not made of requests for {given} different experts each: every layer's stretch is a multiple of "
        f"{shared} requests; give the model's own number of experts a token, or leave it out"
    )


def _distinct(rows: Int32Array) -> bool:
    ordered = np.sort(rows, axis=1)
    return not (ordered[:, 1:] == ordered[:, :-1]).any()


def _passes(runs: Iterable[tuple[int, Int32Array]]) -> Iterator[Pass]:
    """Yield a pass whenever the layers begin again."""
    chosen: list[tuple[int, Int32Array]] = []
    for layer, experts in runs:
        if chosen and layer < chosen[-1][0]:
            yield Pass(tuple(chosen))
            chosen = []
        chosen.append((layer, experts))
    yield Pass(tuple(chosen))

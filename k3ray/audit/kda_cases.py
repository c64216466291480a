"""The chunked form of KDA run against the recurrence: six shapes over decays from none to total, executed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from k3ray.kernels.kda import decay, recurrence
from k3ray.kernels.kda_chunk import chunked
from k3ray.kernels.threads import RowPool

Floats = npt.NDArray[np.float32]

WIDTH = 128  # channels of a head, as released
LOWER_BOUND = -5.0  # of ln alpha, as released
DT_BIASES = (-3.0, 0.0, 3.0)
RATES = (0.01, 1.0, 200.0)  # exp(A_log)


@dataclass(frozen=True, slots=True)
class KdaShape:
    """Sequences that are computed one after another, each with a state of its own. lengths: their tokens."""

    lengths: tuple[int, ...]
    heads: int

    @property
    def name(self) -> str:
        """As the audit lists it."""
        return f"{list(self.lengths)} H{self.heads}"


SHAPES = (
    KdaShape((16,), 1),
    KdaShape((17,), 1),
    KdaShape((32,), 1),
    KdaShape((65,), 2),
    KdaShape((17,), 96),
    KdaShape((17, 31), 2),
)


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """What one sequence is computed from: as `kernels.kda.recurrence` takes it."""

    state: Floats
    q: Floats
    k: Floats
    v: Floats
    alpha: Floats
    beta_logits: Floats


@dataclass(frozen=True, slots=True)
class KdaCase:
    """The largest differences of one shape over the sweep.

    output, state: absolute; relative_output, relative_state: to the largest element of the recurrence's, per setting.
    worst: the setting with the largest relative output. settings: how many there were.
    """

    shape: KdaShape
    output: float
    state: float
    relative_output: float
    relative_state: float
    worst: str
    settings: int


def make_inputs(tokens: int, heads: int, setting: tuple[float, float, bool], seed: int) -> KdaInputs:
    """Random inputs under (dt_bias, exp(A_log), repeated keys); the state before them is random too."""
    dt_bias, rate, repeated = setting
    rng, width = np.random.default_rng(seed), heads * WIDTH
    q, k, v, z = (rng.standard_normal((tokens, width), dtype=np.float32) for _ in range(4))
    alpha = decay(z, np.full(width, dt_bias, np.float32), np.full(heads, np.log(rate), np.float32), LOWER_BOUND)
    if repeated:
        k = np.repeat(k[:1], tokens, axis=0)
    state = rng.standard_normal((heads, WIDTH, WIDTH), dtype=np.float32)
    return KdaInputs(state, q, k, v, alpha, rng.standard_normal((tokens, heads), dtype=np.float32) * 2)


def sweep(shape: KdaShape) -> Iterator[tuple[tuple[float, float, bool], list[KdaInputs]]]:
    """Every setting with the inputs of the shape's sequences."""
    for number, setting in enumerate(product(DT_BIASES, RATES, (False, True))):
        yield setting, [make_inputs(t, shape.heads, setting, 100 * number + s) for s, t in enumerate(shape.lengths)]


def run_case(shape: KdaShape, pool: RowPool) -> KdaCase:
    """Compute a shape both ways under every setting."""
    largest, worst, settings = np.zeros(4), "", 0
    for (dt_bias, rate, repeated), sequences in sweep(shape):
        settings += 1
        for inputs in sequences:
            differences = _differences(inputs, pool)
            if differences[2] > largest[2]:
                worst = f"dt_bias {dt_bias:g}, exp(A_log) {rate:g}, {'repeated' if repeated else 'random'} keys"
            largest = np.maximum(largest, differences)
    output, state, relative_output, relative_state = (float(value) for value in largest)
    return KdaCase(shape, output, state, relative_output, relative_state, worst, settings)


def run_cases() -> tuple[KdaCase, ...]:
    """Run all six shapes, in about two seconds."""
    with RowPool(1) as pool:
        return tuple(run_case(shape, pool) for shape in SHAPES)


def _differences(inputs: KdaInputs, pool: RowPool) -> npt.NDArray[np.float64]:
    """Output and state: the largest absolute differences, then both relative. Not finite: infinitely far."""
    found = []
    for function in (recurrence, chunked):
        state = inputs.state.copy()
        out = function(state, inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta_logits, pool)
        found.append((out.astype(np.float64), state.astype(np.float64)))
    absolute = np.array([np.abs(ours - theirs).max() for ours, theirs in zip(*found, strict=True)])
    scale = np.array([np.abs(values).max() for values in found[0]])
    both = np.concatenate([absolute, absolute / scale])
    return np.where(np.isfinite(both), both, np.inf)

"""The router stress probe: seeded isotropic inputs, which no text has, through a layer's real router.

Synthetic by name: it says how even a router is over all directions, not how it routes text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from k3ray.audit.chosen_tensors import ROUTER, ROUTER_BIAS, Values
from k3ray.audit.snapshot import Load, Probe, ProbeRow
from k3ray.kernels import dense, router
from k3ray.kernels.threads import RowPool
from k3ray.workers.model.config import ModelConfig

SEED = 20_261_130
INPUTS = 2048

Floats = npt.NDArray[np.float32]
Loads = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


def probe_layers(values: Values) -> list[int]:
    """The layers whose router and bias were read, in shapes that fit, and are finite."""
    layers = []
    for layer in values.layers_of(ROUTER):
        weight, bias = values.arrays[layer, ROUTER], values.arrays.get((layer, ROUTER_BIAS))
        if bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1] or bias.dtype != np.float32:
            continue
        if weight.dtype in (np.uint16, np.float32) and np.isfinite(values.widened(layer, ROUTER)).all():
            layers += [layer] if np.isfinite(bias).all() else []
    return layers


def probe_routers(config: ModelConfig, values: Values, threads: int, progress: Progress) -> Probe | None:
    """Probe every layer whose router was read; None when none was. progress: told (layers done, layers in all)."""
    layers = probe_layers(values)
    if not layers:
        return None
    rows: list[ProbeRow] = []
    with RowPool(threads) as pool:
        for layer in layers:
            progress(len(rows), len(layers))
            weight, bias = values.arrays[layer, ROUTER], values.arrays[layer, ROUTER_BIAS]
            logits = dense.matmul(np.ascontiguousarray(weight), make_inputs(weight.shape[1]), pool)
            rows.append(probe_row(layer, logits, bias, config.num_experts_per_token))
    experts, k = rows[0].experts, config.num_experts_per_token
    chance = math.sqrt((experts - k) / (INPUTS * k))  # binomial loads: variance n p (1 - p) over the mean n p, squared
    return Probe(SEED, INPUTS, 1.0, tuple(rows), chance_cv=chance)


def make_inputs(width: int, inputs: int = INPUTS, seed: int = SEED) -> Floats:
    """(inputs, width) f32: directions uniform on the sphere, each row of RMS 1."""
    rows = np.random.Generator(np.random.PCG64(seed)).standard_normal((inputs, width))
    rows /= np.sqrt(np.mean(rows * rows, axis=1, keepdims=True))
    return rows.astype(np.float32)


def probe_row(layer: int, logits: Floats, bias: Floats, k: int) -> ProbeRow:
    """What the routing of logits (inputs, experts) looks like with the correction bias and with none."""
    experts = logits.shape[1]
    ids, _ = router.select(logits, np.ascontiguousarray(bias), k, True, 1.0)
    plain, _ = router.select(logits, np.zeros(experts, np.float32), k, True, 1.0)
    return ProbeRow(
        layer=layer,
        experts=experts,
        top_k=k,
        with_bias=load_of(np.bincount(ids.reshape(-1), minlength=experts)),
        without_bias=load_of(np.bincount(plain.reshape(-1), minlength=experts)),
        overlap=overlap_of(ids, plain),
    )


def load_of(loads: Loads) -> Load:
    """How evenly loads (experts,), not all zero, are spread."""
    ordered = np.sort(loads).astype(np.float64)
    count, total = len(ordered), float(ordered.sum())
    # Gini = sum over ranks i = 1..n of (2 i - n - 1) x_i, over n times the sum
    gini = float((2 * np.arange(1, count + 1) - count - 1) @ ordered) / (count * total)
    return Load(float(ordered.std() / ordered.mean()), gini, int(np.count_nonzero(loads == 0)))


def overlap_of(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> float:
    """The mean share of a row's experts (inputs, k) that the same row of the other has too."""
    shared = (first[:, :, None] == second[:, None, :]).any(axis=2)
    return float(shared.mean())

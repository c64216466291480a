"""How fast the engine goes over one model's weights in memory, by its own layers, head and experts on one token.

The layers are the model's with its small tensors; each matrix and expert lies wherever the next bytes of one large
piece of memory are, so that no weight is still in a processor's cache when it is used again. Everything that a token
does in a layer is in the time: a rate is bytes of weights by that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from k3ray.cluster.lent_weights import LentExperts, LentMatrices, LentMemory
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.part_binding import ModelPart
from k3ray.workers.experts import ExpertStore
from k3ray.workers.failure import Failure
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.weights import WeightSources, read_layer
from k3ray.workers.tape.order import tape_tensors

Float32Array = npt.NDArray[np.float32]
PASSES = (3, 25)  # the least and the most of each figure
PASS_S = 0.5  # after so long no pass more than the least
MANY_TRIES = 4  # layers of a kind that are looked for in a folder with a part of the model


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """Bytes of weights a second with so many threads; None where the folder has nothing of the kind."""

    threads: int
    trunk_bytes_per_s: float | None
    expert_bytes_per_s: float | None


class _NoExperts:
    """Routed experts that take no time."""

    def __init__(self, config: ModelConfig) -> None:
        self._latent = config.routed_expert_hidden_size

    def begin(self, layer: int, expert_ids: npt.NDArray[np.int32], latents: Float32Array) -> Callable[[], Float32Array]:
        """See RoutedExperts."""
        return lambda: np.zeros((*expert_ids.shape, self._latent), np.float32)


def measure_layers(
    model_dir: Path, config: ModelConfig, threads: Sequence[int], cores: Sequence[int], nbytes: int
) -> list[LayerSpeed]:
    """Measure with each number of threads; on the first of `cores`. nbytes: of the memory that weights are lent from.

    A folder with a part of the model is measured by the kinds of layers that are whole there.
    """
    memory = LentMemory(max(nbytes, _smallest(config)))
    found = []
    for count in threads:
        with RowPool(count, tuple(cores[:count])) as pool:
            trunk = _trunk_rate(model_dir, config, memory, pool)
            found.append(LayerSpeed(count, trunk, _expert_rate(config, memory, pool)))
    return found


def _smallest(config: ModelConfig) -> int:
    """What must lie in one piece: the largest matrix that is used whole, and one expert."""
    whole = [tensor.nbytes for tensor in tape_tensors(config) if tensor.short.endswith("kv_b_proj.weight")]
    expert = sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))
    return max([expert, *whole])


def _trunk_rate(model_dir: Path, config: ModelConfig, memory: LentMemory, pool: RowPool) -> float | None:
    """Bytes of all layers and the head by the seconds of each kind, as many times as the model has it."""
    matrices = LentMatrices(memory, config)
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        kinds.setdefault((config.is_mla(layer), config.is_moe(layer)), []).append(layer)
    total, seconds = 0, 0.0
    for layers in kinds.values():
        for layer in _tried(layers):
            try:
                work = _layer_work(model_dir, config, layer, matrices, pool)
            except Failure:  # not whole in this folder
                continue
            seconds += len(layers) * _median_s(work)
            total += len(layers) * matrices.layer_bytes(layer)
            break
    if not total:
        return None
    head = matrices.matrix(config.num_hidden_layers, shapes.LM_HEAD, pool)
    x = np.ones((1, config.hidden_size), np.float32)
    seconds += _median_s(lambda: head.apply(x))
    return (total + matrices.layer_bytes(config.num_hidden_layers)) / seconds


def _tried(layers: Sequence[int]) -> Iterator[int]:
    """The one in the middle, which has a middling number of AttnRes blocks before it, and a few others."""
    middle = len(layers) // 2
    yield from [*layers[middle:], *layers[:middle]][:MANY_TRIES]


def _layer_work(
    model_dir: Path, config: ModelConfig, layer: int, matrices: LentMatrices, pool: RowPool
) -> Callable[[], object]:
    """The call that moves one token through the layer, its routed experts left out. Raises a Failure of binding."""
    spec = CheckpointSpec(model_dir, None, config.num_hidden_layers, partial=True, config=config)
    checkpoint = open_checkpoint(spec, ModelPart(range(layer, layer + 1)))
    sources = WeightSources(checkpoint.binding, checkpoint.reader, matrices, pool)
    parts = SliceParts(config, (read_layer(sources, layer),), None, None)
    layers = Slice(parts, _NoExperts(config), pool)
    layers.open_sequence(0, PASSES[1] + 1)
    dice, blocks = np.random.default_rng(layer), -(-layer // config.attn_res_block_size)
    prefix = dice.standard_normal((1, config.hidden_size), np.float32)
    finished = dice.standard_normal((1, blocks, config.hidden_size), np.float32)

    def one_token() -> None:
        position = layers.sequence(0).position
        frame = ActivationFrame(
            position, np.zeros(1, np.int64), np.array([position]), np.zeros(1, np.int32), np.zeros(1, np.bool_),
            prefix, finished,
        )  # fmt: skip
        layers.forward(frame)

    return one_token


def _expert_rate(config: ModelConfig, memory: LentMemory, pool: RowPool) -> float | None:
    """One token's experts of a layer, all of them resident."""
    if not config.moe_layers:
        return None
    asked = config.num_experts_per_token
    nbytes = sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))
    sets = max(1, min(memory.nbytes // (asked * nbytes), config.num_experts // asked))
    store = ExpertStore(config, LentExperts(memory, config), CirclePolicy(sets * asked), pool)
    latents = np.random.default_rng(0).standard_normal((1, config.routed_expert_hidden_size), np.float32)
    rows, turn = np.zeros(asked, np.int32), 0

    def one_token() -> None:
        nonlocal turn
        turn = (turn + 1) % sets
        store.compute(0, latents, rows, np.arange(turn * asked, (turn + 1) * asked, dtype=np.int32))

    try:
        for _ in range(sets):  # all of them come to be resident
            one_token()
        return asked * nbytes / _median_s(one_token)
    finally:
        store.close()


def _median_s(work: Callable[[], object]) -> float:
    """Seconds of a pass; the first one, which compiles and touches, does not count."""
    work()
    seconds: list[float] = []
    while len(seconds) < PASSES[0] or (len(seconds) < PASSES[1] - 1 and sum(seconds) < PASS_S):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)

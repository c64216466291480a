"""Routed experts of the golden checkpoint: MODEL.md's formula on decoded weights, and every output in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.reference.mxfp4 import decode
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.expert_reader import ExpertReader
from k3ray.workers.experts import ExpertStore, LocalExperts, MissingExpert
from k3ray.workers.model.config import read_config

Doubles = npt.NDArray[np.float64]

LAYER = 4
HELD = (0, 3, 5, 9)
SCALE = 60.0  # latents so large that SiTU is far from linear: then gate and up cannot stand for one another


@pytest.fixture(scope="module")
def reader(k3b_dir: Path) -> TensorReader:
    return TensorReader(open_index(k3b_dir, []))


@pytest.fixture(scope="module")
def store(k3b_dir: Path, reader: TensorReader) -> ExpertStore:
    config = read_config(k3b_dir)
    experts = ExpertReader([(bind(config, reader.index), reader.index)])
    return ExpertStore(
        config, experts, CirclePolicy(len(HELD)), RowPool(1), lambda layer, expert: layer == LAYER and expert in HELD
    )


def latents(count: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(count).standard_normal((count, 96)) * SCALE).astype(np.float32)


def formula(reader: TensorReader, expert: int, x: Doubles) -> Doubles:
    """W2 SiTU(W1 x, W3 x): w1 gate, w3 up, w2 down, by the names of the released layout."""
    start = f"language_model.model.layers.{LAYER}.block_sparse_moe.experts.{expert}."
    w1, w2, w3 = (
        decode(*(reader.read(f"{start}{part}.weight_{kind}") for kind in ("packed", "scale")))
        for part in ("w1", "w2", "w3")
    )
    g, u = w1 @ x, w3 @ x
    return np.asarray(w2 @ (4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)))


def test_an_expert_is_the_formula(store: ExpertStore, reader: TensorReader) -> None:
    x = latents(3)
    for expert in HELD:
        found = store.compute(LAYER, x, np.arange(3, dtype=np.int32), np.full(3, expert, np.int32))
        expected = np.stack([formula(reader, expert, row.astype(np.float64)) for row in x])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_every_pair_gets_its_own_output_whatever_shares_the_batch(store: ExpertStore) -> None:
    x = latents(5)
    rows = np.array([4, 0, 2, 2, 1, 3, 0, 4, 2], np.int32)
    experts = np.array([9, 3, 0, 9, 5, 3, 9, 0, 3], np.int32)
    found = store.compute(LAYER, x, rows, experts)
    for pair in range(len(rows)):
        alone = store.compute(LAYER, x[rows[pair : pair + 1]], np.zeros(1, np.int32), experts[pair : pair + 1])
        assert found[pair].tobytes() == alone[0].tobytes(), pair
    assert len({row.tobytes() for row in found}) == len(rows)


def test_local_experts_answer_in_the_order_of_the_choice(store: ExpertStore) -> None:
    x = latents(3)
    ids = np.array([[9, 0, 3], [0, 5, 9], [5, 3, 0]], np.int32)
    found = LocalExperts(store).begin(LAYER, ids, x)()
    assert found.shape == (3, 3, 96)
    for token in range(3):
        for rank in range(3):
            alone = store.compute(LAYER, x[token : token + 1], np.zeros(1, np.int32), ids[token, rank : rank + 1])
            assert found[token, rank].tobytes() == alone[0].tobytes()


def test_no_pairs_and_an_expert_that_is_not_held(store: ExpertStore) -> None:
    empty = np.zeros(0, np.int32)
    assert store.compute(LAYER, latents(1), empty, empty).shape == (0, 96)
    for layer, expert in ((LAYER, 1), (LAYER + 1, 0)):
        with pytest.raises(MissingExpert, match=f"layer {layer} expert {expert} is not owned"):
            store.compute(layer, latents(2), np.array([0, 1], np.int32), np.array([0, expert], np.int32))

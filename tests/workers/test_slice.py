"""What flows between layers: MODEL.md's residual stream, with attention and MLP replaced by plain matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.threads import RowPool
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.matrices import ResidentMatrix
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.weights import HeadWeights, LayerWeights

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LAYERS, HIDDEN, VOCAB, BLOCK = 7, 11, 9, 3
POOL = RowPool(1)


class StubEmbedding:
    """Rows of a table in memory."""

    def __init__(self, table: Floats) -> None:
        self.table = table

    def rows(self, ids: npt.NDArray[np.int32]) -> Floats:
        return self.table[ids]


def attention(
    config: ModelConfig, weights: ResidentMatrix, x: Floats, sequences: Sequence[Any], pool: RowPool
) -> Floats:
    return weights.apply(x)


def mlp(config: ModelConfig, weights: ResidentMatrix, x: Floats) -> Floats:
    return weights.apply(x)


@pytest.fixture
def parts(k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SliceParts:
    """Seven layers in blocks of three, an embedding and a head; attention and MLP are one matrix each."""
    monkeypatch.setattr("k3ray.workers.model.slice.mla_attention", attention)
    monkeypatch.setattr("k3ray.workers.model.slice.mlp", mlp)
    config = replace(
        read_config(k3b_dir), num_hidden_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB, attn_res_block_size=BLOCK
    )
    # an eps that moves every norm and mix: one that took another would not be seen with streams of size one and 1e-5
    config = replace(config, mla_layers=tuple(range(LAYERS)), kda_layers=(), rms_norm_eps=0.3)
    generator = np.random.default_rng(5)

    def vector(scale: float = 1.0) -> Floats:
        return (generator.standard_normal(HIDDEN) * scale).astype(np.float32)

    def matrix(rows: int) -> Any:
        return ResidentMatrix((generator.standard_normal((rows, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32), POOL)

    layers = tuple(
        LayerWeights(layer, vector(), vector(2), matrix(HIDDEN), vector(), vector(2), matrix(HIDDEN))
        for layer in range(LAYERS)
    )
    table: Any = StubEmbedding(generator.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    return SliceParts(config, layers, table, HeadWeights(vector(), vector(), matrix(VOCAB)))


def frame(positions: Sequence[int], ids: Sequence[int], sessions: Sequence[int]) -> ActivationFrame:
    count = len(ids)
    return ActivationFrame(
        step=1,
        sessions=np.array(sessions),
        positions=np.array(positions),
        ids=np.array(ids, np.int32),
        wants_logits=np.ones(count, np.bool_),
        prefix=np.zeros((count, 0), np.float32),
        blocks=np.zeros((count, 0, 0), np.float32),
    )


def rms(x: Doubles, weight: Floats, eps: float) -> Doubles:
    return np.asarray(weight * x / np.sqrt((x * x).mean() + eps))


def mix(blocks: list[Doubles], p: Doubles, fold: Floats, eps: float) -> Doubles:
    rows = np.stack([*blocks, p])
    scores = rows / np.sqrt((rows * rows).mean(1, keepdims=True) + eps) @ fold
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum() @ rows)


def formula(parts: SliceParts, token_id: int) -> tuple[Doubles, list[Doubles], Doubles]:
    """One token's p and B after the last layer, and its logits."""
    eps, head = parts.config.rms_norm_eps, parts.head
    table: Any = parts.embedding
    assert head is not None
    p: Doubles = table.table[token_id].astype(np.float64)
    blocks: list[Doubles] = []
    for weights in parts.layers:
        attend: Any = weights.attention
        feed: Any = weights.mlp
        h = mix(blocks, p, weights.attention_fold, eps) if blocks else p
        begins = weights.layer % BLOCK == 0
        if begins:
            blocks.append(p)
        a = attend.weight @ rms(h, weights.attention_norm, eps)
        p = a if begins else p + a
        p = p + feed.weight @ rms(mix(blocks, p, weights.mlp_fold, eps), weights.mlp_norm, eps)
    return p, blocks, head.head.weight @ rms(mix(blocks, p, head.fold, eps), head.norm, eps)


def test_streams_and_logits_are_the_formula_at_every_position(parts: SliceParts) -> None:
    experts: Any = None
    whole = Slice(replace(parts, config=replace(parts.config, first_k_dense_replace=LAYERS)), experts, POOL)
    whole.open_sequence(0, 8)
    whole.open_sequence(1, 8)
    for sent in (frame([0, 1, 0], [3, 8, 5], [0, 0, 1]), frame([2, 1], [1, 1], [0, 1]), frame([3], [0], [0])):
        moved = whole.forward(sent)
        logits = whole.logits(moved)
        for row, token_id in enumerate(sent.ids.tolist()):
            p, blocks, expected = formula(parts, token_id)
            np.testing.assert_allclose(moved.prefix[row], p, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(moved.blocks[row], np.stack(blocks), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_logits_are_of_the_tokens_that_want_them(parts: SliceParts) -> None:
    experts: Any = None
    one = Slice(parts, experts, POOL)
    one.open_sequence(0, 4)
    wants = np.array([False, True, False, True])
    moved = one.forward(replace(frame([0, 1, 2, 3], [3, 8, 5, 1], [0] * 4), wants_logits=wants))
    expected = [formula(parts, token_id)[2] for token_id in (8, 1)]
    np.testing.assert_allclose(one.logits(moved), np.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6])
def test_a_cut_between_any_two_layers_moves_no_bit(parts: SliceParts, cut: int) -> None:
    experts: Any = None
    sent = frame([0, 1, 2], [3, 8, 5], [0, 0, 0])
    whole = Slice(parts, experts, POOL)
    first = Slice(replace(parts, layers=parts.layers[:cut], head=None), experts, POOL)
    last = Slice(replace(parts, layers=parts.layers[cut:], embedding=None), experts, POOL)
    for part in (whole, first, last):
        part.open_sequence(0, 3)
    moved, expected = last.forward(first.forward(sent)), whole.forward(sent)
    assert moved.prefix.tobytes() == expected.prefix.tobytes() and moved.blocks.tobytes() == expected.blocks.tobytes()
    assert last.logits(moved).tobytes() == whole.logits(expected).tobytes()

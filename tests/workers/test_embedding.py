"""Embedding rows by token id: the file's own bytes, in the order asked; ids outside the vocabulary are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.embedding import Embedding, TokenIdFailure

NAME = "language_model.model.embed_tokens.weight"
VOCAB, HIDDEN = 512, 160


@pytest.fixture(scope="module")
def embedding(k3b_dir: Path) -> Embedding:
    return Embedding(TensorReader(open_index(k3b_dir, [])), NAME, VOCAB)


def plain_table(folder: Path) -> np.ndarray:
    """The table by plain slicing of the shard that holds it, widened."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:start]).get(NAME)
        if entry is not None:
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(data[start + begin : start + end], "<u2").astype("<u4") << 16
            return bits.view("<f4").reshape(VOCAB, HIDDEN)
    raise AssertionError("no shard holds the embedding")


@pytest.mark.parametrize("ids", [[0], [VOCAB - 1], [7, 7, 7], [300, 0, VOCAB - 1, 300, 5, 0], list(range(VOCAB))])
def test_rows_are_the_files_in_the_order_asked(embedding: Embedding, k3b_dir: Path, ids: list[int]) -> None:
    rows = embedding.rows(np.array(ids, np.int32))
    assert rows.dtype == np.float32 and rows.flags.c_contiguous
    assert rows.tobytes() == plain_table(k3b_dir)[ids].tobytes()


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused(embedding: Embedding, token_id: int) -> None:
    with pytest.raises(TokenIdFailure, match=rf"token id {token_id} is not in the model's vocabulary 0\.\.511"):
        embedding.rows(np.array([3, token_id], np.int32))

"""Damaged weights: a NaN never becomes a token, and a NaN scale byte is contained and named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from k3ray.driver import Driver
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.model.slice import NonFiniteActivation

LAYER = "language_model.model.layers.2."
BF16_NAN, BF16_INFINITY = b"\xc0\x7f", b"\x80\x7f"
F32_NAN = np.float32(np.nan).tobytes()


@pytest.fixture
def model(k3b_dir: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))
    return copy


def overwrite(model: Path, name: str, contents: bytes, at: int = 0) -> None:
    """Put bytes into a tensor's data."""
    entry = open_index(model).find(name)
    assert entry is not None and at + len(contents) <= entry.nbytes
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + at)
        file.write(contents)


def start(model: Path) -> InProcessChain:
    layers = read_config(model).num_hidden_layers
    return start_in_process([StageSpec(CheckpointSpec(model, None, layers), 0, layers, 1, ())], [])


def forward(chain: InProcessChain) -> None:
    driver = Driver(chain)
    driver.forward({driver.open(8): [5, 6, 7]})


@pytest.mark.parametrize(("name", "contents", "reason"), [
    (f"{LAYER}input_layernorm.weight", BF16_NAN, r"layer 2 \(KDA attention\), position 0"),
    ("language_model.model.embed_tokens.weight", BF16_INFINITY, "layer 0 .*, position 1"),
    (f"{LAYER}block_sparse_moe.gate.e_score_correction_bias", F32_NAN, r"layer 2 \(MoE\), positions 0..2"),
    (f"{LAYER}block_sparse_moe.routed_expert_down_proj.weight", BF16_NAN, r"layer 2 \(MoE\)"),
    (f"{LAYER}self_attn.dt_bias", F32_NAN, r"layer 2 \(KDA attention\)"),
    ("language_model.lm_head.weight", BF16_NAN, r"layer 9 \(logits\), position 2"),
])  # fmt: skip
def test_a_value_that_is_not_finite_stops_the_step(model: Path, name: str, contents: bytes, reason: str) -> None:
    at = 6 * read_config(model).hidden_size * 2 if "embed_tokens" in name else 0  # the row of id 6, at position 1
    overwrite(model, name, contents, at)
    with pytest.raises(NonFiniteActivation, match=reason):
        forward(start(model))


def test_a_nan_scale_byte_is_contained_and_named(model: Path) -> None:
    used, untouched = start(model), start(model)
    forward(used)
    assert used.damaged_met() == []
    for expert in range(read_config(model).num_experts):
        overwrite(model, f"{LAYER}block_sparse_moe.experts.{expert}.w1.weight_scale", b"\xff")
    damaged = start(model)
    assert damaged.damaged_met() == [], "an expert that was not used is not reported"
    forward(damaged)
    met = damaged.damaged_met()
    assert met and {layer for layer, _ in met} == {2}
    assert untouched.damaged_met() == []

"""Damaged weights: a NaN never becomes a token, and a NaN scale byte is contained and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3ray.commands import pack
from k3ray.driver import Driver
from k3ray.kernels.router import NonFiniteScore
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReadError
from k3ray.workers.experts import NonFiniteExpert
from k3ray.workers.in_process import InProcessChain, start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.model.finite import NonFiniteProduct
from k3ray.workers.model.slice import NonFiniteActivation, finite_or_named
from k3ray.workers.tape.damaged_scales import DamagedScales

LAYER = "language_model.model.layers.2."
BF16_NAN, BF16_INFINITY = b"\xc0\x7f", b"\x80\x7f"
F32_INFINITY = np.float32(np.inf).tobytes()


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


def start(model: Path, layers: int | None = None) -> InProcessChain:
    layers = layers or read_config(model).num_hidden_layers
    return start_in_process([StageSpec(CheckpointSpec(model, None, layers), 0, layers, 1, ())], [])


def forward(chain: InProcessChain) -> None:
    driver = Driver(chain)
    driver.forward({driver.open(8): [5, 6, 7]})


@pytest.mark.parametrize(("name", "contents", "reason"), [
    ("language_model.model.embed_tokens.weight", BF16_INFINITY, r"layer 0 \(embedding\), position 1"),
    (f"{LAYER}block_sparse_moe.gate.weight", BF16_NAN, r"layer 2 \(MoE\), position 0: .* block_sparse_moe.gate.weight"),
    (f"{LAYER}block_sparse_moe.routed_expert_down_proj.weight", BF16_NAN, r"layer 2 \(MoE\), position 0"),
    ("language_model.lm_head.weight", BF16_NAN, r"layer 9 \(logits\), position 2: .* lm_head.weight"),
])  # fmt: skip
def test_a_value_that_is_not_finite_stops_the_step(model: Path, name: str, contents: bytes, reason: str) -> None:
    at = 6 * read_config(model).hidden_size * 2 if "embed_tokens" in name else 0  # the row of id 6, at position 1
    overwrite(model, name, contents, at)
    with pytest.raises(NonFiniteActivation, match=reason):
        forward(start(model))


def test_what_a_later_token_meets_is_named_by_its_position() -> None:
    positions = np.array([40, 41, 42], np.int64)
    failures = {"position 41: .* g_proj": NonFiniteProduct("g_proj", 1), "positions 40..42: ": NonFiniteScore(1, 7)}
    for reason, error in failures.items():
        match = rf"layer 3 \(MLA attention\), {reason}"
        with pytest.raises(NonFiniteActivation, match=match), finite_or_named("MLA attention", 3, positions):
            raise error


def test_no_infinity_of_any_tensor_is_swallowed(model: Path) -> None:
    """A gate of +inf is 1, a capped activation of -inf its cap: what follows looks sound, so its source is checked."""
    infinities = {"BF16": (BF16_INFINITY, b"\x80\xff"), "F32": (F32_INFINITY, b"\x00\x00\x80\xff")}
    index = open_index(model)
    binding = bind(read_config(model), index)
    names = {**binding.top}
    names |= {f"{layer}.{short}": name for layer in (0, 1, 3) for short, name in binding.layer_tensors(layer).items()}
    for number, (short, name) in enumerate(names.items()):
        entry = index.find(name)
        assert entry is not None
        contents = infinities[entry.dtype][number % 2]
        element = 1 if "A_log" in short else entry.nbytes // len(contents) // 2
        element = 6 * entry.shape[-1] if "embed" in short else element  # of id 6, which is used
        before = entry.path.read_bytes()
        overwrite(model, name, contents, element * len(contents))
        with pytest.raises((NonFiniteActivation, TensorReadError)) as caught:
            forward(start(model, 4))
        entry.path.write_bytes(before)
        is_vector = len(entry.shape) != 2 or "res_proj" in short
        assert isinstance(caught.value, TensorReadError) == is_vector, short
        assert not is_vector or (name in str(caught.value) and "inf at entry" in str(caught.value))
    assert len(names) == 78


def test_an_expert_whose_product_overflows_is_named(model: Path) -> None:
    size = read_config(model)
    for expert in range(size.num_experts):
        name = f"{LAYER}block_sparse_moe.experts.{expert}.w1.weight_scale"
        entry = open_index(model).find(name)
        assert entry is not None
        overwrite(model, name, b"\xfe" * entry.nbytes)
    with pytest.raises(NonFiniteExpert, match=r"layer 2 expert \d+: a NaN or infinite value in what its w1 gives"):
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


def test_a_checkpoint_with_nan_scales_is_not_packed(model: Path, tmp_path: Path) -> None:
    for layer, expert, part in ((1, 0, "w1"), (8, 15, "w2")):  # the first of all, and one of the last layer
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight_scale"
        entry = open_index(model).find(name)
        assert entry is not None
        overwrite(model, name, b"\xff", entry.nbytes - 1)
        with pytest.raises(DamagedScales, match=re.escape(name)) as caught:
            pack.run(model, tmp_path / "tape", False)
    assert caught.value.exit_code == 1 and "layers.1." in str(caught.value)
    assert not list(tmp_path.glob("tape*"))

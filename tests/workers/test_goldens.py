"""The whole model against what Moonshot's own code computed (tests/data/k3b, ../shared/data/golden/k3a)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.driver import Driver
from k3ray.generation import generate
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec, StageSpec, load_slice
from k3ray.workers.model.config import ModelConfig, read_config
from tests.goldens import Golden, read_golden

LOGIT_TOLERANCE = 2e-3  # the goldens' READMEs: generous for float32; mistakes of meaning show as 1e-1 and more
STREAM_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=["k3a", "k3b"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.getfixturevalue(f"{request.param}_dir"))


def whole(path: Path) -> tuple[ModelConfig, StageSpec]:
    config = read_config(path)
    layers = config.num_hidden_layers
    return config, StageSpec(CheckpointSpec(path, None, layers), 0, layers, 1, ())


@pytest.fixture(scope="module")
def driver(golden: Golden) -> Iterator[Driver]:
    yield Driver(start_in_process([whole(golden.path)[1]], []))


class Recorder:
    """Keeps what a slice lets an observer see, by name and layer."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[int, npt.NDArray[Any]]] = defaultdict(dict)

    def __call__(self, name: str, layer: int, values: npt.NDArray[Any]) -> None:
        self.seen[name][layer] = values.copy()

    def stacked(self, name: str) -> npt.NDArray[Any]:
        return np.stack([values for _, values in sorted(self.seen[name].items())])


def run_whole(golden: Golden, prompt: int) -> tuple[Recorder, ActivationFrame, npt.NDArray[np.float32]]:
    _, spec = whole(golden.path)
    layers = load_slice(spec, []).layers
    ids = np.array(golden.ids(prompt), np.int32)
    layers.open_sequence(0, len(ids))
    frame = ActivationFrame(
        step=1,
        sessions=np.zeros(len(ids), np.int64),
        positions=np.arange(len(ids)),
        ids=ids,
        wants_logits=np.ones(len(ids), np.bool_),
        prefix=np.zeros((len(ids), 0), np.float32),
        blocks=np.zeros((len(ids), 0, 0), np.float32),
    )
    recorder = Recorder()
    moved = layers.forward(frame, recorder)
    return recorder, moved, layers.logits(moved, recorder)


@pytest.mark.parametrize("prompt", range(4))
def test_greedy_ids_and_logits(golden: Golden, driver: Driver, prompt: int) -> None:
    steps = list(generate(driver, golden.ids(prompt), 32))
    assert [step.token_id for step in steps] == golden.arrays[f"p{prompt}_greedy"].tolist()
    difference = np.abs(np.stack([step.logits for step in steps]) - golden.arrays[f"p{prompt}_greedy_logits"])
    assert difference.max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("prompt", range(4))
def test_logits_at_every_position_and_routed_experts(golden: Golden, prompt: int) -> None:
    recorder, _, logits = run_whole(golden, prompt)
    assert np.abs(logits - golden.arrays[f"p{prompt}_logits"]).max() < LOGIT_TOLERANCE
    expected = golden.arrays[f"p{prompt}_router_idx"]
    found = recorder.stacked("router_ids")
    # the golden sorts by weight, we by selection score (weight plus bias): the experts must be the same
    assert np.array_equal(np.sort(found, axis=2), np.sort(expected, axis=2))


def test_per_layer_streams(golden: Golden) -> None:
    recorder, moved, _ = run_whole(golden, 0)
    names = ("attn_in", "attn_normed", "attn_out", "mlp_in", "mlp_out", "layer_out")
    worst = {name: float(np.abs(recorder.stacked(name) - golden.arrays[f"p0_{name}"]).max()) for name in names}
    layers = read_config(golden.path).num_hidden_layers
    for name in ("final_mix", "final_norm"):
        worst[name] = float(np.abs(recorder.seen[name][layers] - golden.arrays[f"p0_{name}"]).max())
    assert max(worst.values()) < STREAM_TOLERANCE, worst
    assert moved.blocks.shape[1] == golden.arrays["p0_n_blocks"][-1]


def test_router_weights_and_latents(golden: Golden) -> None:
    recorder, _, _ = run_whole(golden, 0)
    found = -np.sort(-recorder.stacked("router_weights"), axis=2)
    assert np.abs(found - golden.arrays["p0_router_w"]).max() < 1e-5
    recorded = {"latent_in": "latent_in", "latent_aggregate": "latent_agg", "latent_normed": "latent_normed"}
    for name, golden_name in {**recorded, "shared_out": "shared_out"}.items():
        layers = [key for key in golden.arrays if key.startswith(f"p0_{golden_name}_L")]
        assert len(layers) == 2
        for key in layers:
            layer = int(key.rpartition("L")[2])
            assert np.abs(recorder.seen[name][layer] - golden.arrays[key]).max() < STREAM_TOLERANCE, key


def test_state_after_the_prompt(golden: Golden) -> None:
    config, spec = whole(golden.path)
    chain_slice = load_slice(spec, []).layers
    ids = np.array(golden.ids(0), np.int32)
    chain_slice.open_sequence(0, len(ids))
    zeros = np.zeros((len(ids), 0), np.float32)
    wants = np.zeros(len(ids), np.bool_)
    frame = ActivationFrame(1, np.zeros(len(ids), np.int64), np.arange(len(ids)), ids, wants, zeros, zeros[:, None])
    chain_slice.forward(frame)
    states = chain_slice.sequence(0).layers
    recorded = [key for key in golden.arrays if key.startswith("p0_kda_state_L")]
    assert len(recorded) == 3
    for key in recorded:
        layer = int(key.rpartition("L")[2])
        state = states[layer]
        assert np.abs(state.matrices.transpose(0, 2, 1) - golden.arrays[key]).max() < STREAM_TOLERANCE, key
        for part, tail in (("q", state.tail_q), ("k", state.tail_k), ("v", state.tail_v)):
            expected = golden.arrays[f"p0_conv_{part}_L{layer}"][:, -(config.conv_kernel_size - 1) :]
            assert np.abs(tail.T - expected).max() < STREAM_TOLERANCE, (key, part)

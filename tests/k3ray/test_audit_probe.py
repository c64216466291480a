"""The router probe: its measures by their definitions, its routing by the kernels' twins, its inputs by their shape."""

from __future__ import annotations

import statistics
from itertools import product

import numpy as np
import pytest

from k3ray.audit.chosen_tensors import ROUTER, ROUTER_BIAS, Values, widen
from k3ray.audit.probe import INPUTS, load_of, make_inputs, overlap_of, probe_routers
from k3ray.audit.statistics import pearson
from k3ray.kernels.reference import router as twin
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config
from k3ray.workers.model.config import ModelConfig, read_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(encode_config(SyntheticSpec(num_experts=13, num_experts_per_token=3, hidden_size=96)))
    return read_config(path)


def routers(seed: int, layers: tuple[int, ...], dtype: str = "bf16") -> Values:
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in layers:
        weight = rng.standard_normal((13, 96), dtype=np.float32) / 8
        arrays[layer, ROUTER] = (weight.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else weight
        arrays[layer, ROUTER_BIAS] = rng.standard_normal(13, dtype=np.float32) / 4
    return Values(arrays, ())


def test_inputs_are_seeded_and_of_rms_one() -> None:
    inputs = make_inputs(96)
    assert inputs.shape == (INPUTS, 96) == (2048, 96)
    assert np.sqrt(np.mean(inputs.astype(np.float64) ** 2, axis=1)) == pytest.approx(1.0, abs=1e-6)
    assert inputs.tobytes() == make_inputs(96).tobytes() != make_inputs(96, seed=1).tobytes()
    # isotropic: no direction is longer than another, beyond the noise of 2,048 samples
    moments = np.linalg.eigvalsh(np.cov(inputs.T.astype(np.float64)))
    assert moments.min() > 0.5
    assert moments.max() < 1.6


@pytest.mark.parametrize("loads", [[4, 4, 4, 4], [0, 0, 12], [1, 2, 3, 4, 0], [7]])
def test_load_is_by_definition(loads: list[int]) -> None:
    found = load_of(np.array(loads))
    assert found.cv == pytest.approx(statistics.pstdev(loads) / statistics.mean(loads), abs=1e-12)
    pairs = sum(abs(one - other) for one, other in product(loads, repeat=2))
    assert found.gini == pytest.approx(pairs / (2 * len(loads) ** 2 * statistics.mean(loads)), abs=1e-12)
    assert found.without_load == loads.count(0)


def test_overlap_is_the_share_of_the_same_experts() -> None:
    first = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    second = np.array([[4, 3, 9, 0], [1, 2, 3, 4]], np.int32)
    assert overlap_of(first, second) == 0.25
    assert overlap_of(first, first) == 1.0


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_routing_is_the_twins(config: ModelConfig, dtype: str) -> None:
    values = routers(3, (1, 2), dtype)
    probe = probe_routers(config, values, 2, lambda done, total: None)
    assert probe is not None
    assert (probe.kind, probe.inputs, probe.rms) == ("S", 2048, 1.0)
    assert [row.layer for row in probe.layers] == [1, 2]
    for row in probe.layers:
        logits = (make_inputs(96).astype(np.float64) @ widen(values.arrays[row.layer, ROUTER]).T).astype(np.float32)
        sets = []
        for bias in (values.arrays[row.layer, ROUTER_BIAS], np.zeros(13, np.float32)):
            ids, _ = twin.select(logits, bias, 3, True, 1.0)
            sets.append([set(line) for line in ids.tolist()])
        loads = [[sum(expert in line for line in chosen) for expert in range(13)] for chosen in sets]
        assert row.with_bias == load_of(np.array(loads[0]))
        assert row.without_bias == load_of(np.array(loads[1]))
        shared = [len(one & other) / 3 for one, other in zip(*sets, strict=True)]
        assert row.overlap == pytest.approx(statistics.mean(shared), abs=1e-12)
        assert row.with_bias != row.without_bias


def test_chance_is_what_uniform_choice_gives(config: ModelConfig) -> None:
    probe = probe_routers(config, routers(3, (1,)), 1, lambda done, total: None)
    assert probe is not None
    rng = np.random.default_rng(0)
    loads = [
        np.bincount(np.argsort(rng.random((2048, 13)), axis=1)[:, :3].reshape(-1), minlength=13) for _ in range(40)
    ]
    assert np.mean([load_of(load).cv for load in loads]) == pytest.approx(probe.chance_cv, rel=0.15)


def test_what_cannot_be_probed_is_left_out(config: ModelConfig) -> None:
    values = routers(1, (1, 2, 3))
    arrays = dict(values.arrays)
    del arrays[1, ROUTER_BIAS]
    arrays[2, ROUTER_BIAS] = arrays[2, ROUTER_BIAS][:12]
    arrays[3, ROUTER] = np.full((13, 96), 0x7FC0, np.uint16)  # NaN in bf16
    assert probe_routers(config, Values(arrays, ()), 1, lambda done, total: None) is None


def test_correlation_of_what_has_none() -> None:
    one = np.arange(4.0)
    assert pearson(one, np.ones(4)) is None
    assert pearson(one, np.arange(5.0)) is None
    assert pearson(one, 3 - 2 * one) == pytest.approx(-1.0)

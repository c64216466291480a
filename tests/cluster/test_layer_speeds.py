"""Speeds measured with a model's own layers, experts and messages: all of the work is done, on memory of any size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.cluster import layer_speeds, node_speeds, trip_speed
from k3ray.cluster.devices import MemorySpeed
from k3ray.cluster.layer_speeds import LayerSpeed, measure_layers
from k3ray.cluster.lent_weights import LentExperts, LentMatrices, LentMemory
from k3ray.cluster.topology import ThreadSpeeds
from k3ray.cluster.trip_speed import measure_trip
from k3ray.kernels import dense
from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.order import tape_tensors
from tests.tapes import synthetic_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("speeds") / "model", SyntheticSpec())


def test_memory_is_lent_in_a_circle() -> None:
    memory = LentMemory(1000)
    begin = memory.lend(1000).ctypes.data
    places = [memory.lend(nbytes).ctypes.data - begin for nbytes in (300, 64, 500, 110, 1000)]
    assert places == [0, 320, 384, 0, 0]  # on 64 bytes; what does not fit before the end begins again
    assert set(memory.lend(1000).tolist()) == {0x3A}


@pytest.mark.parametrize("nbytes", [1 << 20, 3000])
def test_a_lent_matrix_is_used_whole_however_little_memory_there_is(model: Path, nbytes: int) -> None:
    config = read_config(model)
    tensor = next(one for one in tape_tensors(config) if one.short == "lm_head.weight")
    x = np.random.default_rng(0).standard_normal((1, tensor.columns), np.float32)
    with RowPool(1) as pool:
        found = LentMatrices(LentMemory(nbytes), config).matrix(tensor.layer, tensor.short, pool).apply(x)
        weight = np.full((tensor.rows, tensor.columns), 0x3A3A, np.uint16)
        assert found.tobytes() == dense.matmul(weight, x, pool).tobytes()


def test_all_of_the_tape_is_in_the_layers_bytes(model: Path) -> None:
    config = read_config(model)
    matrices = LentMatrices(LentMemory(4096), config)
    layers = sum(matrices.layer_bytes(layer) for layer in range(config.num_hidden_layers + 1))
    assert layers == sum(tensor.nbytes for tensor in tape_tensors(config))
    expert = LentExperts(LentMemory(1 << 16), config).read(1, 2, np.zeros(0, np.uint8))
    assert not expert.damaged and expert.w1.packed.shape == (32, 16) and expert.w2.scales.shape == (32, 1)


def test_every_kind_of_layer_is_timed_as_often_as_the_model_has_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that take a second each, a head that takes two, experts that take four: the rates by hand."""
    config, asked = read_config(model), []

    def median_s(work: Any) -> float:
        work()
        name = work.__qualname__
        asked.append(name.split(".")[0])
        return 1.0 if "_layer_work" in name else 2.0 if "_trunk_rate" in name else 4.0

    monkeypatch.setattr(layer_speeds, "_median_s", median_s)
    speed = measure_layers(model, config, (1, 2), (), 1 << 20)
    trunk = sum(tensor.nbytes for tensor in tape_tensors(config))
    an_expert = 3 * 32 * 32 * 17 // 32
    rates = trunk / (config.num_hidden_layers + 2.0), 4 * an_expert / 4.0
    assert speed == [LayerSpeed(1, *rates), LayerSpeed(2, *rates)]
    kinds = {(config.is_mla(layer), config.is_moe(layer)) for layer in range(config.num_hidden_layers)}
    assert asked == 2 * [*["_layer_work"] * len(kinds), "_trunk_rate", "_expert_rate"]


def test_real_measurements_are_positive_and_leave_a_part_of_a_model_out(model: Path, tmp_path: Path) -> None:
    config = read_config(model)
    speed = measure_layers(model, config, (1,), (0,), 1 << 20)[0]
    assert speed.trunk_bytes_per_s and speed.expert_bytes_per_s
    part = tmp_path / "part"
    part.mkdir()
    for file in ("config.json", "model.safetensors.index.json"):
        (part / file).write_bytes((model / file).read_bytes())
    nothing = measure_layers(part, config, (1,), (0,), 1 << 20)[0]
    assert nothing.trunk_bytes_per_s is None and nothing.expert_bytes_per_s
    dense_only = replace(config, first_k_dense_replace=config.num_hidden_layers)
    assert measure_layers(part, dense_only, (1,), (0,), 1 << 20)[0].expert_bytes_per_s is None


def test_speeds_of_a_model_are_kept_with_its_threads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_speeds, "SECONDS", 0.0)
    monkeypatch.setattr(
        node_speeds, "measure_memory", lambda threads, cores, nbytes: MemorySpeed(threads, 9e9, 1.0, 2.0)
    )
    monkeypatch.setattr(node_speeds, "measure_trip", lambda latent, pairs: latent * pairs * 1e-6)
    monkeypatch.setattr(node_speeds, "measure_layers", lambda path, config, threads, cores, nbytes:
                        [LayerSpeed(count, 10.0 * count, 3.0 * count) for count in threads])  # fmt: skip
    found = node_speeds.node_speeds([model], [], 5, (0, 1), measure=True, folder=tmp_path)
    assert (found.read, found.trunk, found.experts, found.trip_s) == (9e9, 50.0, 15.0, pytest.approx(32 * 4 * 1e-6))
    assert found.by_threads == (ThreadSpeeds(1, 10.0, 3.0), ThreadSpeeds(2, 20.0, 6.0), ThreadSpeeds(5, 50.0, 15.0))
    assert node_speeds.node_speeds([model], [], 5, (0, 1), measure=False, folder=tmp_path) == found
    other = synthetic_model(tmp_path / "other", SyntheticSpec(hidden_size=96))
    assert node_speeds.node_speeds([other], [], 5, (0, 1), measure=False, folder=tmp_path).trunk is None
    records = [json.loads(file.read_text())["what"] for file in tmp_path.glob("*.json")]
    assert len(records) == 1 and records[0].startswith("memory-5-")


def test_the_last_caches_are_counted_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_speeds, "affinity", lambda: frozenset({0, 1, 2}))
    for cpu, shared, size in ((0, "0-1", "32768K"), (1, "0-1", "32768K"), (2, "2-3", "16M"), (3, "2-3", "16M")):
        for index, text in ((0, "48K"), (3, size)):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{text}\n")
            (folder / "shared_cpu_list").write_text(shared)
    assert node_speeds.cached_bytes(tmp_path) == 48 << 20
    assert node_speeds.cached_bytes(tmp_path / "nothing") == 0


def test_a_trip_is_measured_against_a_process_that_ends_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(trip_speed.subprocess, "Popen", noted)
    found = measure_trip(64, 3)
    assert found is not None and 0 < found < 10 and [one.returncode for one in started] == [0]
    monkeypatch.setattr(trip_speed.sys, "executable", "/nothing/here")
    assert measure_trip(64, 3) is None
    monkeypatch.setattr(trip_speed.sys, "executable", "/bin/true")
    assert measure_trip(64, 3) is None and sys.executable == "/bin/true"

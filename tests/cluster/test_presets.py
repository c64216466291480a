"""Presets for one model on one host, the forecast from speeds, and the doctor's advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.cluster import model_checkup
from k3ray.cluster.budget import resident_plan, smallest_plan
from k3ray.cluster.budget_plan import HostRun
from k3ray.cluster.devices import CHUNK, EXPERT, DiskSpeed, MemorySpeed
from k3ray.cluster.doctor import NOTE, OK, STOP
from k3ray.cluster.forecast import DISK, KERNELS, UNKNOWN, forecast
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.model_checkup import examine_disk, examine_model, examine_tape, model_run, next_step
from k3ray.cluster.preset_rows import preset_rows
from k3ray.cluster.trip_times import CALL_S, DRIVER_S
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.pack import pack

GB = 10**9
MEMORY = MemorySpeed(2, 20e9, 10e9, 5e9)


def limits_of(nbytes: int) -> MemoryLimits:
    return MemoryLimits(nbytes, "MemAvailable", nbytes)


def disk_of(chunks: float, experts: float) -> list[DiskSpeed]:
    """One slow depth and one fast one for each."""
    return [
        DiskSpeed(kind, 1 << 20, depth, True, int(rate * share), 1.0)
        for kind, rate in ((CHUNK, chunks), (EXPERT, experts))
        for depth, share in ((1, 0.5), (16, 1.0))
    ]


@pytest.fixture(scope="module")
def released_run(shared_data: Path) -> HostRun:
    return model_run(read_config(shared_data / "k3-release"), None, 8, 4096)


@pytest.fixture(scope="module")
def small_run(k3b_dir: Path) -> HostRun:
    return model_run(read_config(k3b_dir), None, 2, 100)


def test_every_preset_of_the_released_model_on_a_machine_of_64_gb(released_run: HostRun) -> None:
    rows = {row.name: row for row in preset_rows(released_run, limits_of(60 * GB))}
    assert list(rows) == ["ultra", "laptop", "desktop", "workstation", "server", "max", "auto"]
    assert {name for name, row in rows.items() if row.fits} == {"ultra", "laptop", "desktop", "auto"}
    plans = {name: row.plan for name, row in rows.items()}
    totals = {name: plan.total_bytes for name, plan in plans.items() if plan is not None}
    assert totals["ultra"] == smallest_plan(released_run).total_bytes < 4 * GB
    assert totals["max"] == resident_plan(released_run).total_bytes
    for name, total in (("laptop", 12), ("desktop", 28), ("workstation", 120), ("server", 480), ("auto", 54)):
        assert total * GB - 20_000_000 < totals[name] <= total * GB
    assert all(row.reason and not row.refused and row.forecast is None for row in rows.values())


def test_a_preset_that_cannot_be_planned_says_why(released_run: HostRun) -> None:
    rows = {row.name: row for row in preset_rows(released_run, limits_of(1 * GB))}
    assert [name for name, row in rows.items() if row.plan is None] == ["auto"]
    assert "this run needs at least" in rows["auto"].refused and not any(row.fits for row in rows.values())


def test_the_forecast_is_the_longer_of_disk_and_kernels(released_run: HostRun) -> None:
    plan = smallest_plan(released_run)
    found = forecast(released_run.config, plan, disk_of(4e9, 2e9), MEMORY)
    trunk, experts = 111_107_440_640, 25_829_572_608
    assert found.disk_s == pytest.approx(trunk / 4e9 + experts / 2e9)
    assert found.kernels_s == pytest.approx(trunk / 10e9 + experts / 5e9)
    assert found.seconds == found.disk_s + DRIVER_S + CALL_S and found.dominated_by == DISK
    fast = forecast(released_run.config, plan, disk_of(40e9, 20e9), MEMORY)
    assert fast.seconds == fast.kernels_s + DRIVER_S + CALL_S and fast.dominated_by == KERNELS


def test_a_disk_that_was_not_measured_matters_only_where_it_is_read(released_run: HostRun) -> None:
    found = forecast(released_run.config, smallest_plan(released_run), [], MEMORY)
    assert found.seconds is None and found.dominated_by == UNKNOWN
    resident = forecast(released_run.config, resident_plan(released_run), [], MEMORY)
    assert (
        resident.disk_s == 0
        and resident.seconds == resident.kernels_s + DRIVER_S + CALL_S
        and resident.dominated_by == KERNELS
    )
    only_chunks = [speed for speed in disk_of(4e9, 2e9) if speed.kind == CHUNK]
    assert forecast(released_run.config, smallest_plan(released_run), only_chunks, MEMORY).seconds is None


def test_the_next_command(released_run: HostRun, small_run: HostRun) -> None:
    fits = next_step(small_run, "", None, "--prompt 'Hello'", limits_of(4 * GB))
    assert (fits.level, fits.found) == (OK, "k3ray generate --prompt 'Hello'")
    pack_it = next_step(released_run, "/models/k3", None, "--ids 1,2,3", limits_of(32 * GB))
    assert (pack_it.level, pack_it.found) == (OK, "k3ray pack /models/k3 /models/k3.tape")
    assert "111.11 GB" in pack_it.advice
    stream = next_step(released_run, "/models/k3", Path("/nvme/tape"), "--ids 1,2,3", limits_of(32 * GB))
    assert stream.found == "k3ray generate /models/k3 --tape /nvme/tape --ids 1,2,3"
    nothing = next_step(released_run, "/models/k3", None, "--ids 1,2,3", limits_of(1 * GB))
    assert nothing.level == STOP and "1.00 GB of memory are available" in nothing.found


def test_a_model_is_bound_or_stops(k3b_dir: Path, tmp_path: Path) -> None:
    finding, census = examine_model(k3b_dir)
    assert finding.level == OK and census is not None and f"{census.num_bound:,} tensors bound" in finding.found
    (tmp_path / "config.json").write_bytes((k3b_dir / "config.json").read_bytes())
    finding, census = examine_model(tmp_path)
    assert finding.level == STOP and census is None and "safetensors" in finding.advice


def test_a_tape_of_another_model_stops(k3b_dir: Path, tmp_path: Path, small_run: HostRun) -> None:
    config, index = read_config(k3b_dir), open_index(k3b_dir)
    with TensorReader(index) as reader:
        pack(bind(config, index), reader, tmp_path / "tape", chunk_bytes=32 << 10)
    finding, layout = examine_tape(tmp_path / "tape", config)
    assert finding.level == OK and layout is not None and layout.chunk_bytes == 32 << 10
    finding, layout = examine_tape(tmp_path / "tape", replace(config, vocab_size=1024))
    assert finding.level == STOP and layout is None
    with (tmp_path / "tape" / "trunk.tape").open("r+b") as file:
        file.truncate(4096)
    finding, layout = examine_tape(tmp_path / "tape", config)
    assert finding.level == STOP and layout is None and "4,096 bytes" in finding.found
    finding, layout = examine_tape(tmp_path / "nothing", config)
    assert finding.level == STOP and layout is None


def test_storage_is_measured_or_said_not_to_be(k3b_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings, speeds = examine_disk(k3b_dir, tmp_path, lambda line: None)
    assert speeds == [] and [item.level for item in findings] == [OK, OK]  # nothing large enough
    monkeypatch.setattr(model_checkup, "measurable_files", lambda path: [path])
    asked = []

    def measure(paths: object, seconds: float, say: object, kinds: tuple[str, ...]) -> list[DiskSpeed]:
        asked.append((paths, kinds))
        return [replace(speed, direct=False) for speed in disk_of(4e9, 2e9) if speed.kind in kinds]

    monkeypatch.setattr(model_checkup, "measure_disk", measure)
    findings, speeds = examine_disk(Path("/m"), Path("/t"), lambda line: None)
    assert asked == [([Path("/m")], (EXPERT,)), ([Path("/t/trunk.tape")], (CHUNK,))]
    assert [item.level for item in findings] == [NOTE, NOTE] and len(speeds) == 4
    assert "4.00 GB/s at depth 16" in findings[1].found and "O_DIRECT" in findings[0].advice

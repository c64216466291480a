"""k3ray budget, doctor and devbw: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from k3ray.cluster import devices
from k3ray.cluster.budget import MemoryFailure
from k3ray.cluster.devices import CHUNK, EXPERT, MemorySpeed
from k3ray.commands import budget, devbw, doctor

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment of the tester's, no second of measuring."""
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for command in (doctor, devbw):
        monkeypatch.setattr(command, "measure_memory", lambda threads, cores=(): MemorySpeed(threads, 2e10, 1e10, 5e9))


def budget_json(capsys: Captured, model: Path, *flags: tuple[str, str], stages: int = 1, shards: int = 0) -> Any:
    budget.run(model, flags, stages, shards, 100, None, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_the_budget_as_json_adds_up(k3b_dir: Path, capsys: Captured) -> None:
    record = budget_json(capsys, k3b_dir, ("--memory", "2GiB"), stages=3, shards=2)
    plan = record["plan"]
    assert [len(plan[kind]) for kind in ("stages", "shards")] == [3, 2]
    actors = [sum(actor["parts"].values()) for actor in plan["stages"] + plan["shards"]]
    assert plan["total_bytes"] == sum(plan["host_parts"].values()) + sum(actors) == sum(plan["parts"].values())
    assert plan["limit_bytes"] == 2 << 30 and plan["limit_said"] == "--memory"
    assert plan["trunk_bytes_per_token"] == plan["expert_bytes_per_token"] == 0
    assert [row["name"] for row in record["presets"]][:2] == ["ultra", "laptop"]
    assert all(row["fits"] for row in record["presets"]) and sum(record["bytes"].values()) > 1_000_000


def test_the_budget_of_the_released_model(shared_data: Path, capsys: Captured) -> None:
    """Names only: the release's own index without its shards."""
    budget.run(shared_data / "k3-release", [("--memory", "8G"), ("--cache-gb", "2")], 1, 0, 4096, None, as_json=False)
    printed = capsys.readouterr()
    for words in (
        "1,446.456 GB", "24.310 GB", "2.349 GB", "55,296 bytes over 24 MLA layers", "17,547,264 bytes", "1,472",
        "111.11 GB", "25.83 GB", "16 of 82,432", "82,432 of 82,432", "0.018 GB a token",
    ):  # fmt: skip
        assert words in printed.out, words
    assert "room for 113 of 82,432 experts (1.99 GB)" in printed.err
    assert "next: k3ray pack" in printed.err and printed.err.count("\n") == 2


def test_the_plan_table_has_every_part_and_stays_narrow(k3b_dir: Path, capsys: Captured) -> None:
    budget.run(k3b_dir, [], 9, 5, 10, None, as_json=False)
    printed = capsys.readouterr().out
    assert "all 14 processes" in printed and "expert slots" in printed and "once" in printed
    assert max(map(len, printed.splitlines())) <= 220
    budget.run(k3b_dir, [], 2, 0, 10, None, as_json=False)
    assert "layers 4..8" in capsys.readouterr().out


def test_a_budget_that_cannot_hold_ends_with_the_numbers(k3b_dir: Path, capsys: Captured) -> None:
    with pytest.raises(MemoryFailure, match="this run needs at least"):
        budget.run(k3b_dir, [("--memory", "100M")], 1, 0, 100, None, as_json=False)
    assert "what each preset does" in capsys.readouterr().out


@pytest.mark.parametrize("positions", [0, -1, 1 << 31])
def test_positions_out_of_range_are_refused(k3b_dir: Path, positions: int) -> None:
    with pytest.raises(budget.PositionsFailure, match=f"found {positions}, expected 1 to"):
        budget.run(k3b_dir, [], 1, 0, positions, None, as_json=True)


def test_the_doctor_of_a_whole_model(k3b_dir: Path, capsys: Captured) -> None:
    doctor.run(k3b_dir, None, as_json=True)
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert {item["level"] for item in record["findings"]} <= {"ok", "note"}
    subjects = [item["subject"] for item in record["findings"]]
    assert subjects[0] == "Python" and subjects[-1] == "next" and "storage of the model" in subjects
    assert printed.err.splitlines()[-1] == f"next: k3ray generate {k3b_dir} --prompt 'Hello'"
    resident = next(row for row in record["presets"] if row["name"] == "max")
    assert resident["forecast"]["dominated_by"] == "kernels" and resident["bytes_per_token"] == 0
    doctor.run(k3b_dir, None, as_json=False)
    assert "looked at" in capsys.readouterr().out


def test_the_doctor_of_the_embedded_model_names_the_first_command(capsys: Captured) -> None:
    doctor.run(None, None, as_json=True)
    assert capsys.readouterr().err.splitlines()[-1] == "next: k3ray generate --prompt 'Hello'"


def test_the_doctor_ends_with_1_only_where_nothing_can_run(k3b_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    model = tmp_path / "model"
    shutil.copytree(k3b_dir, model, ignore=shutil.ignore_patterns("golden.*"))
    next(model.glob("*.safetensors")).unlink()
    with pytest.raises(typer.Exit) as ending:
        doctor.run(model, None, as_json=True)
    printed = capsys.readouterr()
    assert ending.value.exit_code == 1 and "cannot run: model" in printed.err
    assert next(item for item in json.loads(printed.out)["findings"] if item["level"] == "stop")["advice"]


def test_devbw_of_a_file_and_of_a_written_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(devices.PIECES, CHUNK, 8192)
    monkeypatch.setitem(devices.PIECES, EXPERT, 10_000)
    written = devices.written_file
    monkeypatch.setattr(devbw, "written_file", lambda path, progress: written(path, 1 << 20, progress))
    devbw.run(tmp_path, write=True, as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert [(speed["kind"], speed["depth"]) for speed in record["disk"]] == [
        (CHUNK, 1), (CHUNK, 16), (EXPERT, 1), (EXPERT, 16),
    ]  # fmt: skip
    assert all(speed["bytes_per_s"] > 0 for speed in record["disk"]) and list(tmp_path.iterdir()) == []
    (tmp_path / "weights").write_bytes(bytes(100_000))
    devbw.run(tmp_path, write=False, as_json=False)
    printed = capsys.readouterr()
    assert "tape chunks" in printed.out and "MXFP4" in printed.out and "next: k3ray doctor" in printed.err

"""`k3ray generate` as a process whose actors are killed from outside: its text, its report, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from k3ray.state_file import open_state
from tests.goldens import read_golden
from tests.k3ray.test_on_ray import COMMAND, clean_machine  # noqa: F401 - a fixture

pytestmark = pytest.mark.ray
PARTS = 3


def start(k3b_dir: Path, environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    """Start a long generation over two stages and a shard, and return when it has loaded."""
    ids = ",".join(map(str, read_golden(k3b_dir).ids(2)))
    arguments = ["--ids", ids, "--ignore-eos", "--stages", "2", "--expert-shards", "1", *options]
    command = [*COMMAND, "generate", str(k3b_dir), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    loaded = 0
    while loaded < PARTS:
        line = process.stderr.readline()
        assert line, "it ended while loading"
        loaded += line.startswith("loaded: ")
    return process


def kill(kind: str, mark: str) -> None:
    """Kill one of the run's actors of a kind."""
    for process in psutil.process_iter():
        try:
            title = process.cmdline()[0] if process.cmdline() else ""
            if title.startswith(f"ray::{kind}") and process.environ().get("K3RAY_TEST_MARK") == mark:
                return os.kill(process.pid, signal.SIGKILL)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"no {kind} runs")


def test_it_goes_on_and_says_so(
    k3b_dir: Path,
    tmp_path: Path,
    clean_machine: dict[str, str],  # noqa: F811
) -> None:
    out = tmp_path / "run.json"
    process = start(k3b_dir, clean_machine, "--gen", "60", "--out", str(out), "--snapshot-every", "8")
    kill("LayerStageActor", clean_machine["K3RAY_TEST_MARK"])
    kill("ExpertShardActor", clean_machine["K3RAY_TEST_MARK"])
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    record = json.loads(out.read_text())
    assert record["generated_ids"][:32] == read_golden(k3b_dir).arrays["p2_greedy"].tolist()
    lost = sorted(name for recovery in record["recoveries"] for name in recovery["lost"])
    assert len(lost) == 2 and lost[0] == "shard 0" and lost[1].startswith("stage ")
    assert errors.count("lost and loaded again: ") == 2 and errors.count("recovered: lost ") == 2
    assert text.rstrip("\n") == record["text"] and "raylet" not in errors


def test_past_the_bound(
    k3b_dir: Path,
    tmp_path: Path,
    clean_machine: dict[str, str],  # noqa: F811
) -> None:
    out = tmp_path / "run.json"
    process = start(k3b_dir, clean_machine, "--gen", "4000", "--out", str(out), "--max-recoveries", "0")
    assert process.stdout is not None
    process.stdout.read(4)  # tokens are coming
    kill("LayerStageActor", clean_machine["K3RAY_TEST_MARK"])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3 and "Traceback" not in errors
    assert "ended or did not answer, and this run was recovered 0 times already (--max-recoveries 0)" in errors
    record = json.loads(out.read_text())
    assert record["stop_reason"].startswith("stopped: stage ") and len(record["generated_ids"]) > 0
    (rescued,) = (tmp_path / "state" / "k3ray").iterdir()
    assert f"next: k3ray generate {k3b_dir} --load-state {rescued}" in errors
    assert open_state(rescued).document.generated_ids == record["generated_ids"]


def test_ctrl_c_in_a_recovery(k3b_dir: Path, clean_machine: dict[str, str]) -> None:  # noqa: F811
    process = start(k3b_dir, clean_machine, "--gen", "4000")
    assert process.stdout is not None
    process.stdout.read(4)
    kill("LayerStageActor", clean_machine["K3RAY_TEST_MARK"])
    time.sleep(0.4)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert time.monotonic() - began < 15  # it takes one or two; the machine may be busy

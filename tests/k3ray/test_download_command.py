"""The command, as a process where it is killed or interrupted, else in this one: two at once, and the token."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from k3ray.cli import main
from tests.downloads import BLOCK, SHARD, assert_asks_for_nothing_proven, assert_exact, journalled, quicken, wanted
from tests.local_hub import Fault, LocalHub

TOKEN = "hf_ThisIsTheTokenThatNothingShows"
PROGRAM = """
import sys
from k3ray.download import part_file
part_file.BLOCK_BYTES = 1 << 17
sys.argv[0] = "k3ray"
from k3ray.cli import main
main()
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command here, for importing the program anew takes seconds: its exit code, output and messages."""
    quicken(monkeypatch)
    for name in [name for name in os.environ if name.startswith(("HF_", "K3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def run(directory: Path, *more: str) -> tuple[int, str, str]:
        arguments = ["k3ray", "download", str(directory), "--endpoint", hub.endpoint, *more]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ending:
            main()
        said = capsys.readouterr()
        return int(ending.value.code or 0), said.out, said.err

    return run


def start(hub: LocalHub, directory: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    """Run the command in a process of its own, to be killed or interrupted."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "K3_"))}
    command = [sys.executable, "-c", PROGRAM, "download", str(directory), "--endpoint", hub.endpoint, *more]
    return subprocess.Popen(
        command,
        env={**environment, "HF_TOKEN": TOKEN, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Until something has come about, as long as the process lives."""
    end = time.monotonic() + 240
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


def kept(directory: Path) -> int:
    """Bytes of the shard that are journalled, and on the disk as journalled."""
    return sum(end - begin for begin, end in journalled(directory, SHARD))


def nothing_on_the_line(hub: LocalHub) -> bool:
    """Whether every byte that the hub's store has sent was taken by the process that asked (Linux tells)."""
    port = f":{urlsplit(hub.content).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4].split(":") for row in rows if port in row[1] or port in row[2]]
    return all(int(sending, 16) == int(waiting, 16) == 0 for sending, waiting in queues)


def test_killed_and_gone_on_with_ends_in_an_exact_copy(hub: LocalHub, tmp_path: Path, run: Run) -> None:
    """kill -9 in the middle of a shard, twice, at seeded bytes; nothing that was journalled is asked for again."""
    chance = random.Random(5)
    check = hub.before = assert_asks_for_nothing_proven(tmp_path)
    for _ in range(2):
        at = chance.randrange(200_000, 800_000)
        hub.faults = lambda asked, at=at: Fault("stall", at, seconds=60.0) if asked.name == SHARD else None  # type: ignore[misc]
        before = kept(tmp_path)
        process = start(hub, tmp_path, "--workers", "2")
        wait_until(process, lambda: kept(tmp_path) > before)  # noqa: B023
        process.kill()
        process.communicate()
    hub.faults = lambda asked: None
    code, out, errors = run(tmp_path)
    assert code == 0, errors
    assert_exact(hub, tmp_path)
    assert check.failures == []  # type: ignore[attr-defined]
    assert "all of it is in" in errors and "pass" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_two_at_once_and_an_end_from_outside(hub: LocalHub, tmp_path: Path, run: Run, number: signal.Signals) -> None:
    """The second is refused; a signal ends the first, which keeps every byte that came, and the third goes on."""
    at = 777_777
    silent = [Fault("stall", at, seconds=60.0)]
    hub.faults = lambda asked: silent.pop() if asked.name == SHARD and silent else None
    first = start(hub, tmp_path)
    others = sum(len(hub.files[name]) for name in wanted(hub)) - len(hub.files[SHARD])
    wait_until(first, lambda: hub.num_sent >= others + at)
    wait_until(first, lambda: kept(tmp_path) >= at // BLOCK * BLOCK and nothing_on_the_line(hub))
    time.sleep(0.3)  # for what was taken from the line and is not yet with the rest
    code, _, refused = run(tmp_path)
    assert code == 2
    assert "another k3ray download is at work in this folder" in refused
    first.send_signal(number)
    _, errors = first.communicate(timeout=240)
    assert first.returncode == 128 + number
    assert "every byte that arrived is kept; the same command goes on" in errors and "Traceback" not in errors
    assert kept(tmp_path) == at
    code, out, errors = run(tmp_path, "--json")
    assert code == 0, errors
    summary = json.loads(out)
    assert (summary["fetched_bytes"], summary["verified"]) == (len(hub.files[SHARD]) - at, True)
    assert_exact(hub, tmp_path)


def test_the_token_goes_to_the_endpoint_and_is_nowhere_else(
    hub: LocalHub, tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Not to the host of a redirect, not in any output or file, even with every log on; nor is a signed address."""
    hub.faults = lambda asked: Fault("status", status=503) if len(hub.asked) % 2 else Fault("cut", 50_000)
    process = start(hub, tmp_path / "one", "--stall-timeout", "1", HF_DEBUG="1")
    wait_until(process, lambda: hub.num_sent >= 50_000)
    process.send_signal(signal.SIGINT)
    failed = "".join(process.communicate(timeout=240))
    hub.faults = lambda asked: None
    caplog.set_level(logging.DEBUG)
    done = "".join(run(tmp_path / "one")[1:])
    hub.refuse = lambda path, headers: (401, {}) if "resolve" in path else None
    code, _, refused = run(tmp_path / "two")
    assert code == 2 and "401" in refused and "set HF_TOKEN" in refused
    assert any(headers.get("authorization") == f"Bearer {TOKEN}" for _, _, headers in hub.api)
    assert hub.asked and all("authorization" not in asked.headers for asked in hub.asked)
    shown = failed + done + refused
    assert TOKEN not in shown
    assert TOKEN not in caplog.text
    assert "secret-of-the-store" not in shown
    assert "Traceback" not in shown
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes() and b"secret-of-the-store" not in path.read_bytes()


def test_part_of_the_layers(hub: LocalHub, tmp_path: Path, run: Run) -> None:
    code, _, errors = run(tmp_path, "--layers", "8")
    assert code == 0, errors
    assert "complete layers: 8;" in errors or "complete layers: 6-8" in errors
    assert "k3ray download" in errors.splitlines()[-1]
    fetched = {asked.name for asked in hub.asked if asked.name.endswith(".safetensors")}
    index = json.loads(hub.files["model.safetensors.index.json"])["weight_map"]
    assert fetched == {shard for name, shard in index.items() if ".layers.8." in name}
    assert "done: part of the model is in" in errors
    run(tmp_path)
    code, _, errors = run(tmp_path, "--layers", "8")
    assert code == 0 and "done: all of it is in" in errors  # the rest is here since


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "3-1"], "expected A-B with A <= B"),
        (["--layers", "0-9"], "there is no layer 9, expected layers within 0-8"),
        (["--layers", "1", "--tokenizer-only"], "give one of them"),
        (["--workers", "0"], "--workers 0: expected 1 to 32"),
        (["--workers", "many"], "expected a whole number"),
        (["--repo", "someone/other"], "name its --revision"),
        (["--revision", "f" * 40], "no such revision"),
        (["--endpoint", "ftp://host"], "--endpoint: expected an address like"),
        (["--stall-timeout", "0"], "expected 1 to 3600"),
        (["--repo", ""], "--repo: found nothing after it"),
        (["--revision", " "], "--revision: found nothing after it"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    hub: LocalHub, tmp_path: Path, run: Run, arguments: list[str], message: str
) -> None:
    code, _, errors = run(tmp_path, *arguments)
    assert code == 2
    assert message in errors
    assert not [asked for asked in hub.asked if asked.name.endswith(".safetensors")]


def test_a_slow_server_is_not_a_silent_one(
    hub: LocalHub, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece takes two thirds of the time allowed for silence, so the whole takes a multiple of it."""
    clock = iter(range(0, 10**9, 20))
    monkeypatch.setattr("k3ray.download.stream.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    code, _, errors = run(tmp_path, "--layers", "8", "--workers", "1")
    assert code == 0, errors
    assert next(clock) > 10 * 30
    asked = [asked.name for asked in hub.asked if asked.name.endswith(".safetensors")]
    assert len(asked) == len(set(asked))

"""The command as a process: killed and gone on with, two at once, Ctrl-C, and the token, which nothing shows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.downloads import assert_asks_for_nothing_proven, assert_exact, journalled, wanted
from tests.local_hub import Asked, Fault, LocalHub, files_of, serving

TOKEN = "hf_ThisIsTheTokenThatNothingShows"
PROGRAM = """
import sys
from k3ray.download import part_file
part_file.BLOCK_BYTES = 1 << 17
sys.argv[0] = "k3ray"
from k3ray.cli import main
main()
"""


@pytest.fixture
def hub(k3b_dir: Path) -> Iterator[LocalHub]:
    with serving(LocalHub(files_of(k3b_dir))) as hub:
        yield hub


def start(hub: LocalHub, directory: Path, *more: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "K3_"))}
    command = [sys.executable, "-c", PROGRAM, "download", str(directory), "--endpoint", hub.endpoint, *more]
    return subprocess.Popen(
        command,
        env={**environment, "HF_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(hub: LocalHub, count: int) -> None:
    """Until the hub has sent so many bytes of files."""
    end = time.monotonic() + 240
    while hub.num_sent < count:
        assert time.monotonic() < end, "the hub was never asked"
        time.sleep(0.01)


def test_killed_and_gone_on_with_ends_in_an_exact_copy(hub: LocalHub, tmp_path: Path) -> None:
    """kill -9 in the middle, three times, at seeded bytes; nothing that was journalled is asked for again."""
    chance = random.Random(5)
    check = hub.before = assert_asks_for_nothing_proven(tmp_path)
    hub.bytes_per_s = 6e6
    for _ in range(3):
        process = start(hub, tmp_path, "--workers", "2")
        wait_until(hub, hub.num_sent + chance.randrange(400_000, 1_200_000))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert any(journalled(tmp_path, name) for name in wanted(hub))
    process = start(hub, tmp_path)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert_exact(hub, tmp_path)
    assert check.failures == []  # type: ignore[attr-defined]
    assert "all of it is in" in errors and "pass" in out


def test_two_at_once_and_control_c(hub: LocalHub, tmp_path: Path) -> None:
    """The second is refused; Ctrl-C ends the first with 130, keeps every byte that came, and the third goes on."""
    at = 777_777
    shard = "model-00002-of-000005.safetensors"
    silent = [Fault("stall", at, seconds=60.0)]
    hub.faults = lambda asked: silent.pop() if asked.name == shard and silent else None
    first = start(hub, tmp_path)
    wait_until(hub, sum(len(hub.files[name]) for name in wanted(hub)) - len(hub.files[shard]) + at)
    second = start(hub, tmp_path)
    _, refused = second.communicate(timeout=240)
    assert second.returncode == 2
    assert "another k3ray download is at work in this folder" in refused and "Traceback" not in refused
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=240)
    assert first.returncode == 130
    assert "every byte that arrived is kept; the same command goes on" in errors and "Traceback" not in errors
    assert sum(end - begin for begin, end in journalled(tmp_path, shard)) == at
    third = start(hub, tmp_path, "--json")
    out, errors = third.communicate(timeout=240)
    assert third.returncode == 0, errors
    summary = json.loads(out)
    assert (summary["fetched_bytes"], summary["verified"]) == (len(hub.files[shard]) - at, True)
    assert_exact(hub, tmp_path)


def test_the_token_goes_to_the_endpoint_and_is_nowhere_else(hub: LocalHub, tmp_path: Path) -> None:
    """Not to the host of a redirect, not in any output or file; nor is a signed address."""
    hub.faults = lambda asked: Fault("status", status=503) if len(hub.asked) % 2 else Fault("cut", 50_000)
    process = start(hub, tmp_path / "one", "--stall-timeout", "1")
    wait_until(hub, 100_000)
    process.send_signal(signal.SIGINT)
    failed = process.communicate(timeout=240)
    hub.faults = lambda asked: None
    done = start(hub, tmp_path / "one").communicate(timeout=240)
    hub.refuse = lambda path, headers: (401, {}) if "resolve" in path else None
    refused = start(hub, tmp_path / "two").communicate(timeout=240)
    assert "401" in refused[1] and "set HF_TOKEN" in refused[1]
    assert any(headers.get("authorization") == f"Bearer {TOKEN}" for _, _, headers in hub.api)
    assert hub.asked and all("authorization" not in asked.headers for asked in hub.asked)
    shown = "".join(text for outputs in (failed, done, refused) for text in outputs)
    assert TOKEN not in shown and "secret-of-the-store" not in shown and "Traceback" not in shown
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes() and b"secret-of-the-store" not in path.read_bytes()


def test_part_of_the_layers(hub: LocalHub, tmp_path: Path) -> None:
    process = start(hub, tmp_path, "--layers", "8")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "complete layers: 8;" in errors or "complete layers: 6-8" in errors
    assert "k3ray download" in errors.splitlines()[-1]
    fetched = {asked.name for asked in hub.asked if asked.name.endswith(".safetensors")}
    index = json.loads(hub.files["model.safetensors.index.json"])["weight_map"]
    assert fetched == {shard for name, shard in index.items() if ".layers.8." in name}


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
    ],
)
def test_what_cannot_be_meant_is_refused(hub: LocalHub, tmp_path: Path, arguments: list[str], message: str) -> None:
    process = start(hub, tmp_path, *arguments)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert message in errors and "Traceback" not in errors
    assert not [asked for asked in hub.asked if asked.name.endswith(".safetensors")]


def test_a_slow_server_is_not_a_silent_one(hub: LocalHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 300_000.0  # the shard takes longer than the time allowed for silence
    process = start(hub, tmp_path, "--layers", "8", "--stall-timeout", "3")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    asked: list[Asked] = [asked for asked in hub.asked if asked.name.endswith(".safetensors")]
    assert len(asked) == len({one.name for one in asked})

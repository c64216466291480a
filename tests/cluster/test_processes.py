"""The sampler against processes that hold a known amount of memory, share it, or vanish."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3ray.cluster.processes import ProcessMemory, children_of, role_of

MIB = 1 << 20

HOLD = """
import sys
held = bytearray(int(sys.argv[1]) << 20)
for i in range(0, len(held), 4096):
    held[i] = 1
print("ready", flush=True)
sys.stdin.read()
"""


# A process of ours has children that other tests left, so what is counted here has a parent of its own: it takes one
# step for every line that it gets, and says when it is done.
STEPS = """
import subprocess, sys
print("ready", flush=True)
for step in sys.argv[2:]:
    sys.stdin.readline()
    if step == "start":
        command = [sys.executable, "-S", "-c", sys.argv[1], "40"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
    elif step == "end":
        child.stdin.close()
        child.wait()
    else:
        with open(step, "rb") as file:
            while file.read(1 << 20):
                pass
    print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def stepping(*steps: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """(process id, take a step) of a process that starts and ends a child that holds 40 MiB, or reads a file."""
    command = [sys.executable, "-S", "-c", STEPS, HOLD, *steps]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"

        def step() -> None:
            assert process.stdout is not None and process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        yield process.pid, step
        process.stdin.close()


@contextmanager
def holder(mib: int, program: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    """A process that has touched `mib` MiB and waits for the end of its standard input."""
    command = [sys.executable, "-S", "-c", program, str(mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.stdin.close()


def test_descendants_are_counted_and_the_peak_outlives_them() -> None:
    with stepping("start", "end") as (pid, step), ProcessMemory({pid: "driver"}, interval_s=0.01) as memory:
        before = memory.sample()
        assert before.role_counts == {"driver": 1}
        step()
        during = memory.sample()
        assert 40 * MIB <= during.total_bytes - before.total_bytes < 70 * MIB
        assert during.role_counts == {"driver": 2}
        step()
        after = memory.sample()
        assert after.total_bytes < before.total_bytes + 20 * MIB and after.role_counts == {"driver": 1}
    assert memory.peak_bytes >= during.total_bytes
    assert memory.peak_bytes == sum(memory.peak.role_bytes.values())
    assert memory.peak.exact
    assert memory.cost_s > 0


def test_a_page_that_two_processes_share_is_counted_once() -> None:
    share = """
import mmap, os, sys
held = mmap.mmap(-1, int(sys.argv[1]) << 20)
for i in range(0, len(held), 4096):
    held[i] = 1
if os.fork() == 0:
    sum(held[i] for i in range(0, len(held), 4096))
    print("ready", flush=True)
sys.stdin.read()
"""
    with holder(60, share) as process:
        found = ProcessMemory({process.pid: "driver"}).sample()
    assert found.role_counts == {"driver": 2}
    assert 60 * MIB <= found.total_bytes < 100 * MIB


def test_reading_a_file_is_no_memory_of_a_process(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(50 * MIB))
    with stepping(str(path)) as (pid, step):
        memory = ProcessMemory({pid: "driver"})
        before = memory.sample().total_bytes
        step()
        assert before > 0 and memory.sample().total_bytes - before < 10 * MIB


def test_a_watched_process_that_is_no_descendant_is_added_under_its_role() -> None:
    with holder(30) as process:
        memory = ProcessMemory({})
        memory.watch(process.pid, "LayerStage")
        found = memory.sample()
        assert found.role_bytes["LayerStage"] >= 30 * MIB
        memory.watch(process.pid, "LayerStage")
        assert memory.sample().role_counts == {"LayerStage": 1}
    assert memory.sample().total_bytes == 0
    memory.watch(process.pid, "LayerStage")
    assert memory.sample().role_counts == {}


def test_processes_that_vanish_while_they_are_sampled() -> None:
    with ProcessMemory({os.getpid(): "driver"}, interval_s=0.0) as memory:
        while memory.samples < 20:
            subprocess.run(["/bin/true"], check=True)
    assert memory.peak_bytes > 0


def test_a_zombie_is_no_process() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        while b") Z" not in Path(f"/proc/{process.pid}/stat").read_bytes():
            time.sleep(0.001)
        assert process.pid not in children_of(os.getpid())
        assert ProcessMemory({process.pid: "ended"}).sample().role_counts == {}


def test_a_number_given_to_another_process_is_not_taken_for_the_watched_one(tmp_path: Path) -> None:
    def process(pid: int, parent: int, start: int, kib: int) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} " + "0 " * 17 + f"{start} 0\n")
        (folder / "smaps_rollup").write_text(f"00-ff ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: {kib} kB\n")
        (folder / "cmdline").write_bytes(b"ray::LayerStage.step\0\0")

    process(10, 1, 500, 3)
    process(11, 10, 501, 4)
    process(12, 11, 502, 5)
    process(13, 1, 503, 100)
    memory = ProcessMemory({10: "raylet"}, proc=tmp_path)
    found = memory.sample()
    assert found.role_bytes == {"raylet": 3 * 1024, "LayerStage": 9 * 1024}
    assert found.role_counts == {"raylet": 1, "LayerStage": 2}
    process(10, 1, 999, 3)
    assert memory.sample().total_bytes == 0
    assert memory.peak == found
    assert [children_of(pid, tmp_path) for pid in (1, 11, 99)] == [{10, 13}, {12}, set()]


def test_where_the_kernel_tells_no_pss_the_sum_says_so(tmp_path: Path) -> None:
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    (folder / "stat").write_text(Path("/proc/self/stat").read_text())
    (folder / "statm").write_text("99999 5000 1000 10 0 700 0\n")
    found = ProcessMemory({os.getpid(): "driver"}, proc=tmp_path).sample()
    assert not found.exact
    assert found.total_bytes == 4000 * mmap.PAGESIZE


def test_the_last_sample_is_taken_at_the_end() -> None:
    memory = ProcessMemory({os.getpid(): "driver"}, interval_s=60.0)
    memory.start()
    while memory.samples == 0:
        time.sleep(0.001)
    held = mmap.mmap(-1, 30 * MIB)
    for i in range(0, len(held), mmap.PAGESIZE):
        held[i] = 1
    before = memory.peak_bytes
    assert memory.stop().total_bytes - before >= 25 * MIB
    samples = memory.samples
    memory.stop()
    assert memory.samples == samples
    held.close()


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (b"ray::LayerStageActor\0", "LayerStageActor"),
        (b"ray::ExpertShard.apply\0\0\0", "ExpertShard"),
        (b"ray::IDLE\0", "idle worker"),
        (b"/x/raylet\0--a=b.py\0", "raylet"),
        (b"/x/gcs_server\0--log_dir=c\0", "gcs_server"),
        (b"/v/bin/python3\0-u\0/x/dashboard/agent.py\0--port=1\0", "agent"),
        (b"/v/bin/python\0-c\0pass\0", "python"),
    ],
)
def test_roles(tmp_path: Path, command: bytes, role: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(command)
    assert role_of(7, tmp_path) == role
    assert role_of(7, tmp_path, parent_role="raylet") == (role if command.startswith(b"ray::") else "raylet")
    assert role_of(8, tmp_path) == "ended"

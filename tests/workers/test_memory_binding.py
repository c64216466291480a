"""Binding a process to a memory node: what is bound, what is refused, and what is said where it is denied."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import numa
from k3ray.workers import memory_binding
from k3ray.workers.memory_binding import MPOL_BIND, MPOL_DEFAULT, MPOL_PREFERRED, bind_process, memory_nodes

CPUS = sorted(os.sched_getaffinity(0))
GIB_KIB = 1 << 20


def write_nodes(root: Path, cpu_lists: list[str], free_kib: int = 8 * GIB_KIB, cached_kib: int = 0) -> Path:
    """A tree with memory nodes as Linux writes them."""
    for number, cpus in enumerate(cpu_lists):
        folder = root / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {64 * GIB_KIB} kB\n"
            f"Node {number} MemFree:        {free_kib} kB\n"
            f"Node {number} Inactive(anon): {7 * GIB_KIB} kB\n"
            f"Node {number} Inactive(file): {cached_kib} kB\n"
            f"Node {number} HugePages_Total:     0\n"
        )
    return root


def in_process(root: Path, body: str) -> list[str]:
    """The lines printed by `body` in a process of its own: what it binds stays there."""
    start = (
        "import os, threading\nfrom pathlib import Path\nfrom k3ray.workers import memory_binding\n"
        "from k3ray.workers.memory_binding import bind_process, memory_policy\n"
        f"root = Path({str(root)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", start + body], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """The policies that are asked for, and nothing is really bound."""
    asked: list[tuple[int, tuple[int, ...]]] = []

    def ask(mode: int, nodes: tuple[int, ...]) -> int:
        asked.append((mode, nodes))
        return 0

    monkeypatch.setattr(memory_binding, "set_memory_policy", ask)
    monkeypatch.setattr(memory_binding, "_pin_threads", lambda cpus: "")
    return asked


def all_cpus() -> str:
    return ",".join(map(str, CPUS))


def test_one_node_or_none_told_or_none_wanted_is_no_work(tmp_path: Path, policies: list[object]) -> None:
    one = write_nodes(tmp_path / "one", [all_cpus()])
    two = write_nodes(tmp_path / "two", [all_cpus(), "900"])
    assert bind_process(0, CPUS, root=one) == bind_process(0, CPUS, root=tmp_path) == bind_process(None, (), root=two)
    assert bind_process(None, (), root=two) == "" and policies == []


def test_it_is_bound_strictly_only_where_all_that_is_planned_has_room(
    tmp_path: Path, policies: list[tuple[int, tuple[int, ...]]]
) -> None:
    """Cached files make room, other processes' memory does not; with the least doubt the node is only preferred."""
    root = write_nodes(tmp_path, [all_cpus(), "900"], free_kib=8 * GIB_KIB, cached_kib=8 * GIB_KIB)
    assert memory_nodes(root)[0].available_bytes == 16 << 30
    assert bind_process(0, CPUS, None, root) == ""
    assert bind_process(0, CPUS, 15 << 30, root) == ""
    line = bind_process(0, CPUS, 16 << 30, root)
    assert policies == [(MPOL_PREFERRED, (0,)), (MPOL_BIND, (0,)), (MPOL_PREFERRED, (0,))]
    assert line.startswith("memory node 0 has 17.2 GB for the 17.2 GB that are planned for it") and "\n" not in line


def test_a_plan_of_another_machine_binds_nothing_and_says_so(tmp_path: Path, policies: list[object]) -> None:
    root = write_nodes(tmp_path, [all_cpus(), "900-903"])
    assert bind_process(2, CPUS, root=root) == "memory node 2: nothing is bound to it: the system has 0, 1"
    assert "its cpus (900, 901, 902, 903) are not among the allowed ones" in bind_process(1, (900,), root=root)
    assert "cpus 901 are planned for it and are of another node" in bind_process(0, (CPUS[0], 901), root=root)
    assert policies == []


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.EPERM, "CAP_SYS_NICE"), (errno.ENOSYS, "no set_mempolicy"), (errno.EINVAL, "Mems_allowed_list")],
)
def test_a_denied_policy_is_one_line(
    number: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: list[object]
) -> None:
    monkeypatch.setattr(memory_binding, "set_memory_policy", lambda mode, nodes: number)
    line = bind_process(0, CPUS, root=write_nodes(tmp_path, [all_cpus(), "900"]))
    assert told in line and os.strerror(number) in line and "threads are bound" in line and "\n" not in line


def test_denied_cpus_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_nodes(tmp_path, [str(CPUS[0]), "900"])
    asked: list[int] = []

    def deny(thread: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {*CPUS, 901})
    monkeypatch.setattr(os, "sched_setaffinity", deny)
    monkeypatch.setattr(memory_binding, "set_memory_policy", lambda mode, nodes: asked.append(mode))
    line = bind_process(0, CPUS[:1], root=root)
    assert line == "memory node 0: nothing is bound to it: its cpus are denied: Operation not permitted"
    assert asked == []


def test_another_processor_has_no_number_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    assert memory_binding.set_memory_policy(MPOL_DEFAULT) == errno.ENOSYS
    with pytest.raises(OSError, match="not implemented"):
        memory_binding.memory_policy()


def _policy_or_skip() -> None:
    try:
        memory_binding.memory_policy()
    except OSError as error:
        pytest.skip(f"get_mempolicy is denied here: {error.strerror}")
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("no memory node 0 here")


def test_a_process_is_really_bound(tmp_path: Path) -> None:
    """The kernel's own word, by get_mempolicy and by numa_maps, in this thread and in one that is started later."""
    _policy_or_skip()
    root = write_nodes(tmp_path, [str(CPUS[0]), "900"])
    body = f"""
early, go = threading.Event(), threading.Event()
masks, later = [], []
thread = threading.Thread(target=lambda: (early.set(), go.wait(), masks.append(os.sched_getaffinity(0))))
thread.start()
early.wait()
before = memory_policy()
print(repr(bind_process(0, ({CPUS[0]},), 1 << 20, root)))
go.set()
thread.join()
other = threading.Thread(target=lambda: later.append((memory_policy(), os.sched_getaffinity(0))))
other.start()
other.join()
print(before, memory_policy(), later[0][0])
print(os.sched_getaffinity(0), masks[0], later[0][1])
kept = bytearray(os.urandom(1 << 20)) * 16
place = Path("/proc/self/numa_maps")
print(sum("bind:0" in line and "N0=" in line for line in place.read_text().splitlines()) if place.exists() else 1)
"""
    line, policies, masks, bound = in_process(root, body)
    node = frozenset({0})
    assert line == "''"
    assert policies == f"{(MPOL_DEFAULT, frozenset())} {(MPOL_BIND, node)} {(MPOL_BIND, node)}"
    assert masks == " ".join([str({CPUS[0]})] * 3)
    assert int(bound) >= 1


def test_a_node_that_the_kernel_does_not_have_is_refused_by_the_kernel_and_said(tmp_path: Path) -> None:
    _policy_or_skip()
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("this machine has a memory node 1")
    root = write_nodes(tmp_path, ["900", str(CPUS[0])])
    line, policy = in_process(root, f"print(bind_process(1, ({CPUS[0]},), None, root))\nprint(memory_policy()[0])")
    assert line.startswith("memory node 1: threads are bound to its cpus, memory is not (Invalid argument: ")
    assert int(policy) == MPOL_DEFAULT


def test_a_real_filter_of_system_calls_denies_it(tmp_path: Path) -> None:
    """The default filter of container engines answers set_mempolicy with EPERM; so does this one."""
    _policy_or_skip()
    numbers = memory_binding.SYSTEM_CALLS[os.uname().machine]
    body = f"""
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {numbers[0]}), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(held)))
library = ctypes.CDLL(None, use_errno=True)
assert library.prctl(38, 1, 0, 0, 0) == 0
print(library.prctl(22, 2, program, 0, 0))
print(bind_process(0, ({CPUS[0]},), None, root))
print(os.sched_getaffinity(0), memory_policy()[0])
"""
    filtered, line, state = in_process(write_nodes(tmp_path, [str(CPUS[0]), "900"]), body)
    if filtered != "0":
        pytest.skip("no filter of system calls can be set here")
    assert "memory is not (Operation not permitted: a container without the right CAP_SYS_NICE" in line
    assert state == f"{ {CPUS[0]} } {MPOL_DEFAULT}"


def test_a_pinned_thread_stays_where_it_is(tmp_path: Path) -> None:
    """A second part loaded in the same process must not move the pool of the first from its cores."""
    if len(CPUS) < 2:
        pytest.skip("one cpu")
    root = write_nodes(tmp_path, [all_cpus(), "900"])
    body = f"""
from k3ray.kernels.threads import RowPool
pool = RowPool(2, ({CPUS[1]},))
def masks():
    return sorted(tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task"))
import time
while ({CPUS[1]},) not in masks():
    time.sleep(0.01)
before = masks()
print(bind_process(0, {tuple(CPUS)}, None, root) == "" and masks() == before)
"""
    assert in_process(root, body) == ["True"]


@given(st.sets(st.integers(0, 300)))
def test_the_kernels_list_form_is_read_as_it_is_written(cpus: set[int]) -> None:
    """Written as the kernel does: runs as low-high."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    assert memory_binding.parse_cpu_list(text + "\n") == cpus


@pytest.mark.parametrize("text", ["a", "0-", "1-x", "-3", "0;1"])
def test_a_list_that_is_none_is_refused_and_nothing_is_bound(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        memory_binding.parse_cpu_list(text)
    assert memory_nodes(write_nodes(tmp_path, [text, "1"])) == {}


def test_the_benchmark_has_nothing_to_compare_on_one_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numa.main([], write_nodes(tmp_path, [all_cpus(), "900"])) == 0  # the second has no cpu that is allowed
    assert capsys.readouterr().out == ("memory nodes with cores that this process may use: 1: nothing to compare\n")


def test_the_benchmark_puts_threads_on_one_node_and_memory_on_each_in_turn() -> None:
    found = numa.placings({0: (0, 1), 1: (4, 5, 6), 3: (8,)}, None, 256)
    assert [(one.name, one.threads_on, one.memory_on, one.cores, one.threads) for one in found] == [
        ("bound", 1, (1,), (4, 5, 6), 3),
        ("remote", 1, (3,), (4, 5, 6), 3),
        ("interleaved", 1, (0, 1, 3), (4, 5, 6), 3),
        ("unbound", None, (), (), 3),
    ]

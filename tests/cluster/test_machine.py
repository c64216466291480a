"""Cores, quotas and memory limits, read from trees of files as Linux shows them (versions 1, 2, both, none)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3ray.cluster import machine

MIB = 1 << 20
UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available_mib: int = 8000, total_mib: int = 16000) -> str:
    return f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"


def topology(siblings: dict[int, str], name: str = "thread_siblings_list") -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{text}\n" for cpu, text in siblings.items()}


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_one_cpu_of_each_core_with_two_threads(tmp_path: Path, name: str) -> None:
    root = tree(
        tmp_path, topology({0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}, name)
    )
    assert machine.physical_cores(range(8), root) == (0, 1, 2, 3)


def test_a_mask_that_holds_only_the_second_thread_still_has_the_core(tmp_path: Path) -> None:
    root = tree(tmp_path, topology({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4-5", 5: "4-5"}))
    assert machine.physical_cores([5, 1, 2, 3], root) == (1, 2, 5)


def test_cpus_of_unknown_topology_are_cores(tmp_path: Path) -> None:
    assert machine.physical_cores([3, 1], tmp_path) == (1, 3)


def test_the_mask_of_this_process_is_respected() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert machine.physical_cores() == (min(mask),)
        assert machine.default_threads() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_nested_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box/inner\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/inner/cpu.max": "400000 100000\n",
        },
    )
    assert machine.cpu_quota(root) == 1.5


def test_version_1_quota_in_a_container_that_mounts_only_its_own_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
            "proc/self/mountinfo": "31 23 0:28 /docker/ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.cpu_quota(root) == 2.5


def test_hybrid_reads_both_versions(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/a\n0::/b\n",
            "proc/self/mountinfo": "1 2 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "1 2 0:1 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/b/cpu.max": "50000 100000\n",
        },
    )
    assert machine.cpu_quota(root) == 0.5


@pytest.mark.parametrize("text", ["max 100000", "", "-1 100000", "100000 0", "junk"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": UNIFIED, "sys/fs/cgroup/cpu.max": text})
    assert machine.cpu_quota(root) is None


def test_nothing_to_read_means_no_quota(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "threads"), [("50000", 1), ("199000", 1), ("200000", 2), ("99900000", 3), ("max", 3)]
)
def test_threads_are_cores_cut_to_the_whole_cores_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, threads: int
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: frozenset({0, 1, 2, 3}))
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": UNIFIED, "sys/fs/cgroup/cpu.max": f"{quota} 100000"}
    root = tree(tmp_path, files | topology({0: "0-1", 1: "0-1", 2: "2", 3: "3"}))
    assert machine.default_threads(root) == threads


def test_memory_without_cgroups_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    limits = machine.memory_limits(tree(tmp_path, {"proc/meminfo": meminfo()}))
    assert limits == machine.MemoryLimits(8000 * MIB, "MemAvailable", 16000 * MIB)


def test_memory_of_a_kernel_without_memavailable(tmp_path: Path) -> None:
    text = "MemTotal: 4096 kB\nMemFree: 1024 kB\nActive(file): 512 kB\nInactive(file): 256 kB\nSReclaimable: 128 kB\n"
    assert machine.memory_limits(tree(tmp_path, {"proc/meminfo": text})).available_bytes == 1920 * 1024


def test_memory_version_2_counts_no_page_cache_and_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/pod/memory.max": f"{4000 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3900 * MIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {900 * MIB}\nfile {3000 * MIB}\nactive_file {2000 * MIB}\n"
            f"inactive_file {800 * MIB}\nslab_reclaimable {100 * MIB}\nshmem {200 * MIB}\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{3900 * MIB}\n",
        },
    )
    limits = machine.memory_limits(root)
    assert limits.available_bytes == (4000 - (3900 - 2900)) * MIB
    assert limits.decided_by == "/sys/fs/cgroup/pod/memory.max"
    assert limits.machine_bytes == 16000 * MIB


def test_memory_high_is_a_limit_and_a_group_over_it_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/memory.max": f"{4000 * MIB}\n",
            "sys/fs/cgroup/memory.high": f"{1000 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{1500 * MIB}\n",
        },
    )
    assert machine.memory_limits(root).available_bytes == 0
    assert machine.memory_limits(root).decided_by == "/sys/fs/cgroup/memory.high"


@pytest.mark.parametrize(("limit", "available_mib"), [(9223372036854771712, 8000), (2000 * MIB, 1500)])
def test_memory_version_1(tmp_path: Path, limit: int, available_mib: int) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/ab/cd\n",
            "proc/self/mountinfo": "1 2 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": f"{limit}\n",
            "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": f"{1700 * MIB}\n",
            "sys/fs/cgroup/memory/docker/ab/memory.stat": f"active_file 7\ntotal_active_file {1000 * MIB}\n"
            f"total_inactive_file {200 * MIB}\n",
            "sys/fs/cgroup/memory/docker/ab/cd/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert machine.memory_limits(root).available_bytes == available_mib * MIB


def test_a_group_path_of_another_namespace_falls_back_to_what_is_mounted(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/../../outside/of/here\n",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/memory.max": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert machine.memory_limits(root).available_bytes == 300 * MIB


def test_a_prefix_of_a_name_is_not_a_prefix_of_a_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "proc/self/mountinfo": "1 2 0:1 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/c/cpu.max": "100000 100000\n",
        },
    )
    assert machine.cpu_quota(root) == 3.0


def test_this_host() -> None:
    limits = machine.memory_limits()
    assert 0 < limits.available_bytes <= limits.machine_bytes
    assert 1 <= machine.default_threads() <= len(machine.physical_cores()) <= len(machine.affinity())


def test_a_folder_that_is_in_memory_is_known(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    here = f"31 23 {os.major(device)}:{os.minor(device)} / /somewhere rw,nosuid shared:7 - %s none rw\n"
    other = "32 23 250:99 / /elsewhere rw - tmpfs none rw\n\n"
    for kind, expected in (("tmpfs", True), ("ramfs", True), ("ext4", False), ("tmpfs2", False)):
        root = tree(tmp_path / kind, {"proc/self/mountinfo": other + here % kind})
        assert machine.is_in_memory(tmp_path, root) is expected
    assert not machine.is_in_memory(tmp_path, tmp_path / "nothing")
    assert machine.is_in_memory(Path("/dev/shm"))

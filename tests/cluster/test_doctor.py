"""What the doctor says of each thing, on hosts made of a few files."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from k3ray.cluster import doctor
from k3ray.cluster.doctor import (
    NOTE,
    OK,
    STOP,
    check_memory,
    check_numa,
    check_packages,
    check_shared_memory,
    examine_host,
)
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.ray_driver import RayFailure
from k3ray.cluster.ray_join import Cluster

WANTED = ["python>=3.11", "ray>=2.54,<3", "numpy>=2.0,<3", "pytest>=8; extra == 'dev'"]
Free = namedtuple("Free", "f_bavail f_frsize")


@pytest.mark.parametrize(("installed", "python", "levels", "words"), [
    ({"ray": "2.60.0", "numpy": "2.4.1"}, "3.11.7", [OK, OK], ""),
    ({"ray": "2.60.0", "numpy": "2.5.0rc1"}, "3.13.0rc1", [OK, OK], ""),
    ({"ray": "2.60.0", "numpy": "1.26.4"}, "3.11.7", [OK, NOTE], "pip install 'numpy<3,>=2.0'"),
    ({"ray": "3.0.0", "numpy": "1.26.4"}, "3.11.7", [OK, NOTE], "'ray<3,>=2.54' 'numpy<3,>=2.0'"),
    ({"numpy": "2.4.1"}, "3.11.7", [OK, STOP], "pip install 'ray<3,>=2.54'"),
    ({"ray": "2.60.0", "numpy": "2.4.1"}, "3.10.4", [STOP, OK], "expected >=3.11"),
])  # fmt: skip
def test_versions_against_the_declared_ranges(
    installed: dict[str, str], python: str, levels: list[str], words: str
) -> None:
    findings = check_packages(WANTED, installed, python)
    assert [item.level for item in findings] == levels
    assert words in " ".join(item.advice for item in findings)
    assert all(bool(item.advice) == (item.level != OK) for item in findings)
    assert "pytest" not in findings[1].found and ("ray missing" in findings[1].found) == ("ray" not in installed)


def test_memory_nodes(tmp_path: Path) -> None:
    assert check_numa(tmp_path).level == OK
    folder = tmp_path / "sys/devices/system/node"
    for number, cpus in ((0, "0-7"), (10, ""), (2, "8-15")):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(cpus + "\n")
    found = check_numa(tmp_path)
    assert found.level == NOTE and "--stages 3" in found.advice
    assert found.found == "3: node0 cpus 0-7, node2 cpus 8-15, node10 cpus none"
    (folder / "node2" / "cpulist").unlink()
    assert "node2 not readable" in check_numa(tmp_path).found


def test_memory_names_the_limit_that_decides() -> None:
    limits = MemoryLimits(16_000_000_000, "/sys/fs/cgroup/user.slice/memory.max", 64_000_000_000)
    found = check_memory(limits)
    assert found.level == OK and found.found == (
        "16.00 GB available of 64.00 GB (by /sys/fs/cgroup/user.slice/memory.max)"
    )
    assert check_memory(MemoryLimits(300_000_000, "MemAvailable", 1)).level == NOTE


def test_a_small_or_absent_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_shared_memory(tmp_path).level == OK
    assert "No such file" in check_shared_memory(tmp_path / "nothing").found
    monkeypatch.setattr(os, "statvfs", lambda path: Free(64 * 256, 4096))
    found = check_shared_memory(Path("/dev/shm"))
    assert found.level == NOTE and "--shm-size" in found.advice and found.found == "67 MB free"


def test_no_folder_for_kernels_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cache_directory", lambda: None)
    monkeypatch.setattr(doctor.index_cache, "usable_directory", lambda directories: None)
    monkeypatch.setattr(doctor, "announced_address", lambda: None)
    findings = {item.subject: item for item in examine_host()}
    for subject in ("compiled kernels", "index of checkpoints"):
        assert findings[subject].level == NOTE and "XDG_CACHE_HOME" in findings[subject].advice


def test_ray_alone_joined_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ray(address: str | None) -> doctor.Finding:
        return next(item for item in examine_host(address) if item.subject == "Ray")

    monkeypatch.setattr(doctor, "announced_address", lambda: None)
    assert ray(None).level == ray("local").level == OK and "of its own" in ray("auto").found
    monkeypatch.setattr(doctor, "announced_address", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(doctor, "examine", lambda address: Cluster(address, "token", 3))
    assert "10.0.0.1:6379 (3 nodes)" in ray(None).found and ray(None).level == OK
    assert "10.0.0.9:1 (3 nodes)" in ray("10.0.0.9:1").found and "of its own" in ray("local").found

    def refuse(address: str) -> Cluster:
        raise RayFailure("it asks for a token")

    monkeypatch.setattr(doctor, "examine", refuse)
    assert ray(None).level == STOP and ray(None).advice == "it asks for a token"


def test_this_host_can_run() -> None:
    """The environment of the tests is one that the doctor must find nothing fatal in."""
    findings = examine_host("local")
    assert [item for item in findings if item.level == STOP] == []
    subjects = [item.subject for item in findings]
    assert subjects[:2] == ["Python", "packages"] and len(subjects) == len(set(subjects)) == 9

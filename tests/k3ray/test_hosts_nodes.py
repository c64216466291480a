"""`k3ray nodes` and `k3ray plan` on separate hosts, each with its own files, versions and faults."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts import Host, Inside
from tests.ray_hosts import ROOT, RayHosts

pytestmark = pytest.mark.ray
NO_PACKAGE = """raise ModuleNotFoundError("No module named 'k3ray'", name="k3ray")"""
OTHER_NUMPY = """
import numpy
numpy.__version__ += "+other"
"""


def give_models(hosts: RayHosts, source: Path) -> Path:
    """Every host has its own copy on a path of its own; returns the roots file, as the head sees it."""
    tables = []
    for host in hosts.hosts:
        copy = host.folder / f"disk-of-{host.name}"
        if not copy.exists():
            shutil.copytree(source, copy)
        tables.append(f'[node.{host.name}]\nmodels = ["/tmp/{copy.name}"]\n')
    (hosts.head.folder / "roots.toml").write_text("\n".join(tables))
    return Path("/tmp/roots.toml")


def newcomer(hosts: RayHosts, **modules: str) -> tuple[Host, Inside]:
    """A host that begins to join, with its own modules in front of the installed ones: file name -> text."""
    host = hosts.add()
    folder = host.folder / "modules"
    for path, text in modules.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return host, hosts.begin_join(host, {"PYTHONPATH": f"/tmp/modules:{ROOT}"})


def judged(hosts: RayHosts, arguments: list[str], code: int) -> dict[str, dict[str, Any]]:
    """What `k3ray nodes --json` says, by host."""
    done = hosts.k3ray(["nodes", *arguments, "--json"], timeout_s=120)
    assert done.returncode == code, done.stderr
    return {record["name"]: record for record in json.loads(done.stdout)["nodes"]}


def test_every_host_is_looked_at_in_its_own_place(three_hosts: RayHosts, k3b_dir: Path) -> None:
    roots = give_models(three_hosts, k3b_dir)
    found = judged(three_hosts, [f"/tmp/disk-of-{three_hosts.head.name}", "--roots", str(roots)], 0)
    assert list(found) == ["host-1", "host-2", "host-3"]  # the driver's first
    for host in three_hosts.hosts:
        record = found[host.name]
        assert record["address"] == host.address and record["usable"] and not record["reasons"]
        assert [copy["path"] for copy in record["models"]] == [f"/tmp/disk-of-{host.name}"]
    assert len({record["models"][0]["fingerprint"] for record in found.values()}) == 1


def test_a_damaged_copy_on_one_host_leaves_that_host_out(three_hosts: RayHosts, k3b_dir: Path) -> None:
    roots = give_models(three_hosts, k3b_dir)
    victim = three_hosts.hosts[2]
    shard = victim.folder / f"disk-of-{victim.name}" / "model-00003-of-000005.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    try:
        planned = three_hosts.k3ray(["plan", "/tmp/disk-of-host-1", "--roots", str(roots), "--json"])
    finally:
        shard.write_bytes(whole)
    (told,) = [line for line in planned.stderr.splitlines() if "left out: " in line]
    assert told.startswith("host-3: left out: ") and shard.name in told
    assert planned.returncode == 0
    assert [node["name"] for node in json.loads(planned.stdout)["placement"]["nodes"]] == ["host-1", "host-2"]


def test_a_plan_over_the_hosts_gives_every_layer_and_expert_a_place(three_hosts: RayHosts, k3b_dir: Path) -> None:
    roots = give_models(three_hosts, k3b_dir)
    done = three_hosts.k3ray(
        ["plan", "/tmp/disk-of-host-1", "--roots", str(roots), "--out", "/tmp/plan.json", "--json"]
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    plan.pop("summary")
    assert plan == json.loads((three_hosts.head.folder / "plan.json").read_text())
    stages, shards = plan["placement"]["stages"], plan["placement"]["shards"]
    assert [stage["node"] for stage in stages] == [0, 1, 2]
    assert [layer for stage in stages for layer in range(stage["first"], stage["stop"])] == list(range(9))
    assert [shard["node"] for shard in shards] == [0, 1, 2]


def test_a_wrong_token_and_none_are_refused_in_seconds(three_hosts: RayHosts, k3b_dir: Path) -> None:
    """From a host of the cluster whose user has not copied the token, and from one with another cluster's."""
    place = three_hosts.hosts[1]
    kept = (place.home / ".ray" / "auth_token").read_text()
    try:
        (place.home / ".ray" / "auth_token").write_text("0" * 64)
        wrong = three_hosts.k3ray(["nodes", str(k3b_dir)], place)
        (place.home / ".ray" / "auth_token").unlink()
        none = three_hosts.k3ray(["nodes", str(k3b_dir)], place)
    finally:
        (place.home / ".ray" / "auth_token").write_text(kept)
    assert wrong.returncode == none.returncode == 2
    assert "refuses the one that was found: put the cluster's token into ~/.ray/auth_token" in wrong.stderr
    assert "asks for its token and none was found" in none.stderr
    assert "Traceback" not in wrong.stderr + none.stderr and kept.strip() not in wrong.stderr


def test_hosts_that_join_are_seen_by_the_next_command_and_judged(three_hosts: RayHosts, k3b_dir: Path) -> None:
    """One like the others, one with another k3ray, one with another numpy, one without k3ray; then they leave."""
    metadata = "Metadata-Version: 2.1\nName: k3ray\nVersion: 0.0.9\n"
    members = {host.name for host in three_hosts.hosts}
    joined = [
        newcomer(three_hosts),
        newcomer(three_hosts, **{"k3ray-0.0.9.dist-info/METADATA": metadata}),
        newcomer(three_hosts, **{"sitecustomize.py": OTHER_NUMPY}),
        newcomer(three_hosts, **{"k3ray/__init__.py": NO_PACKAGE}),
    ]
    for _, command in joined:
        assert command.finish(120).returncode == 0
    found = judged(three_hosts, [str(k3b_dir)], 1)
    alike, older, other, bare = (host for host, _ in joined)
    assert found.keys() == {*members, alike.name, older.name, other.name, bare.name}
    assert {name for name, record in found.items() if record["usable"]} == {*members, alike.name}
    assert found[older.name]["reasons"] == [f"k3ray 0.0.9, here {version('k3ray')}: install the same"]
    assert found[other.name]["reasons"] == [f"numpy {np.__version__}+other, here {np.__version__}: install the same"]
    assert "install the same k3ray, Python and Ray there" in found[bare.name]["reasons"][0]
    for host, _ in joined:
        three_hosts.leave_ray(host)
    assert judged(three_hosts, [str(k3b_dir)], 0).keys() == members

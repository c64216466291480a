"""The commands by which docs/cluster.md joins hosts, run as they stand there, in shells that know nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from k3ray.kernels.compile import cache_directory
from tests.hosts import Host, Hosts, NoHosts
from tests.ray_hosts import PROGRAMS, ROOT

pytestmark = pytest.mark.ray
COMMAND = re.compile(r"^([ab])\$ (.*?)(?: +#.*)?$", re.MULTILINE)
BY_HAND = ("ssh ", "scp ")  # done by the test: its hosts have no sshd
SHELL_S = 120.0


def commands(text: str) -> list[tuple[str, str]]:
    """(host, command) of the manual, from the making of the token to the look at the nodes."""
    found = [(host, command) for host, command in COMMAND.findall(text) if not command.startswith(BY_HAND)]
    return found[: next(number for number, (_, command) in enumerate(found) if "k3ray nodes" in command) + 1]


def test_the_manual_joins_two_hosts(tmp_path: Path, k3b_dir: Path) -> None:
    """The model's folder and the hosts' names are put in; nothing else is changed."""
    kernels = cache_directory()
    try:
        hosts = Hosts(tmp_path, [] if kernels is None else [kernels.parent])
    except NoHosts as reason:
        pytest.skip(str(reason))
    with hosts:
        machines = {"a": hosts.add(), "b": hosts.add()}
        said = commands((ROOT / "docs" / "cluster.md").read_text())
        assert [host for host, _ in said] == ["a"] * 4 + ["b"] * 2 + ["a"] * 2, said  # what the loop below relies on
        exports: dict[str, list[str]] = {"a": [], "b": []}
        for host, command in said:
            written = command.replace("a:6379", f"{machines['a'].address}:6379").replace(
                "/models/kimi-k3", str(k3b_dir)
            )
            written = written.replace(" --tape /nvme/kimi-k3.tape", "")
            if written.startswith("export "):
                exports[host].append(written)
                continue
            if host == "b":
                copy_token(machines["a"], machines["b"])
            done = hosts.run(
                machines[host],
                ["sh", "-c", "; ".join([*exports[host], written])],
                {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
                SHELL_S,
            )
            assert done.returncode == 0, f"{host}$ {command}\n{done.stdout}\n{done.stderr}"
        assert "all 2 nodes can take part" in done.stderr


def copy_token(source: Host, target: Host) -> None:
    """What `ssh b mkdir -p .ray` and `scp -p` do."""
    (target.home / ".ray").mkdir(exist_ok=True)
    shutil.copy2(source.home / ".ray" / "auth_token", target.home / ".ray" / "auth_token")
    assert (target.home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0

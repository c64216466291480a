"""What is decided about Ray before any of its processes starts: addresses, directories, the store, the command line."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3ray.cluster import ray_directory, ray_join, ray_settings
from k3ray.cluster.ray_driver import RayFailure, variables
from k3ray.cluster.ray_head import lean_raylet
from k3ray.cluster.signals import children_shielded, held_signals, ignored_signals, unwinding_signals

MIB = 1 << 20


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "host:-1", "[::1]"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(RayFailure, match="is not HOST:PORT"):
        ray_join.examine(address)


def test_the_client_protocol_is_refused() -> None:
    with pytest.raises(RayFailure, match="client protocol"):
        ray_join.examine("ray://host:10001")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_port_where_nobody_listens(host: str) -> None:
    with pytest.raises(RayFailure, match=r"no Ray cluster answers at .*: start one there") as caught:
        ray_join.examine(f"{host}:1")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"refused": "no token"},
            "asks for its token and none was found: put the cluster's token into ~/.ray/auth_token",
        ),
        ({"refused": "wrong token"}, "refuses the one that was found"),
        ({"refused": "it is a printer"}, r"is no Ray cluster \(it is a printer\): check RAY_ADDRESS"),
        ({"local": False}, "this machine is no node of .*: run `ray start --address=host:6379` here first"),
        ({"ray": "2.0.0"}, r"runs Ray 2\.0\.0 on Python \S+, and this process Ray .*: use the same on every node"),
        ({"python": "3.9.1"}, r"on Python 3\.9\.1, and this process"),
    ],
)
def test_a_cluster_that_cannot_be_joined(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], message: str
) -> None:
    sound = {"mode": "token", "ray": None, "python": None, "nodes": 2, "local": True}
    monkeypatch.setattr(ray_join, "_accepts", lambda host, port: True)
    monkeypatch.setattr(ray_join, "_probe", lambda address: sound)
    assert ray_join.examine("host:6379") == ray_join.Cluster("host:6379", "token", 2)
    monkeypatch.setattr(ray_join, "_probe", lambda address: sound | answer)
    with pytest.raises(RayFailure, match=message):
        ray_join.examine("host:6379")


def test_the_announcement_of_a_dead_cluster_or_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_join.announced_address() is None
    (tmp_path / "ray").mkdir()
    announcement = tmp_path / "ray" / "ray_current_cluster"
    announcement.write_text("127.0.0.1:1\n")
    assert ray_join.announced_address() is None
    monkeypatch.setattr(ray_join, "_accepts", lambda host, port: True)
    assert ray_join.announced_address() == "127.0.0.1:1"
    owner = announcement.stat().st_uid
    monkeypatch.setattr(ray_join.os, "getuid", lambda: owner + 1)
    assert ray_join.announced_address() == ("127.0.0.1:1" if owner == 0 else None)
    announcement.write_text("nonsense")
    assert ray_join.announced_address() is None


@pytest.mark.parametrize(
    ("free_mib", "wanted_mib", "store_mib", "in_memory"),
    [(24000, 200, 200, True), (200, 200, 180, True), (86, 200, 77, True), (64, 200, 200, False), (0, 1, 76, False)],
)
def test_the_object_store_fits_into_shared_memory_or_goes_to_the_disk(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, wanted_mib: int, store_mib: int, in_memory: bool
) -> None:
    status = SimpleNamespace(f_bavail=free_mib * MIB // 4096, f_frsize=4096)
    monkeypatch.setattr(ray_settings.os, "statvfs", lambda path: status)
    directory, shared = Path("/a"), Path("/dev/shm")
    found = ray_settings.private_settings(directory, 10, wanted_mib * MIB, 2, 1000 * MIB, shared)
    assert found.store_bytes // MIB == store_mib
    assert found.store_directory == (shared if in_memory else directory)
    assert (found.cpus, found.workers) == (10, 10)


def test_a_directory_whose_sockets_have_short_names(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    readonly = Path("/proc")
    with ray_directory.session_directory([long, readonly, Path("/tmp")]) as directory:
        assert directory.parent == Path("/tmp")
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(str(directory / ray_directory.LONGEST_SOCKET)) <= 107
        (directory / "file").write_text("")
    assert not directory.exists()
    with (
        pytest.raises(RayFailure, match=r"too long for a socket by .* bytes; /proc: .*Set TMPDIR"),
        ray_directory.session_directory([long, readonly]),
    ):
        pass


def test_a_raylet_without_helpers() -> None:
    command = ["/x/raylet", "--dashboard_agent_command=python a.py --x=1", "--runtime_env_agent_command=python b.py"]
    command += ["--metrics-agent-port=0", "--metrics_export_port=0", "--runtime_env_agent_port=0"]
    command += ["--num_prestart_python_workers=2", "--node_id=ab"]
    lean = lean_raylet(command, 7)
    assert lean[0] == "/x/raylet" and "--node_id=ab" in lean
    assert "--num_prestart_python_workers=7" in lean
    assert not [argument for argument in lean if ".py" in argument or argument.endswith("port=0")]
    with pytest.raises(LookupError, match="no option --runtime_env_agent_port"):
        lean_raylet([argument for argument in command if "env_agent_port" not in argument], 7)


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3RAY_A", "old")
    monkeypatch.delenv("K3RAY_B", raising=False)
    with pytest.raises(KeyError), variables({"K3RAY_A": "new", "K3RAY_B": "new"}):
        assert os.environ["K3RAY_A"] == os.environ["K3RAY_B"] == "new"
        raise KeyError
    assert os.environ["K3RAY_A"] == "old"
    assert "K3RAY_B" not in os.environ


def test_a_held_signal_comes_at_the_end_and_a_second_one_at_once() -> None:
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["first"] and signal.getsignal(signal.SIGINT) is before
    with held_signals():
        done.append("undisturbed")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_unwinds_the_stack_and_handlers_of_others_stay() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught, unwinding_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with ignored_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_children_do_not_get_the_signals_of_a_closing_terminal() -> None:
    def blocked() -> int:
        status = subprocess.run(["cat", "/proc/self/status"], check=True, capture_output=True, text=True).stdout
        return int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)

    with children_shielded():
        assert blocked() == 1 << signal.SIGHUP - 1 | 1 << signal.SIGQUIT - 1
    assert blocked() == 0

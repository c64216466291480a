"""Fixtures that every test folder shares: where the data of others lies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hosts import NoHosts
from tests.ray_hosts import RayHosts

settings.register_profile("k3ray", deadline=None)  # the machine may be busy; counts bound the work, not clocks
settings.load_profile("k3ray")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # started with & or nohup: programs under test would inherit it
        signal.signal(number, usual)

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests of Ray come first: they mostly wait, and what runs beside them needs the cores."""
    waiting = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in waiting)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with what others computed; a test that needs it is skipped where it is absent."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("../shared/data is not beside the project: this test compares with data that others computed")
    return path


@pytest.fixture(scope="session")
def k3b_dir() -> Path:
    """The golden checkpoint that travels with the tests (tests/data/k3b/README.md)."""
    return ROOT / "tests" / "data" / "k3b"


@pytest.fixture(scope="session")
def k3a_dir(shared_data: Path) -> Path:
    """The larger golden checkpoint, read in place."""
    return shared_data / "golden" / "k3a"


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """A Ray cluster of three hosts (tests/ray_hosts.py), for tests that leave all of them alive and connected.

    Ray may promise memory for one run of the golden checkpoint there, not for two.
    """
    try:
        hosts = RayHosts(tmp_path_factory.mktemp("hosts"), 3, memory_bytes=850_000_000)
    except NoHosts as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts

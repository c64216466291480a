"""A joined cluster of one node: Ray is told what a run takes, so that a second one does not take it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray


def test_two_runs_on_one_node_do_not_take_the_same_memory(k3b_dir: Path) -> None:
    asked = ["generate", k3b_dir, "--ids", "3", "--ignore-eos", "--gen"]
    with ray_nodes([600_000_000]) as nodes:
        first = nodes.begin_k3ray([*asked, "3000"])
        try:
            assert first.stdout is not None and first.stdout.read(1)  # it generates
            second = nodes.k3ray([*asked, "1"])
        finally:
            first.terminate()
            first.communicate(timeout=60)
        assert second.returncode and "Ray: its --memory, less what runs hold" in second.stderr, second.stderr
        assert "Traceback" not in second.stderr
        third = nodes.k3ray([*asked, "1"])
    assert third.returncode == 0, third.stderr

"""A plan for this machine alone: run without a cluster, and refused before anything is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3ray.api import open_model
from k3ray.cluster.placement import place
from k3ray.cluster.plan_file import write_plan
from k3ray.cluster.roots_file import Roots, RootsMap
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.strict_toml import TomlFailure
from k3ray.cluster.topology import NodeFacts
from k3ray.driver import Driver
from k3ray.generation import generate
from k3ray.nodes import look_here
from k3ray.state_identity import PartOfModel, identify
from k3ray.workers.checkpoint.index import CheckpointError
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import open_what_is_here
from k3ray.workers.model.config import read_config
from k3ray.workers.specs import CheckpointSpec, StageSpec
from k3ray.workers.tape.layout import plan_layout
from tests.parts import TOP, cut_by_layers, part_of
from tests.tapes import SMALL_CHUNK, opened_model

COMMAND = [sys.executable, "-c", "from k3ray.cli import main; main()"]
IDS = [84, 197, 179, 385, 423]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray of its own, whatever the tester has."""
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "local")


def here(model: Path, tape: Path | None = None) -> NodeFacts:
    roots = RootsMap((), Roots((str(model.resolve()),), (str(tape),) if tape else ()))
    return look_here(roots, None, 2, measure=False)


def planned(model: Path, out: Path, tape: Path | None = None, seats: int = 2, positions: int = 20) -> Path:
    """A plan of two stages and two shards of this machine."""
    config, facts = read_config(model), here(model, tape)
    wishes = ClusterWishes(seats=seats, memory_bytes=2 * 10**9, positions=positions)
    write_plan(out, config, place(config, plan_layout(config, SMALL_CHUNK), [facts], wishes))
    return out


@pytest.mark.ray
def test_a_plan_of_this_machine_with_its_tape(k3b_dir: Path, tmp_path: Path) -> None:
    one = start_in_process([StageSpec(CheckpointSpec(k3b_dir, None, 9), 0, 9, 1, ())], [])
    expected = list(generate(Driver(one), IDS, 3))
    one.close()
    with opened_model(k3b_dir) as model:
        model.pack(tmp_path / "tape")
    plan = planned(k3b_dir, tmp_path / "plan.json", tmp_path / "tape")
    said: list[str] = []
    with open_model(k3b_dir, tape=tmp_path / "tape", plan=plan, say=said.append) as opened:
        found = opened.generate(ids=IDS, gen=3, ignore_eos=True)
        assert [stage.tape is not None for stage in opened.plan.stages] == [True, True]
    assert found.generated_ids == [step.token_id for step in expected]
    assert found.first_logits.tobytes() == np.asarray(expected[0].logits).tobytes()
    (node,) = found.nodes
    assert node.name == socket.gethostname()
    assert len(node.actors) == 4 and found.settings["stages"] == found.settings["expert_shards"] == 2
    assert found.messages is not None and found.messages.between_nodes_bytes == 0 < found.messages.total_bytes
    assert json.loads(json.dumps(found.as_json()))["nodes"][0]["actors"][0]["layers"][0] == 0
    assert said[1].startswith("plan: 2 stages and 2 expert shards on 1 node, ")


@pytest.mark.ray
def test_the_command_stays_within_its_plan(k3b_dir: Path, tmp_path: Path) -> None:
    """As a process of its own: this one holds whatever other tests left in it."""
    plan, out = planned(k3b_dir, tmp_path / "plan.json"), tmp_path / "run.json"
    arguments = ["generate", str(k3b_dir), "--ids", ",".join(map(str, IDS)), "--gen", "3", "--ignore-eos"]
    done = subprocess.run(
        [*COMMAND, *arguments, "--plan", str(plan), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(out.read_text())["nodes"]
    assert 10**8 < node["measured_bytes"] <= node["planned_bytes"] <= 2 * 10**9
    assert all(actor["measured_bytes"] > 0 for actor in node["actors"])


def test_what_a_plan_says_is_not_asked_for_again(k3b_dir: Path, tmp_path: Path) -> None:
    plan = planned(k3b_dir, tmp_path / "plan.json")
    with pytest.raises(PlacementFailure, match="leave --stages and --memory 2,000,000,000 bytes out"):
        open_model(k3b_dir, plan=plan, stages=2, memory="2G")
    with open_model(k3b_dir, plan=plan) as opened, pytest.raises(PlacementFailure, match="of 20 positions, found 21"):
        opened.start(21)
    record = json.loads(plan.read_text())
    record["placement"]["nodes"][0] |= {"name": "elsewhere", "address": "10.9.8.7"}
    plan.write_text(json.dumps(record))
    with (
        open_model(k3b_dir, plan=plan) as opened,
        pytest.raises(PlacementFailure, match="elsewhere: not in the cluster"),
    ):
        opened.start(5)
    roots = tmp_path / "roots.toml"
    roots.write_text('[node.other]\nmodels = ["/m"]\n')
    with open_model(k3b_dir, roots=roots) as opened, pytest.raises(TomlFailure, match="found other, expected"):
        opened.start(5)


def test_the_commands_host_may_hold_a_part(k3b_dir: Path, tmp_path: Path) -> None:
    whole = cut_by_layers(k3b_dir, tmp_path / "whole")
    part = part_of(whole, tmp_path / "part", [TOP, 3])
    names = part_of(whole, tmp_path / "names", [])
    assert not open_what_is_here(CheckpointSpec(whole, None, 9)).partial
    for folder in (part, names):
        checkpoint = open_what_is_here(CheckpointSpec(folder, None, 9))
        assert checkpoint.partial and checkpoint.config.num_hidden_layers == 9
        with pytest.raises(PartOfModel, match="holds a part of the model"):
            identify(checkpoint)
    with open_model(part) as opened, pytest.raises(CheckpointError, match="2 of its 10 shards; missing"):
        opened.start(5)  # without a cluster all of it has to be here
    (names / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_model(names)

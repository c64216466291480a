"""One run over several raylets of this machine: unequal, each with its own part of the model; the bits of one process.

The nodes are as different as the loopback allows; hosts with networks of their own are in test_hosts_*.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.cluster.plan import make_plan
from k3ray.driver import Driver
from k3ray.generation import generate
from k3ray.workers.in_process import start_in_process
from k3ray.workers.specs import CheckpointSpec
from tests.parts import TOP, cut_by_layers, part_of
from tests.ray_nodes import RayNodes, ray_nodes
from tests.tapes import opened_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MB = 10**6
IDS = [84, 197, 179, 385, 423]
GEN = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes([900 * MB, 1400 * MB, 800 * MB]) as started:
        yield started


@pytest.fixture(scope="module")
def folders(k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The whole, three parts of which two are of one node, and a tape."""
    base = tmp_path_factory.mktemp("model")
    whole = cut_by_layers(k3b_dir, base / "whole")
    found = {"whole": whole, "tape": base / "tape"}
    for name, held in {"first": [TOP, 0, 1, 2], "second": [2, 3, 4], "end": [TOP, 4, 5, 6, 7, 8]}.items():
        found[name] = part_of(whole, base / name, held)
    with opened_model(whole) as model:
        model.pack(found["tape"])
    return found


@pytest.fixture(scope="module")
def expected(k3b_dir: Path) -> tuple[list[int], bytes]:
    """Of one process: the ids, and the first step's logits."""
    plan = make_plan(CheckpointSpec(k3b_dir, None, 9), 1, 0, 1, ())
    chain = start_in_process(plan.stages, plan.shards)
    steps = list(generate(Driver(chain), IDS, GEN))
    chain.close()
    return [step.token_id for step in steps], np.asarray(steps[0].logits).astype("<f4").tobytes()


def roots_file(path: Path, nodes: RayNodes, folders: dict[str, Path]) -> Path:
    """The driver's node has two parts, the second everything, the third the end and the tape."""
    held = [(["first", "second"], []), (["whole"], []), (["end"], ["tape"])]
    lines = []
    for address, (models, tapes) in zip(nodes.addresses, held, strict=True):
        lines.append(f'[node."{address}"]')
        lines.append(f"models = {json.dumps([str(folders[name]) for name in models])}")
        if tapes:
            lines.append(f"tapes = {json.dumps([str(folders[name]) for name in tapes])}")
    path.write_text("\n".join(lines) + "\n")
    return path


def generated(nodes: RayNodes, folder: Path, out: Path, *options: str | Path) -> tuple[dict[str, Any], bytes, str]:
    """(what --out says, the first logits, what was said)."""
    arguments: list[str | Path] = ["generate", folder, "--ids", ",".join(map(str, IDS)), "--gen", str(GEN)]
    arguments += ["--ignore-eos", "--out", out / "run.json", "--dump-logits", out / "logits.bin", *options]
    done = nodes.k3ray(arguments)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "run.json").read_text()), (out / "logits.bin").read_bytes(), done.stderr


def check(record: dict[str, Any], logits: bytes, expected: tuple[list[int], bytes]) -> None:
    assert (record["generated_ids"], logits) == expected
    for node in record["nodes"]:
        assert 0 < node["measured_bytes"] <= node["planned_bytes"], node["name"]
        assert node["actors"] and all(actor["measured_bytes"] for actor in node["actors"])
    covered = [actor["layers"] for node in record["nodes"] for actor in node["actors"] if actor["layers"]]
    assert sorted(layer for first, stop in covered for layer in range(first, stop)) == list(range(9))
    assert sum(actor["experts_owned"] for node in record["nodes"] for actor in node["actors"]) == 8 * 16


def test_by_itself_over_unequal_nodes_with_parts(
    nodes: RayNodes, folders: dict[str, Path], expected: tuple[list[int], bytes], tmp_path: Path
) -> None:
    roots = roots_file(tmp_path / "roots.toml", nodes, folders)
    record, logits, said = generated(nodes, folders["first"], tmp_path, "--roots", roots)
    check(record, logits, expected)
    assert [node["address"] for node in record["nodes"]] == [nodes.addresses[0], *sorted(nodes.addresses[1:])]
    assert "plan: 3 stages and 3 expert shards on 3 nodes" in said and "left out: " not in said
    messages = record["messages"]
    assert messages["positions"] == len(IDS) + GEN - 1
    home = {actor["part"]: node["address"] for node in record["nodes"] for actor in node["actors"]}
    ends = {way: [home.get(end, nodes.addresses[0]) for end in way.split(" > ")] for way in messages["ways"]}
    crossed = sum(nbytes for way, nbytes in messages["ways"].items() if ends[way][0] != ends[way][1])
    assert 0 < messages["between_nodes_bytes"] == crossed < messages["total_bytes"] == sum(messages["ways"].values())
    frame = 4 * 160  # bytes of one of the model's vectors
    stages = [way for way in messages["ways"] if way.startswith("layers") and way.split(" > ")[1].startswith("layers")]
    assert len(stages) == 2
    assert all(messages["ways"][way] > messages["positions"] * 2 * frame for way in stages)


def test_a_plan_made_before_and_what_it_refuses(
    nodes: RayNodes, folders: dict[str, Path], expected: tuple[list[int], bytes], tmp_path: Path
) -> None:
    roots, plan = roots_file(tmp_path / "roots.toml", nodes, folders), tmp_path / "plan.json"
    tape = ("--tape", folders["tape"])
    made = nodes.k3ray(["plan", folders["first"], "--roots", roots, "--memory", "760M", "--positions", "20", *tape,
                        "--out", plan])  # fmt: skip
    assert made.returncode == 0, made.stderr
    record, logits, _ = generated(nodes, folders["first"], tmp_path, "--roots", roots, "--plan", plan)
    check(record, logits, expected)
    assert all(node["planned_bytes"] <= 760 * MB for node in record["nodes"])
    roots.write_text(roots.read_text().replace(str(folders["second"]), str(folders["first"]) + "/../second-gone"))
    base = ["generate", folders["first"], "--ids", "3", "--gen", "1", "--plan", plan]
    gone = nodes.k3ray([*base, "--roots", roots])
    assert gone.returncode == 2 and "second-gone" in gone.stderr and "plan cannot run" in gone.stderr
    lacking = nodes.k3ray(base)  # without --roots every node has the driver's folder, which is the first part
    assert lacking.returncode == 2 and "whole in no folder there" in lacking.stderr
    assert "Traceback" not in gone.stderr + lacking.stderr


def test_two_runs_do_not_take_the_same_memory(
    nodes: RayNodes, folders: dict[str, Path], expected: tuple[list[int], bytes], tmp_path: Path
) -> None:
    """While one run holds the nodes' memory another is refused, and afterwards it is not."""
    plan = tmp_path / "plan.json"
    made = nodes.k3ray(["plan", folders["whole"], "--memory", "760M", "--positions", "4000", "--out", plan])
    assert made.returncode == 0, made.stderr
    asked = ["generate", folders["whole"], "--ids", "3", "--plan", plan, "--ignore-eos", "--gen"]
    first = nodes.begin_k3ray([*asked, "3000"])
    try:
        assert first.stdout is not None and first.stdout.read(1)  # it generates
        second = nodes.k3ray([*asked, "1"])
    finally:
        first.terminate()
        first.communicate(timeout=60)
    assert second.returncode == 2 and "are available there (Ray: its --memory, less what runs hold)" in second.stderr
    record, logits, _ = generated(nodes, folders["whole"], tmp_path, "--plan", plan)
    check(record, logits, expected)

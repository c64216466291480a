"""What is found of a node, and which nodes may take part."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3ray.cluster import devices, node_speeds, node_survey
from k3ray.cluster.devices import CHUNK, EXPERT, MemorySpeed
from k3ray.cluster.node_facts import Inquiry, layers_here, look, look_at_model, look_at_tape, numa_nodes
from k3ray.cluster.node_survey import names_of, survey
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.roots_file import Roots, RootsMap
from k3ray.cluster.topology import ModelCopy, NodeFacts, TapeCopy, can_join, compare_nodes
from k3ray.workers.checkpoint.index import open_index, open_names
from k3ray.workers.process_report import versions
from tests.parts import TOP, cut_by_layers, part_of
from tests.tapes import opened_model

VERSIONS = {"python": "3.11.7", "k3ray": "0.1.0", "ray": "2.60.0", "numpy": "2.4.0", "numba": "0.68.0"}
COPY = ModelCopy("/m", "f1", "d1", True, (0, 1, 2), True)


def node(name: str, **more: Any) -> NodeFacts:
    facts = NodeFacts(name, name, versions=tuple(VERSIONS.items()), models=(COPY,), driver=name == "a")
    return replace(facts, **more)


def reasons(*nodes: NodeFacts) -> list[tuple[str, ...]]:
    return [verdict.reasons for verdict in compare_nodes(nodes, VERSIONS)]


def test_equal_nodes_take_part() -> None:
    part = ModelCopy("/p", "", "d1", False, (1,), False)
    same = node("c", models=(ModelCopy("/n", "f1", "", True, (0, 1, 2), True),))
    assert reasons(node("a"), node("b", models=(part, COPY)), same) == [(), (), ()]


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_is_named_with_both(name: str) -> None:
    other = node("b", versions=tuple({**VERSIONS, name: "9.9"}.items()))
    assert reasons(node("a"), other) == [(), (f"{name} 9.9, here {VERSIONS[name]}: install the same",)]
    without = node("b", versions=tuple(item for item in VERSIONS.items() if item[0] != name))
    assert reasons(node("a"), without)[1] == (f"{name} missing, here {VERSIONS[name]}: install the same",)


def test_models_and_tapes_that_differ() -> None:
    other = ModelCopy("/o", "f2", "d2", True, (0, 1, 2), True)
    part = ModelCopy("/p", "", "d2", False, (1,), False)
    empty = ModelCopy("/e", "", "d1", False, (), False)
    broken = ModelCopy("/b", problem="no config")
    cases: list[tuple[tuple[ModelCopy, ...], str]] = [
        ((other,), "/o: another checkpoint than /m of the driver"), ((part,), "/p: another checkpoint"),
        ((empty,), "/e: no whole layer"), ((broken,), "/b: no config"), ((), "no model folder named"),
        ((COPY, broken), "/b: no config"),
    ]  # fmt: skip
    for models, said in cases:
        first, (reason,) = reasons(node("a"), node("b", models=models))
        assert not first and said in reason
    tapes = [node("a", tapes=(TapeCopy("/t", "x"),)), node("b", tapes=(TapeCopy("/u", "y"),)),
             node("c", tapes=(TapeCopy("/v", "", "cut"),)), node("d")]  # fmt: skip
    assert [bool(one) for one in reasons(*tapes)] == [False, True, True, False]


def test_without_a_copy_at_the_driver_most_nodes_decide() -> None:
    other = ModelCopy("/o", "f2", "d2", True, (0, 1, 2), True)
    blind = node("a", models=())
    found = reasons(blind, node("b", models=(other,)), node("c"), node("d"))
    assert [bool(one) for one in found] == [True, True, False, False]
    assert compare_nodes([blind], VERSIONS, with_model=False)[0].usable
    silent = node("e", problem="did not answer in 2 s")
    assert reasons(node("a"), silent)[1] == ("did not answer in 2 s",)


def test_a_newcomers_copies_never_decide_which_model_a_run_has() -> None:
    """Also where the command's node has no part of the run: what moved there would compute with other weights."""
    other = ModelCopy("/o", "f2", "d2", True, (0, 1, 2), True)
    again = replace(other, path="/o2")
    for members in ([node("b"), node("d")], [node("a"), node("b")], [node("b"), node("a")], [node("b")]):
        assert can_join(members, node("c"), VERSIONS)
        for stranger in (node("c", models=(other, again)), node("c", models=(other, again), driver=True)):
            assert not can_join(members, stranger, VERSIONS)
        assert not can_join(members, node("c", models=(COPY, other)), VERSIONS)
        assert not can_join(members, node("c", problem="did not answer"), VERSIONS)
        assert not can_join(members, node("c"), {**VERSIONS, "numpy": "0"})


def test_a_whole_copy(k3b_dir: Path) -> None:
    copy = look_at_model(k3b_dir)
    assert copy.whole and copy.top and copy.layers == tuple(range(9)) and not copy.problem
    assert copy.fingerprint == open_index(k3b_dir).fingerprint
    assert copy.same_as(copy)


def test_part_copies_hold_the_layers_whose_shards_are_there(shared_data: Path) -> None:
    """The released index: layer l is in shard l+1, embedding and head in 94."""
    release = shared_data / "k3-release"
    names = [line.split()[0] for line in (release / "shard_sizes.txt").read_text().splitlines()]
    index = open_names(release)
    assert layers_here(index, {names[number - 1] for number in (1, 2, 30, 93)}, 93) == ((0, 1, 29, 92), False)
    assert layers_here(index, {names[93]}, 93) == ((), True)


def test_a_part_of_a_copy_and_a_damaged_one(k3b_dir: Path, tmp_path: Path) -> None:
    whole = cut_by_layers(k3b_dir, tmp_path / "whole")
    part = part_of(whole, tmp_path / "part", [TOP, 3, 7])
    copy = look_at_model(part)
    assert (
        copy.layers == (3, 7)
        and copy.top
        and not copy.whole
        and not copy.problem
        and copy.same_as(look_at_model(whole))
    )
    shard = part / "model-00007.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    assert "model-00007" in look_at_model(part).problem and not look_at_model(part).layers
    shard.write_bytes((part / "model-00003.safetensors").read_bytes())
    assert "expected in one shard" in look_at_model(part).problem


def test_copies_that_cannot_be_used(k3b_dir: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in look_at_model(tmp_path / "none").problem
    model = tmp_path / "model"
    shutil.copytree(k3b_dir, model, ignore=shutil.ignore_patterns("golden.*"))
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert look_at_model(model).problem and not look_at_model(model).layers


def test_a_tape_and_a_cut_one(k3b_dir: Path, tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    with opened_model(k3b_dir) as model:
        model.pack(tape)
    whole = look_at_tape(tape)
    assert whole.fingerprint and not whole.problem
    file = tape / "trunk.tape"
    file.write_bytes(file.read_bytes()[:-1])
    assert "copy it again" in look_at_tape(tape).problem
    file.unlink()
    assert "No such file" in look_at_tape(tape).problem
    assert look_at_tape(tmp_path).problem


def test_this_machine(k3b_dir: Path) -> None:
    facts = look(Inquiry("id", "name", "", Roots((str(k3b_dir),)), True, threads=3))
    assert facts.threads == 3 and facts.available_bytes > 0 and facts.cores and facts.decided_by
    assert dict(facts.versions) == versions() and facts.models[0].whole and facts.driver
    assert compare_nodes([facts], versions())[0].usable


def test_memory_nodes_of_a_tree_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3ray.cluster.node_facts.physical_cores", lambda root: (0, 1, 4, 5, 6))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert [(one.number, one.cores, one.memory_bytes) for one in numa_nodes(tmp_path)] == [(0, (0, 1, 4, 5, 6), 102400)]
    for number, cpus, kib in ((0, "0-3", 60), (1, "4-7,12", 40), (10, "", 7)):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 1 kB\n")
    found = [(one.number, one.cores, one.memory_bytes) for one in numa_nodes(tmp_path)]
    assert found == [(0, (0, 1), 61440), (1, (4, 5, 6), 40960)]
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("x")
    assert len(numa_nodes(tmp_path)) == 1
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("4")  # two cores of no memory node
    assert len(numa_nodes(tmp_path)) == 1


def test_speeds_are_kept_with_their_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.PIECES, CHUNK, 8192)
    monkeypatch.setitem(devices.PIECES, EXPERT, 10_000)
    monkeypatch.setattr(node_speeds, "SECONDS", 20.0)  # the files end before
    measured = []

    def memory(threads: int, cores: object, nbytes: int) -> MemorySpeed:
        measured.append(threads)
        return MemorySpeed(threads, 2e10, 1e10, 5e9)

    monkeypatch.setattr(node_speeds, "measure_memory", memory)
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(bytes(200_000))
    kept = tmp_path / "kept"
    kept.mkdir()
    arguments: tuple[list[Path], list[Path], int, tuple[int, ...]] = ([model], [], 2, (0, 1))
    before = node_speeds.node_speeds(*arguments, measure=False, folder=kept)
    assert before.measured == "not measured" and before.read is before.disk_experts is None
    found = node_speeds.node_speeds(*arguments, measure=True, folder=kept)
    assert (found.read, found.trunk, found.experts) == (2e10, 1e10, 5e9)
    assert found.disk_chunks and found.disk_experts and len(found.measured) == 10
    assert node_speeds.node_speeds(*arguments, measure=False, folder=kept) == found and measured == [2]
    other_threads = node_speeds.node_speeds([model], [], 4, (), measure=False, folder=kept)
    assert other_threads.read is None and other_threads.disk_experts == found.disk_experts
    for file in kept.iterdir():
        file.write_text(json.dumps({"what": "other", "day": "2026-01-01", "rates": {"read": -1}}))
    assert node_speeds.node_speeds(*arguments, measure=False, folder=kept) == before
    for text in ("", "[]", "{}", '{"day": 3, "rates": {}}', '{"day": "x", "rates": [1]}'):
        for file in kept.iterdir():
            file.write_text(text)
        assert node_speeds.node_speeds(*arguments, measure=False, folder=kept) == before
    (model / "weights").write_bytes(b"short")
    monkeypatch.setattr(node_speeds, "speeds_folder", lambda: None)  # no cache anywhere
    nothing = node_speeds.node_speeds(*arguments, measure=True, folder=None)
    assert nothing.disk_experts is None and nothing.read == 2e10


def test_hosts_of_one_name_are_told_apart() -> None:
    nodes = [("a", "1"), ("b", "2"), ("b", "3"), ("c", "4"), ("c", "4")]
    assert names_of(nodes) == ["a", "b 2", "b 3", "c 4 #1", "c 4 #2"]


@pytest.mark.ray
def test_every_node_of_a_cluster_is_asked(k3b_dir: Path, tmp_path: Path) -> None:
    """One node: its facts through Ray are those found without, and folders that are not there are its problem."""
    with ray_runtime(RaySettings("local")):
        (facts,) = survey(RootsMap((), Roots((str(k3b_dir),))), threads=1)
        assert facts.driver and facts.models == (look_at_model(k3b_dir),) and len(facts.node_id) == 56
        assert compare_nodes([facts], versions())[0].usable
        (lost,) = survey(RootsMap(((facts.name, Roots((str(tmp_path / "none"),))),), Roots()))
        assert lost.models[0].problem and not compare_nodes([lost], versions())[0].usable
        down = RootsMap((("elsewhere", Roots(("/m",))),), Roots((str(k3b_dir),)))
        here, absent = compare_nodes(survey(down), versions())
        assert here.usable and not absent.usable and absent.node.name == "elsewhere"
        assert "no living node of the cluster has that name" in absent.reasons[0]
        (late,) = survey(RootsMap((), Roots((str(k3b_dir),))), answer_s=0.0)
        assert "did not answer in 0 s" in late.problem or late.models


def test_who_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without power answers nothing, and Ray believes in it for a minute."""
    now, said = [0.0], list[str]()

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        now[0] += timeout
        return [], [ref for ref in refs if ref == "c" or now[0] < 25]

    monkeypatch.setattr(node_survey.ray, "wait", wait)
    monkeypatch.setattr(node_survey.time, "monotonic", lambda: now[0])
    node_survey._await({"b": "host-2", "c": "host-3"}, 35.0, said.append)
    assert now == [35.0]
    assert said == [
        "waiting for host-2, host-3: no answer for 10 s, left out after 35 s",
        "waiting for host-2, host-3: no answer for 20 s, left out after 35 s",
        "waiting for host-3: no answer for 30 s, left out after 35 s",
    ]

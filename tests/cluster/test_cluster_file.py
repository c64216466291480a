"""Files that a user writes about a cluster (cluster.toml, roots.toml) and the plan that is written for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3ray.cluster.cluster_file import NETWORK_GB_S, described_node, described_speeds, read_cluster
from k3ray.cluster.placement import Placement, place
from k3ray.cluster.plan_file import PlanFileFailure, read_plan, write_plan
from k3ray.cluster.roots_file import NamedTwice, Roots, read_roots
from k3ray.cluster.seats import ClusterWishes
from k3ray.cluster.strict_toml import TomlFailure
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
NODE = '[[node]]\nname = "a"\nmemory = "64G"\ncores = 8\nmemory_gb_s = 100\ndisk_gb_s = 3.2\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "file.toml"
    path.write_text(text)
    return path


def test_a_described_cluster(tmp_path: Path) -> None:
    text = NODE + 'count = 2\nnuma = 2\n[[node]]\nname = "b"\nmemory = "1GiB"\ncores = 3\nmemory_gb_s = 50.5\n'
    text += 'disk_gb_s = 1\ntrunk_gb_s = 40\nexpert_gb_s = 20\nnetwork_gb_s = 0.125\nlayers = "2-4"\n'
    nodes = read_cluster(write(tmp_path, text), 9)
    assert [(node.name, node.available_bytes, node.driver) for node in nodes] == [
        ("a-1", 64 * 10**9, True), ("a-2", 64 * 10**9, False), ("b", 1 << 30, False),
    ]  # fmt: skip
    first, last = nodes[0], nodes[-1]
    assert [place.cores for place in first.numa] == [(0, 1, 2, 3), (4, 5, 6, 7)] and first.threads == 8
    assert sum(place.memory_bytes for place in first.numa) == first.available_bytes
    assert (first.speeds.read, first.speeds.disk_chunks, first.speeds.disk_experts) == (1e11, 3.2e9, 3.2e9)
    assert first.speeds.network == NETWORK_GB_S * 1e9 and first.layers == frozenset(range(9)) and first.top
    assert (last.speeds.trunk, last.speeds.experts, last.speeds.network) == (4e10, 2e10, 1.25e8)
    assert last.layers == frozenset({2, 3, 4}) and not last.top


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("", "node", "a [[node]] table"),
        ("node = 3\n", "node", "a [[node]] table"),
        ("[[node]]\n", "node[0].name", "found nothing, expected a name"),
        (NODE + "color = 1\n", "node[0].color", "one of the known fields: cores"),
        (NODE + "[extra]\n", "extra", "one of the known fields: node"),
        (NODE.replace('"64G"', "64"), "node[0].memory", 'found 64, expected a size like "64G"'),
        (NODE.replace('"64G"', '"64"'), "node[0].memory", "with its unit"),
        (NODE.replace("cores = 8", "cores = true"), "node[0].cores", "a whole number from 1 to 4096"),
        (NODE.replace("cores = 8", "cores = 0"), "node[0].cores", "found 0"),
        (NODE.replace("cores = 8", "cores = 8.5"), "node[0].cores", "found 8.5"),
        (NODE.replace("3.2", "0"), "node[0].disk_gb_s", "above 0"),
        (NODE.replace("3.2", "nan"), "node[0].disk_gb_s", "found nan"),
        (NODE.replace("3.2", "inf"), "node[0].disk_gb_s", "found inf"),
        (NODE.replace("3.2", "-1"), "node[0].disk_gb_s", "found -1"),
        (NODE + "count = 257\n", "node[0].count", "1 to 256"),
        (NODE + "count = 200\n" + NODE.replace('"a"', '"b"') + "count = 200\n", "node", "at most 256"),
        (NODE + "numa = 9\n", "node[0].numa", "as many memory nodes as cores (8)"),
        (NODE + 'layers = "3"\n', "node[0].layers", "within"),
        (NODE + 'layers = "5-3"\n', "node[0].layers", '"0-8"'),
        (NODE + 'layers = "0-9"\n', "node[0].layers", '"0-8"'),
        (NODE + NODE, "node", "the name 'a' twice"),
        (NODE.replace('"a"', '"\\u001b[2J"'), "node[0].name", "a name for the machine"),
        ("[[node]", "", "no TOML"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(TomlFailure) as failure:
        read_cluster(write(tmp_path, text), 9)
    assert failure.value.field == field and said in str(failure.value) and failure.value.exit_code == 2
    assert str(failure.value).startswith(str(tmp_path / "file.toml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long").write_text("#" * (1 << 20) + "\n")
    for name, said in (("none", "No such file"), (".", "Is a directory"), ("binary", "no TOML"), ("long", "more than")):
        with pytest.raises(TomlFailure, match=said):
            read_cluster(tmp_path / name, 9)


def test_roots_by_name_address_and_for_all_others(tmp_path: Path) -> None:
    here = Roots(("/here",), ())
    path = write(tmp_path, '[node.a]\nmodels = ["/m", "/n"]\ntapes = ["/t"]\n[node."10.0.0.2"]\nmodels = ["/o"]\n')
    roots = read_roots(path, here)
    assert roots.of("a", "10.0.0.1") == Roots(("/m", "/n"), ("/t",))
    assert roots.of("b", "10.0.0.2") == Roots(("/o",), ()) and roots.of("c", "10.0.0.3") == here
    assert roots.unknown({"a", "10.0.0.1", "b"}) == ["10.0.0.2"]
    star = read_roots(write(tmp_path, '[node."*"]\ntapes = ["/t"]\n'), here)
    assert star.of("c", "") == Roots((), ("/t",)) and star.unknown(set()) == []


def test_roots_that_name_one_node_twice(tmp_path: Path) -> None:
    """By its name and by its address: one of the two tables would be left unread without a word."""
    roots = read_roots(write(tmp_path, '[node.a]\nmodels = ["/m"]\n[node."10.0.0.1"]\nmodels = ["/n"]\n'), Roots())
    with pytest.raises(NamedTwice, match=r'\[node.a\] and \[node."10.0.0.1"\], which are the same node') as refused:
        roots.refuse_twice("a", "10.0.0.1")
    assert refused.value.exit_code == 2
    for other in (("a", "10.0.0.2"), ("b", "10.0.0.1"), ("a", "a")):
        roots.refuse_twice(*other)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("", "node", "a table [node.NAME]"),
        ('[node.a]\nmodel = ["/m"]\n', "node.a.model", "known fields: models, tapes"),
        ('[node.a]\nmodels = "/m"\n', "node.a.models", "a list of folders"),
        ('[node.a]\nmodels = ["m"]\n', "node.a.models", "begins with /"),
        ('[node.a]\nmodels = ["/m", "/m"]\n', "node.a.models", "twice"),
        ("[node.a]\n", "node.a", "no folder"),
        ("[node]\na = 3\n", "node.a", "a table with models"),
        ('[nodes.a]\nmodels = ["/m"]\n', "node", "found nothing"),
    ],
)
def test_roots_that_are_not_understood(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(TomlFailure) as failure:
        read_roots(write(tmp_path, text), Roots())
    assert failure.value.field == field and said in str(failure.value)


@pytest.fixture(scope="module")
def placement() -> Placement:
    layers = tuple(range(9))
    nodes = [described_node(name, 10**9, 4, described_speeds(50, 2), layers, driver=name == "a") for name in "ab"]
    return place(SMALL, plan_layout(SMALL, 32 << 10), nodes, ClusterWishes(positions=64))


def test_a_plan_comes_back_as_it_was(tmp_path: Path, placement: Placement) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, SMALL, placement)
    assert read_plan(path, SMALL) == placement and [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    first = path.read_bytes()
    write_plan(path, SMALL, placement)
    assert path.read_bytes() == first
    with pytest.raises(PlanFileFailure, match="plan of another model"):
        read_plan(path, replace(SMALL, hidden_size=1))
    with pytest.raises(PlanFileFailure, match="No such file"):
        read_plan(tmp_path / "none.json", SMALL)
    with pytest.raises(PlanFileFailure, match="no file that can be written"):
        write_plan(tmp_path / "no" / "plan.json", SMALL, placement)


def changed(tmp_path: Path, placement: Placement, *steps: Any) -> Path:
    """The written plan with the value at the path of keys replaced by the last step."""
    path = tmp_path / "plan.json"
    write_plan(path, SMALL, placement)
    document = json.loads(path.read_text())
    place_of = document
    for step in steps[:-2]:
        place_of = place_of[step]
    place_of[steps[-2]] = steps[-1]
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (("version", 2), "another kind of file or version"),
        (("format", "k3ray"), "another kind of file or version"),
        (("extra", 1), "the field extra, which is not known"),
        (
            ("placement", "stages", 0, "budget", "extra", 1),
            "the field placement.stages[0].budget.extra, which is not known",
        ),
        (("placement", "stages", 0, "threads", "2"), "no plan"),
        (("placement", "stages", 0, "threads", 0), "numbers of the actor"),
        (("placement", "stages", 0, "node", 7), "numbers of the actor"),
        (("placement", "stages", 0, "node", -1), "numbers of the actor"),
        (("placement", "stages", 0, "stop", 1), "each once, in order"),
        (("placement", "stages", 0, "stop", 10**12), "each once, in order"),
        (("placement", "stages", []), "each once, in order"),
        (("placement", "num_layers", 8), "num_layers 8"),
        (("placement", "experts", []), "experts of 0 layers dealt out"),
        (("placement", "experts", 0, "counts", [1, 2]), "3 experts over 2 shards"),
        (("placement", "experts", 0, "counts", [129, -1]), "experts over 2 shards"),
        (("placement", "shards", 1, "budget", "owned_experts", 3), "shard 1 with 3 experts"),
        (("placement", "nodes", 1, "budget_bytes", 1000), "bytes on node b, expected at most 1,000"),
        (("placement", "prediction", "disk_s", "1"), "no plan"),
    ],
)
def test_a_plan_that_was_changed_is_refused(
    tmp_path: Path, placement: Placement, steps: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(PlanFileFailure) as failure:
        read_plan(changed(tmp_path, placement, *steps), SMALL)
    assert said in str(failure.value) and failure.value.exit_code == 2


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=40), cut=st.floats(0, 1))
def test_a_damaged_plan_is_refused(tmp_path: Path, placement: Placement, data: bytes, cut: float) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, SMALL, placement)
    whole = path.read_bytes()
    at = int(cut * (len(whole) - 2))
    for text in (data, whole[:at], whole[:at] + b"\x00" + whole[at:]):
        path.write_bytes(text)
        with pytest.raises(PlanFileFailure):
            read_plan(path, SMALL)

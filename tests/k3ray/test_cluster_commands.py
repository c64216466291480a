"""k3ray nodes and k3ray plan: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import typer
from rich.console import Console

from k3ray.cluster.plan_file import read_plan
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.strict_toml import TomlFailure
from k3ray.cluster.topology import NodeFacts, Verdict
from k3ray.commands import nodes, plan
from k3ray.files import OutputFailure
from k3ray.nodes import Nodes
from k3ray.workers.model.config import read_config

GB = 10**9
Captured = pytest.CaptureFixture[str]
CLUSTER = '[[node]]\nname = "host"\ncount = 3\nmemory = "64G"\ncores = 16\nmemory_gb_s = 100\ndisk_gb_s = 3.2\n'


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment of the tester's."""
    for name in ("K3_MODEL_DIR", "K3_TOK_FILES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "local")


def cluster_file(folder: Path, text: str = CLUSTER) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def planned(model: Path | None, cluster: Path | None, *, out: Path | None = None, as_json: bool = True,
            wishes: ClusterWishes | None = None, memory: tuple[tuple[str, str], ...] = ()) -> None:  # fmt: skip
    wishes = wishes or ClusterWishes(positions=512)
    plan.run(model, wishes, memory, cluster, None, None, False, out, as_json)


def test_the_nodes_at_hand(k3b_dir: Path, capsys: Captured) -> None:
    nodes.run(k3b_dir, None, None, False, as_json=True)
    printed = capsys.readouterr()
    (record,) = json.loads(printed.out)["nodes"]
    assert record["usable"] and record["reasons"] == [] and record["models"][0]["whole"]
    assert printed.err.splitlines()[-1].endswith(f"next: k3ray plan {k3b_dir}")
    nodes.run(k3b_dir, None, None, False, as_json=False)
    assert "(here)" in capsys.readouterr().out


def test_the_nodes_in_a_narrow_terminal(k3b_dir: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty columns hold no table of nine: the same things stand below each other, none of them cut."""
    monkeypatch.setattr(nodes, "wide_console", lambda: Console(width=40))
    nodes.run(k3b_dir, None, None, False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("(here) ok") and "\u2026" not in "".join(lines)
    assert [line.split(":")[0] for line in lines[1:4]] == ["  cores", "  memory nodes", "  memory, by"]
    assert any(line.startswith("  model: ") and str(k3b_dir) in line for line in lines)


def test_a_node_that_is_left_out_ends_with_1_and_its_reason(k3b_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    model = tmp_path / "model"
    shutil.copytree(k3b_dir, model, ignore=shutil.ignore_patterns("golden.*"))
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(typer.Exit) as ending:
        nodes.run(model, None, None, False, as_json=False)
    printed = capsys.readouterr()
    assert ending.value.exit_code == 1 and "left out" in printed.out and "0 of 1 node can take part" in printed.err
    with pytest.raises(PlacementFailure, match="no node can take part"):
        planned(model, None)


@pytest.mark.parametrize(
    ("left", "reasons", "said"),
    [
        ((0, 5 * GB, 4 * GB), ((), (), ()), "all 3 nodes can take part, with 9.00 GB, of which 1 has {no}: n0; next:"),
        ((1, 5 * GB, 0), ((), (), ()), "all 3 nodes can take part, with 5.00 GB, of which 2 have {no}: n0, n2; next:"),
        ((9 * GB, 0, 0), ((), (), ("why",)), "2 of 3 nodes can take part, with 9.00 GB, of which 1 has {no}: n1; left"),
        ((GB, 2 * GB), ((), ()), "all 2 nodes can take part, with 3.00 GB; next: k3ray plan /model"),
    ],
)
def test_nodes_with_nothing_left_are_named(
    left: tuple[int, ...], reasons: tuple[tuple[str, ...], ...], said: str
) -> None:
    """`ray start --memory=1`, or another run that holds it all: the node is sound, but no part can go there now."""
    facts = [NodeFacts(str(i), f"n{i}", available_bytes=nbytes) for i, nbytes in enumerate(left)]
    found = Nodes(tuple(Verdict(node, why) for node, why in zip(facts, reasons, strict=True)))
    expected = said.format(no="no memory left for a part of any model")
    assert nodes.conclusion(found, Path("/model")).startswith(expected)


def test_a_node_that_is_only_busy_ends_with_0(k3b_dir: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = NodeFacts("n", "host", available_bytes=0, decided_by="Ray")
    monkeypatch.setattr(nodes, "find_nodes", lambda *_: Nodes((Verdict(busy, ()),)))
    nodes.run(k3b_dir, None, None, False, as_json=False)
    assert "the one node can take part, with 0, of which 1 has no memory left" in capsys.readouterr().err


def test_roots_name_this_machine_or_are_refused(k3b_dir: Path, tmp_path: Path, capsys: Captured) -> None:
    roots = tmp_path / "roots.toml"
    roots.write_text(f'[node.{json.dumps(socket.gethostname())}]\nmodels = ["{k3b_dir.resolve()}"]\n')
    nodes.run(None, None, roots, False, as_json=True)
    (record,) = json.loads(capsys.readouterr().out)["nodes"]
    assert record["models"][0]["path"] == str(k3b_dir.resolve())
    roots.write_text('[node.elsewhere]\nmodels = ["/m"]\n')
    with pytest.raises(TomlFailure, match=r"found elsewhere, expected .* this machine"):
        nodes.run(None, None, roots, False, as_json=True)


def test_described_nodes_that_are_too_small_are_left_out_as_generate_does(
    k3b_dir: Path, tmp_path: Path, capsys: Captured
) -> None:
    """One of a size that the model fits into, ten that cannot have a layer: all ten in one step, each one said."""
    shape = "cores = 4\nmemory_gb_s = 50\ndisk_gb_s = 2\n"
    text = (
        f'[[node]]\nname = "big"\nmemory = "2G"\n{shape}[[node]]\nname = "tiny"\ncount = 10\nmemory = "0.2G"\n{shape}'
    )
    planned(k3b_dir, cluster_file(tmp_path, text))
    printed = capsys.readouterr()
    assert [node["name"] for node in json.loads(printed.out)["placement"]["nodes"]] == ["big"]
    assert [line.split(":")[0] for line in printed.err.splitlines() if ": left out: " in line] == [
        f"tiny-{number}" for number in range(1, 11)
    ]


def test_a_plan_for_a_described_cluster(shared_data: Path, tmp_path: Path, capsys: Captured) -> None:
    """The released model on three machines that do not exist; the file holds what the table shows."""
    out = tmp_path / "plan.json"
    planned(shared_data / "k3-release", cluster_file(tmp_path), out=out)
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["summary"].pop("dominated_by") == "disk" and record["summary"]["seconds"] > 1
    del record["summary"]
    assert json.loads(out.read_text()) == record
    placement = read_plan(out, read_config(shared_data / "k3-release"))
    assert [node.name for node in placement.nodes] == ["host-1", "host-2", "host-3"]
    assert len(placement.stages) == len(placement.shards) == 3
    assert printed.err.splitlines()[-1] == f"planned 3 stages and 3 shards on 3 nodes; written to {out}"
    planned(shared_data / "k3-release", cluster_file(tmp_path), as_json=False)
    text = capsys.readouterr().out
    assert "host-3" in text and "bound by disk" in text and "shard 2 of 3" in text


def test_a_plan_for_this_machine(capsys: Captured) -> None:
    planned(None, None, memory=(("--memory", "1G"),))
    printed = capsys.readouterr()
    record = json.loads(printed.out)["placement"]
    assert record["nodes"][0]["budget_bytes"] == 10**9 and len(record["stages"]) == 1
    assert "this machine; no cluster is joined" in printed.err
    planned(None, None, as_json=False)
    assert "a token reads 0 of trunk" in capsys.readouterr().out


def test_a_place_that_takes_no_plan_is_refused_before_any_work(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(OutputFailure, match="does not exist; make it first"):
        planned(None, None, out=tmp_path / "none" / "plan.json")
    assert capsys.readouterr().err == ""


def test_what_does_not_go_together(k3b_dir: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path)
    with pytest.raises(PlacementFailure, match="leave out --roots and --measure"):
        plan.run(k3b_dir, ClusterWishes(), (), cluster, None, None, True, None, True)
    with pytest.raises(PlacementFailure, match="--stages: found 4, expected 1 to 3"):
        planned(k3b_dir, cluster, wishes=ClusterWishes(stages=4))
    with pytest.raises(PlacementFailure, match="asks for 65"):
        planned(k3b_dir, cluster, memory=(("--memory", "65G"),))

"""k3ray plan: which actor sits on which node with what of the model, and how long a token will take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from k3ray.cluster.budget_plan import EXPERTS, PINNED, gigabytes
from k3ray.cluster.cluster_file import read_cluster
from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.cluster.plan_file import plan_record, write_plan
from k3ray.cluster.prediction import Prediction
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.topology import NodeFacts
from k3ray.cluster.wishes import merge_wishes
from k3ray.commands.budget import read_layout, wide_console
from k3ray.commands.nodes import speeds_text
from k3ray.commands.terminal import say
from k3ray.environment import Environment, read_environment
from k3ray.files import check_writable
from k3ray.model_source import find_model
from k3ray.nodes import find_nodes
from k3ray.placing import place_what_fits
from k3ray.workers.counted import counted
from k3ray.workers.model.config import ModelConfig, read_config


def run(
    model_dir: Path | None,
    wishes: ClusterWishes,
    memory: Sequence[tuple[str, str]],
    cluster: Path | None,
    roots: Path | None,
    tape: Path | None,
    measure: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan for the nodes at hand, or for those that `cluster` describes. memory: --memory or --preset, for a node."""
    environment = read_environment()
    if out is not None:
        check_writable(out, "--out")
    source = find_model(model_dir, None, environment)
    say(source.describe())
    config = read_config(source.model_dir)
    layout = read_layout(config, tape)
    asked = merge_wishes(memory)
    wishes = ClusterWishes(
        wishes.stages, wishes.shards, wishes.seats, asked.total_bytes, asked.preset, wishes.positions
    )
    found = _nodes(environment, config, source.model_dir, cluster, roots, tape, measure)
    placement, nodes = place_what_fits(config, layout, found, wishes, say)
    if as_json:
        print(json.dumps({**plan_record(config, placement), "summary": summary(placement.prediction)}, indent=1))
    else:
        console = wide_console()
        console.print(placement_table(placement))
        for line in prediction_lines(placement.prediction, nodes):
            console.print(line, highlight=False, soft_wrap=True)
    for node in _without_tape(placement, nodes) if cluster is None else ():
        say(f"{node}: the plan streams trunk there, and there is no tape yet: `k3ray pack` makes one, --tape names it")
    if out is not None:
        write_plan(out, config, placement)
    kept = "keep it with --out plan.json"
    if out is not None:
        kept = f"written to {out}" + (_run_with(source.model_dir, tape, roots, out) if cluster is None else "")
    say(
        f"planned {counted(len(placement.stages), 'stage')} and {counted(len(placement.shards), 'shard')} on "
        f"{counted(len(nodes), 'node')}; {kept}"
    )


def _run_with(model_dir: Path, tape: Path | None, roots: Path | None, out: Path) -> str:
    """What to type next, with the options that this plan was made for."""
    named = "".join(f" --{option} {path}" for option, path in (("tape", tape), ("roots", roots)) if path is not None)
    return f"; next: k3ray generate {model_dir}{named} --plan {out}"


def placement_table(placement: Placement) -> Table:
    """A row an actor, under a row for what its node has once and takes in all."""
    table = Table("node", "actor", "threads", "memory", "trunk in memory", "streamed a token", "experts held")
    for column in table.columns[2:]:
        column.justify = "right"
    for number, node in enumerate(placement.nodes):
        whole = f"{gigabytes(placement.node_bytes(number))} of {gigabytes(node.budget_bytes)}"
        table.add_row(node.name, "all, with what is there once", "", whole)
        for actor in placement.actors_of(number):
            table.add_row("", *_actor_cells(actor))
        table.add_section()
    return table


def prediction_lines(expected: Prediction, nodes: Sequence[NodeFacts]) -> list[str]:
    """What a token reads, sends and takes."""
    reads = (
        f"a token reads {gigabytes(expected.trunk_bytes)} of trunk and {gigabytes(expected.expert_bytes)} of experts "
        f"if they are asked for evenly (at most {gigabytes(expected.expert_bytes_at_most)})"
    )
    sends = (
        f"it sends {sum(expected.way_bytes.values()):,} bytes of messages, of which {expected.network_bytes:,} between "
        f"nodes, in {counted(expected.trips, 'trip')} one after the other"
    )
    speeds = ", ".join(dict.fromkeys(speeds_text(node.speeds) for node in nodes))
    if expected.seconds is None:
        return [reads, sends, f"how long it takes is not known (speeds: {speeds}): give --measure"]
    assert expected.disk_s is not None and expected.kernels_s is not None
    time = (
        f"it takes {expected.seconds:,.3f} s, {expected.tokens_per_s:.3g} tokens a second: disk {expected.disk_s:,.3f} "
        f"s, memory and kernels {expected.kernels_s:,.3f} s, messages {expected.network_s:,.3f} s; bound by "
        f"{expected.dominated_by}"
    )
    return [reads, sends, time, f"GB/s of memory and disk: {speeds}"]


def summary(expected: Prediction) -> dict[str, Any]:
    """The prediction's derived figures."""
    return {
        "read_bytes": expected.read_bytes,
        "seconds": expected.seconds,
        "tokens_per_s": expected.tokens_per_s,
        "dominated_by": expected.dominated_by,
    }


def _nodes(
    environment: Environment,
    config: ModelConfig,
    model_dir: Path,
    cluster: Path | None,
    roots: Path | None,
    tape: Path | None,
    measure: bool,
) -> list[NodeFacts]:
    """The described nodes, or those at hand that can take part; those that cannot are named."""
    if cluster is not None:
        if roots is not None or measure:
            raise PlacementFailure("--cluster describes machines that need not exist: leave out --roots and --measure")
        return read_cluster(cluster, config.num_hidden_layers)
    nodes = find_nodes(environment, model_dir, tape, roots, measure, say)
    for one in nodes.verdicts:
        if not one.usable:
            say(f"{one.node.name}: left out: {'; '.join(one.reasons)}")
    if not nodes.usable:
        reasons = "; ".join(f"{one.node.name}: {one.reasons[0]}" for one in nodes.verdicts)
        raise PlacementFailure(f"no node can take part: {reasons}; or describe a cluster with --cluster")
    return nodes.usable


def _without_tape(placement: Placement, nodes: Sequence[NodeFacts]) -> list[str]:
    """The nodes whose stages stream what is on no tape."""
    streaming = {stage.node for stage in placement.stages if stage.budget.streamed_bytes}
    return [nodes[number].name for number in sorted(streaming) if not nodes[number].tapes]


def _actor_cells(actor: ActorPlacement) -> list[str]:
    budget = actor.budget
    name = budget.name if actor.numa is None else f"{budget.name}, memory node {actor.numa}"
    held = f"{budget.cache_slots:,} of {budget.owned_experts:,}" if budget.owned_experts else ""
    held += f" ({gigabytes(budget.parts[EXPERTS])})" if budget.parts.get(EXPERTS) else ""
    trunk = gigabytes(budget.parts.get(PINNED, 0)) if actor.stop else ""
    streamed = gigabytes(budget.streamed_bytes) if actor.stop else ""
    return [name, str(actor.threads), gigabytes(budget.total_bytes), trunk, streamed, held]

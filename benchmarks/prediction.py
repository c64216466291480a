"""The planner's prediction against what a run does: bytes to the byte, and seconds a token.

    .venv/bin/python -m benchmarks.prediction [--folder DIR] [--gen 24] [--only TEXT]

Makes two checkpoints and their tapes (8 GB, removed at the end unless --folder names where they stay). For each set-up:
the speeds are measured as `k3ray plan --measure` does, and the plan is made and run on a Ray of its own; the speeds are
measured again before each third of the tokens and at the end, so that what else the machine does meets both, and the
median of the four predictions is compared with the median of the tokens. Bytes of trunk, experts and messages are
those of the decoded tokens alone: what is routed is recorded, and messages and experts' reads are found again from it
exactly. Ends with 1 where bytes differ, or where seconds are further apart than --within.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.decoded_run import PROMPT, WARM_UP, Decoded, decode
from benchmarks.prediction_setups import SETUPS, SMOKE_SPEC, SetUp, made, planned
from benchmarks.replayed_experts import Asked, Replay
from benchmarks.result_rows import RESULTS, append_records, this_machine
from k3ray.cluster.budget_plan import COPY, EXPERTS, PINNED, RING
from k3ray.cluster.message_sizes import add_ways, routed_ways, stage_ways
from k3ray.cluster.placement import Placement
from k3ray.cluster.prediction import Prediction
from k3ray.cluster.roots_file import Roots, RootsMap
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.topology import NodeFacts
from k3ray.cluster_report import message_report
from k3ray.nodes import look_here
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import plan_layout
from k3ray.workers.tape.manifest import read_manifest
from k3ray.workers.tape.residency import fixed_residency

CHUNK_BYTES, SMOKE_CHUNK = 8 << 20, 256 << 10


def replayed(config: ModelConfig, placement: Placement, model: Path, run: Decoded) -> Asked:
    """What the decoded tokens must have asked of the experts' owners."""
    replay = Replay(config, placement, model)
    try:
        replay.run([one for one in run.routing if one[0] < run.first_step])
        before = replay.asked
        replay.run([one for one in run.routing if one[0] >= run.first_step])
        return replay.asked - before
    finally:
        replay.close()


def foretold_ways(config: ModelConfig, placement: Placement, run: Decoded) -> dict[str, int]:
    """Bytes of the decoded tokens' messages by way."""
    layers = [(stage.first, stage.stop) for stage in placement.stages]
    total: dict[str, int] = {}
    for step in range(len(run.seconds)):
        add_ways(total, stage_ways(config, layers, step=run.first_step + step))
    if placement.shards:
        owners = ExpertOwners(len(placement.shards), config.num_experts, placement.experts)
        routing = [one for one in run.routing if one[0] >= run.first_step]
        add_ways(total, routed_ways(config, layers, owners, len(placement.shards), routing))
    return total


def differences(config: ModelConfig, placement: Placement, costs: LayerCosts, run: Decoded, asked: Asked) -> list[str]:
    """Everything that must be equal to the byte and is not."""
    tokens, counts = len(run.seconds), run.counts
    ways = message_report(counts.messages, [stage.budget.name for stage in placement.stages]).ways
    pairs: list[tuple[str, object, object]] = [
        ("bytes of trunk", placement.prediction.trunk_bytes * tokens, run.trunk_used),
        ("experts asked for", asked.requests, counts.requests),
        ("experts in memory", asked.hits, counts.hits),
        ("bytes of experts", asked.read_bytes, counts.expert_bytes),
        ("bytes of messages", foretold_ways(config, placement, run), dict(ways)),
    ]
    for stage in placement.stages:
        chunks = costs.layout.chunks_of(stage.first, stage.stop, stage.stop == config.num_hidden_layers)
        taken = fixed_residency(costs.layout, chunks, stage.budget.pinned_chunks, stage.budget.ring_chunks)
        planned_bytes = sum(stage.budget.parts.get(part, 0) for part in (PINNED, RING, COPY))
        pairs.append((f"memory for the trunk of {stage.budget.name}", planned_bytes, taken.memory_bytes))
    for actor in (*placement.stages, *placement.shards):
        arena = actor.budget.cache_slots * expert_slot_bytes(config)
        pairs.append((f"memory for the experts of {actor.budget.name}", actor.budget.parts.get(EXPERTS, 0), arena))
    found = [f"{what}: {expected} foretold, {measured} measured" for what, expected, measured in pairs
             if expected != measured]  # fmt: skip
    if sum(run.peaks.values()) > planned_memory(placement):
        found.append(f"memory: {planned_memory(placement):,} planned, {sum(run.peaks.values()):,} held")
    return found


def planned_memory(placement: Placement) -> int:
    """Bytes of all actors, with the libraries that they share."""
    actors = sum(actor.budget.total_bytes for actor in (*placement.stages, *placement.shards))
    return actors + sum(node.parts.get("libraries, once", 0) for node in placement.nodes)


def measure(setup: SetUp, model: Path, tape: Path, gen: int) -> tuple[dict[str, object], list[str]]:
    """One set-up: its row, and what did not hold to the byte."""
    config = read_config(model)
    layout = plan_layout(config, read_manifest(tape).identity.chunk_bytes)
    costs = LayerCosts(config, layout, PROMPT + WARM_UP + gen + 1)
    roots = RootsMap((), Roots((str(model.resolve()),), (str(tape.resolve()),)))
    load = os.getloadavg()[0]
    node = look_here(roots, None, None, measure=True)
    placement = planned(setup, config, costs, node)
    looks: list[NodeFacts] = []

    def look() -> None:
        looks.append(look_here(roots, None, None, measure=True))

    run = decode(placement, node, model, config, gen, look)
    look()
    expected = [planned(setup, config, costs, replace(node, speeds=one.speeds)).prediction for one in looks]
    asked = replayed(config, placement, model, run)
    row = record(setup, expected, run, asked)
    memory = {"planned_mb": planned_memory(placement) // 10**6, "held_mb": sum(run.peaks.values()) // 10**6}
    return {"load": round(load, 1), **row, **memory}, differences(config, placement, costs, run, asked)


def record(setup: SetUp, expected: Sequence[Prediction], run: Decoded, asked: Asked) -> dict[str, object]:
    """The row of a set-up. expected: the same plan by the speeds of different moments."""
    known = sorted(expected, key=lambda one: one.seconds or 0.0)
    middle, tokens, counts = known[len(known) // 2], len(run.seconds), run.counts
    foretold_s, measured_s = median(one.seconds or 0.0 for one in known), median(run.seconds)
    parts = {name: round(value / tokens * 1e3, 1)
             for name, value in counts.times.parts(sum(run.seconds)).items()}  # fmt: skip
    return {
        "setup": setup.name,
        "tokens": tokens,
        "trunk_bytes": middle.trunk_bytes,
        "trunk_bytes_measured": run.trunk_used // tokens,
        "expert_bytes_evenly": middle.expert_bytes,
        "expert_bytes_at_most": middle.expert_bytes_at_most,
        "expert_bytes_replayed": asked.read_bytes // tokens,
        "expert_bytes_measured": counts.expert_bytes // tokens,
        "message_bytes_evenly": sum(middle.way_bytes.values()),
        "message_bytes_measured": counts.messages.total_bytes // tokens,
        "hit_rate": round(counts.hit_rate, 3),
        "predicted_ms": round(foretold_s * 1e3, 1),
        "predicted_least_ms": round((known[0].seconds or 0.0) * 1e3, 1),
        "predicted_most_ms": round((known[-1].seconds or 0.0) * 1e3, 1),
        "measured_ms": round(measured_s * 1e3, 1),
        "fastest_ms": round(min(run.seconds) * 1e3, 1),
        "predicted_disk_ms": round((middle.disk_s or 0.0) * 1e3, 1),
        "predicted_kernels_ms": round((middle.kernels_s or 0.0) * 1e3, 1),
        "predicted_between_ms": round(middle.network_s * 1e3, 1),
        **{f"{name}_ms": value for name, value in parts.items()},
        "ratio": round(foretold_s / measured_s, 3),
    }


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """A column a set-up."""
    for name in rows[0]:
        print(f"{name:24s}" + "".join(f"{row[name]!s:>46s}" for row in rows))


def main() -> None:
    """Measure, print, append; exit 1 with what did not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.prediction", description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoints are made and stay")
    parser.add_argument("--gen", type=int, default=24, help="tokens that count")
    parser.add_argument("--only", default="", help="the set-ups with this in their name")
    parser.add_argument("--within", type=float, default=0.25, help="of the measured seconds")
    parser.add_argument("--smoke", action="store_true", help="small models: the bytes alone are judged")
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument("--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-prediction.csv")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="prediction-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, wrong = [], []
    try:
        for setup in (one for one in SETUPS if asked.only in one.name):
            spec, chunk = (SMOKE_SPEC, SMOKE_CHUNK) if asked.smoke else (setup.spec, CHUNK_BYTES)
            print(f"{setup.name}: measuring", file=sys.stderr)
            row, found = measure(setup, *made(folder, spec, chunk), asked.gen)
            rows.append(row)
            wrong += [f"{setup.name}: {one}" for one in found]
            if not asked.smoke and abs(float(str(row["ratio"])) - 1) > asked.within:
                wrong.append(f"{setup.name}: seconds are foretold as {row['ratio']} times the measured ones")
    finally:
        if asked.folder is None:
            shutil.rmtree(folder)
    print_rows(rows)
    if not asked.smoke:
        path = asked.csv or RESULTS / f"{asked.machine}-prediction.csv"
        append_records(path, asked.machine, rows)
        print(f"added {len(rows)} rows to {path}")
    if wrong:
        sys.exit("DID NOT HOLD:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()

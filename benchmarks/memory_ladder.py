"""Memory as a dial, measured: the same tokens at several budgets; every promise about them is checked.

    .venv/bin/python -m benchmarks.memory_ladder --folder /nvme --repeats 3

Makes a checkpoint of the released widths and its tape (22 GB, removed at the end) unless both are named. Every budget
is run as a process of its own, in turn, and the disk is measured before every run. Ends with 1 when a run breaks its
plan, when the bits of two runs differ, or when streaming does not overlap with the arithmetic.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, pstdev

from benchmarks.memory_rows import append_runs
from benchmarks.memory_runs import Run, Rung, run_rung
from benchmarks.released_widths import released_widths
from benchmarks.result_rows import RESULTS, this_machine

OVERLAP = 1.15  # a step takes at most so many times the longer of reading and computing
BUDGETS = ("4G", "6G", "8G", "16G")


def rungs(budgets: Sequence[str]) -> list[Rung]:
    """The least that can run, and the budgets."""
    return [Rung("ultra", (("--preset", "ultra"),)), *(Rung(size, (("--memory", size),)) for size in budgets)]


def climb(arguments: argparse.Namespace, model: Path, tape: Path) -> list[Run]:
    """Run every rung `repeats` times, in turn."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="memory-ladder-") as folder:
        for turn in range(arguments.repeats):
            for rung in rungs(arguments.budgets):
                run = run_rung(model, tape, rung, turn, arguments.gen, Path(folder), arguments.cgroup)
                print(f"{rung.name:8s} {run.step:.2f} s/token, load {run.load:.1f}", file=sys.stderr)
                runs.append(run)
    return runs


def by_rung(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each rung, in the order of the first."""
    names = dict.fromkeys(run.rung.name for run in runs)
    return {name: [run for run in runs if run.rung.name == name] for name in names}


def compute_seconds(runs: Sequence[Run]) -> dict[int, float]:
    """The median step of the run that reads no trunk, by turn; empty when there is none."""
    return {run.turn: run.step for run in runs if not run.streams}


def overlap_ratio(runs: Sequence[Run], compute_s: Mapping[int, float]) -> float:
    """The median of step / max(read, compute) over the runs of one rung: the disk's speed measured just before each
    run, the arithmetic's in the same turn.
    """
    return median(run.step / max(run.read_seconds, compute_s[run.turn]) for run in runs)


def broken_claims(runs: Sequence[Run]) -> list[str]:
    """Everything that was promised and did not hold."""
    broken = [line for run in runs for line in run.broken_claims()]
    digests = {run.digest for run in runs}
    if len(digests) > 1:
        broken.append(f"{len(digests)} different results: {', '.join(sorted(digest[:16] for digest in digests))}")
    compute_s = compute_seconds(runs)
    if not compute_s:
        return [*broken, "no budget held the whole trunk, so the overlap cannot be judged: add a larger one"]
    for name, of_rung in by_rung(runs).items():
        if of_rung[0].streams and (ratio := overlap_ratio(of_rung, compute_s)) > OVERLAP:
            broken.append(f"{name}: a step takes {ratio:.2f} times the longer of reading and computing, not {OVERLAP}")
    return broken


def print_table(runs: Sequence[Run]) -> None:
    """One line a rung."""
    compute_s = compute_seconds(runs)
    print(f"{'memory':8s} {'plan':>6s} {'peak':>6s}  {'s/token mean':>12s} {'+-':>5s} {'median':>6s} "
          f"{'trunk':>6s} {'experts':>7s} {'hits':>5s} {'I/O':>4s} {'read s':>6s} {'ratio':>5s}")  # fmt: skip
    for name, of_rung in by_rung(runs).items():
        steps, last = [step for run in of_rung for step in run.steps], of_rung[-1]
        print(
            f"{name:8s} {last.plan.total_bytes / 1e9:6.2f} {max(run.peak_bytes for run in of_rung) / 1e9:6.2f}  "
            f"{mean(steps):12.2f} {pstdev(steps):5.2f} {median(steps):6.2f} {last.trunk_bytes / 1e9:6.2f} "
            f"{mean(run.expert_bytes for run in of_rung) / 1e9:7.2f} {last.hit_rate:5.0%} "
            f"{mean(run.io_share for run in of_rung):4.0%} {median(run.read_seconds for run in of_rung):6.2f} "
            + (f"{overlap_ratio(of_rung, compute_s):5.2f}" if last.streams and compute_s else "    -")
        )
    rates = [(run.rates.chunks / 1e9, run.rates.experts / 1e9) for run in runs]
    chunks, experts = zip(*rates, strict=True)
    print(f"GB, GB a token. Disk: chunks {median(chunks):.2f} GB/s ({min(chunks):.2f} to {max(chunks):.2f}), experts "
          f"{median(experts):.2f} ({min(experts):.2f} to {max(experts):.2f}). Load {min(run.load for run in runs):.1f} "
          f"to {max(run.load for run in runs):.1f} on {len(os.sched_getaffinity(0))} cores.")  # fmt: skip
    if not all(run.limited for run in runs):
        print("No hard limit was set: name a cgroup directory with --cgroup to have the kernel enforce the budgets.")


def draw(runs: Sequence[Run], path: Path) -> None:
    """A PNG: seconds a token against memory, with what the disk and the cores alone would take."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    groups = list(by_rung(runs).values())
    planned = [of_rung[0].plan.total_bytes / 1e9 for of_rung in groups]
    steps = [[step for run in of_rung for step in run.steps] for of_rung in groups]
    middle = [median(found) for found in steps]
    spread = [[abs(edge(found) - half) for found, half in zip(steps, middle, strict=True)] for edge in (min, max)]
    axes.errorbar(planned, middle, yerr=spread, fmt="o-", capsize=3, label="measured: median, least, most")
    axes.plot(planned, [median(run.read_seconds for run in found) for found in groups], "s--", label="reading alone")
    if compute_s := compute_seconds(runs):
        axes.axhline(median(compute_s.values()), linestyle=":", color="gray", label="computing alone")
    axes.set(xlabel="planned memory of all processes, GB", ylabel="seconds a token", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory_ladder", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=None, help="a checkpoint of these widths; made when none is named"
    )
    parser.add_argument("--tape", type=Path, default=None, help="its tape; made when none is named")
    parser.add_argument("--folder", type=Path, default=None, help="where to make them: on the disk to be measured")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="beside the preset ultra; the last holds all")
    parser.add_argument("--gen", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cgroup", type=Path, default=None, help="a cgroup directory to make limited groups in")
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument(
        "--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-memory-ladder.csv"
    )
    parser.add_argument("--plot", type=Path, default=None, help="draw a PNG there; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    """Run, print, append, draw; exit 1 with what did not hold."""
    arguments = parse_arguments()
    if arguments.plot is not None:
        importlib.import_module("matplotlib.figure")  # before the long part
    with released_widths(arguments.model, arguments.tape, arguments.folder) as (model, tape):
        runs = climb(arguments, model, tape)
    print_table(runs)
    append_runs(arguments.csv or RESULTS / f"{arguments.machine}-memory-ladder.csv", arguments.machine, runs)
    if arguments.plot is not None:
        draw(runs, arguments.plot)
    broken = broken_claims(runs)
    for line in broken:
        print(f"DID NOT HOLD: {line}")
    if not broken:
        print(f"All held; one result in {len(runs)} runs: {runs[0].digest[:16]}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

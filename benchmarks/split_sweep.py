"""One total, divided between trunk and experts in several ways: what a token takes and reads with each.

    .venv/bin/python -m benchmarks.split_sweep --total 8G --folder /nvme

The expert cache is given with --cache-gb, and the trunk gets what that leaves. Makes its model as memory_ladder does.
Ends with 1 when a run breaks its plan or when the bits of two runs differ.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, pstdev

from benchmarks.memory_ladder import by_rung
from benchmarks.memory_rows import append_runs
from benchmarks.memory_runs import Run, Rung, run_rung
from benchmarks.released_widths import released_widths
from benchmarks.result_rows import RESULTS, this_machine
from k3ray.cluster.budget_plan import EXPERTS, PINNED

CACHES = ("0.3", "0.7", "1.2", "1.7")  # of 1.69 GB that all experts of the model made here take


def splits(total: str, caches: Sequence[str]) -> list[Rung]:
    """The total with each size of the cache."""
    return [Rung(f"{total} cache {cache}", (("--memory", total), ("--cache-gb", cache))) for cache in caches]


def sweep(arguments: argparse.Namespace, model: Path, tape: Path) -> list[Run]:
    """Run every split `repeats` times, in turn."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="split-sweep-") as folder:
        for turn in range(arguments.repeats):
            for rung in splits(arguments.total, arguments.caches):
                run = run_rung(model, tape, rung, turn, arguments.gen, Path(folder), arguments.cgroup)
                print(f"{rung.name} {run.step:.2f} s/token, load {run.load:.1f}", file=sys.stderr)
                runs.append(run)
    return runs


def part_gigabytes(run: Run, part: str) -> float:
    """A part of the plan."""
    return run.plan.parts().get(part, 0) / 1e9


def read_gigabytes(runs: Sequence[Run]) -> float:
    """What a token reads, trunk and experts."""
    return mean(run.trunk_bytes + run.expert_bytes for run in runs) / 1e9


def print_table(runs: Sequence[Run]) -> None:
    """One line a split."""
    print(f"{'trunk':>6s} {'cache':>6s} {'peak':>6s}  {'s/token mean':>12s} {'+-':>5s} {'median':>6s} "
          f"{'trunk read':>10s} {'experts':>7s} {'sum':>6s} {'hits':>5s}")  # fmt: skip
    for of_split in by_rung(runs).values():
        steps, last = [step for run in of_split for step in run.steps], of_split[-1]
        print(
            f"{part_gigabytes(last, PINNED):6.2f} {part_gigabytes(last, EXPERTS):6.2f} {last.peak_bytes / 1e9:6.2f}  "
            f"{mean(steps):12.2f} {pstdev(steps):5.2f} {median(steps):6.2f} {last.trunk_bytes / 1e9:10.2f} "
            f"{mean(run.expert_bytes for run in of_split) / 1e9:7.2f} {read_gigabytes(of_split):6.2f} "
            f"{last.hit_rate:5.0%}"
        )
    print(f"GB, GB a token. Load {min(run.load for run in runs):.1f} to {max(run.load for run in runs):.1f}.")


def draw(runs: Sequence[Run], path: Path) -> None:
    """A PNG: seconds and gigabytes a token against the cache's size."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    groups = list(by_rung(runs).values())
    caches = [part_gigabytes(of_split[0], EXPERTS) for of_split in groups]
    axes.plot(caches, [median(step for run in found for step in run.steps) for found in groups], "o-", label="seconds")
    axes.plot(caches, [read_gigabytes(found) for found in groups], "s--", label="GB read")
    axes.set(xlabel="expert cache, GB of the same total", ylabel="a token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    """Run, print, append, draw; exit 1 with what did not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.split_sweep", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=None, help="a checkpoint of these widths; made when none is named"
    )
    parser.add_argument("--tape", type=Path, default=None, help="its tape; made when none is named")
    parser.add_argument("--folder", type=Path, default=None, help="where to make them: on the disk to be measured")
    parser.add_argument("--total", default="8G")
    parser.add_argument("--caches", nargs="+", default=CACHES, help="gigabytes of expert slots")
    parser.add_argument("--gen", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cgroup", type=Path, default=None, help="a cgroup directory to make limited groups in")
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument("--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-split-sweep.csv")
    parser.add_argument("--plot", type=Path, default=None, help="draw a PNG there; needs matplotlib")
    arguments = parser.parse_args()
    with released_widths(arguments.model, arguments.tape, arguments.folder) as (model, tape):
        runs = sweep(arguments, model, tape)
    print_table(runs)
    append_runs(arguments.csv or RESULTS / f"{arguments.machine}-split-sweep.csv", arguments.machine, runs)
    if arguments.plot is not None:
        draw(runs, arguments.plot)
    broken = [line for run in runs for line in run.broken_claims()]
    if len({run.digest for run in runs}) > 1:
        broken.append("the results of the runs differ")
    for line in broken:
        print(f"DID NOT HOLD: {line}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

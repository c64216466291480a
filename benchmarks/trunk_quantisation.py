"""Why the trunk stays bf16: what int8 and int4 do to every kind of its matrices, and to the logits.

    .venv/bin/python -m benchmarks.trunk_quantisation MODEL_DIR --plot trunk.png

Any checkpoint: its matrices are read one at a time, several times a run. The logits are those of `--tokens` seeded ids
(or of `--ids`), all in one prefill, the routed experts as they are; each form is compared with the exact run. Random
checkpoints have Gaussian weights and nearly tied routers: how far an error of the weights gets in a trained one must
be measured there, with the same command.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from pathlib import Path

import numpy as np

from benchmarks.result_rows import RESULTS, this_machine
from benchmarks.trunk_comparison import Comparison, Row
from benchmarks.trunk_forms import FORMS
from k3ray.embedded_model import embedded_model_dir
from k3ray.kernels.threads import RowPool
from k3ray.workers.model.config import read_config


def print_weights(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Print the relative error of every kind in every form, and return it."""
    print("| matrices | weights | " + " | ".join(form.name for form in FORMS) + " |")
    print("|---|---:|" + "---:|" * len(FORMS))
    found = {}
    for kind, tensors in comparison.kinds().items():
        errors = comparison.weight_errors(tensors, FORMS)
        found[kind] = {name: error.relative for name, error in errors.items()}
        count = next(iter(errors.values())).count
        print(f"| {kind} | {count:,} | " + " | ".join(f"{100 * e:.2f} %" for e in found[kind].values()) + " |")
    return found


def print_logits(comparison: Comparison, by_kind: bool) -> list[Row]:
    """Print and return what every form does to the logits: all matrices, then int4 in groups of 32 kind by kind."""
    print("\n| form | of | bits | weight error | logit error | KL | top-1 kept | experts kept |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    wanted = [(form, "all matrices", list(comparison.tensors)) for form in FORMS]
    if by_kind:
        wanted += [(FORMS[3], kind, tensors) for kind, tensors in comparison.kinds().items()]
    rows = []
    for form, of, tensors in wanted:
        row = comparison.compare(form, of, tensors)
        rows.append(row)
        print(
            f"| {row.form} | {of} | {row.bits_per_weight:.2f} | {100 * row.weight_error:.2f} % | "
            f"{100 * row.logit_error:.2f} % | {row.kl:.2e} | {100 * row.top1_kept:.0f} % | "
            f"{100 * row.experts_kept:.1f} % |",
            flush=True,
        )
    return rows


def write_rows(path: Path, model: Path, rows: list[Row]) -> None:
    """Append one line a row."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["model", *Row.__slots__])
        writer.writerows([model.name, *(getattr(row, name) for name in Row.__slots__)] for row in rows)


def plot(path: Path, errors: dict[str, dict[str, float]], rows: list[Row]) -> None:
    """Two pictures side by side: weights by kind, logits by form."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6), gridspec_kw={"width_ratios": [3, 2]})
    places = np.arange(len(errors))
    for number, form in enumerate(FORMS):
        left.barh(places + 0.16 * number, [100 * errors[kind][form.name] for kind in errors], 0.15, label=form.name)
    left.set_yticks(places + 0.32, list(errors))
    left.invert_yaxis()
    left.set_xlabel("error of the weights, % of their norm")
    left.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    whole = [row for row in rows if row.of == "all matrices"]
    right.bar(range(len(whole)), [100 * row.logit_error for row in whole])
    right.set_xticks(range(len(whole)), [row.form.replace(", ", ",\n") for row in whole], fontsize=7)
    right.set_ylabel("error of the logits, % of their deviation")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=embedded_model_dir(), help="default: the embedded model")
    parser.add_argument("--tokens", type=int, default=32, help="seeded ids to run (default 32)")
    parser.add_argument("--ids", help="these ids instead, with commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--by-kind", action="store_true", help="also each kind of matrix alone, in int4")
    parser.add_argument("--results", type=Path, default=RESULTS / f"{this_machine()}-trunk-quantisation.csv")
    parser.add_argument("--plot", type=Path, help="a picture, as PNG or SVG")
    arguments = parser.parse_args()
    vocabulary = read_config(arguments.model).vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, arguments.tokens).tolist()
    if arguments.ids:
        ids = [int(one) for one in arguments.ids.split(",")]
    with RowPool(arguments.threads) as pool:
        comparison = Comparison(arguments.model, ids, pool)
        errors = print_weights(comparison)
        rows = print_logits(comparison, arguments.by_kind)
    write_rows(arguments.results, arguments.model, rows)
    if arguments.plot:
        plot(arguments.plot, errors, rows)
    print(f"wrote {arguments.results}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

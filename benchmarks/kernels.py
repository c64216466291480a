"""How near the matrix kernels come to the memory's speed: `python -m benchmarks.kernels` from the project's root.

Every figure is a share of what a plain read of the same memory by the same threads reached in the same round, because
a machine is rarely quiet: rounds repeat everything in turn, and the median of the rounds' ratios is reported. Weights
lie in many matrices of one allocation larger than the caches, visited in turn. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plain_read import nothing, read
from benchmarks.result_rows import RESULTS, append_rows, facts_of, this_machine
from k3ray.kernels import dense, mxfp4
from k3ray.kernels.reference import dense as dense_twin
from k3ray.kernels.reference import mxfp4 as mxfp4_twin
from k3ray.kernels.threads import RowPool


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix shape of the released model, in one form."""

    name: str
    rows: int
    columns: int
    row_bytes: int
    target: float | None  # share of the read bandwidth that one token must reach with two threads


CASES = (
    Case("bf16", 12288, 7168, 2 * 7168, 0.70),
    Case("f32", 6144, 7168, 4 * 7168, 0.70),
    Case("mxfp4", 3072, 3584, 3584 // 2 + 3584 // 32, 0.30),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results file."""

    date: str
    commit: str
    machine: str
    cores: int
    load: float
    kernel: str
    shape: str
    tokens: int
    threads: int
    gb_per_s: float
    read_gb_per_s: float
    share: float
    ms_per_token: float
    spread: float
    times_twin: float


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _matrices(case: Case, memory: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[Any, ...]]:
    """Views of the memory as matrices of the case; MXFP4 scale bytes are set to ordinary values."""
    size = case.rows * case.row_bytes
    blocks = memory.view(np.uint8)[: memory.nbytes // size * size].reshape(-1, size)
    if case.name == "bf16":
        return [(block.view(np.uint16).reshape(case.rows, -1),) for block in blocks]
    if case.name == "f32":
        return [(block.view(np.float32).reshape(case.rows, -1),) for block in blocks]
    cut = case.rows * case.columns // 2
    for block in blocks:
        block[cut:] = 110 + block[cut:] % 20
    return [(block[:cut].reshape(case.rows, -1), block[cut:].reshape(case.rows, -1)) for block in blocks]


def _multiplication(case: Case, x: Any, pool: RowPool) -> Callable[[tuple[Any, ...]], object]:
    out = np.empty((x.shape[0], case.rows), np.float32)
    if case.name == "mxfp4":
        return lambda matrix: mxfp4.matmul(*matrix, mxfp4.quantise(x), pool, out)
    return lambda matrix: dense.matmul(*matrix, x, pool, out)


def _times_twin(case: Case, matrix: tuple[Any, ...], x: Any) -> float:
    """How many times faster than the numpy twin, on some rows that fit in the caches, one thread."""
    some = [part[:256] for part in matrix]
    twin = mxfp4_twin.matmul if case.name == "mxfp4" else dense_twin.matmul
    with RowPool(1) as pool:
        multiply = _multiplication(dataclasses.replace(case, rows=256), x[:1], pool)
        ours = min(_seconds(lambda: multiply(tuple(some))) for _ in range(20))
    return _seconds(lambda: twin(*some, x[:1])) / ours


def measure(case: Case, batches: list[int], threads: int, gib: float, rounds: int, facts: dict[str, Any]) -> list[Row]:
    """Rounds of a plain read and of every batch size over the same memory, in turn."""
    random = np.random.default_rng(1)
    words = int(gib * 2**30) // 8
    memory = random.integers(0, 2**63 - 1, words, np.int64)
    memory &= 0x3FFF3FFF3FFF3FFF  # no NaN and no infinity, whatever the form
    matrices = _matrices(case, memory)
    inputs = {tokens: random.standard_normal((tokens, case.columns)).astype(np.float32) for tokens in batches}
    seconds: dict[int, list[float]] = {tokens: [] for tokens in (0, *batches)}
    with RowPool(threads) as pool:
        works = {tokens: _multiplication(case, x, pool) for tokens, x in inputs.items()}
        for work in works.values():
            work(matrices[0])
        read(memory, pool)
        for _ in range(rounds):
            seconds[0].append(_seconds(lambda: read(memory, pool)) / memory.nbytes)
            for tokens, work in works.items():
                took = _seconds(lambda w=work: [w(matrix) for matrix in matrices])
                seconds[tokens].append(took / len(matrices) / (case.rows * case.row_bytes))
    twin = _times_twin(case, matrices[0], inputs[batches[0]])
    rows = []
    for tokens in batches:
        mine = statistics.median(seconds[tokens])
        share = statistics.median(read / own for read, own in zip(seconds[0], seconds[tokens], strict=True))
        rows.append(
            Row(
                **facts,
                kernel=case.name,
                shape=f"{case.rows}x{case.columns}",
                tokens=tokens,
                threads=threads,
                gb_per_s=round(1e-9 / mine, 2),
                read_gb_per_s=round(1e-9 / statistics.median(seconds[0]), 2),
                share=round(share, 3),
                ms_per_token=round(mine * case.rows * case.row_bytes * 1e3 / tokens, 3),
                spread=round(max(seconds[tokens]) / min(seconds[tokens]), 2),
                times_twin=round(twin, 1),
            )
        )
    return rows


def dispatch_microseconds(threads: int, blocks: int) -> float:
    """Median time of a run that does nothing, in blocks."""
    out = np.zeros(1, np.int64)
    with RowPool(threads) as pool:
        return statistics.median(
            _seconds(lambda: pool.run(nothing, blocks, out, block_rows=1)) * 1e6 for _ in range(3000)
        )


def _print(rows: list[Row], case: Case) -> None:
    for row in rows:
        verdict = ""
        if case.target and row.tokens == 1:
            verdict = f"target {case.target:.0%} {'met' if row.share >= case.target else 'MISSED'}"
        print(
            f"{row.kernel:6} {row.shape:11} tokens {row.tokens:3} threads {row.threads}  {row.gb_per_s:6.2f} GB/s of "
            f"{row.read_gb_per_s:6.2f} = {row.share:6.1%}  {row.ms_per_token:8.3f} ms/token  "
            f"{rows[0].ms_per_token / row.ms_per_token:5.2f}x one  slowest/fastest {row.spread:.2f}  {verdict}",
            flush=True,
        )
    print(f"{case.name:6} {rows[0].times_twin:.0f} times the numpy twin (one token, one thread, 256 rows)")


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--kernels", nargs="+", choices=[case.name for case in CASES], default=None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--gib", type=float, default=1.0, help="weights in rotation; more than the caches hold")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument("--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-kernels.csv")
    parser.add_argument("--json", type=Path, default=None, help="also write this run there")
    options = parser.parse_args()
    facts = {**facts_of(options.machine), "load": round(os.getloadavg()[0], 2)}
    print(f"{options.machine}, load average {os.getloadavg()[0]:.2f} before the first round")
    for threads in options.threads:
        dispatch = dispatch_microseconds(threads, 4 * threads)
        print(f"a run of {4 * threads} empty blocks, {threads} threads: {dispatch:.1f} us")
    rows: list[Row] = []
    for case in CASES:
        for threads in options.threads if options.kernels is None or case.name in options.kernels else ():
            measured = measure(case, options.tokens, threads, options.gib, options.rounds, facts)
            _print(measured, case)
            rows += measured
    append_rows(options.csv or RESULTS / f"{options.machine}-kernels.csv", [dataclasses.asdict(row) for row in rows])
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    print(f"load average {os.getloadavg()[0]:.2f} after the last round")


if __name__ == "__main__":
    main()

"""What binding to a memory node is worth: `python -m benchmarks.numa` from the project's root.

The cores of one memory node read weights that lie on it (bound), on another one (remote), page by page on all
(interleaved), and without any binding (unbound: threads and pages go where the system puts them). Each placing has a
process of its own, which says on which nodes its pages really lie; rounds take the placings in turn and the medians
are printed. A machine with one memory node has nothing to compare: that is said, and the end is 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plain_read import read
from k3ray.cluster.machine import physical_cores
from k3ray.kernels import dense, mxfp4
from k3ray.kernels.threads import RowPool
from k3ray.workers.memory_binding import (
    MPOL_BIND,
    MPOL_INTERLEAVE,
    bind_process,
    memory_nodes,
    set_memory_policy,
)

PLAIN, DENSE, EXPERTS = "plain read", "dense bf16", "mxfp4"
DENSE_SHAPE, EXPERT_SHAPE = (12288, 7168), (3072, 3584)  # the released model's
ANSWER_S = 600.0


@dataclass(frozen=True, slots=True)
class Placing:
    """Where threads and memory are put. threads_on: a memory node, None: nowhere in particular; memory_on: likewise."""

    name: str
    threads_on: int | None
    memory_on: tuple[int, ...]
    cores: tuple[int, ...]
    threads: int
    mib: int


@dataclass(frozen=True, slots=True)
class Figures:
    """GB/s of each work in each round, and the share of the pages on each memory node."""

    gb_per_s: dict[str, list[float]]
    page_shares: dict[int, float]


def placings(nodes: dict[int, tuple[int, ...]], threads: int | None, mib: int) -> list[Placing]:
    """The four placings, threads on the node with most cores; nodes: number -> physical cores that are allowed."""
    home = max(nodes, key=lambda node: (len(nodes[node]), -node))
    away = max((node for node in nodes if node != home), key=lambda node: abs(node - home))
    cores = nodes[home][:threads]
    count, every = len(cores), tuple(nodes)
    return [
        Placing("bound", home, (home,), cores, count, mib),
        Placing("remote", home, (away,), cores, count, mib),
        Placing("interleaved", home, every, cores, count, mib),
        Placing("unbound", None, (), (), count, mib),
    ]


def serve(placing: Placing, pipe: Any) -> None:
    """A placing's process: bind, fill the memory, then one round for each message until there is None."""
    try:
        _bind(placing)
        words = np.random.default_rng(1).integers(0, 2**63 - 1, placing.mib << 17, np.int64)
        words &= 0x3FFF3FFF3FFF3FFF  # no NaN and no infinity, whatever the form
        with RowPool(placing.threads, placing.cores[1:] or placing.cores) as pool:
            works = _works(words, pool)
            for work in works.values():
                work()
            pipe.send(_page_shares(words.ctypes.data, words.nbytes))
            while pipe.recv() is not None:
                pipe.send({name: words.nbytes / 1e9 / _seconds(work) for name, work in works.items()})
    except OSError as error:
        pipe.send(str(error))


def measure(wanted: Sequence[Placing], rounds: int) -> dict[str, Figures]:
    """Rounds over all placings in turn. Raises OSError with what a placing's process said."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for placing in wanted:
        pipes[placing.name], other = context.Pipe()
        context.Process(target=serve, args=(placing, other), daemon=True).start()
        other.close()
    shares = {name: _received(pipe, name) for name, pipe in pipes.items()}
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send("round")
            for work, rate in _received(pipe, name).items():
                figures[name].setdefault(work, []).append(rate)
    for pipe in pipes.values():
        pipe.send(None)
    return {name: Figures(figures[name], shares[name]) for name in pipes}


def _received(pipe: Any, name: str) -> dict[Any, float]:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the process of the placing {name} said nothing in {ANSWER_S:g} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise OSError(f"the process of the placing {name} ended") from None
    if isinstance(answer, str):
        raise OSError(f"{name}: {answer}")
    return dict(answer)


def _bind(placing: Placing) -> None:
    """Threads as an actor does it; memory by the policy that the placing compares."""
    line = bind_process(placing.threads_on, placing.cores)
    if line:
        raise OSError(line)
    if placing.memory_on:
        mode = MPOL_BIND if len(placing.memory_on) == 1 else MPOL_INTERLEAVE
        number = set_memory_policy(mode, placing.memory_on)
        if number:
            raise OSError(f"set_mempolicy: {os.strerror(number)}")


def _works(words: np.ndarray[Any, np.dtype[np.int64]], pool: RowPool) -> dict[str, Callable[[], object]]:
    """Each passes over all of the memory once."""
    random, memory = np.random.default_rng(2), words.view(np.uint8)
    (rows, columns), (expert_rows, expert_columns) = DENSE_SHAPE, EXPERT_SHAPE
    x = random.standard_normal((1, columns)).astype(np.float32)
    out = np.empty((1, rows), np.float32)
    matrices = memory[: memory.nbytes // (2 * rows * columns) * 2 * rows * columns].view(np.uint16)
    latent = mxfp4.quantise(random.standard_normal((1, expert_columns)).astype(np.float32))
    expert_out = np.empty((1, expert_rows), np.float32)
    packed = expert_rows * expert_columns // 2
    blocks = memory[: memory.nbytes // (packed + packed // 16) * (packed + packed // 16)].reshape(
        -1, packed + packed // 16
    )
    scales = np.full((expert_rows, expert_columns // 32), 120, np.uint8)  # apart: the memory holds no scales

    def trunk() -> None:
        for matrix in matrices.reshape(-1, rows, columns):
            dense.matmul(matrix, x, pool, out)

    def experts() -> None:
        for block in blocks:
            mxfp4.matmul(block[:packed].reshape(expert_rows, -1), scales, latent, pool, expert_out)

    return {PLAIN: lambda: read(words, pool), DENSE: trunk, EXPERTS: experts}


def _page_shares(address: int, nbytes: int) -> dict[int, float]:
    """On which memory nodes the pages of the mapping at the address lie, by /proc/self/numa_maps; empty if unknown."""
    place, pages = Path("/proc/self/numa_maps"), Counter[int]()
    if not place.exists():
        return {}
    for line in place.read_text().splitlines():
        start = int(line.split()[0], 16)
        if start <= address < start + nbytes or address <= start < address + nbytes:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                pages[int(node)] += int(count)
    return {node: count / pages.total() for node, count in sorted(pages.items())}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _print(found: dict[str, Figures]) -> None:
    bound = {work: statistics.median(rates) for work, rates in found["bound"].gb_per_s.items()}
    print(f"{'':12}{'pages on nodes':24}" + "".join(f"{work + ' GB/s':>22}" for work in bound))
    for name, figures in found.items():
        nodes = ", ".join(f"{node}: {share:.0%}" for node, share in figures.page_shares.items()) or "not told"
        cells = []
        for work, rates in figures.gb_per_s.items():
            rate = statistics.median(rates)
            cells.append(f"{f'{rate:.1f} ({rate / bound[work]:.0%})':>22}")
        print(f"{name:12}{nodes:24}{''.join(cells)}")


def main(arguments: Sequence[str] | None = None, root: Path = Path("/")) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.numa", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="weights in each placing; more than the caches hold")
    parser.add_argument("--threads", type=int, default=None, help="default: all physical cores of one memory node")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args(arguments)
    if options.mib < 256 or options.rounds < 1 or (options.threads is not None and options.threads < 1):
        parser.error("expected --mib of at least 256, and --rounds and --threads of at least 1")
    cores = physical_cores(root=root)
    nodes = {
        number: mine for number, node in sorted(memory_nodes(root).items())
        if (mine := tuple(core for core in cores if core in node.cpus))
    }  # fmt: skip
    if len(nodes) < 2:
        print(f"memory nodes with cores that this process may use: {len(nodes) or 'none told'}: nothing to compare")
        return 0
    try:
        found = measure(placings(nodes, options.threads, options.mib), options.rounds)
    except OSError as error:
        print(f"benchmarks.numa: {error}", file=sys.stderr)
        return 1
    _print(found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(figures) for name, figures in found.items()}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

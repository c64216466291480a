"""Round trips between processes, by every way that might carry frames: on this host, and between two made for it.

    .venv/bin/python -m benchmarks.hop [--rounds 5] [--places one two]

Frames have the sizes of the released model's (docs/cluster.md); answerers compute nothing. The ways are measured in
turn, again and again in one run; medians. two: between two network namespaces joined by a bridge (root).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.hop_carriers import LENGTH, WAYS, Address, Carrier
from benchmarks.hop_ray import RayCalls, RayGraph
from benchmarks.result_rows import RESULTS, append_records, this_machine

MOST_ANSWERERS = 4
WARM_UP = 10
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Shape:
    """What one trip carries: to each of `fan` processes a request, from each an answer."""

    name: str
    fan: int
    request_bytes: int
    answer_bytes: int
    trips: int

    def messages(self) -> list[bytes]:
        """A request to each."""
        return [LENGTH.pack(self.answer_bytes) + bytes(self.request_bytes - LENGTH.size)] * self.fan


SHAPES = (
    Shape("28 kB there and back", 1, 28_672, 28_672, 200),
    Shape("a stage's last frame", 1, 258_900, 64, 200),
    Shape("2 shards, 1 token", 2, 15_120, 115_232, 200),
    Shape("4 shards, 1 token", 4, 15_120, 57_896, 200),
    Shape("2 shards, 64 tokens", 2, 920_560, 7_340_576, 6),
    Shape("4 shards, 64 tokens", 4, 920_560, 3_670_560, 6),
    Shape("a stage's last frame, 64 tokens", 1, 16_520_000, 64, 6),
)


def measure(place: str, carriers: dict[str, Carrier], rounds: int) -> list[dict[str, Any]]:
    """Every way in turn, shape by shape; one record each."""
    records = []
    for shape in SHAPES:
        seconds: dict[str, list[float]] = {way: [] for way in carriers}
        for turn in range(rounds):
            for way, carrier in carriers.items():
                seconds[way] += timed(carrier, shape, min(WARM_UP, shape.trips // 2) if turn == 0 else 1)
        for way, found in seconds.items():
            tenths = quantiles(found, n=10)
            records.append(
                {
                    "place": place,
                    "frames": shape.name,
                    "way": way,
                    "bytes": shape.fan * (shape.request_bytes + shape.answer_bytes),
                    "median_ms": round(median(found) * 1e3, 4),
                    "p10_ms": round(tenths[0] * 1e3, 4),
                    "p90_ms": round(tenths[-1] * 1e3, 4),
                    "trips": len(found),
                }
            )
        print_records(records[-len(carriers) :])
    return records


def timed(carrier: Carrier, shape: Shape, warm_up: int) -> list[float]:
    """Seconds of each trip."""
    messages, found = shape.messages(), []
    for trip in range(warm_up + shape.trips):
        started = time.perf_counter()
        got = carrier.exchange(messages)
        if trip >= warm_up:
            found.append(time.perf_counter() - started)
        if got != shape.fan * shape.answer_bytes:
            raise SystemExit(f"{shape.name}: {got} bytes came back, expected {shape.fan * shape.answer_bytes}")
    return found


def print_records(records: Sequence[dict[str, Any]]) -> None:
    """One shape's table, the fastest way first."""
    first = records[0]
    print(f"\n{first['place']}: {first['frames']}, {first['bytes']:,} bytes", file=sys.stderr)
    for one in sorted(records, key=lambda record: record["median_ms"]):
        print(
            f"  {one['way']:32s} {one['median_ms']:9.3f} ms   ({one['p10_ms']:.3f} to {one['p90_ms']:.3f})",
            file=sys.stderr,
        )


def kinds(host: str) -> dict[str, tuple[str, str]]:
    """Name in the tables -> (way, host to listen on); on one host with and without TCP."""
    far = {f"{way}, tcp": (way, host) for way in WAYS}
    return far if host != "127.0.0.1" else {**{f"{way}, unix": (way, "") for way in WAYS}, **far}


@contextmanager
def answerers_here() -> Iterator[dict[str, list[Address]]]:
    """Processes of this host, four of each way."""
    processes: list[subprocess.Popen[str]] = []
    found: dict[str, list[Address]] = {}
    try:
        for name, (way, host) in kinds("127.0.0.1").items():
            for _ in range(MOST_ANSWERERS):
                command = [sys.executable, "-m", "benchmarks.hop_carriers", way, host]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            found[name] = [json.loads(_line(one)) for one in processes[-MOST_ANSWERERS:]]
        yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def on_one_host(rounds: int) -> list[dict[str, Any]]:
    """All ways between processes of this host."""
    from k3ray.cluster.ray_runtime import RaySettings, ray_runtime

    with answerers_here() as addresses, ray_runtime(RaySettings("local", workers=MOST_ANSWERERS)):
        return _measured("one host", addresses, rounds, lambda: None)


def between_hosts(rounds: int) -> list[dict[str, Any]]:
    """All ways that cross hosts, between two made here; the work is done by this module, started inside the first."""
    from tests.hosts import NoHosts
    from tests.ray_hosts import RayHosts

    with tempfile.TemporaryDirectory(prefix="hop-hosts-") as folder, ExitStack() as ending:
        try:
            hosts = ending.enter_context(RayHosts(Path(folder), 2, {"PYTHONPATH": str(ROOT)}))
        except NoHosts as reason:
            print(f"not measured between hosts: {reason}", file=sys.stderr)
            return []
        environment = hosts.environment({"PYTHONPATH": str(ROOT), "RAY_ADDRESS": hosts.ray_address})
        far = hosts.hosts[1]
        addresses: dict[str, list[Address]] = {}
        for name, (way, host) in kinds(far.address).items():
            command = [sys.executable, "-m", "benchmarks.hop_carriers", way, host]
            started = [hosts.start(far, command, environment) for _ in range(MOST_ANSWERERS)]
            addresses[name] = [json.loads(_line(one.process)) for one in started]
        (hosts.head.folder / "addresses.json").write_text(json.dumps(addresses))
        inside = [sys.executable, "-m", "benchmarks.hop", "--rounds", str(rounds), "--inside", far.address]
        done = hosts.start(hosts.head, inside, environment).finish(timeout_s=800)
        print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise SystemExit(f"between hosts: exit {done.returncode}\n{done.stdout}")
        records: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return records


def inside(far_address: str, rounds: int) -> None:
    """The part of between_hosts that runs in the first host."""
    import ray

    from benchmarks.hop_ray import node_at

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    addresses = json.loads(Path("/tmp/addresses.json").read_text())
    records = _measured("two hosts", addresses, rounds, lambda: node_at(far_address))
    ray.shutdown()
    print(json.dumps(records))


def _measured(
    place: str, addresses: dict[str, list[Address]], rounds: int, node: Callable[[], str | None]
) -> list[dict[str, Any]]:
    carriers: dict[str, Carrier] = {name: WAYS[name.split(",")[0]][0](found) for name, found in addresses.items()}
    carriers["ray call"] = RayCalls(MOST_ANSWERERS, node())
    graph = RayGraph(MOST_ANSWERERS, node())
    carriers["ray compiled graph"] = graph
    try:
        return measure(place, carriers, rounds)
    finally:
        graph.close()


def semaphores() -> set[Path]:
    """Those of processes that are gone: Ray's compiled graphs leave theirs in /dev/shm."""
    named = ((re.fullmatch(r"sem\.(?:obj|hdr)(\d+)-\d+", path.name), path) for path in Path("/dev/shm").glob("sem.*"))
    return {path for found, path in named if found and not Path(f"/proc/{found[1]}").exists()}


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(prog="benchmarks.hop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--places", nargs="+", choices=("one", "two"), default=["one"], help="on one host, on two")
    parser.add_argument("--machine", default=this_machine(), help="name of the results file")
    parser.add_argument("--csv", type=Path, default=None, help="default: benchmarks/results/<machine>-hop.csv")
    parser.add_argument("--inside", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        inside(arguments.inside, arguments.rounds)
        return
    path = arguments.csv or RESULTS / f"{arguments.machine}-hop.csv"
    for place in arguments.places:
        load = os.getloadavg()[0]
        before = semaphores()
        try:
            records = {"one": on_one_host, "two": between_hosts}[place](arguments.rounds)
        finally:
            for left in semaphores() - before:
                left.unlink(missing_ok=True)
        append_records(path, arguments.machine, [{"load": round(load, 2), **record} for record in records])
        print(f"added {len(records)} rows to {path}")


if __name__ == "__main__":
    main()

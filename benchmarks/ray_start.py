"""Starting Ray: `python -m benchmarks.ray_start --actors 4 --rounds 3` compares `ray.init` with ours.

One line a round: seconds to import, to start, to the answers of all the actors, and to end; memory (PSS) of Ray's
helpers and of the actors. Run it on a quiet machine: the seconds are those of its cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

MIB = 1 << 20


class Actor:
    """As small as an actor can be."""

    def answer(self) -> int:
        """Its process id."""
        return os.getpid()


@contextmanager
def public(actors: int) -> Iterator[None]:
    """As Ray's manual shows, with all left out that its arguments let."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=max(2, actors), num_gpus=0)
    yield
    ray.shutdown()


def ours(actors: int) -> AbstractContextManager[object]:
    """As the program does."""
    from k3ray.cluster.ray_runtime import RaySettings, ray_runtime

    return ray_runtime(RaySettings("local", workers=actors))


def measure(way: str, actors: int) -> None:
    """One round in this process, which must have imported nothing yet."""
    started = time.perf_counter()
    import ray

    from k3ray.cluster.processes import ProcessMemory, children_of, role_of

    imported = time.perf_counter()
    with {"public": public, "ours": ours}[way](actors):
        connected = time.perf_counter()
        handles = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(actors)]
        ray.get([handle.answer.remote() for handle in handles])
        answered = time.perf_counter()
        found = ProcessMemory({pid: role_of(pid) for pid in children_of(os.getpid())}).sample()
        ending = time.perf_counter()
    of_actors = found.role_bytes["Actor"]
    print(
        f"{way:6} {actors} actors: import {imported - started:.2f} s, start {connected - imported:.2f} s, "
        f"answers {answered - connected:.2f} s, together {answered - started:.2f} s; end "
        f"{time.perf_counter() - ending:.2f} s; helpers {(found.total_bytes - of_actors) // MIB} MiB, "
        f"an actor {of_actors // MIB // actors} MiB"
    )


def main() -> None:
    """Every round in a process of its own, the two ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=("public", "ours"), help="one round of one way, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments.actors)
        return
    for _ in range(arguments.rounds):
        for way in ("public", "ours"):
            command = [sys.executable, "-m", "benchmarks.ray_start", "--way", way, "--actors", str(arguments.actors)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

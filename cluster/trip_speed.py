"""How long a question of a stage to an expert shard of its own host takes beside the experts' own time.

Measured with the engine's messages and sockets against a process made for it, which answers with zeros and ends with
our end of its input.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median

import numpy as np
import pyarrow as pa

from k3ray.workers.expert_fanout import RemoteExperts
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.frames import ExpertReply, decode_expert_request, encode_expert_reply
from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_link import HopLink

TRIPS = 200
WARM_UP = 20
LONGEST_S = 1.0  # for all of them
END_S = 5.0


def measure_trip(latent: int, pairs: int) -> float | None:
    """Seconds of a trip with one token's latent there and `pairs` outputs back; None where it cannot be measured."""
    try:
        with _answerer() as address:
            link = HopLink(lambda given_up: address)
            try:
                return _measure(RemoteExperts([link], ExpertOwners(1)), latent, pairs)
            finally:
                link.close()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _measure(experts: RemoteExperts, latent: int, pairs: int) -> float:
    ids, latents = np.arange(pairs, dtype=np.int32)[None], np.ones((1, latent), np.float32)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < TRIPS and (len(seconds) <= WARM_UP or time.perf_counter() - began < LONGEST_S):
        started = time.perf_counter()
        experts.begin(0, ids, latents)()
        seconds.append(time.perf_counter() - started)
    return median(seconds[min(WARM_UP, len(seconds) - 1) :])


@contextmanager
def _answerer() -> Iterator[DoorAddress]:
    process = subprocess.Popen(
        [sys.executable, "-m", "k3ray.cluster.trip_speed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        name, secret = process.stdout.readline().split()
        yield DoorAddress("", name, 0, bytes.fromhex(secret))
    finally:
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _answer(message: pa.Buffer) -> pa.Buffer:
    request = decode_expert_request(message)
    outputs = np.zeros((len(request.experts), request.latents.shape[1]), np.float32)
    return encode_expert_reply(ExpertReply(request.layer, outputs))


def main() -> None:
    """Answer until the input ends."""
    door = HopDoor(_answer)
    address = door.local()
    print(address.name, address.secret.hex(), flush=True)
    sys.stdin.read()
    door.close()


if __name__ == "__main__":
    main()

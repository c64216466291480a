"""A link between two hosts: cut for seconds it goes on, and a host that is gone without a word is noticed."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, Hosts, Inside, NoHosts

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SILENCE_S, ANSWERS = 6, 40

DOOR = """
import base64, json, sys, threading
import pyarrow as pa
from k3ray.workers.hop_door import HopDoor
door = HopDoor(lambda message: pa.py_buffer(b"answer to " + message.to_pybytes()))
found = door.at(sys.argv[1], (21000, 21009))
print(json.dumps({"port": found.port, "secret": base64.b64encode(found.secret).decode()}), flush=True)
threading.Event().wait()
"""

ASKER = """
import base64, os, sys, threading, time
import pyarrow as pa
from k3ray.workers import hop_address
from k3ray.workers.hop_link import HopLink
host, port, secret, silence_s, answers = sys.argv[1:]
hop_address.SILENCE_S = int(silence_s)
address = hop_address.DoorAddress(host, "", int(port), base64.b64decode(secret))
link = HopLink(lambda given_up: address, patience_s=1.0)
def watch():
    while (found := link.unreached(7)) is None or found.seconds < float(silence_s) + 2:
        time.sleep(0.1)
    print(found.shard, found.before, found.refused, flush=True)
    os._exit(3)
threading.Thread(target=watch, daemon=True).start()
for number in range(int(answers)):
    text = b"%d" % number * 100_000
    assert link.collect(link.submit(pa.py_buffer(text))).to_pybytes() == b"answer to " + text
    print(number, flush=True)
    time.sleep(0.05)
"""


@dataclass(slots=True)
class Pair:
    """Two hosts, and what was started on them."""

    hosts: Hosts
    near: Host
    far: Host
    started: list[Inside] = field(default_factory=list)

    def python(self, host: Host, script: str, *words: object) -> Inside:
        command = [sys.executable, "-c", script, *map(str, words)]
        self.started.append(self.hosts.start(host, command, {"PYTHONPATH": str(ROOT)}))
        return self.started[-1]

    def door(self) -> dict[str, Any]:
        """Open one on the far host."""
        found: dict[str, Any] = json.loads(lines(self.python(self.far, DOOR, self.far.address), 1)[0])
        assert 21_000 <= found["port"] <= 21_009 and len(base64.b64decode(found["secret"])) == 32
        return found

    def asker(self, door: dict[str, Any]) -> Inside:
        """Ask at it from the near host."""
        words = (self.far.address, door["port"], door["secret"], SILENCE_S, ANSWERS)
        return self.python(self.near, ASKER, *words)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    try:
        hosts = Hosts(tmp_path)
    except NoHosts as reason:
        pytest.skip(str(reason))
    with hosts:
        made = Pair(hosts, hosts.add(), hosts.add())
        yield made
    for one in made.started:
        one.process.communicate(timeout=10)


def lines(started: Inside, count: int) -> list[str]:
    assert started.process.stdout is not None
    return [started.process.stdout.readline().strip() for _ in range(count)]


def test_a_link_that_is_cut_for_seconds_goes_on(pair: Pair) -> None:
    asking = pair.asker(pair.door())
    assert lines(asking, 5) == ["0", "1", "2", "3", "4"]
    pair.hosts.cut(pair.far)
    time.sleep(3)
    pair.hosts.mend(pair.far)
    done = asking.finish(30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == str(ANSWERS - 1)


def test_a_host_that_is_gone_without_a_word_is_noticed_and_named(pair: Pair) -> None:
    door = pair.door()
    asking = pair.asker(door)
    lines(asking, 3)
    pair.hosts.power_off(pair.far)
    done = asking.finish(SILENCE_S + 25)
    assert (done.returncode, done.stderr) == (3, "")  # it goes on trying: whoever hears of it decides
    assert f"7 True {pair.far.address} port {door['port']} has not let us in (timed out)" in done.stdout

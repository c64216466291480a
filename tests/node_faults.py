"""Runs over several hosts (tests/node_run.py) that are struck at chosen calls: for tests and scripts/fault_matrix."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import Host
from tests.ray_faults import GEN, MOMENTS
from tests.ray_hosts import PROGRAMS, RayHosts

ROOT = Path(__file__).resolve().parents[1]
RUN_S = 180.0
Moment = tuple[str, str, int]  # an actor, a method, the how manieth call of it


@dataclass(frozen=True, slots=True)
class Strike:
    """At the moment something is done to the cluster."""

    moment: Moment
    harm: Callable[[RayHosts], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. record: its last line."""

    code: int
    where: dict[str, str]
    record: dict[str, Any]
    stderr: str


def run_struck(hosts: RayHosts, strikes: Sequence[Strike] = (), gen: int = GEN, **request: Any) -> Outcome:
    """Run k3b over all hosts, from the head; request: see node_run.main."""
    files = [hosts.head.folder / f"moment-{number}" for number in range(len(strikes))]
    moments = [[*strike.moment, f"/tmp/{file.name}"] for strike, file in zip(strikes, files, strict=True)]
    asked = {"model": str(ROOT / "tests/data/k3b"), "address": hosts.ray_address, "moments": moments, "gen": gen}
    environment = hosts.environment({"RAY_ADDRESS": hosts.ray_address, "PYTHONPATH": str(ROOT)})
    command = [str(PROGRAMS / "python"), "-m", "tests.node_run", json.dumps({**asked, **request})]
    running, ended = hosts.start(hosts.head, command, environment), threading.Event()

    def strike_when_due() -> None:
        left = dict(zip(files, strikes, strict=True))
        while left and not ended.wait(0.02):
            for file in [file for file in left if file.exists()]:
                left.pop(file).harm(hosts)
                file.unlink()

    striking = threading.Thread(target=strike_when_due)
    striking.start()
    try:
        done = running.finish(RUN_S)
    finally:
        ended.set()
        striking.join()
        for file in files:
            file.unlink(missing_ok=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2, f"{done.returncode} {done.stdout} {done.stderr}"  # and nothing of Ray's own
    return Outcome(done.returncode, lines[0]["where"], lines[1], done.stderr)


def kill_host(name: str) -> Callable[[RayHosts], None]:
    """A host dies, with all that runs there."""
    return lambda hosts: hosts.kill(_named(hosts, name))


def cut_host(name: str, mended_after_s: float | None = None) -> Callable[[RayHosts], None]:
    """A host's link is cut without a word, for a time or for good."""

    def harm(hosts: RayHosts) -> None:
        host = _named(hosts, name)
        hosts.cut(host)
        if mended_after_s is not None:
            threading.Timer(mended_after_s, hosts.mend, (host,)).start()

    return harm


def cut_link(name: str, other: str, mended_after_s: float | None = None) -> Callable[[RayHosts], None]:
    """The link between two hosts is cut without a word, for a time or for good; both reach all others."""

    def harm(hosts: RayHosts) -> None:
        ends = _named(hosts, name), _named(hosts, other)
        hosts.cut_between(*ends)
        if mended_after_s is not None:
            threading.Timer(mended_after_s, hosts.mend_between, ends).start()

    return harm


def node_cases(stage: int, name: str, other: str) -> dict[str, list[Strike]]:
    """The moments at which the host of a stage and a shard is killed; "and again": another host a little later."""
    at = f"stage {stage}"
    found = {moment: [Strike((at, "apply", nth), kill_host(name))] for moment, nth in MOMENTS.items()}
    found["snapshot"] = [Strike((at, "snapshot", 1), kill_host(name))]
    fifth = MOMENTS["fifth decode"]
    found["replay"] = [
        Strike((at, "apply", fifth), kill_host(name)),
        Strike((at, "apply", fifth + 2), kill_host(other)),
    ]
    twice = {f"{moment}, and again": [*strikes, _later(strikes[-1], other)] for moment, strikes in found.items()}
    del twice["replay, and again"]  # only the head would be left to kill
    return {**found, **twice}


def link_cases(stage: int, name: str, other: str) -> dict[str, list[Strike]]:
    """The moments at which the link between two hosts is cut, `name` having the stage and a shard.

    "for ten seconds": it is mended. "and again": the other host dies a little later.
    """
    at, fifth = f"stage {stage}", MOMENTS["fifth decode"]
    found = {moment: [Strike((at, "apply", nth), cut_link(name, other))] for moment, nth in MOMENTS.items()}
    found["snapshot"] = [Strike((at, "snapshot", 1), cut_link(name, other))]
    twice = {f"{moment}, and again": [*strikes, _later(strikes[-1], other)] for moment, strikes in found.items()}
    del twice["last decode, and again"]  # no later step comes
    return {**found, **twice, "for ten seconds": [Strike((at, "apply", fifth), cut_link(name, other, 10.0))]}


def _later(strike: Strike, other: str) -> Strike:
    actor, method, nth = strike.moment
    return Strike((actor, "apply", (nth if method == "apply" else 5) + 2), kill_host(other))


def _named(hosts: RayHosts, name: str) -> Host:
    return next(host for host in hosts.hosts if host.name == name)

"""Joining a Ray cluster that somebody else has started: finding it, asking what it is, connecting as it demands.

Every refusal comes within seconds, in one message.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from k3ray.cluster.ray_driver import RayFailure, authentication, connect

CONNECT_S = 3.0
PROBE_S = 30.0  # it takes one second, on a machine that is not overloaded
# What Ray's client waits for a port that is open and silent, in the probe.
PROBE_LIMITS = {"RAY_py_gcs_connect_timeout_s": "4", "RAY_gcs_rpc_server_connect_timeout_s": "1"}

LOCAL = "local"  # as an address: a Ray of our own
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OWN_INSTEAD = "or set RAY_ADDRESS=local to start a Ray of its own"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster that answers, and lets us in."""

    address: str  # HOST:PORT as a driver must give it
    mode: str  # its authentication: "token" or "disabled"
    nodes: int


def announced_address() -> str | None:
    """The address that the last `ray start` on this machine left for `ray.init`; None where no cluster answers there.

    A file of another user is not believed: it would send this user's token to a port of the other one's choice.
    """
    with suppress(ImportError, AttributeError, OSError, RayFailure):
        path = Path(importlib.import_module("ray._common.utils").get_ray_address_file(None))
        if path.stat().st_uid in (0, os.getuid()):
            address = path.read_text().strip()
            if _accepts(*_host_and_port(address)):
                return address
    return None


def chosen_address(address: str | None) -> str | None:
    """The address that RAY_ADDRESS or a call gives, else the announced one; None: no cluster is to be joined."""
    found = address if address not in (None, "", "auto") else announced_address()
    return None if found == LOCAL else found


def examine(address: str) -> Cluster:
    """Asks the cluster at HOST:PORT how it is to be joined. Raises RayFailure where it cannot be."""
    reachable = _reachable(address)
    facts = _probe(reachable)
    refused = facts.get("refused")
    if refused in ("no token", "wrong token"):
        raise RayFailure(
            f"the Ray cluster at {address} asks for its token and "
            + ("none was found" if refused == "no token" else "refuses the one that was found")
            + ": put the cluster's token into ~/.ray/auth_token, into the file that RAY_AUTH_TOKEN_PATH names, or into "
            f"RAY_AUTH_TOKEN (`ray get-auth-token` shows it on the machine that started the cluster), {OWN_INSTEAD}"
        )
    if refused is not None:
        raise RayFailure(f"what answers at {address} is no Ray cluster ({refused}): check RAY_ADDRESS, {OWN_INSTEAD}")
    ours = (ray.__version__, platform.python_version())
    theirs = (facts["ray"] or ours[0], facts["python"] or ours[1])
    if theirs != ours:
        raise RayFailure(
            f"the Ray cluster at {address} runs Ray {theirs[0]} on Python {theirs[1]}, and this process Ray {ours[0]} "
            f"on Python {ours[1]}: use the same on every node, {OWN_INSTEAD}"
        )
    if not facts["local"]:
        raise RayFailure(
            f"this machine is no node of the Ray cluster at {address}: run `ray start --address={address}` here "
            f"first, {OWN_INSTEAD}"
        )
    return Cluster(reachable, facts["mode"], facts["nodes"])


@contextmanager
def joined_ray(cluster: Cluster) -> Iterator[None]:
    """Connects this process as a driver; at the end the cluster ends our actors, and nothing else of it changes."""
    with authentication(cluster.mode):
        connect(cluster.address)
        try:
            yield
        finally:
            ray.shutdown()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if "://" in address:
        raise RayFailure(
            f"the Ray address {address} is one of Ray's client protocol, which this program does not speak: give the "
            "HOST:PORT that `ray start` printed, on a machine that is a node of the cluster"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RayFailure(f"the Ray address {address!r} is not HOST:PORT: give what `ray start` printed, {OWN_INSTEAD}")
    return host, int(port)


def _reachable(address: str) -> str:
    """The address that Ray would make of it: the outer one of this machine for a loopback one (Ray listens there)."""
    host, port = _host_and_port(address)
    if host in LOOPBACK:
        host = ray.util.get_node_ip_address()
        address = f"{host}:{port}"
    if not _accepts(host, port):
        raise RayFailure(
            f"no Ray cluster answers at {address}: start one there with `ray start --head`, or correct RAY_ADDRESS, "
            f"{OWN_INSTEAD}"
        )
    return address


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _probe(address: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("ray_probe.py")), address]
    try:
        answer = subprocess.run(
            command, capture_output=True, timeout=PROBE_S, env={**os.environ, **PROBE_LIMITS}, check=False, text=True
        )
        return dict(json.loads(answer.stdout))
    except (subprocess.TimeoutExpired, ValueError):
        return {"refused": "it does not answer as Ray does"}

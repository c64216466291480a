"""Asks a Ray cluster what it is, in a process of its own: `python ray_probe.py HOST:PORT` prints one JSON object.

In a process of its own because Ray's client writes to the terminal when it is refused, ends the process when it has no
token, and waits for half a minute at a port where something else answers. Imports nothing of k3ray.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

MODE = "RAY_AUTH_MODE"


def probe(address: str) -> dict[str, Any]:
    """`{"mode": "token" or "disabled", "ray", "python", "nodes", "local"}`, or `{"refused": why}`.

    `local` tells whether a node of the cluster runs on this machine. `why` is "no token", "wrong token" or Ray's text.
    """
    internals = importlib.import_module("ray._raylet")
    refusal = importlib.import_module("ray.exceptions").AuthenticationError
    token = internals.AuthenticationTokenLoader.instance()
    for mode in ("disabled", "token"):
        os.environ[MODE] = mode
        internals.Config.initialize("")
        token.reset_cache()
        if mode == "token" and not token.has_token(ignore_auth_mode=True):
            return {"refused": "no token"}
        try:
            client = internals.GcsClient(address=address)
            return {"mode": mode, **_facts(client)}
        except refusal:
            continue
        except Exception as error:  # noqa: BLE001  the parent tells it to the user
            return {"refused": str(error)}
    return {"refused": "wrong token"}


def _facts(client: Any) -> dict[str, Any]:
    nodes = client.get_all_node_info(timeout=5)
    alive = {node_id.hex() for node_id, info in nodes.items() if info.state == 0}
    usage = importlib.import_module("ray._common.usage.usage_lib")
    metadata = usage.get_cluster_metadata(client) or {}
    here = importlib.import_module("ray._private.services").find_node_ids()
    return {
        "ray": metadata.get("ray_version"),
        "python": metadata.get("python_version"),
        "nodes": len(alive),
        "local": bool(alive & set(here)),
    }


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))

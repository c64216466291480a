"""A run over all nodes of a cluster, as a program that a test starts on the head and strikes from outside.

It says on standard output, a JSON line each, where the actors are, and at the end the hash of all logits with what was
recovered. When a chosen call is sent it writes a file and goes on when that is gone: meanwhile the test does harm.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3ray.cluster.actor_calls import ActorId, ActorLost, all_actors
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.living_nodes import LivingNodes, PlacedRun
from k3ray.cluster.node_survey import survey
from k3ray.cluster.placed_plan import placed_plan
from k3ray.cluster.placement import place
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.ray_view import RayView
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.roots_file import Roots, RootsMap
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes
from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout
from tests.ray_faults import CHUNK, PROMPT

NODE_BYTES = 1_500_000_000
POLL_S = 0.02


class Struck:
    """Actors (cluster/actor_calls.py) that wait at chosen calls until the test has done something."""

    def __init__(self, chain: ActorChain, moments: dict[tuple[str, str, int], Path]) -> None:
        self._chain = chain
        self._moments = moments
        self._calls: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        self._calls[str(actor), method] += 1
        ticket = self._chain.call(actor, method, *arguments)
        path = self._moments.pop((str(actor), method, self._calls[str(actor), method]), None)
        if path is not None:
            path.touch()
            while path.exists():
                time.sleep(POLL_S)
        return ticket


def main(request: dict[str, Any]) -> int:
    """Run what is asked for."""
    model, positions = Path(request["model"]), len(PROMPT) + request["gen"]
    config, moments = read_config(model), {}
    for actor, method, nth, path in request["moments"]:
        moments[actor, method, nth] = Path(path)
    roots = RootsMap((), Roots((str(model),)))
    with ray_runtime(RaySettings(request["address"])) as runtime:
        facts = survey(roots)
        wishes = ClusterWishes(memory_bytes=request.get("memory", NODE_BYTES), positions=positions)
        layout = plan_layout(config)
        placement = place(config, layout, facts, wishes)
        spec = CheckpointSpec(model, None, config.num_hidden_layers, config=config)
        actors = ActorChain(placed_plan(placement, facts, spec, True), runtime.actor_options)
        try:
            actors.load()
            names = {node.node_id: node.name for node in facts}
            say(where={str(one): names[str(actors.spec_of(one).node_id)] for one in all_actors(actors)})
            run = PlacedRun(placement, tuple(facts), LayerCosts(config, layout, positions))
            homes = LivingNodes(actors, run, RayView(request["address"], roots, facts))
            settings = RecoverySettings(**request.get("settings", {}))
            chain = RecoveringChain(Struck(actors, moments), settings, homes=homes)  # type: ignore[arg-type]
            began = time.monotonic()
            try:
                found = logits_hash(trace(Driver(chain, CHUNK), PROMPT, request["gen"])[1])
            except ActorLost as lost:
                say(lost=str(lost), kind=type(lost).__name__, seconds=time.monotonic() - began)
                return lost.exit_code
            recoveries = [asdict(recovery) for recovery in chain.recoveries]
            say(hash=found, seconds=time.monotonic() - began, recoveries=recoveries,
                lines=[recovery.describe() for recovery in chain.recoveries])  # fmt: skip
            if request.get("linger"):
                linger = Path(request["linger"])
                linger.touch()
                while linger.exists():
                    time.sleep(POLL_S)
        finally:
            actors.stop()
    return 0


def say(**record: Any) -> None:
    """One line."""
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

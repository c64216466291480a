"""The sizing table of docs/cluster.md: `python -m benchmarks.cluster_sizing MODEL_DIR` (a config.json is enough).

For 1 to 16 equal hosts of several sizes, with a fast and a slow disk: what a token reads and takes. Nothing is measured
here; the planner does arithmetic on the speeds that the options give.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from k3ray.cluster.cluster_file import NETWORK_GB_S, described_node, described_speeds
from k3ray.cluster.placement import Placement, place
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

HOSTS = (1, 4, 8, 12, 16)
MEMORY_GB = (32, 64, 128, 256)
GB = 10**9


def main() -> None:
    """Print the table as Markdown."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model_dir", type=Path)
    options.add_argument("--memory-gb-s", type=float, default=100.0)
    options.add_argument("--disks-gb-s", type=float, nargs=2, default=(3.2, 0.5))
    options.add_argument("--network-gb-s", type=float, default=NETWORK_GB_S)
    options.add_argument("--cores", type=int, default=32)
    options.add_argument("--positions", type=int, default=4096)
    asked = options.parse_args()
    config = read_config(asked.model_dir)
    layout = plan_layout(config)
    costs = LayerCosts(config, layout, asked.positions)
    layers = tuple(range(config.num_hidden_layers))
    disks = [f"{disk:g} GB/s disk: s/token, bound by" for disk in asked.disks_gb_s]
    print(f"| hosts x GB | trunk held | experts held | reads a token: trunk | experts | sends | {' | '.join(disks)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for hosts in HOSTS:
        for memory in MEMORY_GB:
            cells, placement = [], None
            for disk in asked.disks_gb_s:
                speeds = described_speeds(asked.memory_gb_s, disk, asked.network_gb_s)
                nodes = [
                    described_node(f"host-{number}", memory * GB, asked.cores, speeds, layers, driver=not number)
                    for number in range(hosts)
                ]
                try:
                    placement = place(config, layout, nodes, ClusterWishes(positions=asked.positions), costs)
                except PlacementFailure:
                    cells.append("does not fit")
                    continue
                expected = placement.prediction
                cells.append(f"{expected.seconds:.1f}, {expected.dominated_by}")
            print(f"| {hosts} x {memory} | {' | '.join([*_sizes(placement, costs), *cells])} |")


def _sizes(placement: Placement | None, costs: LayerCosts) -> list[str]:
    if placement is None:
        return [""] * 5
    expected, owners = placement.prediction, placement.shards or placement.stages
    trunk = costs.trunk_bytes(0, placement.num_layers)
    held, owned = (sum(getattr(one.budget, name) for one in owners) for name in ("cache_slots", "owned_experts"))
    return [
        f"{1 - expected.trunk_bytes / trunk:.0%}",
        f"{held / owned:.0%}",
        f"{expected.trunk_bytes / GB:.1f} GB",
        f"{expected.expert_bytes / GB:.1f} GB",
        f"{expected.network_bytes / 1e6:.1f} MB",
    ]


if __name__ == "__main__":
    main()

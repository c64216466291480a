"""A described cluster, of machines that need not exist: cluster.toml read strictly into the planner's records.

    [[node]]
    name = "server"          # with count = 4: server-1 to server-4
    count = 4
    memory = "64G"           # what is available there
    cores = 32               # physical cores
    memory_gb_s = 100        # plain reading, as `k3ray devbw` measures it
    disk_gb_s = 3.2

Also: numa (memory nodes, which share memory and cores evenly), trunk_gb_s and expert_gb_s (the kernels' own speed where
it was measured), network_gb_s, layers (like "0-45": which of the model's layers its disks hold).
"""

from __future__ import annotations

import re
from pathlib import Path

from k3ray.cluster.strict_toml import TomlFailure, TomlTable, read_toml
from k3ray.cluster.topology import DESCRIBED, ModelCopy, NodeFacts, NodeSpeeds, NumaNode
from k3ray.cluster.wishes import SizeFailure, parse_size

MAX_NODES = 256
MAX_RATE = 1e6
GB = 1e9
# What the kernels make of a plain reading speed, measured with k3ray devbw on 2 cores with AVX2 (12.1, 7.3, 3.6 GB/s).
TRUNK_SHARE, EXPERT_SHARE = 0.6, 0.3
NETWORK_GB_S = 1.25  # ten gigabits
_LAYERS = re.compile(r"(\d{1,4})-(\d{1,4})", re.ASCII)


def read_cluster(path: Path, num_layers: int) -> list[NodeFacts]:
    """The nodes that the file describes, the driver on the first; raises TomlFailure."""
    document = read_toml(path, "a file with a [[node]] table for every kind of machine")
    nodes: list[NodeFacts] = []
    for table in document.tables("node", "a [[node]] table for every kind of machine"):
        nodes += _nodes(table, num_layers, not nodes)
        if len(nodes) > MAX_NODES:
            raise TomlFailure(path, "node", f"{len(nodes)} nodes", f"at most {MAX_NODES}")
    document.finish()
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TomlFailure(path, "node", f"the name {twice!r} twice", "every node by a name of its own")
    return nodes


def described_node(
    name: str,
    memory_bytes: int,
    cores: int,
    speeds: NodeSpeeds,
    layers: tuple[int, ...],
    *,
    top: bool = True,
    numa: int = 1,
    driver: bool = False,
) -> NodeFacts:
    """One node that need not exist. layers: those that its disks hold; top: whether also embedding and head."""
    cuts = [cores * place // numa for place in range(numa + 1)]
    places = tuple(
        NumaNode(place, tuple(range(cuts[place], cuts[place + 1])), memory_bytes // numa) for place in range(numa)
    )
    copy = ModelCopy("described", fingerprint=DESCRIBED, index_digest=DESCRIBED, whole=True, layers=layers, top=top)
    return NodeFacts(
        name, name, "", cores, cores, places, memory_bytes, DESCRIBED, memory_bytes, speeds, models=(copy,),
        driver=driver,
    )  # fmt: skip


def described_speeds(
    memory_gb_s: float,
    disk_gb_s: float,
    network_gb_s: float = NETWORK_GB_S,
    trunk_gb_s: float | None = None,
    expert_gb_s: float | None = None,
) -> NodeSpeeds:
    """Speeds from gigabytes a second; what is not given of the kernels is a share of the memory's."""
    trunk = (trunk_gb_s or TRUNK_SHARE * memory_gb_s) * GB
    experts = (expert_gb_s or EXPERT_SHARE * memory_gb_s) * GB
    disk = disk_gb_s * GB
    return NodeSpeeds(DESCRIBED, memory_gb_s * GB, trunk, experts, disk, disk, network_gb_s * GB)


def _nodes(table: TomlTable, num_layers: int, first: bool) -> list[NodeFacts]:
    name = table.text("name", "a name for the machine")
    count = table.whole("count", 1, MAX_NODES, 1)
    memory = table.text("memory", 'a size like "64G"')
    try:
        memory_bytes = parse_size(memory, "memory")
    except SizeFailure:
        raise table.refuse("memory", 'a size with its unit, like "64G" or "64GiB"') from None
    cores = table.whole("cores", 1, 4096)
    numa = table.whole("numa", 1, 64, 1)
    if numa > cores:
        raise table.refuse("numa", f"at most as many memory nodes as cores ({cores})")
    memory_gb_s = table.rate("memory_gb_s", MAX_RATE)
    speeds = described_speeds(
        memory_gb_s,
        table.rate("disk_gb_s", MAX_RATE),
        table.rate("network_gb_s", MAX_RATE, NETWORK_GB_S),
        table.rate("trunk_gb_s", MAX_RATE, TRUNK_SHARE * memory_gb_s),
        table.rate("expert_gb_s", MAX_RATE, EXPERT_SHARE * memory_gb_s),
    )
    layers = _layers(table, num_layers)
    table.finish()
    top = layers[0] == 0 or layers[-1] == num_layers - 1
    names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
    return [
        described_node(
            each, memory_bytes, cores, speeds, layers, top=top, numa=numa, driver=first and place == 0
        )
        for place, each in enumerate(names)
    ]  # fmt: skip


def _layers(table: TomlTable, num_layers: int) -> tuple[int, ...]:
    """The layers "first-last" that the node's disks hold; whoever has the first or last has embedding and head too."""
    text = table.text("layers", 'layers like "0-45"', f"0-{num_layers - 1}")
    match = _LAYERS.fullmatch(text)
    if match is None or not int(match[1]) <= int(match[2]) < num_layers:
        raise table.refuse("layers", f'the first and the last of them, within "0-{num_layers - 1}"')
    return tuple(range(int(match[1]), int(match[2]) + 1))

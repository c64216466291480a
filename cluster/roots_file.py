"""Which folders of which node hold the model and its tape: the file of --roots, read strictly.

    [node.server-a]
    models = ["/nvme0/kimi-k3", "/nvme1/kimi-k3"]
    tapes = ["/nvme0/kimi-k3.tape"]

A node is named by its host name or its address; `[node."*"]` is for all that are not named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.cluster.strict_toml import TomlFailure, read_toml
from k3ray.workers.failure import Failure

EVERY_OTHER = "*"


class NamedTwice(Failure):
    """A roots file that names one node by its host name and by its address."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Roots:
    """The folders of one node, of several disks or of one."""

    models: tuple[str, ...] = ()
    tapes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RootsMap:
    """nodes: by name or address. others: of the nodes that are not named."""

    nodes: tuple[tuple[str, Roots], ...]
    others: Roots

    def of(self, name: str, address: str) -> Roots:
        """The folders of a node."""
        named = dict(self.nodes)
        return named.get(name) or named.get(address) or self.others

    def refuse_twice(self, name: str, address: str) -> None:
        """Refuse a file with two tables for one node, of which one would be left unread; raises NamedTwice."""
        if name != address and {name, address} <= {named for named, _ in self.nodes}:
            raise NamedTwice(
                f'the --roots file: found [node.{name}] and [node."{address}"], which are the same node; expected one '
                "table for it: put all its folders there"
            )

    def unknown(self, names: set[str]) -> list[str]:
        """Which names of the file no node has: a mistake in writing would leave a node out."""
        return [name for name, _ in self.nodes if name not in names]


def read_roots(path: Path, others: Roots) -> RootsMap:
    """Read the file; `others` holds for nodes that it does not name. Raises TomlFailure."""
    document = read_toml(path, 'a file with tables like [node.NAME] and models = ["/path"] in them')
    nodes = document.table("node", "a table [node.NAME] for every node")
    document.finish()
    found = []
    for name in nodes.keys():  # noqa: SIM118  not a dict
        table = nodes.table(name, "a table with models and tapes")
        models = _folders(table.texts("models", 'a list of folders: ["/nvme/kimi-k3"]'), path, f"node.{name}.models")
        tapes = _folders(table.texts("tapes", 'a list of folders: ["/nvme/kimi-k3.tape"]'), path, f"node.{name}.tapes")
        table.finish()
        if not models and not tapes:
            raise TomlFailure(path, f"node.{name}", "no folder", "models = [...], tapes = [...] or both")
        found.append((name, Roots(models, tapes)))
    named = dict(found)
    others = named.pop(EVERY_OTHER, others)
    return RootsMap(tuple(named.items()), others)


def _folders(texts: list[str], path: Path, field: str) -> tuple[str, ...]:
    for text in texts:
        if not Path(text).is_absolute():
            raise TomlFailure(path, field, repr(text), "a path that begins with /: nodes have other working folders")
    if len(set(texts)) < len(texts):
        raise TomlFailure(path, field, "the same folder twice", "every folder once")
    return tuple(texts)

"""The nodes that a command can use: those of the Ray cluster that is given or announced, or this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3ray.cluster.node_facts import Inquiry, look
from k3ray.cluster.node_survey import survey
from k3ray.cluster.ray_join import chosen_address
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.roots_file import Roots, RootsMap, read_roots
from k3ray.cluster.strict_toml import TomlFailure
from k3ray.cluster.topology import NodeFacts, Verdict, compare_nodes
from k3ray.environment import Environment
from k3ray.workers.process_report import versions


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes, judged."""

    verdicts: tuple[Verdict, ...]

    @property
    def usable(self) -> list[NodeFacts]:
        """The nodes that take part."""
        return [verdict.node for verdict in self.verdicts if verdict.usable]


def find_nodes(
    environment: Environment,
    model_dir: Path,
    tape: Path | None,
    roots_file: Path | None,
    measure: bool,
    say: Callable[[str], None],
) -> Nodes:
    """Ask every node, and compare. model_dir, tape: where every node has them that the roots file does not name.
    say: hears where they are found, and who is waited for.

    Raises TomlFailure or RayFailure.
    """
    here = Roots((str(model_dir.resolve()),), () if tape is None else (str(tape.resolve()),))
    roots = RootsMap((), here) if roots_file is None else read_roots(roots_file, here)
    address = chosen_address(environment.ray_address)
    if address is None:
        say("this machine; no cluster is joined")
        facts = [look_here(roots, roots_file, environment.threads, measure)]
    else:
        with ray_runtime(RaySettings(address)) as runtime:
            say(runtime.describe())
            facts = survey(roots, environment.threads, measure, say=say)
    return Nodes(tuple(compare_nodes(facts, versions())))


def look_here(roots: RootsMap, path: Path | None, threads: int | None, measure: bool) -> NodeFacts:
    """This machine, by its host name; raises TomlFailure for a roots file that names others."""
    name = socket.gethostname()
    unknown = roots.unknown({name})
    if unknown:
        expected = f"{name}, this machine, as no cluster is joined: set RAY_ADDRESS for several"
        raise TomlFailure(path or Path("roots"), "node", ", ".join(unknown), expected)
    return look(Inquiry("local", name, "", roots.of(name, ""), True, threads, measure))

"""What the planner knows of every node of a cluster, and which nodes may take part in a run: records and comparison.

Nothing here looks at a machine: node_facts.py gathers these records, cluster_file.py reads described ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

DESCRIBED = "described"
COMPARED_VERSIONS = ("python", "k3ray", "ray", "numpy", "numba")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node. cores: one logical cpu of each physical core allowed there. memory_bytes: all it has."""

    number: int
    cores: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ThreadSpeeds:
    """trunk, experts: as NodeSpeeds has them, by so many threads while no others are at work."""

    threads: int
    trunk: float
    experts: float


@dataclass(frozen=True, slots=True)
class NodeSpeeds:
    """Bytes a second, by all threads of the node together; None where nothing was measured.

    measured: the dates, or that a file describes them. trunk, experts: the engine's layers and experts over bf16 and
    MXFP4 weights in memory. disk_chunks, disk_experts: random reads of a tape's chunks and of experts. network: of its
    link. by_threads: of fewer threads, the fewest first; empty: a thread has its even share. trip_s: seconds of a
    question to a shard of the same node, beside the experts.
    """

    measured: str = "not measured"
    read: float | None = None
    trunk: float | None = None
    experts: float | None = None
    disk_chunks: float | None = None
    disk_experts: float | None = None
    network: float | None = None
    by_threads: tuple[ThreadSpeeds, ...] = ()
    trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """One folder with the model. layers: the zero-based ones whose every tensor is here; top: embedding, head, norms.

    fingerprint: TensorIndex.fingerprint of a whole copy, empty for a part. index_digest: of its index file, empty
    without one. problem: why it cannot be used; then nothing else is known.
    """

    path: str
    fingerprint: str = ""
    index_digest: str = ""
    whole: bool = False
    layers: tuple[int, ...] = ()
    top: bool = False
    problem: str = ""

    def same_as(self, other: ModelCopy) -> bool:
        """Whether both are of one checkpoint, as far as their files say; the weights themselves are not compared."""
        if self.whole and other.whole:
            return self.fingerprint == other.fingerprint
        return bool(self.index_digest) and self.index_digest == other.index_digest


@dataclass(frozen=True, slots=True)
class TapeCopy:
    """One folder that `k3ray pack` made. fingerprint: its manifest's digest. problem: why it cannot be used.

    chunk_bytes: the largest of its chunks.
    """

    path: str
    fingerprint: str = ""
    problem: str = ""
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. cpus: logical ones allowed; threads: of computation, by cores and quotas.

    driver: the command runs here. available_bytes: by the tightest limit, which is
    decided_by. problem: why nothing is known of it.
    """

    node_id: str
    name: str
    address: str = ""
    cpus: int = 0
    threads: int = 0
    numa: tuple[NumaNode, ...] = ()
    available_bytes: int = 0
    decided_by: str = ""
    machine_bytes: int = 0
    speeds: NodeSpeeds = NodeSpeeds()
    versions: tuple[tuple[str, str], ...] = ()
    models: tuple[ModelCopy, ...] = ()
    tapes: tuple[TapeCopy, ...] = ()
    driver: bool = False
    problem: str = ""

    @property
    def cores(self) -> tuple[int, ...]:
        """One logical cpu of each physical core allowed."""
        return tuple(core for place in self.numa for core in place.cores)

    @property
    def layers(self) -> frozenset[int]:
        """The layers that its usable copies hold together."""
        return frozenset(layer for copy in self.models for layer in copy.layers)

    @property
    def top(self) -> bool:
        """Whether a copy has the embedding and the head."""
        return any(copy.top for copy in self.models)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a node takes part. reasons: why it does not, each with what to do."""

    node: NodeFacts
    reasons: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether it takes part."""
        return not self.reasons


def compare_nodes(nodes: Sequence[NodeFacts], versions: Mapping[str, str], with_model: bool = True) -> list[Verdict]:
    """Judge every node against the driver's versions and model.

    The model is the driver's copy, or, where the driver has none, the one that most nodes see.
    """
    reference = _reference(nodes) if with_model else None
    tape = _reference_tape(nodes)
    return [Verdict(node, tuple(_reasons(node, versions, with_model, reference, tape))) for node in nodes]


def can_join(members: Sequence[NodeFacts], newcomer: NodeFacts, versions: Mapping[str, str]) -> bool:
    """Whether a node can take over parts of a run: it has what the run's own nodes have, whatever more there is of it.

    members: at least one, all alike. A newcomer's copies never decide which model is the right one.
    """
    first, *others = sorted(members, key=lambda node: not node.driver)
    alike = [replace(first, driver=True), *others, replace(newcomer, driver=False)]
    return compare_nodes(alike, versions)[-1].usable


def _reasons(
    node: NodeFacts, versions: Mapping[str, str], with_model: bool, reference: ModelCopy | None, tape: str | None
) -> list[str]:
    if node.problem:
        return [node.problem]
    theirs, found = dict(node.versions), []
    for name in COMPARED_VERSIONS:
        if theirs.get(name) != versions.get(name):
            found.append(f"{name} {theirs.get(name, 'missing')}, here {versions.get(name)}: install the same")
    if not with_model:
        return found
    found += [f"{copy.path}: {copy.problem}" for copy in node.models if copy.problem]
    good = [copy for copy in node.models if not copy.problem]
    if not node.models:
        found.append("no model folder named for it: add one to the --roots file")
    for copy in good:
        if reference is not None and not copy.same_as(reference):
            found.append(f"{copy.path}: another checkpoint than {reference.path} of the driver: copy the same one")
        elif not copy.layers and not copy.top:
            found.append(f"{copy.path}: no whole layer of the model is there: finish the download")
    for copied in node.tapes:
        if copied.problem:
            found.append(f"{copied.path}: {copied.problem}")
        elif copied.fingerprint != tape:
            found.append(f"{copied.path}: another tape than the driver's: copy the same one")
    return found


def _reference(nodes: Sequence[NodeFacts]) -> ModelCopy | None:
    """The first usable copy of the driver, else of the largest group of equal ones."""
    copies = [copy for node in nodes for copy in node.models if not copy.problem and (copy.layers or copy.top)]
    own = [copy for node in nodes if node.driver for copy in node.models if not copy.problem]
    if own:
        return own[0]
    return max(copies, key=lambda copy: sum(copy.same_as(other) for other in copies), default=None)


def _reference_tape(nodes: Sequence[NodeFacts]) -> str | None:
    own = [tape.fingerprint for node in nodes if node.driver for tape in node.tapes if not tape.problem]
    counted = Counter(tape.fingerprint for node in nodes for tape in node.tapes if not tape.problem)
    return own[0] if own else next((name for name, _ in counted.most_common(1)), None)

"""The audit's record: every statement with its kind and who made it. snapshot_file.py writes and reads it as JSON.

Kinds: O observed in the artifact, D derived from rules, X executed here, S synthetic, U unresolved. Knows neither how a
statement was made nor how it is shown. Fields are only ever added, never renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Letter = Literal["O", "D", "X", "S", "U"]
View = Literal["layers", "tensors", "parameters", "boundary"]
Author = Literal["k3ray", "recorded by others"]
SourceKind = Literal["directory", "http", "config and index only"]

KINDS: dict[Letter, str] = {
    "O": "observed in the artifact",
    "D": "derived from rules",
    "X": "executed here",
    "S": "synthetic",
    "U": "unresolved",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the checkpoint. bytes: its size, None where unknown; ranges: requests made for its content.

    sha256: hexadecimal, of what `sha256_of` says, both empty where nothing was read. Fetched ranges are hashed one
    after another in ascending order; places: (begin, end) of each in bytes, neighbours joined, so that anybody with
    the file can compute the same.
    """

    name: str
    bytes: int | None
    sha256: str
    fetched_bytes: int
    ranges: int
    sha256_of: Literal["whole file", "fetched ranges", ""]
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """What was audited. address: without credentials; revision: "" where none is known.

    total_bytes: of all shards, None where unknown. fetched_bytes, requests: read for this audit, all files together.
    """

    kind: SourceKind
    address: str
    revision: str
    total_bytes: int | None
    fetched_bytes: int
    files: tuple[SourceFile, ...]
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing said about the checkpoint. id: dotted and stable, like "a_log.shape".

    expected: "" when there is nothing to compare with. agrees: None where the comparison decides nothing (an
    observation, or nothing to compare). source: the file or rule that it comes from. main: shown large in its view.
    """

    id: str
    view: View
    kind: Letter
    by: Author
    subject: str
    found: str
    expected: str
    agrees: bool | None
    source: str
    main: bool = False


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer, zero-based. attnres_block: zero-based number of its block. bytes: of its tensors, with its experts."""

    layer: int
    attention: Literal["KDA", "MLA"]
    feed_forward: Literal["dense", "MoE"]
    attnres_block: int
    tensors: int
    bytes: int | None
    shards: tuple[str, ...]
    letter: Letter


@dataclass(frozen=True, slots=True)
class KindRow:
    """Tensors that differ in layer and expert only. kind: their name with # for the numbers.

    where: "text", "routed experts", "vision", "projector" or "other". letter: O where from headers, D where from rules.
    bytes: of all entries. expected_entries, agrees: None where no rule says how many there are.
    """

    kind: str
    where: str
    entries: int
    expected_entries: int | None
    dtype: str
    shape: tuple[int, ...]
    bytes: int | None
    agrees: bool | None
    note: str
    letter: Letter


@dataclass(frozen=True, slots=True)
class StatisticRow:
    """Statistics of one tensor's values. Percentiles by linear interpolation between the sorted values' ranks.

    None where somebody else recorded the row and did not give that figure. extra: further figures by their name, like
    "exp(A_log) median".
    """

    subject: str
    tensor: str
    count: int
    median: float | None
    p10: float | None
    p90: float | None
    minimum: float | None
    maximum: float | None
    extra: dict[str, float]
    letter: Letter
    by: Author
    source: str


@dataclass(frozen=True, slots=True)
class Load:
    """How evenly the inputs fall on the experts. cv: population standard deviation of the loads over their mean.

    gini: 0 when all loads are the same. without_load: experts that no input chose.
    """

    cv: float
    gini: float
    without_load: int


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One layer's router under the probe. overlap: mean share of an input's experts chosen with and without bias."""

    layer: int
    experts: int
    top_k: int
    with_bias: Load
    without_bias: Load
    overlap: float


@dataclass(frozen=True, slots=True)
class Probe:
    """The router stress probe: seeded isotropic inputs, which no text has. chance: what uniform choice would give."""

    seed: int
    inputs: int
    rms: float
    layers: tuple[ProbeRow, ...]
    kind: Literal["S"] = "S"
    chance_cv: float = 0.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A figure of the reproduction boundary: who measured what, where (their machine or paper)."""

    who: str
    what: str
    where: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One audit. made_at: ISO 8601 in UTC. k3ray: the version that made it."""

    made_at: str
    k3ray: str
    source: Source
    statements: tuple[Statement, ...]
    layers: tuple[LayerRow, ...]
    kinds: tuple[KindRow, ...]
    statistics: tuple[StatisticRow, ...]
    probe: Probe | None
    recorded: tuple[Recorded, ...]
    format: Literal["k3ray audit"] = "k3ray audit"
    version: Literal[1] = 1

    @property
    def disagreements(self) -> tuple[Statement, ...]:
        """The statements that must agree and do not."""
        return tuple(statement for statement in self.statements if statement.agrees is False)

"""The checkpoint's tensors as four columns sorted by key: 24 bytes a tensor, and no Python object per tensor.

Knows nothing of how the columns were made (index_build) or where they are kept (index_cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.header import TensorKind
from k3ray.workers.checkpoint.names import NUMBER_BITS, Keys, NameTable, template_of


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard file as it was when it was indexed; mtime_ns 0 where only its name and size are known."""

    name: str
    file_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. offset: absolute in the file, bytes."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class IndexColumns:
    """(tensors,) each, ascending by key. begins are absolute file offsets; keys as names.NameTable makes them."""

    keys: Keys
    begins: npt.NDArray[np.int64]
    shard_ids: npt.NDArray[np.uint32]
    kind_ids: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of all four columns."""
        return self.keys.nbytes + self.begins.nbytes + self.shard_ids.nbytes + self.kind_ids.nbytes


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of one checkpoint directory.

    fingerprint: over the shards' names, sizes and headers, the same on every machine; not over the weights' bytes.
    index_file: the name of the checkpoint's own index, None when it has none; stated_bytes: the total it states.
    has_shapes: False when only names are known, because the shards are not here; then there are no kinds and no places.
    """

    directory: Path
    shards: tuple[Shard, ...]
    kinds: tuple[TensorKind, ...]
    names: NameTable
    columns: IndexColumns
    fingerprint: str
    index_file: str | None
    stated_bytes: int | None
    has_shapes: bool = True

    def __len__(self) -> int:
        return len(self.columns.keys)

    def row(self, name: str) -> int | None:
        """The row of a tensor, or None when there is no such tensor."""
        key = self.names.key(name)
        if key is None:
            return None
        row = int(np.searchsorted(self.columns.keys, np.uint64(key)))
        return row if row < len(self) and int(self.columns.keys[row]) == key else None

    def find(self, name: str) -> TensorEntry | None:
        """The entry of a tensor, or None when there is no such tensor."""
        row = self.row(name)
        return None if row is None else self.entry(row)

    def entry(self, row: int) -> TensorEntry:
        """The entry of a row; only where the shards are known."""
        assert self.has_shapes, "an index of names alone has no entries"
        kind = self.kinds[int(self.columns.kind_ids[row])]
        offset = int(self.columns.begins[row])
        return TensorEntry(self.name(row), self.path(row), kind.dtype, kind.shape, offset, kind.nbytes)

    def name(self, row: int) -> str:
        """The name of a row."""
        return self.names.name(int(self.columns.keys[row]))

    def path(self, row: int) -> Path:
        """The shard file of a row."""
        return self.directory / self.shards[int(self.columns.shard_ids[row])].name

    def rows_of(self, template: str) -> slice:
        """The rows whose names have this template; an empty slice when none has."""
        number = self.names.template_id(template)
        if number is None:
            return slice(0, 0)
        first = number << 2 * NUMBER_BITS
        last = first | ((1 << 2 * NUMBER_BITS) - 1)
        low = np.searchsorted(self.columns.keys, np.uint64(first))
        high = np.searchsorted(self.columns.keys, np.uint64(last), side="right")
        return slice(int(low), int(high))

    def templates(self) -> dict[str, int]:
        """How many tensors each template has, in the order of the checkpoint."""
        counts = np.bincount(template_of(self.columns.keys), minlength=len(self.names.templates))
        return dict(zip(self.names.templates, counts.tolist(), strict=True))

    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        counts = np.bincount(self.columns.kind_ids, minlength=len(self.kinds)).tolist()
        return sum(count * kind.nbytes for count, kind in zip(counts, self.kinds, strict=True))

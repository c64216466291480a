"""One expert's bytes from the shards into a slot of memory, in as few reads as its tensors' places allow.

It does not know why an expert is wanted, nor which slot is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.index_table import TensorEntry, TensorIndex
from k3ray.workers.checkpoint.shapes import expert_tensors, nbytes
from k3ray.workers.checkpoint.tensors import count_nan_scales
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.direct_io import DirectFile, DiskReadFailure, slot_bytes

Bytes = npt.NDArray[np.uint8]
TRIES = 3
MATRICES = ("w1", "w2", "w3")


class ExpertUnreadable(Failure):
    """An expert that no root gave after every try; the step that needs it does not happen."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """packed: (rows, columns / 2) u8, low nibble first. scales: (rows, columns / 32) u8, E8M0."""

    packed: Bytes
    scales: Bytes


@dataclass(frozen=True, slots=True)
class Expert:
    """w1 gate, w3 up: latent -> inner. w2 down: inner -> latent. damaged: a scale byte is NaN."""

    w1: Mxfp4Matrix
    w2: Mxfp4Matrix
    w3: Mxfp4Matrix
    damaged: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors that lie one after the other in one shard: nbytes at offset, read at once."""

    path: Path
    offset: int
    nbytes: int
    tensors: tuple[tuple[str, TensorEntry], ...]


def expert_slot_bytes(config: ModelConfig) -> int:
    """Return the bytes of a slot that holds any expert, even one whose six tensors all lie apart."""
    return sum(slot_bytes(nbytes(tensor)) for tensor in expert_tensors(config).values())


def runs_of(binding: Binding, index: TensorIndex, layer: int, expert: int) -> list[Run]:
    """Return the reads that bring one expert: in the released layout a single one, and none where it is not whole."""
    found = []
    for short, name in binding.expert_tensors(layer, expert).items():
        entry = index.find(name)
        if entry is None:
            return []
        found.append((short, entry))
    found.sort(key=lambda item: (str(item[1].path), item[1].offset))
    runs: list[Run] = []
    for short, entry in found:
        last = runs[-1] if runs else None
        if last is not None and last.path == entry.path and last.offset + last.nbytes == entry.offset:
            tensors = (*last.tensors, (short, entry))
            runs[-1] = Run(last.path, last.offset, last.nbytes + entry.nbytes, tensors)
        else:
            runs.append(Run(entry.path, entry.offset, entry.nbytes, ((short, entry),)))
    return runs


class ExpertReader:
    """Reads experts from the first root that gives them; safe from several threads, each with a slot of its own.

    spread: each expert begins with another root, so that all their disks work; a root may lack experts then.
    bytes_read and reads count what the disk was asked for: whole pages.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Binding, TensorIndex]],
        say: Callable[[str], None] = lambda line: None,
        spread: bool = False,
    ) -> None:
        self._roots = tuple(roots)
        self._spread = spread
        self._say = say
        self._files: dict[Path, DirectFile] = {}
        self._shards = {index.directory / shard.name: shard for _, index in roots for shard in index.shards}
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes that the disks gave."""
        return sum(file.bytes_read for file in self._files.values())

    @property
    def reads(self) -> int:
        """Reads that the system was asked for."""
        return sum(file.reads for file in self._files.values())

    def read(self, layer: int, expert: int, slot: Bytes) -> Expert:
        """Read one expert into the slot (expert_slot_bytes) and return it in place; ExpertUnreadable."""
        failures: list[str] = []
        turn = expert % len(self._roots) if self._spread else 0
        found = [
            runs
            for binding, index in (*self._roots[turn:], *self._roots[:turn])
            if (runs := runs_of(binding, index, layer, expert))
        ]
        assert found, "the binding proved that a root has it"
        for _ in range(TRIES):
            for runs in found:
                try:
                    return self._read(runs, slot)
                except DiskReadFailure as failure:
                    failures.append(str(failure))
        causes = "\n  ".join(dict.fromkeys(failures))
        raise ExpertUnreadable(
            f"layer {layer} expert {expert} could not be read in {TRIES} tries from {len(found)} folders:\n"
            f"  {causes}\nThe step that needs it was stopped; what was generated before is sound. Repair the shard, or "
            "name a folder that has another copy with --mirror"
        )

    def close(self) -> None:
        """Close the shards."""
        with self._lock:
            for file in self._files.values():
                file.close()

    def _read(self, runs: Sequence[Run], slot: Bytes) -> Expert:
        arrays: dict[str, Bytes] = {}
        used = 0
        for run in runs:
            room = slot_bytes(run.nbytes)
            view = self._file(run.path).read(slot[used : used + room], run.offset, run.nbytes)
            used += room
            for short, entry in run.tensors:
                start = entry.offset - run.offset
                arrays[short] = view[start : start + entry.nbytes].reshape(entry.shape)
        w1, w2, w3 = (Mxfp4Matrix(arrays[f"{part}.weight_packed"], arrays[f"{part}.weight_scale"]) for part in MATRICES)
        return Expert(w1, w2, w3, damaged=any(count_nan_scales(matrix.scales) for matrix in (w1, w2, w3)))

    def _file(self, path: Path) -> DirectFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = DirectFile(path, self._say)
                shard, mtime_ns = self._shards[path], path.stat().st_mtime_ns
                if (file.file_bytes, mtime_ns) != (shard.file_bytes, shard.mtime_ns):
                    file.close()
                    expected = "the file that was indexed: let no download write to it, and start again"
                    raise DiskReadFailure(path, 0, "a shard that has changed since", expected, None)
                self._files[path] = file
            return file

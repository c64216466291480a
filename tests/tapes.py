"""Tapes for tests: a checkpoint opened, packed, and its tape opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.pack import PackSummary, pack
from k3ray.workers.tape.tape import Tape, open_tape

SMALL_CHUNK = 32 << 10  # many chunks even in the small models

# rows of 110, 70 and 42 bytes: none of their multiples in a small chunk is a whole page
ODD_WIDTHS = SyntheticSpec(num_hidden_layers=4, hidden_size=55, q_lora_rank=35, kv_lora_rank=21, vocab_size=300)


@dataclass(frozen=True, slots=True)
class Model:
    """A bound checkpoint."""

    path: Path
    binding: Binding
    reader: TensorReader

    def pack(self, out: Path, chunk_bytes: int = SMALL_CHUNK) -> PackSummary:
        """Pack it in small chunks."""
        return pack(self.binding, self.reader, out, chunk_bytes, threads=2)

    def open(self, folder: Path) -> Tape:
        """Open its tape for all layers and the head."""
        return open_tape(folder, self.binding, self.reader, range(self.binding.config.num_hidden_layers + 1))


@contextmanager
def opened_model(path: Path) -> Iterator[Model]:
    """A checkpoint's shards, open."""
    index = open_index(path, [])
    with TensorReader(index) as reader:
        yield Model(path, bind(read_config(path), index), reader)


def synthetic_model(folder: Path, spec: SyntheticSpec, seed: int = 1) -> Path:
    """A synthetic checkpoint in a new folder."""
    write_checkpoint(folder, spec, seed)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}

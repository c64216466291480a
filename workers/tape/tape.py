"""A packed trunk, opened: its layout and checksums, proven to be of the model at hand and to be whole."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.tape.direct_io import Bytes, DirectFile
from k3ray.workers.tape.identity import refuse_other_config, refuse_other_weights
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.manifest import TAPE_NAME, TapeError, TapeIdentity, layout_digest, read_manifest


@dataclass(frozen=True, slots=True)
class Tape:
    """One tape open for reading. checksums: CRC-32 of every chunk."""

    folder: Path
    identity: TapeIdentity
    layout: TapeLayout
    checksums: tuple[int, ...]
    file: DirectFile

    def read(self, number: int, slot: Bytes, check: bool) -> Bytes:
        """Read a chunk into a slot of layout.chunk_bytes; with `check` its checksum is proven.

        Raises DiskReadFailure, or TapeError when the bytes are not those that were packed.
        """
        chunk = self.layout.chunks[number]
        data = self.file.read(slot, chunk.offset, chunk.nbytes)
        if check and (found := zlib.crc32(data.data)) != self.checksums[number]:
            raise TapeError(
                self.file.path,
                f"chunk {number} (layer {chunk.layer}, bytes {chunk.offset}..{chunk.offset + chunk.nbytes}) with "
                f"checksum {found:08x}",
                f"{self.checksums[number]:08x}",
                "the tape is damaged: copy it again, or pack the model again with `k3ray pack`",
            )
        return data


def open_tape(
    folder: Path,
    binding: Binding,
    reader: TensorReader,
    layers: Iterable[int],
    say: Callable[[str], None] = lambda line: None,
) -> Tape:
    """Open a tape for some layers (the head's number is binding.config.num_hidden_layers) of a bound checkpoint.

    Raises TapeError for a damaged, cut or older tape, WrongTape for that of another model, DiskReadFailure.
    `say` is told when the tape cannot be read past the page cache.
    """
    manifest = read_manifest(folder)
    identity = manifest.identity
    refuse_other_config(folder, identity, binding.config, reader.index.directory)
    layout = _check_layout(folder, binding, identity, len(manifest.checksums))
    path = folder / TAPE_NAME
    if not path.is_file():
        raise TapeError(folder, f"no {TAPE_NAME}", "the tape beside its manifest")
    file = DirectFile(path, say)
    try:
        if file.file_bytes != layout.total_bytes:
            raise TapeError(path, f"{file.file_bytes} bytes", f"{layout.total_bytes}: the tape was cut or is another")
        refuse_other_weights(folder, identity, binding, reader, layout, layers)
    except BaseException:
        file.close()
        raise
    return Tape(folder, identity, layout, tuple(manifest.checksums), file)


def _check_layout(folder: Path, binding: Binding, identity: TapeIdentity, num_checksums: int) -> TapeLayout:
    """The layout that the manifest speaks of, made again; raises TapeError when it comes out otherwise."""
    layout = plan_layout(binding.config, identity.chunk_bytes)
    stated = (identity.layout, identity.total_bytes, len(identity.samples), num_checksums)
    made = (layout_digest(layout), layout.total_bytes, len(layout.tensors), len(layout.chunks))
    if stated != made:
        found = "layout {}, {} bytes, {} tensors, {} chunks"
        raise TapeError(folder, found.format(*stated), found.format(*made) + " as this k3ray lays the model out")
    return layout

"""A sequence's state in a slice as bytes, piece by piece, and back into memory of its own.

A piece is one KDA layer, or so many rows of one MLA layer's cache that it stays small: whoever makes, sends, writes or
reads a snapshot holds one piece at a time. Pieces name their layer, so they can be dealt out over other slices than
those that made them. Format: docs/state.md. Knows neither files nor processes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.state import KdaState, MlaState, SequenceFailure, SequenceState, new_sequence

FORMAT = "k3ray state piece"
FORMAT_VERSION = 1
DIGEST_BYTES = 16  # BLAKE2b of everything before it, at the piece's end
PIECE_BYTES = 4 << 20  # of MLA cache in one piece; a KDA layer of the released model is 6.7 MB

Float32Array = npt.NDArray[np.float32]


class SnapshotDamaged(Failure):
    """A piece that is cut or changed, or pieces that are not one whole sequence."""


class SnapshotMismatch(Failure):
    """A sound piece of another format, of other widths, of other layers, or too long for its new place."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class StatePiece:
    """What one piece holds. position: of the whole sequence. first, stop: the MLA cache rows; 0, 0 of a KDA layer."""

    layer: int
    position: int
    first: int
    stop: int


def pieces_of(state: SequenceState) -> list[StatePiece]:
    """Return the pieces of a sequence, in the order of the layers; SequenceFailure when a step has broken it."""
    if state.broken:
        raise SequenceFailure(f"a sequence that stopped at position {state.position} has no snapshot: {state.broken}")
    found = []
    for layer, part in state.layers.items():
        if isinstance(part, MlaState):
            rows = max(1, PIECE_BYTES // (4 * part.cache.shape[1]))
            cuts = [*range(0, max(1, state.position), rows), state.position]
            found += [StatePiece(layer, state.position, low, high) for low, high in itertools.pairwise(cuts)]
        else:
            found.append(StatePiece(layer, state.position, 0, 0))
    return found


def encode_piece(state: SequenceState, piece: StatePiece) -> pa.Buffer:
    """Return one piece as an Arrow IPC stream, an array a batch, followed by the digest of the stream's bytes."""
    if state.position != piece.position:
        raise SequenceFailure(f"the sequence moved from position {piece.position} to {state.position} in its snapshot")
    arrays = _arrays(state.layers[piece.layer], piece)
    numbers = {"version": FORMAT_VERSION, **asdict(piece)}
    metadata = {"format": FORMAT, **{name: str(value) for name, value in numbers.items()}}
    metadata |= {name: ",".join(map(str, values.shape)) for name, values in arrays.items()}
    schema = pa.schema([pa.field("values", pa.float32())], metadata=metadata)
    counted = pa.MockOutputStream()
    _write_stream(counted, schema, arrays)
    message = pa.allocate_buffer(counted.size() + DIGEST_BYTES)  # at its size at once: the only copy
    _write_stream(pa.FixedSizeBufferWriter(message), schema, arrays)
    view = memoryview(message).cast("B")
    view[-DIGEST_BYTES:] = hashlib.blake2b(view[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest()
    return message


def piece_of(message: pa.Buffer) -> StatePiece:
    """Return what a piece says it holds; SnapshotDamaged, SnapshotMismatch."""
    return _described(_open(message)[1])


class Restoring:
    """A sequence that is being put together, in memory of its own, from pieces in any order."""

    def __init__(self, config: ModelConfig, layers: range, capacity: int) -> None:
        self._layers = layers
        self._state = new_sequence(config, layers, capacity)
        self._added: set[StatePiece] = set()

    def add(self, message: pa.Buffer) -> None:
        """Copy one piece's values into their place; SnapshotDamaged, SnapshotMismatch."""
        batches, metadata = _open(message)
        piece = _described(metadata)
        self._check_place(piece)
        for name, target in _arrays(self._state.layers[piece.layer], piece).items():
            found, expected = metadata.get(name, "no such array"), ",".join(map(str, target.shape))
            if found != expected:
                raise SnapshotMismatch(
                    f"layer {piece.layer} of a saved state: found {name} of shape {found}, expected {expected}: "
                    "it is of a model with other widths"
                )
            target[...] = _next_values(batches, target.size, piece).reshape(target.shape)
        self._added.add(piece)
        self._state.position = piece.position

    def finish(self) -> SequenceState:
        """Return the sequence when every layer is there whole, else SnapshotDamaged."""
        for layer, part in self._state.layers.items():
            mine = sorted((piece.first, piece.stop) for piece in self._added if piece.layer == layer)
            rows = self._state.position if isinstance(part, MlaState) else 0
            borders = [0, *(stop for _, stop in mine)]
            if not mine or [first for first, _ in mine] != borders[:-1] or borders[-1] != rows:
                raise SnapshotDamaged(
                    f"layer {layer} of a saved state: found rows {mine}, expected 0..{rows} without a gap: "
                    "a piece is missing or of another state"
                )
        return self._state

    def _check_place(self, piece: StatePiece) -> None:
        if piece.layer not in self._layers:
            found = f"layers {self._layers.start}..{self._layers.stop - 1}"
            raise SnapshotMismatch(f"a saved state of layer {piece.layer} was given to {found}, which does not hold it")
        if piece.position > self._state.capacity:
            raise SnapshotMismatch(
                f"a saved state of {piece.position} positions does not fit in the {self._state.capacity} positions "
                "that the session was opened for; open it with a larger capacity"
            )
        if self._added and piece.position != self._state.position:
            raise SnapshotDamaged(
                f"layer {piece.layer} of a saved state is at position {piece.position}, other layers at "
                f"{self._state.position}: its pieces are not of one moment"
            )
        if not 0 <= piece.first <= piece.stop <= piece.position:
            raise SnapshotDamaged(f"a piece of a saved state with rows {piece.first}..{piece.stop}: {piece}")


def _arrays(part: KdaState | MlaState, piece: StatePiece) -> Mapping[str, Float32Array]:
    """The arrays of one piece, in order, as views of the state's memory."""
    if isinstance(part, MlaState):
        return {"cache": part.cache[piece.first : piece.stop]}
    return {"matrices": part.matrices, "tail_q": part.tail_q, "tail_k": part.tail_k, "tail_v": part.tail_v}


def _write_stream(sink: pa.NativeFile, schema: pa.Schema, arrays: Mapping[str, Float32Array]) -> None:
    with pa.ipc.new_stream(sink, schema) as writer:
        for values in arrays.values():
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(values.reshape(-1))], schema=schema))


def _open(message: pa.Buffer) -> tuple[pa.RecordBatchReader, dict[str, str]]:
    """Prove the digest before Arrow reads a byte, then the format."""
    view = memoryview(message)
    stream, digest = view[:-DIGEST_BYTES], bytes(view[-DIGEST_BYTES:])
    if hashlib.blake2b(stream, digest_size=DIGEST_BYTES).digest() != digest:
        raise SnapshotDamaged(f"a piece of a saved state, {message.size} bytes, is cut or changed: its digest differs")
    try:
        batches = pa.ipc.open_stream(message.slice(0, max(0, message.size - DIGEST_BYTES)))
    except pa.ArrowInvalid as error:
        raise SnapshotMismatch(f"expected a piece of a saved state, found another message: {error}") from None
    metadata = {name.decode(): text.decode() for name, text in (batches.schema.metadata or {}).items()}
    found = metadata.get("format"), metadata.get("version")
    if found != (FORMAT, str(FORMAT_VERSION)):
        raise SnapshotMismatch(f"expected a {FORMAT} of version {FORMAT_VERSION}, found {found}: mixed versions?")
    return batches, metadata


def _described(metadata: Mapping[str, str]) -> StatePiece:
    return StatePiece(*(_number(metadata, name) for name in ("layer", "position", "first", "stop")))


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise SnapshotDamaged(f"a piece of a saved state whose {name} is {text!r}, expected a whole number")
    return int(text)


def _next_values(batches: pa.RecordBatchReader, count: int, piece: StatePiece) -> Float32Array:
    try:
        values: Float32Array = batches.read_next_batch().column("values").to_numpy()
    except (StopIteration, pa.ArrowInvalid, KeyError):
        values = np.zeros(0, np.float32)
    if values.dtype != np.float32 or len(values) != count:
        raise SnapshotDamaged(f"layer {piece.layer} of a saved state holds {len(values)} values, expected {count}")
    return values

"""A saved sequence as a file: its ids, which of them are committed, the layers' state, and the model it belongs to.

Written piece by piece beside its place, flushed, renamed; every byte of it is under a digest. Format and promises:
docs/state.md. Knows neither prompts nor processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.files import OutputFailure, written_whole
from k3ray.state_identity import StateIdentity
from k3ray.workers.failure import Failure
from k3ray.workers.model.snapshot import StatePiece

BEGIN = b"k3ray state file"
END = b"k3ray state ends"
FORMAT_VERSION = 1
LENGTH_BYTES, DIGEST_BYTES = 8, 16
TAIL_BYTES = LENGTH_BYTES + DIGEST_BYTES + len(END)
BLOCK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 1 << 28
_ADVICE = "load a sound copy, or begin anew without --load-state"

Float32Array = npt.NDArray[np.float32]


class StateRefused(Failure):
    """A file that is not a saved state of this version."""

    exit_code = 2


class StateDamaged(Failure):
    """A saved state that was cut or changed."""


class PieceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of the layers' state, in the order of the file. digest: BLAKE2b of its bytes."""

    layer: int
    first: int
    stop: int
    nbytes: int
    digest: str


class StateDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything but the pieces. logits: float32, little-endian; only when every id is committed, else empty."""

    version: int
    made_by: str
    identity: StateIdentity
    prompt_ids: list[int]
    generated_ids: list[int]
    num_committed: int
    logits: bytes
    pieces: list[PieceEntry]


class _Versioned(msgspec.Struct):
    version: int


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A sequence as it is saved. num_committed: how many of its ids the pieces of its state have applied.

    0: there are no pieces, and the ids are run anew. logits: (vocab,) f32 of the last id, where all are committed.
    """

    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    num_committed: int
    logits: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class StateFile:
    """A saved state that was read and proven, its pieces still in the file."""

    path: Path
    document: StateDocument

    @property
    def ids(self) -> list[int]:
        """Prompt and generated ids."""
        return [*self.document.prompt_ids, *self.document.generated_ids]

    @property
    def logits(self) -> Float32Array | None:
        """(vocab,) f32 of the last id, where every id is committed."""
        return np.frombuffer(self.document.logits, "<f4").astype(np.float32) if self.document.logits else None

    def pieces(self) -> Iterator[tuple[int, pa.Buffer]]:
        """Yield (layer, piece), one in memory at a time; StateDamaged when the file changed since it was opened."""
        with _opened(self.path) as file:
            file.seek(len(BEGIN))
            for entry in self.document.pieces:
                piece = file.read(entry.nbytes)
                if _digest(piece) != entry.digest:
                    raise StateDamaged(f"{self.path}: changed while it was loaded; {_ADVICE}")
                yield entry.layer, pa.py_buffer(piece)


def write_state(
    path: Path,
    identity: StateIdentity,
    sequence: SavedSequence,
    pieces: Iterable[tuple[StatePiece, pa.Buffer]],
    made_by: str,
) -> None:
    """Write the file whole or not at all; OutputFailure when the place does not take it."""
    try:
        with written_whole(path) as file:
            _write(file, identity, sequence, pieces, made_by)
    except OSError as error:
        raise OutputFailure(
            f"--save-state {path}: {error.strerror or error}; nothing was saved: make room or name another place"
        ) from error


def open_state(path: Path) -> StateFile:
    """Read the document and prove every byte, a block at a time; StateRefused, StateDamaged."""
    with _opened(path) as file:
        document, offset = _read_document(path, file)
        expected = len(BEGIN) + sum(entry.nbytes for entry in document.pieces)
        if expected != offset or any(entry.nbytes < 1 for entry in document.pieces):
            raise StateDamaged(f"{path}: found its document at byte {offset}, expected {expected}; {_ADVICE}")
        file.seek(len(BEGIN))
        for entry in document.pieces:
            if _digest_of(file, entry.nbytes) != entry.digest:
                raise StateDamaged(f"{path}: the saved state of layer {entry.layer} was changed; {_ADVICE}")
    _check_counts(path, document)
    return StateFile(path, document)


def _write(
    file: BinaryIO,
    identity: StateIdentity,
    sequence: SavedSequence,
    pieces: Iterable[tuple[StatePiece, pa.Buffer]],
    made_by: str,
) -> None:
    file.write(BEGIN)
    entries = []
    for piece, message in pieces:
        view = memoryview(message)
        file.write(view)
        entries.append(PieceEntry(piece.layer, piece.first, piece.stop, view.nbytes, _digest(view)))
    document = msgspec.json.encode(
        StateDocument(
            version=FORMAT_VERSION,
            made_by=made_by,
            identity=identity,
            prompt_ids=list(sequence.prompt_ids),
            generated_ids=list(sequence.generated_ids),
            num_committed=sequence.num_committed,
            logits=b"" if sequence.logits is None else sequence.logits.astype("<f4").tobytes(),
            pieces=entries,
        )
    )
    length = len(document).to_bytes(LENGTH_BYTES, "little")
    file.write(document + length + bytes.fromhex(_digest(document + length)) + END)


def _read_document(path: Path, file: BinaryIO) -> tuple[StateDocument, int]:
    """The document, and the byte at which it begins."""
    if file.read(len(BEGIN)) != BEGIN:
        raise StateRefused(f"{path}: found another kind of file, expected what `k3ray generate --save-state` wrote")
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    length = int.from_bytes(tail[:LENGTH_BYTES], "little")
    offset = size - TAIL_BYTES - length
    if not tail.endswith(END) or offset < len(BEGIN) or length > MAX_DOCUMENT_BYTES:
        raise StateDamaged(f"{path}: found {size} bytes without their end, expected a whole file: cut? {_ADVICE}")
    file.seek(offset)
    text = file.read(length)
    if _digest(text + tail[:LENGTH_BYTES]) != tail[LENGTH_BYTES : -len(END)].hex():
        raise StateDamaged(f"{path}: its document was changed (its digest is another); {_ADVICE}")
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != FORMAT_VERSION:
            raise StateRefused(
                f"{path}: found a saved state of version {version}, expected {FORMAT_VERSION}; "
                "load it with the k3ray that wrote it"
            )
        return msgspec.json.decode(text, type=StateDocument), offset
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StateRefused(f"{path}: found a document that is not understood ({error}); {_ADVICE}") from None


def _check_counts(path: Path, document: StateDocument) -> None:
    """What the numbers of a document must be to each other."""
    num_ids = len(document.prompt_ids) + len(document.generated_ids)
    vocab = document.identity.config.get("vocab_size")
    layers = {entry.layer for entry in document.pieces}
    sound = (
        isinstance(vocab, int)
        and num_ids >= 1
        and 0 <= document.num_committed <= num_ids
        and all(0 <= token_id < vocab for token_id in (*document.prompt_ids, *document.generated_ids))
        and layers == set(range(document.identity.num_layers if document.num_committed else 0))
        and len(document.logits) == (4 * vocab if document.num_committed == num_ids else 0)
    )
    if not sound:
        raise StateRefused(
            f"{path}: found {num_ids} ids, {document.num_committed} of them committed in {len(layers)} layers, and "
            f"{len(document.logits)} bytes of logits, which do not belong together; {_ADVICE}"
        )


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise StateRefused(f"--load-state {path}: {error.strerror}; name a file that can be read") from None


def _digest(contents: bytes | memoryview) -> str:
    return hashlib.blake2b(contents, digest_size=DIGEST_BYTES).hexdigest()


def _digest_of(file: BinaryIO, nbytes: int) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while nbytes:
        block = file.read(min(nbytes, BLOCK_BYTES))
        if not block:
            break
        digest.update(block)
        nbytes -= len(block)
    return digest.hexdigest()
